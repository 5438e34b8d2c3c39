"""Batches of configs: a process for each config, and one summary for all."""
