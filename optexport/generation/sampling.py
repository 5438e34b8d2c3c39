"""How the next token is chosen from the logits: the most likely one, or at random.

The order of the steps is that of transformers: repetition penalty, temperature, top-k, top-p.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from optexport.errors import ConfigError

# Takes logits [batch, vocabulary] and the tokens so far [batch, sequence], without padding; returns tokens [batch].
Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice; `Generator.generate` describes them.

    Raises:
        ConfigError: A value is out of range, or sampling is off and another value needs it.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, is_valid, expectation in (
            ("temperature", _is_positive(self.temperature), "a positive number"),
            ("top_k", self.top_k is None or _is_whole(self.top_k), "a whole number, and at least 0"),
            ("top_p", isinstance(self.top_p, numbers.Real) and 0 <= float(self.top_p) <= 1, "a number from 0 to 1"),
            ("repetition_penalty", _is_positive(self.repetition_penalty), "a positive number"),
            ("seed", self.seed is None or _is_whole(self.seed), "a whole number from 0 to 2**63 - 1"),
        ):
            if not is_valid:
                message = f"expected {expectation}, found {getattr(self, name)!r}"
                raise ConfigError(message, location=f"generate: {name}")
        for name in ("temperature", "top_k", "top_p", "seed"):
            if not self.do_sample and getattr(self, name) != getattr(Sampling, name):
                message = "has no effect on the most likely token"
                raise ConfigError(message, location=f"generate: {name}", hint="Pass do_sample=True.")

    def start(self) -> Choose:
        """Returns the choice for one call; its random numbers start at the seed."""
        random = torch.Generator()
        if self.seed is None:
            random.seed()
        else:
            random.manual_seed(int(self.seed))

        def choose(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            logits = self._penalize(logits.float(), tokens)
            if not self.do_sample:
                return logits.argmax(-1)
            probabilities = torch.softmax(self._filter(logits / self.temperature), -1)
            return torch.multinomial(probabilities, 1, generator=random)[:, 0]

        return choose

    def _penalize(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Makes tokens of the text less likely, as in Keskar et al., 2019, "CTRL", section 4.1."""
        if self.repetition_penalty == 1:
            return logits
        earlier = logits.gather(1, tokens)
        penalty = self.repetition_penalty
        return logits.scatter(1, tokens, torch.where(earlier < 0, earlier * penalty, earlier / penalty))

    def _filter(self, logits: torch.Tensor) -> torch.Tensor:
        """Leaves the ``top_k`` likeliest tokens (all if 0 or None), then those that have ``top_p`` of the probability.

        The latter is nucleus sampling (Holtzman et al., 2020, "The Curious Case of Neural Text Degeneration").
        """
        if self.top_k:
            smallest = logits.topk(min(int(self.top_k), logits.shape[-1]))[0][:, -1:]
            logits = logits.masked_fill(logits < smallest, -math.inf)
        if self.top_p < 1:
            ascending, order = logits.sort(-1)
            is_removed = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            is_removed[:, -1] = False
            logits = logits.masked_fill(is_removed.scatter(1, order, is_removed), -math.inf)
        return logits


def _is_positive(value: Any) -> bool:
    return isinstance(value, numbers.Real) and 0 < float(value) < math.inf


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and 0 <= int(value) < 2**63
