"""Traces a model to a graph, and tries fallbacks if the trace fails."""
