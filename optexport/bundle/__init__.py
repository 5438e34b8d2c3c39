"""Bundles: self-describing output folders, written completely or not at all."""
