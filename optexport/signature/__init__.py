"""Inputs and outputs of a model: names, dtypes, axes and call arguments."""
