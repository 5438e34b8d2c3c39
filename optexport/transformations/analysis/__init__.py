"""Analyses of graphs that rules use, and changes that several rules make."""
