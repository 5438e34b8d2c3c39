"""Helpers for files, processes, packages and torch modules, without knowledge of formats or bundles."""
