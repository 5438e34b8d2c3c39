"""The cache of results between runs. It speeds up repeated and interrupted runs."""
