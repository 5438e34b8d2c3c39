"""The config file, table by table. Needs no torch."""
