"""Tiny random models of all transformers types, run through the whole pipeline."""
