"""The proof: on what a model is checked, how far rounding explains a difference, and what differs by more."""
