"""Chooses, for each format, the rules and lowerings whose file is the fastest of those that are proven."""
