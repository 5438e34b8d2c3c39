"""Models of sound."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tests.zoo.libraries.absent import absent
from tests.zoo.libraries.model import Input, Model, waves

_FRAMES = ({"batch": 2, "frames": 20}, {"batch": 1, "frames": 33}, {"batch": 3, "frames": 9})


def models() -> Iterator[Model]:
    """Yields the models."""

    def crepe() -> nn.Module:
        with absent("librosa", "resampy", "torchaudio"):
            import torchcrepe
        return torchcrepe.Crepe("tiny")

    def conformer() -> nn.Module:
        from conformer import Conformer

        return Conformer(dim=32, depth=2, dim_head=16, heads=2, ff_mult=2, conv_expansion_factor=2, conv_kernel_size=7)

    def vocos() -> nn.Module:
        with absent("torchaudio", "encodec"):
            from vocos.models import VocosBackbone
        return VocosBackbone(input_channels=20, dim=32, intermediate_dim=64, num_layers=2)

    def vocos_head() -> nn.Module:
        with absent("torchaudio", "encodec"):
            from vocos.heads import ISTFTHead
        return ISTFTHead(dim=16, n_fft=32, hop_length=8, padding="same")

    yield Model("torchcrepe/tiny", crepe, {"x": Input(("batch", 1024), waves)}, [{"batch": b} for b in (2, 1, 5)])
    yield Model("conformer/conformer", conformer, {"x": Input(("batch", "frames", 32))}, _FRAMES)
    yield Model("vocos/backbone", vocos, {"x": Input(("batch", 20, "frames"))}, _FRAMES)
    yield Model("vocos/istft_head", vocos_head, {"x": Input(("batch", "frames", 16))}, _FRAMES)
