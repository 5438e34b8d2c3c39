"""Opsets of ONNX with a meaning for the export."""

# The first opset with an operator for attention.
ATTENTION_OPSET = 23
# The opset that is tried if the export with the default one fails; torch.onnx writes 18 to 26.
FALLBACK_OPSET = 23
