"""Parity checks: cases, the float64 reference, the noise floor and the checker."""
