"""Result of the checks of a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from optexport._utils import notebook
from optexport.errors import GateError, OptexportError, ParityError, on_one_line, printable
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.gates import Gate
from optexport.parity.noise_floor import Tolerance
from optexport.parity.reference import Reference


class Verified(ParityChecker):
    """Comparison of a bundle's files with its stored outputs.

    Attributes:
        folder: The bundle's folder.
        unchecked: The gates that were not checked.
        fixed: The formats of files that work at the traced shape only.
        key: The public key that the signature was checked with; None if it was not checked.
    """

    def __init__(
        self,
        reference: Reference,
        tolerances: Mapping[str, Tolerance],
        gates: Sequence[Gate],
        *,
        folder: Path,
        unchecked: Sequence[str],
        fixed: Sequence[str],
    ) -> None:
        super().__init__(reference, tolerances, gates)
        self.folder = folder
        self.key: Path | None = None
        self.unchecked = [*unchecked]
        self.fixed = [*fixed]

    def __repr__(self) -> str:
        targets = ", ".join(target.title for target in self.targets[1:])
        return f"Verified({'passed' if self.passed else 'failed'}, {targets} in {self.folder})"

    @property
    def gate_failures(self) -> list[str]:
        """The gates that fail."""
        results = [(target.target, result) for target in self.targets[1:] for result in target.gate_results]
        return [f"{target}: {result.failure}" for target, result in results if result.failure is not None]

    @property
    def failure(self) -> OptexportError | None:
        """The error of ``optexport verify``; None if all files passed."""
        outputs = [(target.target, output) for target in self.targets[1:] for output in target.outputs]
        failures = [f"{t}: {on_one_line(o.output)}, {o.failure}" for t, o in outputs if o.failure is not None]
        location, details = str(self.folder), "\n".join(failures + self.gate_failures)
        if failures:
            return ParityError("the files do not reproduce the stored outputs", location=location, details=details)
        if self.gate_failures:
            return GateError("the files no longer meet their gates", location=location, details=details)
        return None

    def summary(self) -> str:
        """Returns the text that ``optexport verify`` prints."""
        if self.failure is not None:
            return f"{printable(self.failure.labelled)}\n"
        signed = "" if self.key is None else f"signed with the key of {self.key}, "
        return printable(f"{self.folder}: OK ({signed}files unchanged; {self._describe_checks()})") + "\n"

    def _repr_html_(self) -> str:
        return notebook.preformatted(self.summary())

    def _uncounted(self, reference: Reference, output: str) -> frozenset[str]:
        """Returns the cases as in the run. There, a gate that cannot be checked again counts all cases."""
        has_gate = any(gate.output in (None, output) for gate in self.gates)
        return super()._uncounted(reference, output) if has_gate or not self.unchecked else frozenset()

    def _name(self, target: TargetParity) -> str:
        is_fixed = target.target.partition("-")[0] in self.fixed
        return f"{target.target} (traced shape only)" if is_fixed else target.target

    def _describe_checks(self) -> str:
        """Describes the checks that passed."""
        targets = self.targets[1:]
        exact = [self._name(target) for target in targets if target.precision is None]
        lowered = [target.title for target in targets if target.precision is not None]
        texts = [f"stored outputs reproduced by {', '.join(exact)}"] if exact else []
        if lowered:
            result = "gates met by" if self.gates else "no gate to check for"
            texts.append(f"{result} {', '.join(lowered)}")
        texts += [f"not checked again: {'; '.join(self.unchecked)}"] if self.unchecked else []
        return "; ".join(texts)
