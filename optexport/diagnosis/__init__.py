"""Diagnosis of a failed parity check: its cause, and a script that reproduces it."""
