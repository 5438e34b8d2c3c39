"""CastPrecision casts products and keeps everything else in float32."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F
from transformers import GPT2Config, GPT2Model

from optexport import ConfigError, ExportError, ParityError, export, symbolic_trace
from optexport.signature.signature import Dim
from optexport.testing import check_refused, copy_sharing_modules, graph_state, model_state, outputs
from optexport.transformations import CastPrecision, FuseBatchNorm, MergeLinears, registry
from optexport.transformations.rule import Report, run
from tests._helpers import models
from tests._helpers.graphs import Inherited, by_export, by_fx
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
IMAGE = torch.linspace(-2, 2, 96).reshape(2, 3, 4, 4)
IDS = torch.tensor([[0, 3, 1], [2, 2, 4]])
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class _Dtypes(Interpreter):
    """Asserts that the dtype of every result is the one in its meta."""

    def run_node(self, n: Node) -> Any:
        result, value = super().run_node(n), n.meta.get("val")
        if isinstance(value, torch.Tensor):
            assert (result.dtype, result.dim()) == (value.dtype, value.dim()), n
        return result


def _cast(graph_module: GraphModule, inputs: Any, rule: CastPrecision | None = None) -> tuple[GraphModule, Report]:
    """Applies the rule, and asserts all laws except the tolerance of outputs."""
    rule = rule or CastPrecision()
    before, random_state, want = model_state(graph_module), torch.get_rng_state(), outputs(graph_module, inputs)
    cast, report = run(rule, copy_sharing_modules(graph_module))
    assert model_state(graph_module) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    flags = {
        name: value.requires_grad
        for name, value in copy_sharing_modules(graph_module).state_dict(keep_vars=True).items()
    }
    assert {name: value.requires_grad for name, value in cast.state_dict(keep_vars=True).items()} == flags
    named_inputs = inputs if isinstance(inputs, dict) else {"x": inputs}
    with torch.no_grad():
        _Dtypes(cast).run(*(named_inputs[n.target].clone() for n in cast.graph.find_nodes(op="placeholder")))
    for actual, expected in zip(outputs(cast, inputs), want, strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        if expected.is_floating_point():
            limit = 0.05 if rule.dtype == "bfloat16" else 0.01
            assert float((actual - expected).abs().max()) <= limit * max(1.0, float(expected.abs().max()))
    once = graph_state(cast)
    again, second = run(rule, cast)
    assert (graph_state(again), second.changes) == (once, ())
    return cast, report


def _casts(graph_module: GraphModule) -> list[torch.dtype]:
    return [n.args[1] for n in graph_module.graph.nodes if n.meta.get("cast_precision")]  # type: ignore[misc]


LAYERS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "linear": (nn.Linear(4, 3), X),
    "linear without bias": (nn.Linear(4, 3, bias=False), X),
    "embedding": (nn.Embedding(5, 3), IDS),
    "conv 1d": (nn.Conv1d(3, 2, 3), X),
    "conv 2d": (nn.Conv2d(3, 3, 3, padding=1, groups=3), IMAGE),
    "conv 3d": (nn.Conv3d(3, 2, 2), IMAGE[..., None].expand(2, 3, 4, 4, 4).contiguous()),
    "transposed 1d": (nn.ConvTranspose1d(3, 2, 3), X),
    "transposed 2d": (nn.ConvTranspose2d(3, 2, 3, stride=2), IMAGE),
    "transposed 3d": (nn.ConvTranspose3d(3, 2, 2), IMAGE[..., None].expand(2, 3, 4, 4, 4).contiguous()),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_computed_in_half_precision(name: str, dtype: str) -> None:
    layer, x = LAYERS[name]
    graph_module = by_export(x, lambda m, x: m.layer(x), layer=layer)
    cast, report = _cast(graph_module, x, CastPrecision(dtype=dtype))
    assert len(report.changes) == 1
    assert {value.dtype for value in cast.state_dict().values()} == {HALVES[dtype]}
    half = cast.get_submodule("layer")
    own = half(x.to(HALVES[dtype]) if x.is_floating_point() else x).float()
    assert torch.equal(outputs(cast, x)[0], own)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.b(F.gelu(m.a(x))),
        lambda m, x: m.b(F.dropout(m.a(x), 0.5, training=False).view(6, 4).tanh()),
        lambda m, x: m.b(F.silu(m.a(x)) * m.c(x)),
        lambda m, x: m.b(torch.cat([m.a(x), m.c(x)], 1).transpose(0, 1)),
        lambda m, x: m.b((y := m.a(x)) + y.relu()),
    ],
)
def test_no_cast_stands_between_half_precision_nodes(body: Any) -> None:
    layers = {name: nn.Linear(4, 4) for name in "abc"}
    cast, _ = _cast(by_export(X, body, **layers), X)
    assert _casts(cast) == [torch.float16, torch.float32]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "between",
    [
        lambda m, y: m.norm(y),
        lambda m, y: y.softmax(-1),
        lambda m, y: y - y.mean(-1, keepdim=True),
        lambda m, y: y + 1e6 - 1e6,
        lambda m, y: y * 1e-12 * 1e12,
        lambda m, y: y / (y.pow(2).sum(-1, keepdim=True).sqrt() + 1e-12),
        lambda m, y: y.masked_fill(y > 1, torch.finfo(torch.float32).min).softmax(-1),
        lambda m, y: y.exp(),
    ],
)
def test_operations_that_need_float32_stay(between: Any) -> None:
    children = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    graph_module = by_export(X, lambda m, x: m.b(between(m, m.a(x))), **children)
    cast, report = run(CastPrecision(), copy_sharing_modules(graph_module))
    assert [change.target for change in report.changes] == ["a", "b"]
    assert all(result.isfinite().all() for result in outputs(cast, X))


@pytest.mark.slow
def test_norm_between_layers_in_bfloat16_is_computed_in_bfloat16() -> None:
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    cast, _ = _cast(by_export(X, lambda m, x: m.b(m.norm(m.a(x))), **layers), X, CastPrecision(dtype="bfloat16"))
    assert _casts(cast) == [torch.bfloat16, torch.float32]
    assert {parameter.dtype for parameter in cast.norm.parameters()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "casts_norm"),
    [
        (lambda m, x: m.a(m.norm(m.a(m.norm(m.a(x))))), True),
        (lambda m, x: m.norm(m.a(x)) + m.norm(x), True),
        (lambda m, x: m.norm(x) + m.norm(m.a(x)), False),
        (lambda m, x: m.a(m.norm(m.a(x).softmax(-1))), False),
    ],
    ids=["several calls", "first call after a layer", "first call on the input", "after a softmax"],
)
def test_norm_is_cast_if_its_first_call_reads_bfloat16(body: Any, casts_norm: bool) -> None:
    layers = {"a": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    cast, _ = _cast(by_export(X, body, **layers), X, CastPrecision(dtype="bfloat16"))
    dtype = torch.bfloat16 if casts_norm else torch.float32
    assert {parameter.dtype for parameter in cast.norm.parameters()} == {dtype}


@pytest.mark.slow
def test_attention_with_and_without_a_mask_that_is_added() -> None:
    def body(mask: torch.Tensor | None) -> Any:
        return lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), attn_mask=mask)

    layers = {name: nn.Linear(4, 4) for name in "qkv"}
    for mask in (None, torch.ones(3, 3, dtype=torch.bool).tril()):
        cast, report = _cast(by_export(X, body(mask), **layers), X)
        assert len(report.changes) == 4
        assert _casts(cast) == [torch.float16, torch.float32]
    added = torch.zeros(3, 3).masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), torch.finfo(torch.float32).min)
    _, report = _cast(by_export(X, body(added), **layers), X)
    assert len(report.changes) == 3
    assert "the mask is added" in report.near_misses[0].reason


@pytest.mark.slow
def test_manual_attention_keeps_its_softmax_in_float32() -> None:
    layers = {name: nn.Linear(4, 4) for name in "qkv"}
    graph_module = by_export(X, lambda m, x: (m.q(x) @ m.k(x).transpose(1, 2) / 2).softmax(-1) @ m.v(x), **layers)
    cast, _ = _cast(graph_module, X)
    (softmax,) = [node for node in cast.graph.nodes if "softmax" in str(node.target)]
    assert softmax.meta["val"].dtype is softmax.args[0].meta["val"].dtype is torch.float32
    matmuls = [node for node in cast.graph.nodes if "matmul" in str(node.target)]
    assert [node.meta["val"].dtype for node in matmuls] == [torch.float16] * 2


def _changes_a_part(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    y[0].sub_(1.0)
    return y, m.b(y)


def _changes_a_view(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    z = y.view(6, 4)
    y.add_(1.0)
    return m.b(z), z.tanh()


def _changes_the_input(m: Any, x: torch.Tensor) -> Any:
    x = x * 1
    y = m.a(x)
    x.add_(1.0)
    return y, m.b(x)


def _changes_a_part_of_the_input(m: Any, x: torch.Tensor) -> Any:
    x = x * 1
    y = m.a(x)
    x[0].add_(1.0)
    return y, m.b(x)


def _in_place_activation(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    z = F.relu(y, inplace=True)
    return m.b(z), y


def _changes_it_after_it_was_read(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    z = m.b(y)
    y.mul_(2.0)
    return m.b(y), z


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        *(_changes_a_part, _changes_a_view, _changes_the_input, _changes_a_part_of_the_input),
        *(_in_place_activation, _changes_it_after_it_was_read),
    ],
)
def test_tensor_changed_in_place_is_read_after_the_change(body: Any) -> None:
    _cast(by_export(X, body, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), X)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.a(m.a(x)),
        lambda m, x: m.a(x) - m.a(x * 2),
        lambda m, x: m.a(input=x),
        lambda m, x: (m.a(x), x),
        lambda m, x: m.a(x) * x.shape[0],
    ],
)
def test_calls_of_all_kinds(body: Any) -> None:
    cast, _ = _cast(by_export(X, body, a=nn.Linear(4, 4)), X)
    assert cast.get_submodule("a").weight.dtype is torch.float16


def test_frozen_weights_stay_frozen() -> None:
    _cast(by_export(X, lambda m, x: m.a(x), a=nn.Linear(4, 4).requires_grad_(False)), X)


def _tied() -> dict[str, nn.Module]:
    tied = {"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4)}
    tied["b"].weight = tied["a"].weight
    return tied


def test_layers_that_are_skipped() -> None:
    def refused(body: Any, *reasons: str, dtype: torch.dtype = torch.float32, **children: nn.Module) -> None:
        x = X.to(dtype)
        graph_module = GraphModule(nn.ModuleDict(children), by_fx(body, **children).graph)
        for node in graph_module.graph.nodes:
            node.meta["val"] = torch.empty(0, device="meta", dtype=dtype)
        check_refused(CastPrecision(), graph_module, x, *reasons)

    refused(lambda m, x: m.a(x), "a: Inherited is a subclass", a=Inherited(4, 4))
    refused(lambda m, x: m.a(x) + m.b(x), "tied to b.weight", "tied to a.weight", **_tied())
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        refused(lambda m, x: m.a(x), dtype=dtype, a=nn.Linear(4, 4).to(dtype))


def test_layer_with_weights_that_overflow_is_skipped() -> None:
    graph_module = by_export(X, lambda m, x: m.a(x), a=nn.Linear(4, 4))
    with torch.no_grad():
        graph_module.get_submodule("a").weight[0, 0] = 1e5
    check_refused(CastPrecision(), graph_module, X, "a: the weights are too large for float16")
    assert run(CastPrecision(dtype="bfloat16"), copy_sharing_modules(graph_module))[1].changes


def test_an_embedding_that_renormalises_is_skipped() -> None:
    graph_module = by_fx(lambda m, x: m.a(x), a=nn.Embedding(5, 4, max_norm=1.0))
    for node in graph_module.graph.nodes:
        node.meta["val"] = torch.empty(2, 3, 4, device="meta")
    check_refused(CastPrecision(), graph_module, None, "a: the layer renormalizes its weight")


def test_a_hook_and_a_parametrization_are_skipped() -> None:
    graph_module = by_fx(lambda m, x: m.a(x), a=nn.Linear(4, 4))
    for node in graph_module.graph.nodes:
        node.meta["val"] = torch.empty(2, 3, 4, device="meta")
    graph_module.get_submodule("a").register_forward_hook(lambda module, args, result: result * 2)
    check_refused(CastPrecision(), graph_module, None, "a: the module has hooks")


@pytest.mark.slow
def test_parameter_of_a_product_is_cast_only_once() -> None:
    graph_module = by_export(X, lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(4, 4)))
    cast, _ = _cast(graph_module, X)
    assert cast.state_dict()["w"].dtype is torch.float16
    assert _casts(cast) == [torch.float16, torch.float32]
    for body in (lambda m, x: x @ m.w + m.w.sum(), lambda m, x: (x @ m.w) @ m.w):
        shared = by_export(X, body, w=nn.Parameter(torch.randn(4, 4)))
        cast, _ = _cast(shared, X)
        assert cast.state_dict()["w"].dtype is torch.float32


@pytest.mark.slow
def test_products_of_gpt2_that_are_not_linears() -> None:
    config = GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=40)
    graph_module = symbolic_trace(randomise(GPT2Model(config)), input_names=["input_ids"])
    inputs = {"input_ids": torch.randint(0, 60, (3, 7))}
    cast, report = _cast(graph_module, inputs)
    assert len([change for change in report.changes if "addmm" in change.target]) == 4
    float32_names = [name for name, value in cast.state_dict().items() if value.dtype is torch.float32]
    assert all(".ln_" in f".{name}" for name in float32_names)
    _, report = _cast(graph_module, inputs, CastPrecision(keep=("h.0.mlp",)))
    assert len([change for change in report.changes if "addmm" in change.target]) == 2


def test_unknown_dtypes_are_skipped() -> None:
    check_refused(CastPrecision(), by_fx(lambda m, x: m.a(x), a=nn.Linear(4, 4)), X, "a: dtypes are unknown")


@pytest.mark.slow
def test_layers_to_keep_stay_in_float32() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph_module = by_export(X, lambda m, x: m.last(m.block(x)), block=block, last=nn.Linear(4, 4))
    for keep, left in ((("block",), ["last"]), (("block.1", "last"), ["block.0"])):
        _, report = _cast(graph_module, X, CastPrecision(keep=keep))
        assert [change.target for change in report.changes] == left
    with pytest.raises(ConfigError, match='the model has no module "blok"\n.*Did you mean "block"'):
        CastPrecision(keep=("blok",))(copy_sharing_modules(graph_module))


def test_the_registry_knows_the_precisions_without_torch() -> None:
    dtypes = importlib.import_module("optexport.transformations.cast_precision")._DTYPES
    assert registry.RULES["cast-precision"].options["dtype"].choices == tuple(dtypes)
    with pytest.raises(ConfigError, match='here.dtype: unknown value "fp16"\n.*Choose one of: float16, bfloat16'):
        registry.check("cast-precision", {"dtype": "fp16"}, "here")
    with pytest.raises(ConfigError):
        CastPrecision(dtype="float32")


@pytest.mark.sample(0, 6)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", models.NAMES)
def test_models(name: str, dtype: str) -> None:
    cast, _ = _cast(models.traced(name), models.inputs(name), CastPrecision(dtype=dtype))
    float32_layers = {
        type(module).__name__
        for _, module in cast.named_modules()
        if any(parameter.dtype is torch.float32 for parameter in module.parameters(recurse=False))
    }
    assert not float32_layers & {"Conv2d", "Linear"} or name == "t5"  # its head is tied to its embeddings


class _Convolutional(nn.Module):
    """A small model with the layers of a MobileNet."""

    def __init__(self) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> nn.Module:
            conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
            return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())

        self.stem, self.expand, self.depth = block(3, 8, 3, 2), block(8, 16), block(16, 16, 3, groups=16)
        self.project = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.project(self.depth(self.expand(x)))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits.softmax(-1)


def _example(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, Any]]:
    if name == "bert":
        sizes: Any = {0: Dim("batch", 1, 8), 1: Dim("sequence", 2, 40)}
        return models.model("bert"), models.inputs("bert"), {"input_ids": sizes, "attention_mask": sizes}
    return randomise(_Convolutional()), {"x": torch.randn(2, 3, 32, 32)}, {"x": {0: Dim("batch", 1, 8)}}


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.nightly), "convolutional"])
def test_exports_pass_only_within_a_declared_tolerance(name: str, dtype: str, tmp_path: Path) -> None:
    model, inputs, dynamic = _example(name)
    rules = [FuseBatchNorm(), MergeLinears(), CastPrecision(dtype=dtype)]
    formats = ["torchscript", "pt2", *(["onnx"] if dtype == "float16" else [])]
    atol = 0.02 if dtype == "float16" else 0.2
    result = export(
        model, inputs, tmp_path / "made", transformations=rules, formats=formats, dynamic=dynamic, atol=atol
    )
    assert result.passed
    assert {output.floor_ratio > 10 for place in result.parity[1:] for output in place.outputs} == {True}
    with pytest.raises(ParityError, match="cast-precision caused the difference"):
        export(model, inputs, tmp_path / "no", transformations=rules, formats=["pt2"], dynamic=dynamic)


@pytest.mark.slow
def test_onnx_runtime_refuses_bfloat16_on_the_cpu(tmp_path: Path) -> None:
    model, inputs, dynamic = _example("convolutional")
    with pytest.raises(ExportError, match="NOT_IMPLEMENTED"):
        export(
            model,
            inputs,
            tmp_path / "no",
            transformations=CastPrecision(dtype="bfloat16"),
            formats=["onnx"],
            dynamic=dynamic,
            atol=0.2,
        )
