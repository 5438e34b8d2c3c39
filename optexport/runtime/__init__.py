"""Opens exported files on a device."""
