"""From a model to a graph: what stops a trace, and what is tried then."""
