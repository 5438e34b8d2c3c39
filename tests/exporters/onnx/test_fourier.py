"""Tests of Fourier transforms in ONNX files: any length, complex and real, and inverses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fft, nn

from tests._helpers.graphs import Program
from tests.exporters import files

_NORMS = ("backward", "ortho", "forward")


def _complex(m: nn.Module, x: torch.Tensor) -> Any:
    y = torch.complex(x, x.flip(1))
    turned = [part for norm in _NORMS for part in (fft.fft(y, norm=norm), fft.ifft(y, dim=1, norm=norm))]
    return [torch.view_as_real(part) for part in (*turned, fft.fftn(y, dim=(1, 2), norm="ortho"), fft.ifft2(y))]


def _half(m: nn.Module, x: torch.Tensor) -> Any:
    halves = [fft.rfft(x, norm=norm) for norm in _NORMS] + [
        fft.rfft2(x, norm="ortho"),
        fft.rfftn(x, dim=(2, 1), norm="ortho"),
    ]
    return [part for half in halves for part in (half.real, half.imag)]


def _back(m: nn.Module, x: torch.Tensor) -> Any:
    """Computes inverse transforms of a spectrum whose first and middle numbers may be complex."""
    y = torch.complex(x, x.flip(1))
    same = [fft.irfft(y, n=x.shape[2], norm=norm) for norm in _NORMS]
    return same, fft.irfft(y), fft.irfft(y, n=7, dim=1), fft.irfft2(y), fft.hfft(y), fft.ihfft(x).abs()


@pytest.mark.nightly
@pytest.mark.parametrize("transforms", [_complex, _half, _back])
def test_transforms_of_any_length_are_as_exact_as_products(transforms: Any, tmp_path: Path) -> None:
    dynamic = {"x": {0: "batch", 1: "rows", 2: "columns"}}
    example = {"x": torch.randn(2, 6, 9)}
    sizes = [(1, 6, 9), (3, 8, 16), (2, 13, 10), (2, 36, 37), (1, 5, 97)]
    files.assert_onnx(Program(transforms), example, dynamic, tmp_path, *({"x": torch.randn(*size)} for size in sizes))


@pytest.mark.nightly
@pytest.mark.parametrize("transforms", [_complex, _half, _back])
@pytest.mark.parametrize("length", [16, 37, 10])
def test_transforms_of_a_fixed_length_are_written(length: int, transforms: Any, tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 4, length)}
    files.assert_onnx(Program(transforms), example, {"x": {0: "batch"}}, tmp_path, {"x": torch.randn(5, 4, length)})


@pytest.mark.slow
def test_spectrogram_and_its_inverse_are_written(tmp_path: Path) -> None:
    window = torch.hann_window(20)

    def there_and_back(m: nn.Module, x: torch.Tensor) -> Any:
        spectrum = torch.stft(x, 20, hop_length=5, window=window.to(x.dtype), return_complex=True)
        return torch.view_as_real(spectrum), torch.istft(spectrum * 0.5, 20, hop_length=5, window=window.to(x.dtype))

    model, example, dynamic = Program(there_and_back), {"x": torch.randn(2, 80)}, {"x": {0: "batch", 1: "samples"}}
    files.assert_onnx(model, example, dynamic, tmp_path, {"x": torch.randn(3, 80)}, {"x": torch.randn(1, 111)})


@pytest.mark.slow
def test_real_numbers_of_a_spectrum_have_the_angle_of_torch(tmp_path: Path) -> None:
    def angles(m: nn.Module, x: torch.Tensor) -> Any:
        spectrum = fft.rfft(x)
        return spectrum.angle()[:, 0], spectrum.angle()[:, -1], spectrum.conj().imag

    model, example, dynamic = Program(angles), {"x": torch.randn(4, 10)}, {"x": {0: "batch", 1: "samples"}}
    files.assert_onnx(model, example, dynamic, tmp_path, *({"x": torch.randn(9, size)} for size in (8, 22, 64)))


@pytest.mark.slow
def test_a_spectrum_is_shifted_to_its_middle_and_back(tmp_path: Path) -> None:
    def shifted(m: nn.Module, x: torch.Tensor) -> Any:
        return fft.fftshift(x), fft.ifftshift(x, dim=1), torch.view_as_real(fft.fftshift(fft.fft(x), dim=(1,)))

    example, dynamic = {"x": torch.randn(4, 10)}, {"x": {0: "batch", 1: "samples"}}
    files.assert_onnx(Program(shifted), example, dynamic, tmp_path, {"x": torch.randn(3, 7)}, {"x": torch.randn(1, 8)})
