"""Signature of a model's inputs and outputs: names, dtypes, axes and call arguments (not a cryptographic signature)."""

from optexport.signature.signature import Dim

__all__ = ["Dim"]
