"""Helpers that know nothing about models or bundles."""
