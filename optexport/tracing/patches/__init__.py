"""Replacements for functions of torch and transformers during tracing."""
