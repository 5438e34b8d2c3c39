"""Exports a generative model with its key/value cache, and compares generated tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optexport._utils import atomic_dir
from optexport._utils.paths import as_path
from optexport._utils.progress import Progress
from optexport.bundle import digest_json
from optexport.bundle.layout import GENERATION, MANIFEST, SIGNED, check_output_path, check_replaceable
from optexport.bundle.parts import PARTS
from optexport.config.consistency import check_generation_precision, check_precision
from optexport.config.load import validate_settings
from optexport.config.metrics import GENERATION_METRIC, METRICS
from optexport.config.schema import FORMATS, Effort
from optexport.errors import ConfigError, TraceError
from optexport.generation import runtime, tokens
from optexport.generation.caches import NO_CACHE_HINT
from optexport.generation.components import STEPS, Component, Prompt, components, find_recompute_length
from optexport.generation.result import GenerationResult
from optexport.generation.runtime import Parts
from optexport.generation.tokens import TokenComparison
from optexport.job import Job
from optexport.loading.loader import Loaded
from optexport.parity.gates import load_metrics
from optexport.pipeline import run
from optexport.pipeline.api_arguments import as_list, as_pretrained, check_arguments, name_rules
from optexport.report.progress import show_progress
from optexport.report.result import Result
from optexport.runtime.runners import Run
from optexport.signature.token_limit import find_token_limit
from optexport.transformations import Transformation

_UNLIMITED = 1 << 30


def export_generation(  # noqa: PLR0913 - options of the public API
    model: nn.Module,
    prompts: Prompt | Sequence[Prompt],
    output: str | Path,
    *,
    transformations: Transformation | Iterable[Transformation] | None = None,
    formats: Sequence[str] = FORMATS,
    new_tokens: int = 64,
    noise_multiple: float = 4.0,
    metrics: Mapping[str, Any] | None = None,
    precision: Mapping[str, Any] | None = None,
    effort: Effort = "standard",
    opset: int | None = None,
    tokenizer: Any = None,
    progress: bool | Progress | None = None,
) -> GenerationResult:
    """Traces, transforms, exports and checks a generative model with its key/value cache.

    A model without an encoder has one part, ``decoder``. It takes tokens, mask and cache, and returns logits and the
    next cache. With a cache of length 0, it is the prefill. A model with an encoder also has a part ``encoder``.

    Each part is checked like every export, also with caches that the prompts produce. Then the files must generate the
    tokens of greedy ``model.generate`` for each prompt. Other settings of the model's generation config, such as
    penalties, forced tokens or beams, are ignored and listed.

    Layers with a sliding window keep all keys in the files, and the mask hides those outside of the window. The numbers
    are the same, but the cache grows.

    Args:
        model: A transformers model in eval mode; it is not changed.
        prompts: One or more batches of arguments of ``model.generate``: ``input_ids`` and ``attention_mask``, padded on
            the left, or ``input_features``.
        output: The folder; an earlier export in it is replaced.
        transformations: As for `optexport.export`.
        formats: As for `optexport.export`.
        new_tokens: How many tokens are compared; fewer if the model does not have enough positions.
        noise_multiple: As for `optexport.export`.
        metrics: As for `optexport.export`, for the logits of a decoder in lower precision.
        precision: The precision of the decoder, as in ``[precision]``: ``{"onnx": "int4-blocks"}``. The share of
            tokens that it predicts like the model must reach the metric ``argmax_agreement``.
        effort: As for `optexport.export`.
        opset: As for `optexport.export`.
        tokenizer: A tokenizer of transformers, for `Generator.generate_text`; it is saved in the bundles.
        progress: Whether to print every step, with its time, on standard error; by default in notebooks and at prompts.

    Raises:
        ConfigError: An argument is invalid.
        TraceError: The model cannot generate, has an unsupported cache, or cannot be traced.
        ParityError: The results or the generated tokens differ from the original.
        ExportError: A file cannot be written in its format.
    """
    check_arguments(model, metrics=metrics, precision=precision)
    pretrained = as_pretrained(tokenizer=tokenizer)
    rules, output = name_rules(transformations), as_path(output, "output").resolve()
    config = validate_settings(
        {
            "model": {"source": f"python:{type(model).__module__}:{type(model).__qualname__}"},
            "parity": {
                "noise_multiple": noise_multiple,
                "effort": effort,
                "metrics": None if metrics is None else dict(metrics),
            },
            "export": {"formats": as_list(formats), "output": output.name, "opset": opset},
            "precision": None if precision is None else dict(precision),
        },
        "export_generation",
    )
    if metrics is not None and precision is None:
        raise ConfigError("metrics apply to a decoder in lower precision only", location="metrics", hint="Remove it.")
    check_precision(config, "export_generation")
    check_generation_precision(config, "export_generation")
    custom_metrics = load_metrics(config.parity.metrics, Path())

    def make_job(part: Component, location: Path) -> Job:
        loaded = Loaded(part.module, pretrained=pretrained)
        return Job(config, loaded, part.batches[0], part.batches, part.dynamic, rules, location, metrics=custom_metrics)

    batches = [prompts] if isinstance(prompts, Mapping) else prompts
    with show_progress(progress) as shown:
        return produce(model, batches, output, make_job, new_tokens, shown)


def produce(
    model: nn.Module,
    prompts: Sequence[Prompt],
    output: Path,
    make_job: Callable[[Component, Path], Job],
    new_tokens: int,
    progress: Progress,
    output_lock: contextlib.ExitStack | None = None,
) -> GenerationResult:
    """Exports every part, and compares tokens. The folder appears only if all checks pass.

    Args:
        make_job: Returns the job of a part in a folder.
        output_lock: Takes over the lock of the folder. No other run replaces the folder until the stack is closed.
    """
    prompts = [_with_mask(prompt) for prompt in prompts] if isinstance(prompts, list | tuple) else prompts
    _check(model, prompts, new_tokens)
    check_output(output)
    prompts = [{name: t if t.is_floating_point() else t.long() for name, t in prompt.items()} for prompt in prompts]
    parts = components(model, prompts)
    results: dict[str, Result] = {}
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_dir.drafting(output, check_output, output_lock) as draft:
        jobs = [_set_precision(make_job(part, draft / part.name), part.name) for part in parts]
        progress.count.expect([*(step for job in jobs for step in run.list_steps(job)), "tokens"])
        for part, job in zip(parts, jobs, strict=True):
            # At quick effort only the first batch is checked: the prefill, with a cache of length 0. The sizes are not
            # declared, so sizes without positions in the model are omitted.
            job = replace(job, final_output=output, user_batches=part.batches[1:], is_dynamic_declared=False)
            announce = progress.prefixed(part.name)
            try:
                results[part.name] = run.export_bundle(job, announce)
            except TraceError as error:
                if error.location != "inputs.dynamic":  # a config with [generation] has no such key
                    raise
                location = f"generation: {part.name}"
                raise TraceError(error.message, location=location, hint=NO_CACHE_HINT) from error
            progress.seconds.update({f"{part.name}: {name}": spent for name, spent in announce.seconds.items()})
        with progress.step("tokens"):
            start = getattr(parts[0].module, "start", None)
            compared = _compare(model, parts, results, prompts, new_tokens, start, draft)
            decoder = jobs[-1].config
            if decoder.precision is not None and decoder.parity.metrics is not None:
                tokens.check_agreement(compared, decoder.parity.metrics[GENERATION_METRIC].min)
        digest_json.write(draft / GENERATION, _document(model, results, compared, start))
    moved = {name: replace(result, output=output / name) for name, result in results.items()}
    return GenerationResult(output, moved, tuple(compared), tokens.ignored_settings(model))


def _set_precision(job: Job, part: str) -> Job:
    """Returns the job of a part: the encoder is not lowered, and gates of the decoder apply to its logits."""
    config, gates = job.config, job.config.parity.metrics
    if config.precision is None or gates is None:
        return job
    if part == "encoder":
        parity = config.parity.model_copy(update={"metrics": None})
        return replace(job, config=config.model_copy(update={"precision": None, "parity": parity}), metrics={})
    named = {
        name: gate.model_copy(update={"output": "logits"}) if name in METRICS else gate for name, gate in gates.items()
    }
    parity = config.parity.model_copy(update={"metrics": named})
    return replace(job, config=config.model_copy(update={"parity": parity}))


def _compare(
    model: nn.Module,
    parts: Sequence[Component],
    results: Mapping[str, Result],
    prompts: Sequence[Prompt],
    new_tokens: int,
    start: int | None,
    draft: Path,
) -> list[TokenComparison]:
    manifests = {name: result.manifest for name, result in results.items()}
    caches = tuple(spec for spec in manifests["decoder"].inputs if "past_sequence" in spec.shape)
    runs = {part.name: _eager(part.module) for part in parts}
    original = Parts(runs["decoder"], caches, runs.get("encoder"), start, find_recompute_length(model))
    limit = manifests["decoder"].parity.bounds["logits"].limit
    checked = []
    for case in tokens.cases(prompts):
        room = (find_token_limit(model.config, decoder=True) or _UNLIMITED) - _length(case[1], model)
        checked.append((case, tokens.likeliest_tokens(model, case[1], min(new_tokens, room))))
    compared = []
    for artifact in manifests["decoder"].artifacts:
        name = artifact.format
        candidate = runtime.open_parts(draft, manifests, name, start, original.recompute_length)
        if artifact.precision is None:
            compared += [tokens.compare(original, candidate, name, case, ids, limit) for case, ids in checked]
        else:  # the first row alone would count twice
            whole = [(case, ids) for case, ids in checked if any(case[1] is prompt for prompt in prompts)]
            compared += [tokens.count_agreeing(candidate, name, case, ids) for case, ids in whole]
    return compared


def _eager(module: nn.Module) -> Run:
    def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            outputs = module(**inputs)
        assert isinstance(outputs, dict)
        return outputs

    return run


def _length(prompt: Prompt, model: nn.Module) -> int:
    """Returns how many tokens the decoder has when it generates the first."""
    config: Any = model.config
    return 1 if config.is_encoder_decoder else prompt["input_ids"].shape[1]


def _document(
    model: nn.Module, results: Mapping[str, Result], compared: Sequence[TokenComparison], start: int | None
) -> dict[str, Any]:
    config: Any = model.generation_config
    eos, pad = config.eos_token_id, config.pad_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return {
        "version": 1,
        "parts": {name: digest_json.read(result.output / MANIFEST)["digest"] for name, result in results.items()},
        "start": start,
        "recompute_length": find_recompute_length(model),
        "eos": [int(token) for token in ends if token >= 0],  # older configs have -1 for none
        "pad": int(pad) if pad is not None and pad >= 0 else None,
        "tokens": [asdict(comparison) for comparison in compared],
        "left_out": list(tokens.ignored_settings(model)),
    }


def _with_mask(prompt: Prompt) -> Prompt:
    """Returns a prompt with a mask of ones if it has tokens and no mask."""
    ids = prompt.get("input_ids") if isinstance(prompt, Mapping) else None
    if not isinstance(ids, torch.Tensor) or "attention_mask" in prompt:
        return prompt
    return {**prompt, "attention_mask": torch.ones_like(ids)}


def _check(model: nn.Module, prompts: Sequence[Prompt], new_tokens: int) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "generation_config"):
        raise ConfigError(
            f"a {type(model).__name__} has no method generate()",
            location="model",
            hint="Give a transformers model that can generate.",
        )
    if not isinstance(new_tokens, int) or new_tokens < 1:
        raise ConfigError(f"the number must be at least 1 (found {new_tokens})", location="new_tokens")
    if not isinstance(prompts, list | tuple):
        raise ConfigError(
            f"expected a prompt or a list of prompts (found {type(prompts).__name__})", location="prompts"
        )
    if not prompts:
        raise ConfigError("the list of prompts is empty", location="prompts")
    for index, prompt in enumerate(prompts):
        tensors = list(prompt.values()) if isinstance(prompt, Mapping) else []
        if not tensors or not all(isinstance(tensor, torch.Tensor) and tensor.numel() for tensor in tensors):
            raise ConfigError("expected a dict of tensors that are not empty", location=f"prompts[{index}]")
        if set(prompt) != set(prompts[0]):
            raise ConfigError("the prompt has other inputs than the first prompt", location=f"prompts[{index}]")
        config: Any = model.config
        if not config.is_encoder_decoder:
            if set(prompt) != {"input_ids", "attention_mask"}:
                raise ConfigError(
                    f"wrong inputs (expected input_ids, attention_mask, found {', '.join(sorted(prompt))})",
                    location=f"prompts[{index}]",
                )
            runtime.check_left_padded(prompt, f"prompts[{index}]")
        maximum = find_token_limit(config, decoder=True)
        if maximum is not None and _length(prompt, model) + STEPS > maximum:
            raise ConfigError(
                f"the prompt is too long (found {_length(prompt, model)} tokens, the model takes {maximum})",
                location=f"prompts[{index}]",
                hint=f"Shorten the prompt, so that at least {STEPS} new tokens fit.",
            )


def check_output(output: Path) -> None:
    """Checks that the output is an empty folder, or an earlier export of the same kind.

    Raises:
        ConfigError: The path has other contents.
    """
    names = {path.name for path in output.iterdir()} if output.is_dir() and not output.is_symlink() else set()
    if GENERATION in names and names <= {GENERATION, *PARTS, *SIGNED}:
        for part in names - {GENERATION, *SIGNED}:
            check_replaceable(output / part)
    else:
        check_output_path(output)
