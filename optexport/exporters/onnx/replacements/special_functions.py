"""Special functions that ``torch.onnx`` does not convert, computed in float64."""

from __future__ import annotations

import functools
import math

import torch

# Coefficients of `erfinv`: numerator and denominator, highest power first, for |x| <= 0.85 and two tails.
_PERCENTAGE_POINTS = (
    (
        (
            2509.0809287301227,
            33430.57558358813,
            67265.7709270087,
            45921.95393154987,
            13731.69376550946,
            1971.5909503065513,
            133.14166789178438,
            3.3871328727963665,
        ),
        (
            5226.495278852854,
            28729.085735721943,
            39307.89580009271,
            21213.794301586597,
            5394.196021424751,
            687.1870074920579,
            42.31333070160091,
            1.0,
        ),
    ),
    (
        (
            0.0007745450142783414,
            0.022723844989269184,
            0.2417807251774506,
            1.2704582524523684,
            3.6478483247632045,
            5.769497221460691,
            4.630337846156546,
            1.4234371107496835,
        ),
        (
            1.0507500716444169e-09,
            0.0005475938084995345,
            0.015198666563616457,
            0.14810397642748008,
            0.6897673349851,
            1.6763848301838038,
            2.053191626637759,
            1.0,
        ),
    ),
    (
        (
            2.0103343992922881e-07,
            2.7115555687434876e-05,
            0.0012426609473880784,
            0.026532189526576124,
            0.29656057182850487,
            1.7848265399172913,
            5.463784911164114,
            6.657904643501103,
        ),
        (
            2.0442631033899397e-15,
            1.421511758316446e-07,
            1.8463183175100548e-05,
            0.0007868691311456133,
            0.014875361290850615,
            0.1369298809227358,
            0.599832206555888,
            1.0,
        ),
    ),
)


def erfinv(x: torch.Tensor) -> torch.Tensor:
    """Computes the inverse of the error function.

    It computes in float64 and casts to the input's dtype. It does not call the error function, which ONNX Runtime lacks
    in float64. Source: algorithm AS 241 of Wichura, "The Percentage Points of the Normal Distribution", Applied
    Statistics 37 (1988). Three rational functions give about 16 digits.
    """
    dtype, x = x.dtype, (x if x.is_floating_point() else x.float()).double()
    half = x / 2
    tail = torch.sqrt(-torch.log((1 - x.abs()) / 2))
    near_zero = _quotient(0.180625 - half * half, 0) * half
    near_end = torch.where(tail <= 5, _quotient(tail - 1.6, 1), _quotient(tail - 5, 2)) * torch.sign(x)
    result = torch.where(half.abs() <= 0.425, near_zero, near_end) / math.sqrt(2)
    return torch.where(x.abs() == 1, x * math.inf, result).to(dtype if dtype.is_floating_point else torch.float32)


def _quotient(x: torch.Tensor, index: int) -> torch.Tensor:
    numerator, denominator = (
        functools.reduce(lambda total, factor: total * x + factor, factors, torch.zeros_like(x))
        for factors in _PERCENTAGE_POINTS[index]
    )
    return numerator / denominator


# Coefficients of Lanczos' approximation with g = 7, from Godfrey, "A note on the computation of the convergent Lanczos
# complex Gamma approximation" (2001).
_LANCZOS = (
    0.99999999999980993,
    676.5203681218851,
    -1259.1392167224028,
    771.32342877765313,
    -176.61502916214059,
    12.507343278686905,
    -0.13857109526572012,
    9.9843695780195716e-6,
    1.5056327351493116e-7,
)


def lgamma(x: torch.Tensor) -> torch.Tensor:
    """Computes the logarithm of the absolute gamma function by Lanczos' approximation, and by reflection below 1/2."""
    dtype, x = x.dtype if x.is_floating_point() else torch.float32, x.double()
    z = torch.where(x < 0.5, 1 - x, x) - 1
    terms = (factor / (z + i) for i, factor in enumerate(_LANCZOS[1:], start=1))
    total = sum(terms, start=torch.full_like(z, _LANCZOS[0]))
    t = z + 7.5
    result = math.log(2 * math.pi) / 2 + (z + 0.5) * torch.log(t) - t + torch.log(total)
    reflected = math.log(math.pi) - torch.log(torch.sin(math.pi * (x - torch.floor(x))).abs()) - result
    result = torch.where(x < 0.5, reflected, result)
    is_pole = (x <= 0) & (x == torch.floor(x))
    return torch.where(is_pole | x.isinf(), math.inf, result).to(dtype)


def digamma(x: torch.Tensor) -> torch.Tensor:
    """Computes the derivative of `lgamma` by recurrence to 8, an asymptotic series, and reflection below 0.

    Source: Abramowitz and Stegun, 6.3.5, 6.3.7 and 6.3.18.
    """
    dtype, x = x.dtype if x.is_floating_point() else torch.float32, x.double()
    z = torch.where(x < 0, 1 - x, x)
    shift = sum((1 / (z + i) for i in range(8)), start=torch.zeros_like(z))
    y = z + 8
    square = 1 / (y * y)
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square * (1 / 240 - square / 132))))
    result = torch.log(y) - 0.5 / y - series - shift
    angle = math.pi * (x - torch.floor(x))
    result = torch.where(x < 0, result - math.pi * torch.cos(angle) / torch.sin(angle), result)
    return torch.where((x < 0) & (x == torch.floor(x)), math.nan, result).to(dtype)
