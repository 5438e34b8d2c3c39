"""Searches for the rules and format passes that make each exported file fastest."""
