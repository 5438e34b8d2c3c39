"""Benchmarks exported files: latency with its uncertainty, load time, memory and size."""
