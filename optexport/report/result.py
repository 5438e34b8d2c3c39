"""The result of a run, for the Python API."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rich.console import Console

from optexport._utils import notebook
from optexport.bundle.verdict import check_text
from optexport.report import terminal
from optexport.result import RunData


@dataclass(frozen=True, repr=False)
class Result(RunData):
    """Result of a successful run.

    Attributes:
        output: The bundle's folder.
        parity: The parity of every target, in the order of the pipeline.
        manifest: The bundle's manifest.
        run_id: The MLflow run, if the run was tracked.
        run_page: The address of the run in MLflow's web page, after the command that serves it if necessary.
        tracking_failure: The error of tracking, if it failed.
        registered: The result of the registration, if the config names a registered model.
        baseline: The folder of the plain export, if requested.
        seconds: Wall-clock seconds of the run.
        gain: The times of the files, except ``.pt2``, and of the original model in PyTorch.
        gain_skipped: The reason if these times are missing; empty otherwise.
        bench: The benchmarks of the files, if any.
        tuned: The results of tuning, by format.
        cache_hits: The steps whose results are from the cache.
    """

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else "failed"
        return f"Result({verdict}, {check_text(self.manifest.parity)}, {', '.join(self.files)} in {self.output})"

    def summary(self, *, verbose: bool = False) -> str:
        """Returns the text that ``optexport run`` prints at its end, with the error of tracking if it failed.

        Args:
            verbose: Whether to list rules that found nothing, format passes, and the cases.
        """
        return notebook.as_text(functools.partial(self._show, verbose=verbose))

    def _repr_html_(self) -> str:
        return notebook.as_html(self._show)

    def _show(self, console: Console, *, verbose: bool = False) -> None:
        terminal.show(self, console, verbose=verbose)
        if self.failure is not None:  # a command prints it as its error
            console.print(str(self.failure), soft_wrap=True, highlight=False, markup=False)
