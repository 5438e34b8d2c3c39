"""The TorchScript exporter."""
