"""The seeded faults: each replaces one snippet of one line of the package, as a realistic mistake would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """One seeded fault.

    Attributes:
        name: Identifies it on the command line.
        file: Path of the module, relative to the root of the repository.
        before: Text that occurs exactly once in the file, on one line.
        after: Text that replaces it.
        tests: Test paths that should notice the fault. They run first.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Changes the file under ``root``.

        Raises:
            ValueError: The snippet does not occur exactly once, or the mutation changes nothing.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        count = text.count(self.before)
        if count != 1 or self.before == self.after or "\n" in self.before + self.after:
            raise ValueError(f"{self.name}: {self.before!r} occurs {count} times in {self.file}, expected once.")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")


MUTATIONS = (
    # transformations
    Mutation(
        "undo-oldest-change-first",
        "optexport/transformations/rule.py",
        "key=lambda r: r[0], reverse=True",
        "key=lambda r: r[0]",
        ("tests/transformations/test_undo.py", "tests/transformations/test_rule.py"),
    ),
    Mutation(
        "batch-norm-leaves-bias-unscaled",
        "optexport/transformations/fuse_batch_norm.py",
        "bias * scale + shift",
        "bias + shift",
        ("tests/transformations/test_fuse_batch_norm.py",),
    ),
    Mutation(
        "merge-linears-undo-loses-module-order",
        "optexport/transformations/merge_linears.py",
        "modules.reorder_children(graph_module, target, order)",
        "assert order",
        ("tests/transformations/test_merge_linears.py", "tests/transformations/test_undo.py"),
    ),
    Mutation(
        "merge-linears-ignores-write-between-calls",
        "optexport/transformations/merge_linears.py",
        "first, last = min(calls), max(calls)",
        "first, last = min(calls), min(calls)",
        ("tests/transformations/test_merge_linears_refusals.py",),
    ),
    Mutation(
        "sink-select-through-causal-attention",
        "optexport/transformations/analysis/row_wise.py",
        'or arguments["dropout_p"] or arguments["is_causal"]:',
        'or arguments["dropout_p"]:',
        ("tests/transformations/test_sink_select.py",),
    ),
    Mutation(
        "fold-constants-folds-changed-buffers",
        "optexport/transformations/analysis/constants.py",
        "tensor = memory.find_constant(graph_module, node)",
        "tensor = memory._attribute(graph_module, node)",
        ("tests/transformations/test_fold_constants.py",),
    ),
    Mutation(
        "fold-constants-under-autocast",
        "optexport/transformations/analysis/constants.py",
        "and not modes.find_state(graph_module, node)",
        "and graph_module is not None",
        ("tests/transformations/test_fold_constants.py",),
    ),
    Mutation(
        "batch-norm-across-joined-axes",
        "optexport/transformations/analysis/axes.py",
        "if all(statically_known_true(a == b) for a, b in pairs):",
        "if any(statically_known_true(a == b) for a, b in pairs):",
        ("tests/transformations/test_fuse_batch_norm.py",),
    ),
    # tracing
    Mutation(
        "all-buffers-persistent",
        "optexport/tracing/module_reconstruction.py",
        "persistent=target in program.state_dict",
        "persistent=True",
        ("tests/tracing/test_module_reconstruction.py",),
    ),
    Mutation(
        "size-range-cut-at-multiples",
        "optexport/tracing/shapes/size_guards.py",
        "if larger and larger != [",
        "if not larger and larger != [",
        ("tests/tracing/shapes/test_size_guards.py",),
    ),
    # parity
    Mutation(
        "limit-twice-as-wide",
        "optexport/parity/noise_floor.py",
        "return noise_multiple * max(floor,",
        "return 2 * noise_multiple * max(floor,",
        ("tests/parity/test_checker.py", "tests/parity/test_parity_properties.py"),
    ),
    Mutation(
        "fixed-tolerance-takes-smaller-term",
        "optexport/parity/noise_floor.py",
        "return torch.maximum(own,",
        "return torch.minimum(own,",
        ("tests/parity/test_checker.py",),
    ),
    Mutation(
        "tie-of-one-slack",
        "optexport/parity/metrics.py",
        "(highest - lowest <= 2 * slack)",
        "(highest - lowest <= slack)",
        ("tests/parity/test_metrics.py", "tests/parity/test_gates.py"),
    ),
    Mutation(
        "gates-do-not-count",
        "optexport/parity/checker.py",
        "return self.outputs_passed and all(gate_result.passed for gate_result in self.gate_results)",
        "return self.outputs_passed",
        ("tests/parity/test_metric_gates.py", "tests/parity/test_gates.py"),
    ),
    Mutation(
        "raised-limit-unbounded",
        "optexport/parity/perturbation.py",
        "limit = min(noise_multiple / _WORST_IN_FLOORS",
        "limit = max(noise_multiple / _WORST_IN_FLOORS",
        ("tests/parity/test_perturbation.py",),
    ),
    # diagnosis
    Mutation(
        "bisection-stops-early",
        "optexport/diagnosis/bisect_rules.py",
        "while bad - good > 1:",
        "while bad - good > 2:",
        ("tests/diagnosis/test_bisect_rules.py",),
    ),
    # exporters
    Mutation(
        "sigmoid-kept-in-any-product",
        "optexport/exporters/onnx/sigmoid.py",
        "not user.domain and x in user.inputs for user, _ in uses",
        "not user.domain for user, _ in uses",
        ("tests/exporters/onnx/test_sigmoid.py",),
    ),
    Mutation(
        "int64-reduction-keepdims-swapped",
        "optexport/exporters/onnx/int64.py",
        'if axes and not node.attributes.get_int("keepdims", 1):',
        'if axes and node.attributes.get_int("keepdims", 1):',
        ("tests/exporters/onnx/test_int64.py",),
    ),
    # bundle
    Mutation(
        "unknown-folder-accepted",
        "optexport/bundle/digests.py",
        "if name not in folders if path.is_dir() else name not in expected and name not in UNLISTED:",
        "if not path.is_dir() and name not in expected and name not in UNLISTED:",
        ("tests/bundle/test_contents.py",),
    ),
    Mutation(
        "document-not-compared-with-canonical-form",
        "optexport/bundle/digest_json.py",
        "and content == _canonical(document)",
        "and bool(content)",
        ("tests/bundle/test_digest_json.py",),
    ),
    Mutation(
        "missing-sizes-looked-for-on-wrong-side",
        "optexport/parity/verify.py",
        "recorded_cases.intersection(manifest.reference_cases) - cases",
        "cases - recorded_cases.intersection(manifest.reference_cases)",
        ("tests/bundle/test_hostile_manifests.py", "tests/parity/test_verify.py"),
    ),
    Mutation(
        "bundle-files-private",
        "optexport/_utils/atomic_dir.py",
        "(0o777 if path.is_dir() else 0o666) & ~mask",
        "(0o777 if path.is_dir() else 0o600) & ~mask",
        ("tests/bundle/test_contents.py", "tests/_utils/test_atomic_dir.py"),
    ),
    # config and command line
    Mutation(
        "tolerance-asked-for-rules-left-out",
        "optexport/config/consistency.py",
        "if name is not None and name not in omitted and not",
        "if name is not None and not",
        ("tests/cli/test_run.py",),
    ),
    Mutation(
        "verify-json-ends-well",
        "optexport/cli/verify.py",
        "    if failure is not None:",
        "    if failure is not None and not as_json:",
        ("tests/report/test_junit.py", "tests/parity/test_verify.py"),
    ),
    Mutation(
        "tracking-failure-is-plain-error",
        "optexport/errors.py",
        "exit_code = 7",
        "exit_code = 1",
        ("tests/cli/test_run.py", "tests/tracking/test_failures.py"),
    ),
    # tracking
    Mutation(
        "latency-compared-with-lower-end",
        "optexport/tracking/registry/regression_gate.py",
        "if ours.low_ms > theirs.high_ms * (1 + allowed):",
        "if ours.low_ms > theirs.low_ms * (1 + allowed):",
        ("tests/tracking/registry/test_regression_gate.py",),
    ),
    Mutation(
        "history-loses-holder",
        "optexport/tracking/registry/aliases.py",
        "return history[: indices[-1] + 1] if indices",
        "return history[: indices[-1]] if indices",
        ("tests/tracking/registry/test_promotion.py", "tests/tracking/registry/test_registration.py"),
    ),
    # bench and tuning
    Mutation(
        "verdict-from-median",
        "optexport/bench/comparison.py",
        '"faster" if low > 0 else',
        '"faster" if median > 0 else',
        ("tests/bench/test_comparison.py",),
    ),
    Mutation(
        "speedup-gate-on-median",
        "optexport/bench/gates.py",
        "if pair.comparison.low < minimum:",
        "if pair.comparison.speedup < minimum:",
        ("tests/bench/test_gates.py",),
    ),
    Mutation(
        "tournament-calls-faster-alike",
        "optexport/tuning/search.py",
        'return comparison.verdict != "faster" and comparison.speedup',
        'return comparison.verdict != "faster" or comparison.speedup',
        ("tests/tuning/test_search.py",),
    ),
    # generation and quantization
    Mutation(
        "ended-row-goes-on",
        "optexport/generation/runtime.py",
        "token = torch.where(ended, pad, choose(logits, real))",
        "token = choose(logits, real)",
        ("tests/generation/test_tokens.py", "tests/generation/test_export.py"),
    ),
    Mutation(
        "least-harmful-layers-kept",
        "optexport/quantization/sensitivity.py",
        "_rank(choice.by_unit[unit], original_results), reverse=True)",
        "_rank(choice.by_unit[unit], original_results))",
        ("tests/quantization/test_sensitivity.py",),
    ),
    # cache
    Mutation(
        "renamed-cache-entry-taken",
        "optexport/cache/store.py",
        'if digests != files or record["sha256"] != _digest(entry, files, notes):',
        "if digests != files:",
        ("tests/cache/test_store.py",),
    ),
    Mutation(
        "changed-file-of-cache-entry-taken",
        "optexport/cache/store.py",
        'if digests != files or record["sha256"] != _digest(entry, files, notes):',
        'if digests.keys() != files.keys() or record["sha256"] != _digest(entry, files, notes):',
        ("tests/cache/test_store.py",),
    ),
    # sources
    Mutation(
        "unexpected-weights-taken-for-missing",
        "optexport/loading/loader.py",
        'absent = sorted(info["missing_keys"]) +',
        'absent = sorted(info["unexpected_keys"]) +',
        ("tests/loading/test_loader.py",),
    ),
    Mutation(
        "pickled-sample-inputs-unchecked",
        "optexport/runtime/untrusted/archives.py",
        'elif name.endswith(".pt") and size:',
        'elif name == "sample_inputs.pt" and size:',
        ("tests/runtime/untrusted/test_archives.py",),
    ),
    # trust
    Mutation(
        "partial-signature-accepted",
        "optexport/bundle/signing/folder_signature.py",
        'if predicate.get("serialization") != _EXPECTED_SERIALIZATION:',
        'if "serialization" not in predicate:',
        ("tests/bundle/signing/test_folder_signature.py",),
    ),
    # batch
    Mutation(
        "batch-exit-code-of-mildest-failure",
        "optexport/batch/results.py",
        "return min(codes, key=",
        "return max(codes, key=",
        ("tests/batch/test_batch.py",),
    ),
    # reports
    Mutation(
        "alike-changes-drawn-apart",
        "optexport/report/html/changes.py",
        r're.sub(r"\d+", "#", shown.node.target)',
        "shown.node.target",
        ("tests/report/html/test_changes.py",),
    ),
    # inputs
    Mutation(
        "token-ids-padded-with-zero",
        "optexport/inputs/data_lines.py",
        "padding_value=padding.get(name, 0)",
        "padding_value=0",
        ("tests/inputs/test_data.py",),
    ),
    # inference
    Mutation(
        "special-tokens-labelled",
        "optexport/inference/answers.py",
        "if identity not in tokenizer.all_special_ids",
        "if identity != tokenizer.pad_token_id",
        ("tests/cli/test_predict.py",),
    ),
    # runtime, undo, state
    Mutation(
        "session-on-cpu-accepted-for-cuda",
        "optexport/runtime/onnx_session.py",
        'if device == "cuda" and providers[:1] != [CUDA_PROVIDER]:',
        'if device == "cuda" and not providers:',
        ("tests/runtime/test_onnx_session.py",),
    ),
    Mutation(
        "undo-compared-by-value",
        "optexport/pipeline/undo_check.py",
        "and torch.equal(bytes_of(a), bytes_of(b))",
        "and torch.allclose(a, b)",
        ("tests/pipeline/test_undo_check.py",),
    ),
    # pipeline
    Mutation(
        "too-few-matches-accepted",
        "optexport/transformations/apply.py",
        "if len(report.changes) < rule.min_matches:",
        "if len(report.changes) < rule.min_matches - 1:",
        ("tests/pipeline/test_wrong_rules.py",),
    ),
)
