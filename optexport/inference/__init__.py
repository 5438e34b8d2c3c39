"""Inference with a bundle: preprocessing, the model file, and postprocessing."""
