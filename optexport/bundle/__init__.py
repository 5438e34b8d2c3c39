"""What a run leaves behind: files under one name, whole or not at all, that say of themselves what they are."""
