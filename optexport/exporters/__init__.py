"""Writes traced graphs to files that run without optexport: .pt2, TorchScript, ONNX."""
