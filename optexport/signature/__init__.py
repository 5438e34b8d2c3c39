"""Inputs and outputs of a model: names, dtypes, axes, and how they are passed."""
