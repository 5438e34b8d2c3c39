"""Models of sound."""

from __future__ import annotations

from collections.abc import Iterator

from tests.zoo.libraries.model import Input, Model, network, waves

_FRAMES = ({"batch": 2, "frames": 20}, {"batch": 1, "frames": 33}, {"batch": 3, "frames": 9})
_SAMPLES = ({"batch": 2, "samples": 320}, {"batch": 1, "samples": 640}, {"batch": 3, "samples": 480})
_WAVE = Input(("batch", 1, "samples"), waves)


def models() -> Iterator[Model]:
    """Yields the models."""
    crepe = network("torchcrepe:Crepe", "tiny")
    yield Model("torchcrepe/tiny", crepe, {"x": Input(("batch", 1024), waves)}, [{"batch": b} for b in (2, 1, 5)])
    yield Model(
        "conformer/conformer",
        network(
            "conformer:Conformer",
            dim=32,
            depth=2,
            dim_head=16,
            heads=2,
            ff_mult=2,
            conv_expansion_factor=2,
            conv_kernel_size=7,
        ),
        {"x": Input(("batch", "frames", 32))},
        _FRAMES,
    )
    yield Model(
        "vocos/backbone",
        network("vocos.models:VocosBackbone", input_channels=20, dim=32, intermediate_dim=64, num_layers=2),
        {"x": Input(("batch", 20, "frames"))},
        _FRAMES,
    )
    yield Model(
        "vocos/resnet_backbone",
        network("vocos.models:VocosResNetBackbone", input_channels=20, dim=32, num_blocks=2),
        {"x": Input(("batch", 20, "frames"))},
        _FRAMES,
    )
    yield Model(
        "vocos/istft_head",
        network("vocos.heads:ISTFTHead", dim=16, n_fft=32, hop_length=8, padding="same"),
        {"x": Input(("batch", "frames", 16))},
        _FRAMES,
    )
    codec = {"dimension": 16, "n_filters": 4, "ratios": [4, 2], "lstm": 0}
    multiple = {"samples": {"min": 64, "multiple_of": 8}}
    yield Model("encodec/encoder", network("encodec.modules:SEANetEncoder", **codec), {"x": _WAVE}, _SAMPLES, multiple)
    yield Model(
        "encodec/encoder_lstm",
        network("encodec.modules:SEANetEncoder", **codec | {"lstm": 1}),
        {"x": _WAVE},
        _SAMPLES,
        multiple,
    )
    yield Model(
        "encodec/decoder",
        network("encodec.modules:SEANetDecoder", **codec),
        {"z": Input(("batch", 16, "frames"))},
        _FRAMES,
    )
    spectrum = {"sr": 16000, "n_fft": 64, "hop_length": 16, "verbose": False}
    waveform = {"x": Input(("batch", "samples"), waves)}
    yield Model(
        "nnaudio/mel", network("nnAudio.features:MelSpectrogram", n_mels=8, **spectrum), waveform, _SAMPLES, multiple
    )
    yield Model(
        "nnaudio/stft",
        network("nnAudio.features:STFT", output_format="Magnitude", **spectrum),
        waveform,
        _SAMPLES,
        multiple,
    )
