"""Checks files from strangers before they are opened."""
