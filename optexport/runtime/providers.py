"""Execution providers of ONNX Runtime that a config or a file names. Needs neither numpy nor torch."""

from __future__ import annotations

from collections.abc import Sequence

from optexport.errors import DeviceError

# Entry of a file's metadata that names the providers it was exported for, as JSON.
PROVIDERS_KEY = "optexport.providers"
# This provider sends inputs to a server that the file names.
FORBIDDEN_PROVIDER = "AzureExecutionProvider"


def check_available(providers: Sequence[str], location: str) -> None:
    """Checks that this build of ONNX Runtime has execution providers.

    Raises:
        DeviceError: It lacks one, or one sends data elsewhere.
    """
    if not providers:
        return
    import onnxruntime

    if FORBIDDEN_PROVIDER in providers:
        raise DeviceError(f"the {FORBIDDEN_PROVIDER} sends inputs to a server", location=location)
    available = [name for name in onnxruntime.get_available_providers() if name != FORBIDDEN_PROVIDER]
    if missing := [name for name in providers if name not in available]:
        raise DeviceError(
            f"the installed ONNX Runtime has no {' and no '.join(missing)} (it has {', '.join(available)})",
            location=location,
            hint="Install the build of ONNX Runtime that has it, such as onnxruntime-openvino, instead of onnxruntime.",
        )
