"""The tables of the config file, as pydantic models; imports no torch."""
