"""Runs in the process of one model type."""

from __future__ import annotations

import resource
import signal
import warnings
from multiprocessing.connection import Connection

import torch
import transformers

from tests.zoo.runner import Judge
from tests.zoo.stages import Outcome

_MOST_MEMORY = 12 << 30


def main(model_type: str, answer: Connection, judge: Judge) -> None:
    """Judges a model type and sends the result.

    Before each stage it sends the results until then, in case it is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner ends this process
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")

    def announce(outcome: Outcome, stage: str) -> None:
        answer.send({**outcome.as_json(), "at": stage})

    outcome = judge(model_type, announce)
    answer.send({**outcome.as_json(), "finished": True})
    answer.close()
