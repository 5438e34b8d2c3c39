"""Loads TorchScript programs.

The reference of all comparisons is the TorchScript program itself.
"""

from __future__ import annotations

from pathlib import Path

import torch

from optexport.runtime.untrusted import archives
from optexport.signature.signature import call_signature


def load(path: Path) -> torch.jit.ScriptModule:
    """Loads an untrusted TorchScript file in eval mode.

    See `optexport.runtime.untrusted.archives` for the checks.

    Raises:
        SourceError: The program could do more than compute, has no ``forward``, or is damaged.
    """
    script = archives.load_torchscript(path)
    call_signature(script)
    return script.eval() if hasattr(script, "training") else script  # frozen programs have no train mode
