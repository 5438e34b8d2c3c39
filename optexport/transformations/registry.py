"""The built-in rules by name, with their options: what a config may say, known without importing torch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optexport.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from optexport.transformations import Transformation


@dataclass(frozen=True)
class Option:
    """An option of a rule: its type, its default, what it does, and what it may be, if not anything of its type."""

    type: type
    default: Any
    summary: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleInfo:
    """What is known of a built-in rule before it is imported.

    Attributes:
        spec: ``module:Class``.
        in_preset: Whether it is applied when a config names no transformations.
    """

    spec: str
    summary: str
    reversible: bool
    preserves_computation: bool
    in_preset: bool
    options: Mapping[str, Option] = field(default_factory=dict)


_HERE = "optexport.transformations"
_ACTIVATIONS = ("gelu", "gelu-tanh", "silu", "hardswish", "sigmoid", "hardsigmoid")

# In the order in which the preset applies them: what nobody needs goes first; norms are folded before linears merge.
RULES: Mapping[str, RuleInfo] = {
    "keep-outputs": RuleInfo(
        f"{_HERE}.keep_outputs:KeepOutputs",
        "only the outputs that are named stay, and what they need",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
        options={"outputs": Option(tuple, (), "the names of those that stay")},
    ),
    "remove-no-ops": RuleInfo(
        f"{_HERE}.remove_no_ops:RemoveNoOps",
        "what hands its input on as it is goes: dropout, casts, copies and views that change nothing",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "share-equal": RuleInfo(
        f"{_HERE}.share_equal:ShareEqual",
        "what is computed twice is computed once",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
        options={"weights": Option(bool, False, "store equal weights once too, tied under all of their names")},
    ),
    "sink-select": RuleInfo(
        f"{_HERE}.sink_select:SinkSelect",
        "where one position of a sequence is used, the work for the others goes",
        reversible=True,
        preserves_computation=True,
        in_preset=True,
    ),
    "fuse-batch-norm": RuleInfo(
        f"{_HERE}.fuse_batch_norm:FuseBatchNorm",
        "a batch norm becomes part of the linear or convolution before or after it",
        reversible=False,
        preserves_computation=True,
        in_preset=True,
    ),
    "fuse-batch-norm-2d-in-conv-2d": RuleInfo(
        f"{_HERE}.fuse_batch_norm_2d_in_conv_2d:FuseBatchNorm2dInConv2d",
        "the same, for a BatchNorm2d after a Conv2d only",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "fuse-batch-norm-1d-in-linear": RuleInfo(
        f"{_HERE}.fuse_batch_norm_1d_in_linear:FuseBatchNorm1dInLinear",
        "the same, for a BatchNorm1d before or after a Linear only",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "fuse-bias": RuleInfo(
        f"{_HERE}.fuse_bias:FuseBias",
        "a constant added after a linear or convolution becomes its bias",
        reversible=False,
        preserves_computation=True,
        in_preset=True,
    ),
    "merge-parallel-convs": RuleInfo(
        f"{_HERE}.merge_parallel_convs:MergeParallelConvs",
        "convolutions of one input whose results are summed become one",
        reversible=False,
        preserves_computation=True,
        in_preset=True,
    ),
    "merge-linear-chain": RuleInfo(
        f"{_HERE}.merge_linear_chain:MergeLinearChain",
        "linears that follow each other become one, and so do low-rank adapters with their linear",
        reversible=False,
        preserves_computation=True,
        in_preset=True,
    ),
    "fold-scale": RuleInfo(
        f"{_HERE}.fold_scale:FoldScale",
        "a constant factor becomes part of the linear or convolution before or after it",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "fold-norm-affine": RuleInfo(
        f"{_HERE}.fold_norm_affine:FoldNormAffine",
        "the gain and shift of a norm become part of the linears that read it",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "fuse-attention": RuleInfo(
        f"{_HERE}.fuse_attention:FuseAttention",
        "attention that is written out becomes one call",
        reversible=False,
        preserves_computation=True,
        in_preset=False,
    ),
    "merge-linears": RuleInfo(
        f"{_HERE}.merge_linears:MergeLinears",
        "linears that read the same input become one",
        reversible=True,
        preserves_computation=True,
        in_preset=True,
    ),
    "change-true-div-to-mul-by-inverse": RuleInfo(
        f"{_HERE}.change_true_div_to_mul_by_inverse:ChangeTrueDivToMulByInverse",
        "a division by a constant becomes a multiplication",
        reversible=True,
        preserves_computation=True,
        in_preset=True,
        options={"exact": Option(bool, False, "change only what stays equal to the bit")},
    ),
    "fuse-bias-in-linear": RuleInfo(
        f"{_HERE}.fuse_bias_in_linear:FuseBiasInLinear",
        "the bias of a linear becomes a column of its weight",
        reversible=True,
        preserves_computation=True,
        in_preset=False,
    ),
    "replace-activation": RuleInfo(
        f"{_HERE}.replace_activation:ReplaceActivation",
        "an activation becomes one that is nearly the same; needs parity.atol or parity.rtol",
        reversible=True,
        preserves_computation=False,
        in_preset=False,
        options={
            "old": Option(str, "gelu", "the activation that goes", _ACTIVATIONS),
            "new": Option(str, "gelu-tanh", "the activation that comes", _ACTIVATIONS),
        },
    ),
    "cast-precision": RuleInfo(
        f"{_HERE}.cast_precision:CastPrecision",
        "layers and products are computed in half precision; needs parity.atol or parity.rtol",
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

PLUGIN = "python:"
ENTRY_POINTS = "optexport.transformations"

# Modules that were imported from beside a config, and the folder of that config.
_homes: dict[str, Path] = {}


@functools.cache
def installed() -> Mapping[str, str]:
    """The rules that installed packages bring, by name: ``module:Class``. A built-in rule of that name stands first."""
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {entry.name: entry.value for entry in found if canonical_name(entry.name) is None}


def canonical_name(name: str) -> str | None:
    """The built-in rule that a name means, however it is spelled: ``merge-linears``, ``MergeLinears``."""
    by_letters = {_letters(known): known for known in RULES}
    by_letters |= {_letters(info.spec.rpartition(":")[2]): known for known, info in RULES.items()}
    return by_letters.get(_letters(name))


def location_of(name: str) -> str | None:
    """Where a rule is, as ``module:Class``: a built-in one, one of an installed package, or a ``python:`` one."""
    if name.startswith(PLUGIN):
        return name.removeprefix(PLUGIN)
    known = canonical_name(name)
    return installed().get(name) if known is None else RULES[known].spec


def _letters(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()


def check(name: str, options: Mapping[str, Any], location: str) -> None:
    """Checks a rule's name and options as far as that goes without importing it.

    Raises:
        ConfigError: There is no such rule, it has no such option, or the option's value has the wrong type.
    """
    if name.startswith(PLUGIN):
        if len([part for part in name.removeprefix(PLUGIN).split(":") if part]) != 2:
            raise ConfigError(f'"{name}" is not of the form "python:module:Class"', location=f"{location}.use")
        return
    known = canonical_name(name)
    if known is None:
        if location_of(name) is None:
            names = [*RULES, *installed()]
            raise ConfigError(f'there is no rule "{name}"', location=f"{location}.use", hint=did_you_mean(name, names))
        return  # of whose options only its class knows
    for option, value in options.items():
        if option not in (allowed := RULES[known].options):
            raise ConfigError(
                f"{known} has no such option",
                location=f"{location}.{option}",
                hint=did_you_mean(option, allowed) if allowed else "It has no options.",
            )
        if type(value) is not allowed[option].type or (type(value) is tuple and not all(type(v) is str for v in value)):
            kind = "list of names" if allowed[option].type is tuple else allowed[option].type.__name__
            shown = list(value) if type(value) is tuple else value
            raise ConfigError(f"it must be a {kind}, not {shown!r}", location=f"{location}.{option}")
        if (choices := allowed[option].choices) and value not in choices:
            raise ConfigError(
                f'it cannot be "{value}"', location=f"{location}.{option}", hint=did_you_mean(str(value), choices)
            )


def load(name: str, options: Mapping[str, Any], folder: Path, location: str) -> Transformation:
    """Imports a rule, built in, installed or a plugin, and makes it with its options.

    Args:
        folder: Where a plugin's module may lie, besides the installed packages: that of the config.

    Raises:
        ConfigError: It cannot be imported, or does not take these options.
    """
    spec = location_of(name)
    assert spec is not None, "the config was checked"
    from optexport.transformations import Transformation

    def is_transformation(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, Transformation) and not inspect.isabstract(value)

    cls = import_from(spec, folder, location, is_transformation)
    check_makes(Transformation, cls, spec, location)
    if inspect.isabstract(cls):
        missing = " and ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"{cls.__name__} must define {missing}", location=location)
    try:
        made = cls(**options)
    except (Exception, SystemExit) as error:  # a plugin's own code may raise anything
        cause = str(error) if isinstance(error, TypeError) else f"it raised {type(error).__name__}: {error}"
        raise ConfigError(cause, location=location, hint=f"Its options are: {parameters(cls)}") from error
    if not isinstance(made, Transformation):
        raise ConfigError(
            f"{spec} makes a {type(made).__name__}, which is no Transformation",
            location=location,
            hint="Subclass optexport.transformations.Transformation, or Rule.",
        )
    return made


def _how_to_import(module_name: str, error: BaseException) -> str:
    top = module_name.partition(".")[0]
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing == top:
        return f"Install it, or put {top}.py beside the config."
    return f"Install {missing}." if missing else f"It is there: look where python -c 'import {module_name}' fails."


def import_from(spec: str, folder: Path, location: str, wanted: Callable[[Any], bool] = callable) -> Any:
    """Imports ``module:name``, looking beside the config first.

    Args:
        wanted: What may be meant where there is no such name.

    Raises:
        ConfigError: There is no such module, it fails to import, or it has no such name.
    """
    module_name, _, name = spec.partition(":")
    top, home = module_name.partition(".")[0], folder.resolve()
    if _homes.get(top, home) != home:  # beside another config lay a module of the same name
        del _homes[top]
        for known in [known for known in sys.modules if known == top or known.startswith(f"{top}.")]:
            del sys.modules[known]
    if top not in sys.modules and ((home / f"{top}.py").is_file() or (home / top).is_dir()):
        _homes[top] = home
    importlib.invalidate_caches()
    try:
        with importing_beside(folder):
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs code of others, which may raise anything
        raise ConfigError(
            f"{module_name} cannot be imported: {type(error).__name__}: {error}",
            location=location,
            hint=_how_to_import(module_name, error),
        ) from error
    if not hasattr(module, name):
        public = [n for n, value in vars(module).items() if not n.startswith("_") and wanted(value)]
        raise ConfigError(f"{module_name} has no {name}", location=location, hint=did_you_mean(name, public))
    return getattr(module, name)


@contextlib.contextmanager
def importing_beside(folder: Path) -> Iterator[None]:
    """Within it, modules in a folder are found first."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # code of others may have changed the path itself
            sys.path.remove(str(folder))


def check_makes(kind: type, factory: Any, spec: str, location: str) -> None:
    """Refuses what makes nothing of a kind, as far as that shows before it is called: a call may do anything.

    A function that is not written in Python, as ``os.system``, makes neither a model nor a rule, and a class makes what
    it is, unless it says otherwise itself.

    Raises:
        ConfigError: It makes none.
    """
    if not callable(factory):
        raise ConfigError(f"{spec} is a {type(factory).__name__}, not a function or a class", location=location)
    is_other = isinstance(factory, type) and not issubclass(factory, kind)
    plain = is_other and not inspect.isfunction(factory.__new__) and not inspect.isfunction(type(factory).__call__)
    if plain or inspect.isbuiltin(factory) or inspect.ismethoddescriptor(factory):
        what = f"a class of no {kind.__name__}" if plain else "a function that is not written in Python"
        raise ConfigError(
            f"{spec} is {what}, and is not called: it makes no {kind.__name__}",
            location=location,
            hint=f"Name a subclass of {kind.__name__}, or a function in Python that makes one.",
        )


def parameters(function: Any) -> str:
    """What a function takes, in brackets, as far as that can be known."""
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"
