"""The export pipeline, from model source to verified bundle."""
