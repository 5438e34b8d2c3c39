"""Loads models from their sources, with their preprocessing."""
