"""Registry of the built-in rules: their names and options, without importing torch."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optexport._utils.imports import check_makes, import_from, parameters
from optexport.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from optexport.transformations import Transformation


@dataclass(frozen=True)
class Option:
    """An option of a rule. Its values are `choices`, or all of its type if that is empty."""

    type: type
    default: Any
    summary: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleInfo:
    """Description of a built-in rule, available without importing it.

    Attributes:
        import_path: ``module:Class``.
        in_preset: True if the rule is applied when a config names no transformations.
    """

    import_path: str
    summary: str
    reversible: bool
    preserves_computation: bool
    in_preset: bool
    options: Mapping[str, Option] = field(default_factory=dict)


_PACKAGE = "optexport.transformations"
_ACTIVATIONS = ("gelu", "gelu-tanh", "silu", "hardswish", "sigmoid", "hardsigmoid")

# The preset applies rules in this order: unused nodes go first, and norms are folded before linears are merged.
RULES: Mapping[str, RuleInfo] = {
    "keep-outputs": RuleInfo(
        f"{_PACKAGE}.keep_outputs:KeepOutputs",
        "removes all outputs except the named ones, and what only they need",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
        options={"outputs": Option(tuple, (), "names of the outputs to keep")},
    ),
    "remove-no-ops": RuleInfo(
        f"{_PACKAGE}.remove_no_ops:RemoveNoOps",
        "removes operations that return their input unchanged: dropouts, casts, copies and views",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "share-equal": RuleInfo(
        f"{_PACKAGE}.share_equal:ShareEqual",
        "computes equal results once",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
        options={"weights": Option(bool, False, "also store equal weights once, tied under all of their names")},
    ),
    "fold-constants": RuleInfo(
        f"{_PACKAGE}.fold_constants:FoldConstants",
        "computes once what depends only on weights and numbers",
        reversible=False,
        preserves_computation=True,
        in_preset=True,
    ),
    "sink-select": RuleInfo(
        f"{_PACKAGE}.sink_select:SinkSelect",
        "computes only the position of a sequence that is used",
        reversible=True,
        preserves_computation=True,
        in_preset=True,
    ),
    "fuse-batch-norm": RuleInfo(
        f"{_PACKAGE}.fuse_batch_norm:FuseBatchNorm",
        "folds a batch norm into the linear or convolution before or after it",
        reversible=False,
        preserves_computation=True,
        in_preset=True,
    ),
    "fuse-batch-norm-2d-in-conv-2d": RuleInfo(
        f"{_PACKAGE}.fuse_batch_norm_2d_in_conv_2d:FuseBatchNorm2dInConv2d",
        "folds a BatchNorm2d into the Conv2d before it",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "fuse-batch-norm-1d-in-linear": RuleInfo(
        f"{_PACKAGE}.fuse_batch_norm_1d_in_linear:FuseBatchNorm1dInLinear",
        "folds a BatchNorm1d into the Linear before or after it",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "fuse-bias": RuleInfo(
        f"{_PACKAGE}.fuse_bias:FuseBias",
        "adds a constant to the bias of the linear or convolution before it",
        reversible=False,
        preserves_computation=True,
        in_preset=True,
    ),
    "merge-parallel-convs": RuleInfo(
        f"{_PACKAGE}.merge_parallel_convs:MergeParallelConvs",
        "merges convolutions with the same input whose results are added",
        reversible=False,
        preserves_computation=True,
        in_preset=True,
    ),
    "merge-linear-chain": RuleInfo(
        f"{_PACKAGE}.merge_linear_chain:MergeLinearChain",
        "merges linears in a row, and low-rank adapters with their linear",
        reversible=False,
        preserves_computation=True,
        in_preset=True,
    ),
    "fold-scale": RuleInfo(
        f"{_PACKAGE}.fold_scale:FoldScale",
        "folds a constant factor into the linear or convolution before or after it",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "fold-norm-affine": RuleInfo(
        f"{_PACKAGE}.fold_norm_affine:FoldNormAffine",
        "folds the gain and shift of a norm into the linears that read it",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "fuse-attention": RuleInfo(
        f"{_PACKAGE}.fuse_attention:FuseAttention",
        "replaces attention that is written as separate operations by one call",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "merge-linears": RuleInfo(
        f"{_PACKAGE}.merge_linears:MergeLinears",
        "merges linears with the same input",
        reversible=True,
        preserves_computation=True,
        in_preset=True,
    ),
    "change-true-div-to-mul-by-inverse": RuleInfo(
        f"{_PACKAGE}.change_true_div_to_mul_by_inverse:ChangeTrueDivToMulByInverse",
        "replaces a division by a constant by a multiplication",
        reversible=True,
        preserves_computation=True,
        in_preset=True,
        options={"exact": Option(bool, False, "change only divisions whose result stays bit-exact")},
    ),
    "fuse-bias-in-linear": RuleInfo(
        f"{_PACKAGE}.fuse_bias_in_linear:FuseBiasInLinear",
        "converts the bias of a linear to a column of its weight",
        reversible=True,
        preserves_computation=True,
        in_preset=False,
    ),
    "replace-activation": RuleInfo(
        f"{_PACKAGE}.replace_activation:ReplaceActivation",
        "replaces an activation by a similar one; needs parity.atol or parity.rtol",
        reversible=True,
        preserves_computation=False,
        in_preset=False,
        options={
            "old": Option(str, "gelu", "the activation to replace", _ACTIVATIONS),
            "new": Option(str, "gelu-tanh", "the replacement", _ACTIVATIONS),
        },
    ),
    "cast-precision": RuleInfo(
        f"{_PACKAGE}.cast_precision:CastPrecision",
        "computes layers and products in half precision; needs parity.atol or parity.rtol",
        reversible=False,
        preserves_computation=False,
        in_preset=False,
        options={
            "dtype": Option(str, "float16", "the precision", ("float16", "bfloat16")),
            "keep": Option(tuple, (), "names of modules whose layers stay in float32"),
        },
    ),
}

PRESET: tuple[str, ...] = tuple(name for name, info in RULES.items() if info.in_preset)

# Options that every rule has in a config.
SHARED_OPTIONS = ("min_matches", "formats")

PLUGIN = "python:"
ENTRY_POINTS = "optexport.transformations"


@functools.cache
def installed() -> Mapping[str, str]:
    """Returns ``module:Class`` of the rules of installed packages, by name.

    Built-in rules take precedence.
    """
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {entry.name: entry.value for entry in entry_points if canonical_name(entry.name) is None}


def canonical_name(name: str) -> str | None:
    """Returns the name of a built-in rule in any spelling, for example ``MergeLinears``."""
    by_letters = {_letters(rule): rule for rule in RULES}
    by_letters |= {_letters(info.import_path.rpartition(":")[2]): rule for rule, info in RULES.items()}
    return by_letters.get(_letters(name))


def find_import_path(name: str) -> str | None:
    """Returns ``module:Class`` of a built-in, installed or ``python:`` rule, or None."""
    if name.startswith(PLUGIN):
        return name.removeprefix(PLUGIN)
    rule = canonical_name(name)
    return installed().get(name) if rule is None else RULES[rule].import_path


def _letters(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()


def check(name: str, options: Mapping[str, Any], location: str) -> None:
    """Checks a rule's name, and its options if it is built in, without importing it.

    Args:
        name: The name in the config.
        options: The options in the config.
        location: The position in the config, for error messages.

    Raises:
        ConfigError: The rule or an option is unknown, or an option has a wrong value.
    """
    if name.startswith(PLUGIN):
        if len([part for part in name.removeprefix(PLUGIN).split(":") if part]) != 2:
            raise ConfigError(f'"{name}" is not of the form "python:module:Class"', location=f"{location}.use")
        return
    rule = canonical_name(name)
    if rule is None:
        if find_import_path(name) is None:
            hint = did_you_mean(name, [*RULES, *installed()])
            raise ConfigError(f'unknown rule "{name}"', location=f"{location}.use", hint=hint)
        return  # only the class of a plugin knows its options
    for option, value in options.items():
        _check_option(rule, option, value, f"{location}.{option}")


def _check_option(rule: str, option: str, value: Any, location: str) -> None:
    allowed = RULES[rule].options
    if option not in allowed:
        candidates = [*allowed, *difflib.get_close_matches(option, SHARED_OPTIONS)]
        hint = did_you_mean(option, candidates) if candidates else f"Remove it: {rule} has no options."
        raise ConfigError(f"{rule} has no option of this name", location=location, hint=hint)
    expected = allowed[option]
    if type(value) is not expected.type or (type(value) is tuple and not all(type(v) is str for v in value)):
        kind = "list of names" if expected.type is tuple else expected.type.__name__
        shown = list(value) if type(value) is tuple else value
        raise ConfigError(f"wrong type (expected a {kind}, found {shown!r})", location=location)
    if expected.choices and value not in expected.choices:
        raise ConfigError(
            f'unknown value "{value}"', location=location, hint=did_you_mean(str(value), expected.choices)
        )


def load(name: str, options: Mapping[str, Any], folder: Path, location: str) -> Transformation:
    """Imports a rule or a plugin, and creates it with its options.

    Args:
        name: The name in the config, after `check`.
        options: The options in the config.
        folder: Folder of the config, where the module of a plugin may be.
        location: The position in the config, for error messages.

    Raises:
        ConfigError: The rule cannot be imported, or does not accept these options.
    """
    import_path = find_import_path(name)
    assert import_path is not None, "the config was checked"
    from optexport.transformations import Transformation

    def is_transformation(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, Transformation) and not inspect.isabstract(value)

    cls = import_from(import_path, folder, location, is_transformation)
    check_makes(Transformation, cls, import_path, location)
    if inspect.isabstract(cls):
        missing = " and ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"{cls.__name__} must define {missing}", location=location)
    try:
        rule = cls(**options)
    except (Exception, SystemExit) as error:  # code of plugins may raise anything
        message = str(error) if isinstance(error, TypeError) else f"the rule raised {type(error).__name__}: {error}"
        raise ConfigError(message, location=location, hint=f"Use these options: {parameters(cls)}") from error
    if not isinstance(rule, Transformation):
        raise ConfigError(
            f"{import_path} returned a {type(rule).__name__}, not a Transformation",
            location=location,
            hint="Subclass optexport.transformations.Transformation, or Rule.",
        )
    return rule
