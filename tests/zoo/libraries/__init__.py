"""Models of libraries other than transformers, small and with random weights."""
