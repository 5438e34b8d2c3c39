"""Counts how many models each workaround of the tracer saves.

Every model is traced once, and each workaround reports whether it did anything. Each model on which a workaround acted
is then traced again without that workaround. The workaround is needed if the model no longer traces, fixes more sizes,
or if the graph differs from the model. Run it with ``python -m tests.zoo.rescues``; the results stay in
``build/rescues.jsonl``, and a second run continues there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import runpy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, masking_utils
from transformers.exporters import exporter_dynamo
from transformers.exporters import utils as exporter_utils

from optexport._utils import user_lines
from optexport._utils.module_state import restoring_state
from optexport.errors import OptexportError, UntraceableError
from optexport.signature.arguments import flat_inputs, take_flat_tensors
from optexport.signature.resizing import resize
from optexport.tracing import (
    dynamo_exporter,
    graph_checks,
    module_reconstruction,
    trace,
    value_checks,
)
from optexport.tracing.fallbacks import attempts, scalar_tensors
from optexport.tracing.model_run import run_or_error
from optexport.tracing.patches import expert_loops, transformers_functions
from optexport.tracing.shapes.path_probe import ProbeResult, agree
from tests._helpers import models
from tests.tracing import test_any_module
from tests.zoo import runner, shrinking, stages

Note = Callable[[], None]
Manager = AbstractContextManager[Any]
Example = tuple[nn.Module, dict[str, torch.Tensor], Any]

_COVERAGE = Path(__file__).with_name("COVERAGE.md")
# A process that waits instead of computing is ended after this many times its limit of CPU time.
_PATIENCE = 20


@dataclass(frozen=True)
class Rescue:
    """One workaround.

    Attributes:
        watch: Calls its argument whenever the workaround does something.
        off: Switches the workaround off.
    """

    watch: Callable[[Note], Manager]
    off: Callable[[], Manager]


def _when(owner: Any, name: str, acted: Callable[[Any], Any]) -> Callable[[Note], Manager]:
    """Watches a function, and reports a call if ``acted`` is true of its result."""

    def watch(note: Note) -> Manager:
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if acted(result):
                note()
            return result

        return patch.object(owner, name, watched)

    return watch


def _when_raised(owner: Any, name: str) -> Callable[[Note], Manager]:
    def watch(note: Note) -> Manager:
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except OptexportError:
                note()
                raise

        return patch.object(owner, name, watched)

    return watch


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], Manager]:
    return lambda: patch.object(owner, name, value)


class _Off(contextlib.nullcontext):  # type: ignore[type-arg]
    """Replaces a context manager of the tracer to switch it off."""

    def __init__(self, *_: Any) -> None:
        super().__init__(self)
        self.used_buffers = set[str]()

    def note(self, program: Any) -> None:
        """Does nothing."""


def _patch_of_transformers(
    owner: Any, name: str, is_active: Callable[..., bool] = lambda *_, **__: True, key: str | None = None
) -> Rescue:
    """One entry of the patches for models of transformers.

    Args:
        is_active: Returns True for arguments with which the patch does something.
        key: Key of a patched mapping entry.
    """

    def others() -> list[Any]:
        return [entry for entry in dynamo_exporter._PATCHES if entry[:2] != (owner, name)]

    def watch(note: Note) -> Manager:
        ((_, _, factory),) = (e for e in dynamo_exporter._PATCHES if e[:2] == (owner, name))

        def watched(original: Any) -> Any:
            patched = factory(original)
            function = patched[key] if key else patched

            def call(*args: Any, **kwargs: Any) -> Any:
                if is_active(*args, **kwargs):
                    note()
                return function(*args, **kwargs)

            return {**patched, key: call} if key else call

        return patch.object(dynamo_exporter, "_PATCHES", [*others(), (owner, name, watched)])

    return Rescue(watch, lambda: patch.object(dynamo_exporter, "_PATCHES", others()))


def _is_attention_changed(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> bool:
    causal = kw.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    length = query.shape[2]
    is_unknown = isinstance(length, torch.SymInt) and transformers_functions.free_unbacked_symbols(length)
    return bool(is_unknown or (not causal and mask is not None and transformers_functions._PADDING in vars(mask)))


def _is_precomputed(model: Any, inputs: Any) -> bool:
    extended = dict(inputs)
    with torch.no_grad():
        exporter_utils._original_precompute(model, extended)  # type: ignore[attr-defined]
    return extended.keys() != dict(inputs).keys()


def _is_moved_where_it_is(module: nn.Module, *_: Any, **__: Any) -> bool:
    return any(True for _ in module.parameters())


def _watch_numbers(note: Note) -> Manager:
    cls = scalar_tensors.ScalarTracker
    function = cls.__torch_function__

    def watched(
        self: Any, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        values = args[:1] if name in scalar_tensors._READING else []
        if name in scalar_tensors._OF_SIZES:
            values = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(value, torch.Tensor) and self._find_value(value) is not None for value in values):
            note()
        return function(self, func, types, args, kwargs)

    return patch.object(cls, "__torch_function__", watched)


def _watch_experts(note: Note) -> Manager:
    cls = expert_loops._AllIndices
    function = cls.__torch_function__

    def watched(self: Any, *args: Any) -> Any:
        result = function(self, *args)
        if self._nonzero:
            note()
        return result

    return patch.object(cls, "__torch_function__", watched)


def _watch_ones(note: Note) -> Manager:
    function = trace.SizeOneRecorder.store

    def watched(self: Any, program: Any) -> None:
        if self._symbols:
            note()
        function(self, program)

    return patch.object(trace.SizeOneRecorder, "store", watched)


def _watch_swallowed(note: Note) -> Manager:
    function = trace.refuse_caught_errors

    @contextlib.contextmanager
    def watched() -> Any:
        try:
            with function():
                yield
        except OptexportError as error:
            if "catches the error" in str(error):
                note()
            raise

    return patch.object(trace, "refuse_caught_errors", watched)


def _watch_switches(note: Note) -> Manager:
    function = module_reconstruction.inline_regions

    def watched(graph: Any, owner: Any) -> None:
        before = len(graph.nodes)
        function(graph, owner)
        if len(graph.nodes) != before:
            note()

    return patch.object(module_reconstruction, "inline_regions", watched)


def _untraceable(*_: Any, **__: Any) -> Any:
    raise UntraceableError("it is switched off", location="rescues")


def _raise_error(_: Any, __: Any, error: Exception, ___: Any, **____: Any) -> Any:
    raise error


@contextlib.contextmanager
def _watch_exclusive(note: Note) -> Any:
    """Reports a trace that succeeded with only the batch dynamic and without constant values."""
    traces_with_values = list[bool]()
    with (
        _when(attempts, "_trace_with_values", lambda _: traces_with_values.append(True))(note),
        _when(trace, "retry_trace", lambda _: not traces_with_values)(note),
    ):
        yield


RESCUES: dict[str, Rescue] = {
    "own_output_classes": Rescue(
        _when(trace, "returns_own_classes", bool), _replaced(trace, "returns_own_classes", lambda *_: False)
    ),
    "draws": Rescue(
        _when_raised(graph_checks, "check_deterministic"),
        _replaced(graph_checks, "check_deterministic", lambda *_: None),
    ),
    "expert_loops": Rescue(_watch_experts, _replaced(dynamo_exporter, "_expert_patches", lambda _: [])),
    "gradient_switches": Rescue(_watch_switches, _replaced(module_reconstruction, "inline_regions", lambda *_: None)),
    "known_values": Rescue(
        _when(attempts, "_trace_with_values", bool), _replaced(attempts, "_trace_with_values", _untraceable)
    ),
    "long_sizes": Rescue(_when(trace, "_long_size_error", bool), _replaced(trace, "LongSizeDetector", _Off)),
    "number_tensors": Rescue(_watch_numbers, _replaced(trace, "ScalarTracker", _Off)),
    "other_ways": Rescue(
        _when(trace, "probe_paths", lambda ways: ways.removable or ways.fixed_dims or ways.sizes),
        _replaced(trace, "probe_paths", lambda *_: ProbeResult()),
    ),
    "otherwise": Rescue(_watch_exclusive, _replaced(trace, "retry_trace", _raise_error)),
    "sizes_of_one": Rescue(_watch_ones, _replaced(trace, "SizeOneRecorder", _Off)),
    "skipped_checks": Rescue(
        _when(value_checks, "_passing_answer", lambda passes: passes is not None),
        _replaced(trace, "skip_value_checks", lambda: contextlib.nullcontext({})),
    ),
    "swallowed": Rescue(_watch_swallowed, _replaced(trace, "refuse_caught_errors", _Off)),
    "writable": Rescue(
        _when_raised(graph_checks, "check_writable"), _replaced(graph_checks, "check_writable", lambda _: None)
    ),
    "patches.skip_needless_moves": _patch_of_transformers(nn.Module, "to", _is_moved_where_it_is),
    "patches.allow_unknown_length": _patch_of_transformers(
        AttentionInterface, "_global_mapping", _is_attention_changed, "sdpa"
    ),
    "patches.remember_padding": _patch_of_transformers(
        masking_utils.AttentionMaskInterface,
        "_global_mapping",
        lambda *_, attention_mask=None, **__: attention_mask is not None,
        "sdpa",
    ),
    "patches.omit_empty_mask": _patch_of_transformers(
        masking_utils,
        "_ignore_bidirectional_mask_sdpa",
        lambda padding, _, window=None: padding is None and window is None,
    ),
    "patches.apply_head_norms": _patch_of_transformers(
        exporter_dynamo,
        "_reshaped_vision_attention_forward",
        lambda module, *_, **__: all(hasattr(module, name) for name in ("qkv", "q_norm", "k_norm")),
    ),
    "transformers: _vmap_expansion_sdpa": _patch_of_transformers(masking_utils, "_vmap_expansion_sdpa"),
    "transformers: TransformGetItemToIndex": _patch_of_transformers(masking_utils, "TransformGetItemToIndex"),
    "transformers: precompute_export_inputs": _patch_of_transformers(
        exporter_utils, "precompute_export_inputs", _is_precomputed
    ),
}
exporter_utils._original_precompute = exporter_utils.precompute_export_inputs  # type: ignore[attr-defined]


def cheap_types(seconds: int) -> list[str]:
    """Returns the architectures that took few seconds in COVERAGE.md, in a mixed order."""
    rows = (line.strip("|\n ").split("|") for line in _COVERAGE.read_text(encoding="utf-8").splitlines())
    cheap = {row[0].strip() for row in rows if row[-1].strip().isdigit() and int(row[-1]) <= seconds}
    return [name for name in runner.spread(shrinking.model_types()) if name in cheap]


def names(extra: Sequence[Path], cost: int, types: Sequence[str] = ()) -> list[str]:
    """Returns the names of all models: first the hand-written ones, then architectures.

    Args:
        extra: Python files with more models.
        cost: Seconds that an architecture may have taken in COVERAGE.md.
        types: Architectures to add at any cost.
    """
    added = [f"{path}:{name}" for path in extra for name in runpy.run_path(str(path))["MODELS"]]
    own = [f"module:{name}" for name in test_any_module.TABLE] + [f"tiny:{name}" for name in models.NAMES]
    return [*own, *added, *(f"zoo:{name}" for name in [*types, *cheap_types(cost)])]


def example(name: str) -> Example | None:
    """Returns a model, its inputs and dynamic axes; None if it cannot be built."""
    kind, _, rest = name.partition(":")
    if kind == "zoo":
        built = stages.build(stages.Outcome(rest))
        return None if built is None else (*built, None)
    if kind == "tiny":
        return models.model(rest), models.inputs(rest), None
    if kind != "module":
        model, tensors, dynamic = runpy.run_path(kind)["MODELS"][rest]()
        return model.eval(), tensors, dynamic
    make, make_inputs, *_ = test_any_module.TABLE[rest]
    model = make().eval() if rest.startswith("a graph") else models.randomise(make())
    tensors, arguments = flat_inputs(model, make_inputs(3))
    return take_flat_tensors(model, arguments) if arguments else model, tensors, None


def traced(built: Example, sizes: Iterable[dict[str, int]] = ()) -> dict[str, Any]:
    """Traces a model and compares the graph with it.

    Args:
        sizes: Where to compare, if these are sizes of the graph; besides the traced sizes and some near them.
    """
    model, tensors, dynamic = built
    try:
        result = trace.trace(model, tensors, dynamic)
        graph_checks.check_writable(result.graph_module.graph)
        output_names = result.signature.output_names
        graph_checks.check_deterministic(result.graph_module, output_names, output_names)
    except OptexportError as error:
        return {"outcome": "refused", "reason": str(error)[:300]}
    except Exception as error:  # a defect of the tracer, or of a library that it uses
        return {"outcome": "crash", "reason": f"{type(error).__name__}: {error}"[:300]}
    dims, constants = result.signature.dims, result.constants
    usual = result.signature.sizes(tensors)
    near = [{**usual, name: usual[name] + step} for name in dims for step in (1, usual[name])]
    compared = {}
    for sizes_to_compare in [usual, *near, *result.suspect_sizes, *sizes]:
        every = {**usual, **sizes_to_compare}
        if every.keys() == dims.keys() and all(
            dims[name].min <= size <= (dims[name].max or size) for name, size in every.items()
        ):
            compared[json.dumps(every)] = _compare(model, result, resize(tensors, result.signature, every), constants)
    return {
        "outcome": "traced",
        "fixed": sorted({axis.partition(";")[0].partition(" = ")[0] for axis in result.fixed}),
        "held": sorted(constants),
        "dims": {name: [dim.min, dim.max] for name, dim in dims.items()},
        "doubtful": [dict(sizes) for sizes in result.suspect_sizes],
        "compared": compared,
    }


def _compare(model: nn.Module, result: trace.Traced, batch: Mapping[str, torch.Tensor], constants: Any) -> str:
    inputs = {**batch, **constants}
    want = run_or_error(model, inputs)
    if isinstance(want, Exception):
        return "the model fails"
    with restoring_state(result.graph_module):
        got = run_or_error(result.graph_module, {n: v for n, v in batch.items() if n not in constants})
    if isinstance(got, Exception):
        return "the graph fails"
    return "same" if agree(got, want, 1e-3) else "differs"


def find_need(base: Mapping[str, Any], without: Mapping[str, Any]) -> str | None:
    """Returns why a model needs a workaround, from its results with and without it."""
    if base["outcome"] != "traced":
        return None if without["outcome"] == base["outcome"] else f"{base['outcome']}, then {without['outcome']}"
    if without["outcome"] != "traced":
        return f"{without['outcome']}: {without.get('reason', '')}"
    if set(without["fixed"]) - set(base["fixed"]) or set(without["held"]) - set(base["held"]):
        return "fixes more"
    common = [key for key in base["compared"] if key in without["compared"]]
    worse = [key for key in common if base["compared"][key] == "same" != without["compared"][key]]
    if worse:
        return f"{without['compared'][worse[0]]} at {worse[0]}"
    lost = [sizes for sizes in base["doubtful"] if sizes not in without["doubtful"]]
    return f"not checked at {lost[0]}" if lost else None


def _child(name: str, off: str | None, sizes: list[dict[str, int]], seconds: int, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with torch.random.fork_rng(devices=[]):
        try:
            built = example(name)
        except Exception as error:
            answer.send({"outcome": "not built", "reason": str(error)[:200]})
            return
        if built is None:
            answer.send({"outcome": "not built"})
            return
        acted = Counter[str]()
        with contextlib.ExitStack() as stack:
            # These functions are called between a model's lines and torch, and must not count as the model's own code.
            libraries = (*user_lines._LIBRARIES, __file__, mock.__file__)
            stack.enter_context(patch.object(user_lines, "_LIBRARIES", libraries))
            if off is None:
                for rescue_name, rescue in RESCUES.items():
                    stack.enter_context(rescue.watch(lambda key=rescue_name: acted.update([key])))  # type: ignore[misc]
            else:
                stack.enter_context(RESCUES[off].off())
            record = traced(built, sizes)
    answer.send({**record, "acted": dict(acted)})


def run(name: str, off: str | None, sizes: list[dict[str, int]], seconds: int) -> dict[str, Any]:
    """Traces one model in a separate process, with one workaround off or all on."""
    context = multiprocessing.get_context("fork")  # so that the child imports nothing again
    answer, end = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, off, sizes, seconds, end))
    process.start()
    end.close()
    record: dict[str, Any] = {"outcome": "timeout", "reason": f"more than {seconds} s", "acted": {}}
    with contextlib.suppress(EOFError):
        if answer.poll(_PATIENCE * seconds):
            record = answer.recv()
    process.kill()
    process.join()
    return {"name": name, "off": off, **record}


def read(results: Path) -> dict[tuple[str, str | None], dict[str, Any]]:
    """Reads the results by model and workaround."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {(record["name"], record["off"]): record for record in map(json.loads, lines)}


def summarise(records: Mapping[tuple[str, str | None], Mapping[str, Any]]) -> str:
    """Returns a table of the models on which each workaround acted and was needed."""
    bases = {name: record for (name, off), record in records.items() if off is None}
    built = [name for name, record in bases.items() if record["outcome"] != "not built"]
    zoo = sum(name.startswith("zoo:") for name in built)
    lines = [
        f"{zoo} architectures and {len(built) - zoo} hand-written models",
        f"{'workaround':42} {'acted':>5} {'tried':>5} {'needed':>6}",
    ]
    for rescue in RESCUES:
        acted = [name for name in built if bases[name]["acted"].get(rescue)]
        tried = [name for name in acted if (name, rescue) in records]
        needs = {name: find_need(bases[name], records[name, rescue]) for name in tried}
        needed = {name: need for name, need in needs.items() if need}
        lines.append(f"{rescue:42} {len(acted):5} {len(tried):5} {len(needed):6}")
        lines += [f"    {name}: {need[:140]}" for name, need in needed.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.rescues", description=__doc__)
    add = parser.add_argument
    add("--results", type=Path, default=Path("build/rescues.jsonl"), help="where results are kept")
    add("--models", type=Path, action="append", default=[], help="a Python file with MODELS, a dictionary of factories")
    add("--types", nargs="*", default=(), metavar="MODEL_TYPE", help="architectures to add, at any cost")
    add("--cost", type=int, default=15, help="seconds that an architecture may have taken in COVERAGE.md")
    add("--enough", type=int, default=5, help="models that need a workaround, after which no more are tried")
    add("--tries", type=int, default=20, help="models on which each workaround is switched off, at most")
    add("--seconds", type=int, default=60, help="CPU time for each trace")
    add("--watch-only", action="store_true", help="only find out which workarounds act")
    add("--table", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OPTEXPORT_CACHE": "", "OMP_NUM_THREADS": "1"}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    records = read(arguments.results)

    def add_record(name: str, off: str | None, sizes: list[dict[str, int]]) -> dict[str, Any]:
        record = run(name, off, sizes, arguments.seconds)
        records[name, off] = record
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return record

    tried, needed = Counter[str](), Counter[str]()
    for name in [] if arguments.table else names(arguments.models, arguments.cost, arguments.types):
        base = records.get((name, None)) or add_record(name, None, [])
        print(name, base["outcome"], *base.get("acted", {}), flush=True)
        for rescue in base.get("acted", {}):
            is_open = tried[rescue] < arguments.tries and needed[rescue] < arguments.enough
            if is_open and not arguments.watch_only:
                without = records.get((name, rescue)) or add_record(name, rescue, base.get("doubtful", []))
                need = find_need(base, without)
                tried[rescue] += 1
                needed[rescue] += need is not None
                print(f"    without {rescue}: {need or 'the same'}", flush=True)
    print(summarise(records))


if __name__ == "__main__":
    main()
