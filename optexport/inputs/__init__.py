"""Prepares model inputs, from the user's data or from the model's config."""
