"""Where models come from, and what their files may carry."""
