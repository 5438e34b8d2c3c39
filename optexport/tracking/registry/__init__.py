"""The model registry: versions, the alias, and the comparison that decides whether the alias moves."""
