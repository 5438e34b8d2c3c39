"""Measures exported files against each other: speed with its uncertainty, load time, memory and size."""
