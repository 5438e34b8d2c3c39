"""Chooses, for each format, the rules and passes whose file is the fastest of those that are proven."""
