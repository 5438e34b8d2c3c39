"""What a fault is, and how the files of the catalogue enter theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import fx

from optexport.transformations import Transformation

Mistake = Callable[..., "fx.Node | Iterable[fx.Node]"]
AnyMistake = TypeVar("AnyMistake", bound=Callable[..., Any])


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        on: The subject that it is put into.
        mistake: Spoils a graph and says which nodes changed; or spoils a file in place.
        options: What the mistake is called with besides.
        after: An honest rule whose work it spoils.
        fails: The places that must fail, in the order of the pipeline; none for the transformed graph.
        missed: Why the proof does not catch it, though it should; None where it does.
        nightly: Whether it takes too long for every day.
    """

    name: str
    on: str
    mistake: Callable[..., Any]
    options: dict[str, Any]
    after: Transformation | None = None
    fails: tuple[str, ...] = ("transformed graph",)
    missed: str | None = None
    nightly: bool = False

    @property
    def by_a_rule(self) -> bool:
        """Whether it is a rule that makes the mistake, and not an exporter or a runtime."""
        return self.fails == ("transformed graph",)


FAULTS: dict[str, Fault] = {}


def enter(
    mistake: AnyMistake,
    on: str,
    options: dict[str, Any],
    shelf: dict[str, Fault] = FAULTS,
    **more: Any,
) -> AnyMistake:
    """Enters a mistake under its own name, its subject and its options."""
    where = "".join(f", {key} {value}" for key, value in options.items())
    name = f"{mistake.__name__.replace('_', ' ')} ({on}{where})"
    assert name not in shelf, name
    shelf[name] = Fault(name, on, mistake, options, **more)
    return mistake


def rule(
    on: str,
    *,
    after: Transformation | None = None,
    missed: str | None = None,
    nightly: bool = False,
    **options: Any,
) -> Callable[[AnyMistake], AnyMistake]:
    """A mistake that a rule makes: a function of the graph, which it changes, to the nodes that it changed.

    Args:
        on: The subject.
        after: The honest rule whose work it spoils.
        options: Handed to the mistake: which layer, for instance.
    """
    return lambda mistake: enter(mistake, on, options, after=after, missed=missed, nightly=nightly)


FILES = {"onnx": ("onnx", "onnx, optimised"), "torchscript": ("torchscript",), "pt2": ("pt2",)}


def exporter(
    file_format: str, on: str = "block", *, missed: str | None = None, nightly: bool = False, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A mistake that an exporter makes: a function of the path of an honest file, which it changes."""
    return lambda mistake: enter(mistake, on, options, fails=FILES[file_format], missed=missed, nightly=nightly)


def runtime(on: str = "block", **options: Any) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """A mistake that ONNX Runtime makes as it optimises, given as a change of the file that it then runs."""
    return lambda mistake: enter(mistake, on, options, fails=("onnx, optimised",))
