"""Sizes in a trace: symbols, guards, and the sizes at which they may not hold."""
