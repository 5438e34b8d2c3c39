"""Complex numbers in ONNX files, as pairs of real numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport import Dim
from optexport.errors import ExportError
from optexport.exporters.onnx.complex_numbers import replace_with_pairs
from tests._helpers.graphs import Program
from tests.exporters import files


class Rotary(nn.Module):
    """Turns pairs of features by an angle for each position, as Llama's original code does."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(64.0), 10.0 ** -torch.arange(2.0))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turned = torch.view_as_real(y * self.freqs_cis[: x.shape[1], None])  # type: ignore[index]  # a buffer
        return turned.flatten(3) + (y * y.conj()).real.sum(-1, keepdim=True)


def test_rotary_embedding_turns_complex_numbers(tmp_path: Path) -> None:
    example, dynamic = {"x": torch.randn(2, 5, 3, 4)}, {"x": {0: "batch", 1: Dim("time", 2, 60)}}
    files.assert_onnx(Rotary(), example, dynamic, tmp_path, *({"x": torch.randn(3, n, 3, 4)} for n in (2, 9, 40)))


def _arithmetic(m: nn.Module, x: torch.Tensor) -> Any:
    z = torch.complex(x, x.flip(1) + 0.5)
    turned = z.abs() * torch.exp(1j * z.angle()) - z / (2 - 1j) + 1
    powers = z**2 + z**0.5 + z.sqrt() + z.log() + 1 / z
    chosen = torch.where(x > 0, z, 0) + z.masked_fill(x > 1, 2j)
    moved = torch.cat([z.T, torch.zeros_like(z).T], 1).flip(0)[1:].reshape(-1)
    summed = torch.einsum("ij,kj->ik", z, z.conj()) + z @ z.mT
    written = torch.zeros(x.shape[0], 5, dtype=torch.complex64)
    written[:, 1:4] = z[:, :3]
    written *= 2j
    results = turned, powers, chosen, moved, summed, written, z.sgn(), z.sum(1), z.cumsum(0), z.to(torch.complex128)
    return *map(torch.view_as_real, results), torch.linalg.vector_norm(z, dim=1), z.isfinite(), z == z.conj()


@pytest.mark.slow
def test_arithmetic_is_done_with_both_parts(tmp_path: Path) -> None:
    """torch.onnx has no powers, roots, conditions or sums by index for complex numbers."""
    model, example, dynamic = Program(_arithmetic), {"x": torch.randn(4, 6)}, {"x": {0: Dim("rows", 2, 40)}}
    files.assert_onnx(model, example, dynamic, tmp_path, {"x": torch.randn(7, 6)}, {"x": torch.randn(2, 6) * 100})


class Denoiser(nn.Module):
    """Multiplies a spectrogram by a complex mask and goes back to the sound."""

    def __init__(self, *, onto_length: bool) -> None:
        super().__init__()
        self.onto_length = onto_length
        self.register_buffer("window", torch.hann_window(12))
        self.mask = nn.Linear(9, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {"n_fft": 16, "hop_length": 4, "win_length": 12, "window": self.window}
        z = torch.stft(x, **options, return_complex=True)  # type: ignore[call-overload]  # options of several types
        real, imag = self.mask(z.abs().transpose(1, 2)).transpose(1, 2).chunk(2, 1)
        z = z * torch.complex(real, imag) + torch.polar(z.abs(), z.angle())
        length = x.shape[1] if self.onto_length else None
        return torch.istft(z, **options, length=length)  # type: ignore[arg-type]  # options of several types


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("onto_length", [True, False])
def test_masked_spectrogram_goes_back_to_sound_of_any_length(onto_length: bool, tmp_path: Path) -> None:
    """A trace of istft fixed the length."""
    dynamic = {"x": {0: Dim("batch", 1, 9), 1: Dim("time", 32, 400)}}
    model, example = Denoiser(onto_length=onto_length).eval(), {"x": torch.randn(2, 64)}
    files.assert_onnx(model, example, dynamic, tmp_path, *({"x": torch.randn(3, n)} for n in (33, 98, 200)))


class SpectralConvolution(nn.Module):
    """Multiplies the lowest frequencies by complex weights, as Fourier neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.rfft(x)
        y = torch.zeros(x.shape[0], 4, z.shape[-1], dtype=torch.complex64)
        y[:, :, :5] = torch.einsum("bix,iox->box", z[:, :, :5], self.weight)
        return torch.fft.irfft(y, n=x.shape[-1])


@pytest.mark.slow
def test_complex_weight_is_stored_as_two_real_ones(tmp_path: Path) -> None:
    dynamic = {"x": {0: Dim("batch", 1, 9), 2: Dim("time", 10, 400)}}
    model, example = SpectralConvolution(), {"x": torch.randn(2, 3, 16)}
    files.assert_onnx(model, example, dynamic, tmp_path, *({"x": torch.randn(1, 3, n)} for n in (10, 31, 64)))


def test_missing_form_names_the_line(tmp_path: Path) -> None:
    subject = files.prepare(Product(), {"x": torch.randn(4, 3)}, {"x": {0: "rows"}})
    with pytest.raises(
        ExportError, match=r"aten.prod.dim_int, at test_complex_numbers.py:\d+: return z.prod"
    ) as raised:
        files.save_onnx(subject, tmp_path / "model.onnx")
    assert raised.value.hint == "Write it with real and imaginary parts."


class Product(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x)
        return z.prod(1).real


class Named(nn.Module):
    """Has buffers whose names become equal when dots are replaced, or when a part is named."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Module()
        self.a.register_buffer("b", torch.tensor([1 + 2j]))
        self.register_buffer("a_b", torch.tensor([3 - 4j]))
        self.register_buffer("a_b_real", torch.tensor([50.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x * self.a.b + x**2 * self.a_b + self.a_b_real)  # type: ignore[operator]  # buffers


def _doubles(m: nn.Module, x: torch.Tensor) -> Any:
    z = torch.complex(x, x.flip(0))
    numbers = torch.full((4,), 1j), torch.arange(4) + z, torch.where(x > 0, z, 0.1), torch.cat([z, torch.arange(4) * z])
    powers = x**z, 2**z, (-2) ** z, x ** (1 + 2j), torch.tensor([0.0, -2.0, 3.0, -1.0]).double() ** (z.abs() + 1j)
    single = x.float().type_as(z), z.to(x.to(torch.complex64)), z + x.shape[0], z + 0.1, 0.7 - z
    return *map(torch.view_as_real, (*numbers, *powers, *single)), z.type_as(x.float()), (z * torch.inf).abs()


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("model", [Named(), Program(_doubles)])
def test_pairs_compute_the_same_in_double_precision(model: nn.Module) -> None:
    inputs = {"x": torch.tensor([0.3, -1.5, 2.0, -0.1]).double()}
    subject = files.prepare(model, inputs, None)
    module = replace_with_pairs(subject.program, subject.signature, inputs).module()
    expected = model(**inputs)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    torch.testing.assert_close(list(module(**inputs)), expected, rtol=1e-12, atol=1e-12)
