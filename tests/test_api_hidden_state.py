"""State that a repeated batch hides is refused, in the Python API."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport import export
from optexport.errors import TraceError
from tests._helpers.exports import Counting, X


class Cache(nn.Module):
    """Writes its input at positions, and sums what was written so far. The same batch gives the same cache again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(8, 4))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.keys[position] = x
        return self.keys.cumsum(0)[position]


class Peak(nn.Module):
    """Divides by the largest value so far, which the inputs of an export need not exceed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.tensor(100.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.peak = torch.maximum(self.peak, x.max())
        return x / self.peak


class CacheInParameter(Cache):
    def __init__(self) -> None:
        super().__init__()
        del self.keys
        self.keys = nn.Parameter(torch.zeros(8, 4), requires_grad=False)


class CacheInAttribute(Cache):
    def __init__(self) -> None:
        super().__init__()
        del self.keys
        self.keys = torch.zeros(8, 4)


class CacheInDict(Cache):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [{"keys": torch.zeros(8, 4)}]

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        keys = self.layers[0]["keys"]
        keys[position] = x
        return keys.cumsum(0)[position]


class CacheInTuple(Cache):
    def __init__(self) -> None:
        super().__init__()
        self.layers = ((torch.zeros(8, 4),),)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        keys = self.layers[0][0]
        keys[position] = x
        return keys.cumsum(0)[position]


class Memory(nn.Module):
    """Returns the larger of this input and the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.last is None else torch.maximum(x, self.last)
        self.last = x
        return y


class Calls(nn.Module):
    """Adds the number of calls, which is a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


class Means(nn.Module):
    """Adds the means of all inputs so far."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.means.append(x.mean())
        return x + sum(self.means)


class FirstCall(nn.Module):
    """Doubles the result of the first call, which takes an entry out of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {"first": 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors.pop("first", 1.0)


class LastThree(nn.Module):
    """Adds the largest values of the last three inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: deque[torch.Tensor] = deque(maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.peaks.append(x.max())
        return x + sum(self.peaks)


class CountingInScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(Counting())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * 2  # type: ignore[no-any-return]


_WRITTEN = {"x": X, "position": torch.arange(2, 2 + len(X))}


class Streaming(nn.Module):
    """Continues from the last call, and starts again for another number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hidden is None or self.hidden.shape[0] != x.shape[0]:
            self.hidden = x.new_zeros(x.shape[0], 4)
        self.hidden = self.cell(x, self.hidden)
        return self.hidden


class StreamingPeak(nn.Module):
    """Divides by the largest value since the number of rows changed, which a repeated batch does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = torch.zeros(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.peak.shape != x.shape:
            self.peak = x.abs()
        self.peak = torch.maximum(self.peak, x.abs())
        return x / self.peak


class InTurn(nn.Module):
    """Multiplies by one of two numbers, which take turns by their order in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {"first": 2.0, "second": 3.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = next(iter(self.factors))
        self.factors[key] = factor = self.factors.pop(key)
        return x * factor


class PeakInTuple(nn.Module):
    """Keeps the largest value since the number of rows changed, in a tuple that each call makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[torch.Tensor, ...] = (torch.zeros(1, 4),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        peak = x.abs() if self.kept[0].shape != x.shape else torch.maximum(self.kept[0], x.abs())
        self.kept = (peak,)
        return x / peak


class Countdown(nn.Module):
    """Computes something else after many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 5000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        return x if self.left > 0 else 2 * x


class CountdownInBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.tensor(5000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        return torch.where(self.left > 0, x, 2 * x)


class CountingByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["forward"] += 1
        return x if self.calls["forward"] < 5000 else 2 * x


class CountingInSet(nn.Module):
    """Computes something else in the second call with other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(len(self.seen))
        return x * len(self.seen)


class FirstIds(nn.Module):
    """Compares its ids with those of the first call with as many."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.first: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.first is None or self.first.shape != ids.shape:
            self.first = ids.clone()
        return self.embedding(ids) * (ids == self.first)[..., None]


class FirstDirection(nn.Module):
    """Keeps the direction of the first input, which does not depend on its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None or self.first.shape != x.shape:
            self.first = nn.functional.normalize(x, dim=0)
        return x * self.first


@pytest.mark.parametrize("options", [{}, {"effort": "quick"}, {"atol": 1e-3, "rtol": 1e-3}])
@pytest.mark.parametrize(
    ("make", "inputs", "place"),
    [
        (Cache, _WRITTEN, "keys"),
        (CacheInParameter, _WRITTEN, "keys"),
        (CacheInAttribute, _WRITTEN, "keys"),
        (CacheInDict, _WRITTEN, "layers.0.keys"),
        (Peak, {"x": X}, "peak"),
        (Memory, {"x": X}, "last"),
        (Calls, {"x": X}, "calls"),
        (Means, {"x": X}, "means"),
        (FirstCall, {"x": X}, "factors.first"),
        (LastThree, {"x": X}, "peaks"),
        (CountingInScript, {"x": X}, "part.calls"),
        (Streaming, {"x": X}, "hidden"),
        (StreamingPeak, {"x": X}, "peak"),
        (InTurn, {"x": X}, "factors"),
        (CacheInTuple, _WRITTEN, "layers.0.0"),
        (PeakInTuple, {"x": X}, "kept"),
        (Countdown, {"x": X}, "left"),
        (CountdownInBuffer, {"x": X}, "left"),
        (CountingByName, {"x": X}, "calls.forward"),
        (CountingInSet, {"x": X}, "seen"),
        (FirstIds, {"ids": torch.tensor([[1, 2, 3, 4]])}, "first"),
        (FirstDirection, {"x": X}, "first"),
    ],
)
def test_state_that_a_repeated_batch_hides_is_refused(
    make: type[nn.Module], inputs: dict[str, torch.Tensor], place: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The files passed, and disagreed with the model on the second call."""
    with pytest.raises(TraceError, match=f"depend on what earlier calls wrote to {place} "):
        export(make().eval(), inputs, tmp_path / "bundle", formats=["pt2"], **options)
