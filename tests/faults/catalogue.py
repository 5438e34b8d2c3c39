"""The Fault class, and the decorators that add faults to the catalog."""

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
        on: The subject that the fault is put into.
        mistake: Damages a graph and returns the changed nodes, or damages a file in place.
        options: Additional keyword arguments of the mistake.
        after: A correct rule whose result the mistake damages.
        fails: The targets that must fail, in the order of the pipeline.
        missed: Why the parity checks do not catch the fault. None if they do.
        nightly: True if the fault takes too long for a daily run.
    """

    name: str
    on: str
    mistake: Callable[..., Any]
    options: dict[str, Any]
    after: Transformation | None = None
    fails: tuple[str, ...] = ("graph",)
    missed: str | None = None
    nightly: bool = False

    @property
    def by_a_rule(self) -> bool:
        """True if a rule makes the mistake, and not an exporter or a runtime."""
        return self.fails == ("graph",)


FAULTS: dict[str, Fault] = {}


def enter(
    mistake: AnyMistake,
    on: str,
    options: dict[str, Any],
    shelf: dict[str, Fault] = FAULTS,
    **more: Any,
) -> AnyMistake:
    """Adds a mistake to a catalog. Its name contains the subject and the options."""
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
    """Registers a mistake of a rule: a function that changes a graph and returns the changed nodes.

    Args:
        on: The subject.
        after: The correct rule whose result the mistake damages.
        options: Keyword arguments of the mistake, for instance the layer.
    """
    return lambda mistake: enter(mistake, on, options, after=after, missed=missed, nightly=nightly)


FILES = {"onnx": ("onnx", "onnx-optimized"), "torchscript": ("torchscript",), "pt2": ("pt2",)}


def exporter(
    file_format: str, on: str = "block", *, missed: str | None = None, nightly: bool = False, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a mistake of an exporter: a function that changes a correct file in place."""
    return lambda mistake: enter(mistake, on, options, fails=FILES[file_format], missed=missed, nightly=nightly)


def runtime(on: str = "block", **options: Any) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers a mistake of the ONNX Runtime optimizer, as a change of the file that it runs."""
    return lambda mistake: enter(mistake, on, options, fails=("onnx-optimized",))
