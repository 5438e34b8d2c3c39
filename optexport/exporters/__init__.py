"""Writes a traced graph to files that run without this package: ``.pt2``, TorchScript and ONNX."""
