"""Helpers that do not depend on models or bundles."""
