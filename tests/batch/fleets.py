"""Folders of configs, some with models that crash, hang or misbehave."""

from __future__ import annotations

from pathlib import Path

_MODELS = """
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn


def good():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


def crashes_once():
    marker = Path(__file__).with_name("crashed")
    if not marker.exists():
        marker.touch()
        os.abort()
    return good()


def hangs():
    time.sleep(600)


def leaves():
    os._exit(0)


def prints():
    os.write(1, b"[" * 200000)
    return good()


def changes_its_config():
    for path in Path(__file__).parent.glob("*.toml"):
        path.write_text("[modle]")
    return good()


def leaves_its_session():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:  # its parent ends at once, as daemons do it
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(__file__).with_name("moved").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not Path(__file__).with_name("moved").exists():
        time.sleep(0.01)
    return good()


def leaves_its_session_and_hangs():
    leaves_its_session()
    time.sleep(600)


def eats():
    eaten = []
    while True:
        eaten.append(bytearray(os.urandom(1)) * (64 << 20))
        time.sleep(0.02)


class Late(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, input):
        if torch.compiler.is_exporting():  # the first call checks the inputs, before tracking starts
            self.function()
        return input + 1


def crashes_in_forward():
    return Late(crashes)


def eats_in_forward():
    return Late(eats)
"""

_CONFIG = """
[model]
source = "python:{module}:{factory}"
[inputs]
tensors.input.shape = ["batch", 4]
dynamic.batch = [1, 8]
[parity]
effort = "quick"
[export]
formats = ["onnx"]
output = "out/{name}"
[tracking]
{tracking}
"""

UNTRACKED = "enabled = false"


def config(folder: Path, name: str, factory: str = "good", tracking: str = UNTRACKED) -> Path:
    """Writes a config and its models into a folder, and returns the path of the config."""
    module = f"fleet_{abs(hash(str(folder)))}"
    (folder / f"{module}.py").write_text(_MODELS, encoding="utf-8")
    path = folder / f"{name}.toml"
    path.write_text(_CONFIG.format(module=module, factory=factory, name=name, tracking=tracking), encoding="utf-8")
    return path
