"""Tiny random models of every type that transformers knows, taken through the whole pipeline."""
