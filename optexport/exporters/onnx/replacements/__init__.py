"""Replacements for operators that ONNX lacks or that ``torch.onnx`` converts wrongly.

During ONNX export, a graph calls these functions in place of ATen operators. They compute the same results at any size.
"""
