"""FoldConstants: weights that are computed from weights, tables and grids are computed once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from optexport import symbolic_trace
from optexport.testing import assert_same, check_applied, check_laws, check_refused, copy_sharing_modules, outputs
from optexport.transformations import FoldConstants, FuseBatchNorm, ShareEqual, compose
from optexport.transformations.rule import run
from tests._helpers.graphs import Program, by_export, by_fx, calls
from tests._helpers.models import randomise

RULE = FoldConstants()
X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGES = torch.linspace(-2, 2, 288).reshape(2, 4, 6, 6)
aten = torch.ops.aten


class StandardizedConv(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-6)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class StandardizedByBatchNorm(nn.Conv2d):
    """Standardizes its weight by a batch norm in train mode, as timm does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        rows = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(x, rows.reshape_as(self.weight), self.bias)


LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "standardized": (lambda: StandardizedConv(4, 6, 3, stride=2, padding=1, groups=2), IMAGES),
    "standardized, without a bias": (lambda: StandardizedConv(4, 6, 3, bias=False), IMAGES),
    "standardized by a batch norm": (lambda: StandardizedByBatchNorm(4, 6, 3), IMAGES),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 5)), X),
    "weight norm of a transposed convolution": (
        lambda: parametrizations.weight_norm(nn.ConvTranspose2d(4, 3, 2, stride=2)),
        IMAGES,
    ),
    "weight norm by a hook": (lambda: weight_norm(nn.Conv1d(4, 5, 3), dim=None), IMAGES.flatten(2)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Conv2d(4, 5, 3)), IMAGES),
    "spectral norm by a hook": (lambda: spectral_norm(nn.Linear(4, 5)), X),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), X),
}


def _traced(layer: nn.Module, x: torch.Tensor) -> GraphModule:
    program = Program(lambda m, x: m.block.layer(x).tanh(), block=nn.ModuleDict({"layer": layer}))
    return symbolic_trace(randomise(program).eval(), example_inputs={"x": x}, dynamic={"x": {0: "batch"}})


def _folded(graph_module: GraphModule) -> GraphModule:
    return run(RULE, copy_sharing_modules(graph_module))[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_layer_with_a_computed_weight_becomes_a_plain_layer(name: str) -> None:
    build, x = LAYERS[name]
    graph_module = _traced(build(), x)
    check_applied(RULE, graph_module, x, exact=True)
    folded = _folded(graph_module)
    assert [node.op for node in folded.graph.nodes if node.op != "placeholder"][:2] == ["call_module", "call_function"]
    names = [f"block.layer.{name}" for name, _ in build().named_parameters() if name == "bias"]
    assert list(folded.state_dict()) == ["block.layer.weight", *names]
    other = torch.cat([x * 3, x.flip(0)])
    assert_same(outputs(folded, other), outputs(graph_module, other), "at another size")


class _NormalizedInput(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.norm = nn.LayerNorm(4, elementwise_affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), F.normalize(self.weight, dim=1), self.bias)


def test_module_with_other_layers_stays_apart() -> None:
    graph_module = _traced(_NormalizedInput(), X)
    check_applied(RULE, graph_module, X, exact=True)
    folded = _folded(graph_module)
    assert set(folded.state_dict()) == {"block.layer.weight", "block.layer.bias"}
    assert len(calls(folded, nn.LayerNorm)) == 1
    assert not calls(folded, nn.Linear)


def test_batch_norm_behind_a_normalized_weight_is_fused() -> None:
    layers = {"conv": parametrizations.weight_norm(nn.Conv2d(4, 5, 3)), "norm": nn.BatchNorm2d(5)}
    graph_module = by_export(IMAGES, lambda m, x: m.norm(m.conv(x)), **layers)
    check_refused(FuseBatchNorm(), graph_module, IMAGES)
    check_applied(FuseBatchNorm(), _folded(graph_module), IMAGES)


def _bias_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    bias: torch.Tensor = m.bias.table[m.bias.index.view(-1)].view(3, 3, -1).permute(2, 0, 1).contiguous()
    return (x @ x.mT)[None] + 16 * torch.sigmoid(bias).unsqueeze(0)


class _Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 2))
        self.register_buffer("index", torch.randint(5, (3, 3)))


def _grid(m: Any, x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")
    grid = torch.stack([rows, columns]).flatten(1).float() / 2
    return x[:, None] * grid + torch.linspace(-1, 1, 4).square()


def _rotation(m: Any, x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(3).float(), 1 / 10 ** (torch.arange(2) / 2))
    turned = torch.view_as_complex(x.view(3, 2, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(1)


BODIES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], dict[str, Any]]] = {
    "a table of relative positions": (_bias_table, {"bias": _Bias()}),
    "a temperature": (lambda m, x: x * m.tau.exp().clamp(max=100), {"tau": nn.Parameter(torch.ones(1))}),
    "a grid": (_grid, {}),
    "a rotation": (_rotation, {}),
    "numbers": (lambda m, x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), {}),
    "embeddings of fixed positions": (lambda m, x: x + m.e(torch.arange(3)), {"e": nn.Embedding(7, 4)}),
    "a projection of learned queries": (
        lambda m, x: F.scaled_dot_product_attention(m.q(m.latents), x, x),
        {"q": nn.Linear(4, 4), "latents": nn.Parameter(torch.randn(2, 4))},
    ),
    "the norm of a parameter": (
        lambda m, x: x * F.layer_norm(m.gain, (4,)),
        {"gain": nn.Parameter(torch.tensor([1.0, 2.0, 4.0, 8.0]))},
    ),
    "a part of a result with two parts": (
        lambda m, x: x * torch.exp(m.two).chunk(2)[1],
        {"two": nn.Parameter(torch.randn(8))},
    ),
    "both parts of a result with two parts": (
        lambda m, x: x * torch.exp(m.two).chunk(2)[1] + torch.exp(m.two).chunk(2)[0],
        {"two": nn.Parameter(torch.randn(8))},
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BODIES)
def test_constant_is_computed_once_with_the_same_bits(name: str) -> None:
    body, children = BODIES[name]
    graph_module = by_export(X, body, **children)
    _, report = run(RULE, copy_sharing_modules(graph_module))
    assert report.changes
    check_laws(RULE, graph_module, X, exact=True)
    folded = _folded(graph_module)
    with_inputs = {node for node in folded.graph.nodes if node.op == "placeholder"}
    for node in folded.graph.nodes:
        if not with_inputs.isdisjoint(node.all_input_nodes):
            with_inputs.add(node)
        elif node.op.startswith("call"):
            assert node.target in (aten.unsqueeze.default, aten.permute.default), node.format_node()


def test_weights_of_several_dtypes_are_cast_once() -> None:
    weights = {
        "narrow": nn.Parameter(torch.linspace(-1, 1, 20, dtype=torch.float16).reshape(5, 4)),
        "scale": nn.Parameter(torch.tensor(0.3, dtype=torch.bfloat16)),
    }
    graph_module = by_export(X, lambda m, x: F.linear(x, m.narrow.float() * m.scale.double()), **weights)
    folded = _folded(graph_module)
    assert [tuple(t.shape) for t in folded.parameters()] == [(5, 4)]
    assert_same(outputs(folded, X), outputs(graph_module, X), "cast once")


def test_results_keep_their_strides() -> None:
    graph_module = by_export(X, lambda m, x: x @ (m.w.t() * 0.3), w=nn.Parameter(torch.randn(5, 4)))
    folded = _folded(graph_module)
    assert folded.folded_mul.stride() == (1, 4)
    assert_same(outputs(folded, X), outputs(graph_module, X), "transposed")


def test_result_does_not_depend_on_the_state_in_which_the_rule_runs() -> None:
    body = lambda m, x: x + m.a(m.rows)  # noqa: E731
    graph_module = by_export(X, body, a=nn.Linear(4, 4), rows=nn.Parameter(torch.randn(3, 4)))
    expected = outputs(graph_module, X)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        folded = _folded(graph_module)
    assert_same(outputs(folded, X), expected, "applied under autocast")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x + aten.rand.default([4]),
        lambda m, x: x + aten.dropout.default(m.w, 0.5, True),
        lambda m, x: x + aten.empty.memory_format([4]) * 0,
        lambda m, x: x + m.counter.add_(1.0) * 2,
        lambda m, x: (m.counter.add_(x.sum()), x * m.counter.exp())[1],
        lambda m, x: (m.counter.view(2, 2)[0].zero_(), x * m.counter.exp())[1],
        lambda m, x: m.w.exp().add_(x.sum()) * x,
        lambda m, x: x + m.w[None],
        lambda m, x: x @ m.square.t(),
        lambda m, x: x + m.w.expand(3, 4),
    ],
    ids=[
        *("random numbers", "a dropout", "uninitialized memory", "a counter", "a buffer written from the input"),
        *("a buffer written through a view", "a result changed in place"),
        *("a view", "a transposed weight", "an expanded weight"),
    ],
)
def test_what_changes_or_is_only_a_view_stays(body: Callable[..., Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))
            self.square = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("counter", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> Any:
            return body(self, x)

    graph_module = symbolic_trace(Model(), example_inputs={"x": X}, dynamic={})
    _, report = run(RULE, copy_sharing_modules(graph_module))
    assert not report.changes


@pytest.mark.parametrize("enabled", [True, False])
def test_constant_under_autocast_keeps_the_bits_of_the_model(enabled: bool) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return x + (m.w @ m.w).exp().sum()

    program = randomise(Program(body, w=nn.Parameter(torch.randn(4, 4))))
    graph_module = symbolic_trace(program, example_inputs={"x": X})
    folded, report = run(RULE, copy_sharing_modules(graph_module))
    assert len(report.changes) == 1
    with torch.no_grad():
        assert torch.equal(folded(X), program(X))


@pytest.mark.parametrize("ends", [True, False], ids=["after it has ended", "inside"])
def test_autocast_that_the_graph_switches_is_noticed(ends: bool) -> None:
    graph_module = by_export(X[:, None], lambda m, x: x + (m.w @ m.w), w=nn.Parameter(torch.randn(3, 4, 4)))
    (product,) = graph_module.graph.find_nodes(op="call_function", target=aten.matmul.default)
    with graph_module.graph.inserting_before(product):
        entered = graph_module.graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, None))
    with graph_module.graph.inserting_before(product if ends else product.next):
        graph_module.graph.call_function(_exit_autocast, (entered,))
    graph_module.recompile()
    changes = run(RULE, copy_sharing_modules(graph_module))[1].changes
    assert bool(changes) is ends


def test_output_stays_but_its_sources_are_folded() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        scale = m.tau.exp() * 3
        return x * scale, scale.view(1, 1)

    graph_module = by_export(X, body, tau=nn.Parameter(torch.ones(1)))
    report = check_applied(RULE, graph_module, X, exact=True)
    assert [change.replaced for change in report.changes] == [("exp",)]
    reasons = [near_miss.reason for near_miss in report.near_misses]
    assert reasons == [f"{name} is an output, or shares memory with one" for name in ("mul", "view")]


def test_small_results_are_folded_and_large_ones_stay() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        positions = torch.arange(1200)
        mask = (positions[:, None] >= positions).float()
        return x.sum() + mask[:3, :4] * 2 + torch.arange(4)

    graph_module = by_export(X, body)
    _, report = run(RULE, copy_sharing_modules(graph_module))
    # The last result is small, so the mask that it is computed from is not stored.
    assert len(report.changes) == 2
    assert not report.near_misses
    large = by_export(X, lambda m, x: x.sum() * (torch.arange(1200)[:, None] >= torch.arange(1200)).float())
    _, report = run(RULE, copy_sharing_modules(large))
    reasons = [near_miss.reason for near_miss in report.near_misses]
    assert reasons == ["ge would enlarge the model by 1440000 bytes", "to would enlarge the model by 5760000 bytes"]
    check_laws(RULE, large, X, exact=True)


def test_a_compressed_weight_is_not_expanded() -> None:
    class Compressed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randint(-128, 128, (700, 700), dtype=torch.int8))
            self.scale = nn.Parameter(torch.tensor(0.01))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.codes.float() * self.scale)

    x = torch.randn(2, 700)
    graph_module = symbolic_trace(Compressed(), example_inputs={"x": x}, dynamic={})
    _, report = run(RULE, copy_sharing_modules(graph_module))
    assert not report.changes


def test_all_results_share_the_limit() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        for size in range(400, 410):
            x = x * (torch.arange(size)[:, None] + torch.arange(size)).sum(0, keepdim=True).mT.expand(-1, 400)[:1, :4]
            x = x + torch.ones(size, 250)[:1, :4].sum() + (torch.ones(size, 250) * x.sum())[:1, :4]
        return x

    graph_module = by_export(X, body)
    folded, report = run(RULE, copy_sharing_modules(graph_module))
    stored = sum(tensor.nbytes for tensor in folded.buffers())
    assert 500_000 < stored < 1 << 20
    assert any("would enlarge" in near_miss.reason for near_miss in report.near_misses)
    check_laws(RULE, graph_module, X, exact=True)


def test_trainable_weights_stay_trainable() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        return x * m.frozen.exp() + (m.frozen * m.trained) + torch.arange(4)

    frozen, trained = nn.Parameter(torch.ones(4), requires_grad=False), nn.Parameter(torch.ones(4))
    folded = _folded(by_export(X, body, frozen=frozen, trained=trained))
    assert {name: tensor.requires_grad for name, tensor in folded.named_parameters()} == {
        "folded_exp": False,
        "folded_mul_1": True,
    }
    assert [name for name, _ in folded.named_buffers()] == ["folded_arange"]
    assert "folded_arange" not in folded.state_dict()


def test_weight_with_another_reader_is_kept() -> None:
    graph_module = by_export(X, lambda m, x: x * m.w.exp() + m.w, w=nn.Parameter(torch.randn(4)))
    folded = check_laws(RULE, graph_module, X, exact=True)
    assert list(folded.state_dict()) == ["w", "folded_exp"]


def test_layer_that_is_called_twice_keeps_one_weight_after_share_equal() -> None:
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    graph_module = by_export(X, lambda m, x: m.layer(m.layer(x).tanh()), layer=layer)
    check_laws(RULE, graph_module, X, exact=True)
    folded = check_laws(compose(ShareEqual(), RULE), graph_module, X, exact=True)
    assert set(folded.state_dict()) == {"layer.weight", "layer.bias"}
    assert not calls(folded, nn.Linear)


def test_results_without_shapes_stay() -> None:
    check_refused(RULE, by_fx(lambda m, x: x * (m.w * math.pi), w=nn.Parameter(torch.randn(4))), X)
