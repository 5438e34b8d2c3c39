"""Each lowering: the operators change as said, and the file computes what it did without, at any size."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from optexport import lowerings, runtimes
from optexport.formats import exported_program, torchscript
from optexport.formats import onnx as onnx_format
from optexport.signature import Dim
from tests.exports import Block
from tests.formats import files
from tests.models import randomise
from tests.transformations.programs import Program

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

AXES = {0: Dim("batch", 0, 16), 1: Dim("sequence", 2, 40)}
X = torch.linspace(-2, 2, 60).reshape(3, 5, 4)
EACH = [(lowering.name, file_format) for lowering in lowerings.LOWERINGS for file_format in lowering.formats]
LINEAR = torch.ops.mkldnn._linear_pointwise.default

_PLACE = tempfile.TemporaryDirectory(prefix="optexport-lowerings-")

onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


class Mlp(nn.Module):
    """Linear layers with an activation of each kind, on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU("tanh"), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Masked(nn.Module):
    """A block of attention with a bias of -inf, whose rows of padding attend to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.block.query(x)[:, None]
        attended = nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask[:, None, None, :] > 0)[:, 0]
        y = self.block.norm(x + self.block.out(attended))
        return y + self.block.down(self.block.act(self.block.up(y)))


@functools.cache
def prepared(name: str) -> files.Prepared:
    """A small model of each family; shared between tests, so none may change it."""
    if name == "mlp":
        return files.prepare(randomise(Mlp()), {"x": X[0]}, {"x": {0: Dim("batch", 1, 32)}})
    if name == "masked":
        example = {"x": X, "mask": torch.ones(3, 5)}
        return files.prepare(randomise(Masked()), example, {"x": AXES, "mask": AXES})
    return files.prepared(name)


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    """Inputs of sizes that were never traced."""
    if name == "mlp":
        return [{"x": torch.randn(rows, 4)} for rows in (1, 2, 17)]
    if name == "masked":
        mask = torch.ones(4, 7)
        mask[1], mask[2, 3:], mask[3, :5] = 0, 0, 0
        return [{"x": torch.randn(1, 9, 4), "mask": torch.ones(1, 9)}, {"x": torch.randn(4, 7, 4), "mask": mask}]
    return [batch for _, batch in files.batches(name)]


def save(made: files.Prepared, file_format: str, path: Path, names: Sequence[str] = ()) -> Path:
    path.parent.mkdir(exist_ok=True)
    match file_format:
        case "onnx":
            onnx_format.save(made.flat, made.signature, made.example, path, lowerings=names)
        case "torchscript":
            assert torchscript.save(made.program, made.signature, made.example, path, lowerings=names) is None
        case "pt2":
            exported_program.save(made.program, path, lowerings=names)
    return path


@functools.cache
def plain_file(model: str, file_format: str) -> Path:
    return save(prepared(model), file_format, Path(_PLACE.name) / f"{model}.{file_format}")


def agree(path: Path, other: Path, file_format: str, made: files.Prepared, given: Sequence[Any]) -> None:
    """Asserts that two files compute the same, to a few units in the last place of the largest number."""
    names = made.signature.output_names
    pairs = zip(*(runtimes.open_file(p, file_format, names) for p in (path, other)), strict=True)
    for (_, run), (_, plain) in pairs:
        for batch in given:
            got, want = run(batch), plain(batch)
            for name, value in want.items():
                assert got[name].dtype == value.dtype
                assert got[name].shape == value.shape
                tolerance = 64 * torch.finfo(torch.float32).eps * float(value.abs().max() if value.numel() else 0)
                torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("model", ["bert", "resnet", "mlp", "llama", "masked"])
@pytest.mark.parametrize(("name", "file_format"), EACH)
def test_every_lowering_gives_a_file_that_opens_and_agrees_at_any_size(
    name: str, file_format: str, model: str, tmp_path: Path
) -> None:
    lowered = save(prepared(model), file_format, tmp_path / "model", (name,))
    agree(lowered, plain_file(model, file_format), file_format, prepared(model), batches(model))


@pytest.mark.parametrize("file_format", ["onnx", "torchscript", "pt2"])
def test_all_lowerings_of_a_format_together_agree_in_whatever_order_they_are_named(
    file_format: str, tmp_path: Path
) -> None:
    made, names = prepared("bert"), lowerings.of_format(file_format)
    lowered = save(made, file_format, tmp_path / "lowered" / "model", names)
    backwards = save(made, file_format, tmp_path / "backwards" / "model", names[::-1])
    agree(lowered, plain_file("bert", file_format), file_format, made, batches("bert"))
    assert lowered.read_bytes() == backwards.read_bytes()


@pytest.mark.parametrize(("name", "file_format"), EACH)
def test_a_file_written_twice_is_the_same_and_tells_nothing_of_the_machine(
    name: str, file_format: str, tmp_path: Path
) -> None:
    first, second = (save(prepared("masked"), file_format, tmp_path / part / "model", (name,)) for part in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert all(told not in first.read_bytes() for told in (b"site-packages", str(tmp_path).encode()))


@pytest.mark.parametrize("name", ["sum-residuals", "gemm", "onednn-linear"])
def test_a_graph_with_nothing_to_lower_gives_the_same_file(name: str, tmp_path: Path) -> None:
    made = files.prepare(Program(lambda m, x: x.sin() + x @ x.mT @ x), {"x": X}, {"x": AXES})
    for file_format in [file_format for other, file_format in EACH if other == name]:
        plain, lowered = both(made, file_format, name, tmp_path)
        assert lowered.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize(("name", "file_format"), EACH)
def test_a_lowering_leaves_what_it_was_given_as_it_was(name: str, file_format: str, tmp_path: Path) -> None:
    made = prepared("masked")
    before = str(made.flat.graph), str(made.program)
    weights = {name: (value.data_ptr(), value.clone()) for name, value in made.program.state_dict.items()}
    save(made, file_format, tmp_path / "model", (name,))
    assert (str(made.flat.graph), str(made.program)) == before
    for key, (address, value) in weights.items():
        assert made.program.state_dict[key].data_ptr() == address
        assert torch.equal(made.program.state_dict[key], value)


def both(made: files.Prepared, file_format: str, name: str, place: Path) -> tuple[Path, Path]:
    """The file without a lowering, and with it."""
    return save(made, file_format, place / "plain" / "model"), save(
        made, file_format, place / "lowered" / "model", (name,)
    )


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def program(body: Any, **children: Any) -> files.Prepared:
    return files.prepare(randomise(Program(body, **children)), {"x": X}, {"x": AXES})


def in_onnx(made: files.Prepared, name: str, place: Path) -> tuple[Counter[str], Counter[str]]:
    """The operators of a file without and with a lowering, after checking that they agree, for empty batches too."""
    plain, lowered = both(made, "onnx", name, place)
    agree(lowered, plain, "onnx", made, [{"x": torch.randn(*size, 4)} for size in ((1, 2), (7, 33), (0, 5))])
    assert [value.name for value in onnx.load(lowered).graph.output] == made.signature.output_names
    assert [value.name for value in onnx.load(lowered).graph.input] == ["x"]
    return operators(plain), operators(lowered)


def test_a_residual_before_a_layer_norm_becomes_a_sum(tmp_path: Path) -> None:
    made = program(lambda m, x: m.n(x + m.a(x).sin()) + x, a=nn.Linear(4, 4), n=nn.LayerNorm(4))
    plain, lowered = in_onnx(made, "sum-residuals", tmp_path)
    assert lowered == plain - Counter(Add=1) + Counter(Sum=1)


def test_a_residual_that_other_nodes_and_the_output_read_becomes_a_sum_too(tmp_path: Path) -> None:
    made = program(lambda m, x: (y := x.sin() + x, m.n(y) + y), n=nn.LayerNorm(4))
    plain, lowered = in_onnx(made, "sum-residuals", tmp_path)
    assert lowered == plain - Counter(Add=1) + Counter(Sum=1)


def test_a_bias_before_a_layer_norm_stays_an_add(tmp_path: Path) -> None:
    made = program(lambda m, x: m.n(m.a(x)) + m.n(x + 1.0), a=nn.Linear(4, 4), n=nn.LayerNorm(4))
    plain, lowered = in_onnx(made, "sum-residuals", tmp_path)
    assert lowered == plain


def test_onnx_runtime_makes_no_skip_layer_normalization_of_a_sum(tmp_path: Path) -> None:
    """The reason that the lowering is there; where it fails, the lowering has lost its use."""
    import onnxruntime

    kept = {}
    for names in ((), ("sum-residuals",)):
        path = save(prepared("masked"), "onnx", tmp_path / "model.onnx", names)
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        options.log_severity_level = 4
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        kept[names] = operators(tmp_path / "optimised.onnx")["SkipLayerNormalization"]
    assert kept[()] > 0
    assert kept["sum-residuals",] == 0


@pytest.mark.parametrize("dynamic", [AXES, {0: Dim("batch", 0, 16)}, {1: Dim("sequence", 2, 40)}])
def test_a_linear_layer_on_three_dimensions_becomes_a_gemm(dynamic: Mapping[int, Dim], tmp_path: Path) -> None:
    made = files.prepare(randomise(Program(lambda m, x: m.a(x), a=nn.Linear(4, 6))), {"x": X}, {"x": dict(dynamic)})
    plain, lowered = both(made, "onnx", "gemm", tmp_path)
    sizes = itertools.product((0, 1, 7) if 0 in dynamic else (3,), (2, 33) if 1 in dynamic else (5,))
    agree(lowered, plain, "onnx", made, [{"x": torch.randn(*size, 4)} for size in sizes])
    counts = operators(lowered)
    assert (counts["Gemm"], counts["Reshape"], counts["MatMul"], counts["Add"]) == (1, 2, 0, 0)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.a(x).sin(),
        lambda m, x: m.a(x) + x,
        lambda m, x: x @ x.mT @ x + m.v,
        lambda m, x: m.a(x) + m.w[0, 0],
        lambda m, x: m.b(x[:, 0]),
    ],
    ids=["no bias", "residual", "no weight", "bias of another shape", "two dimensions"],
)
def test_products_that_are_no_linear_layers_stay_what_they_are(body: Any, tmp_path: Path) -> None:
    made = program(
        body,
        a=nn.Linear(4, 4, bias=False),
        b=nn.Linear(4, 2),
        w=nn.Parameter(torch.randn(1, 4)),
        v=nn.Parameter(torch.randn(4)),
    )
    plain, lowered = in_onnx(made, "gemm", tmp_path)
    assert lowered == plain


def test_transformers_fuses_what_onnx_runtime_has_operators_for(tmp_path: Path) -> None:
    path = save(prepared("masked"), "onnx", tmp_path / "model.onnx", ("transformers-fusions",))
    assert operators(path)["SkipLayerNormalization"] > 0
    path = save(prepared("masked"), "onnx", tmp_path / "model.onnx", ("transformers-fusions", "sum-residuals"))
    assert operators(path)["SkipLayerNormalization"] == 0


def test_fusions_that_would_leave_the_standard_are_not_made(tmp_path: Path) -> None:
    """The runtime's SimplifiedLayerNormalization bears the standard's domain, which onnx.checker refuses."""
    made = program(
        lambda m, x: m.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), w=nn.Parameter(torch.randn(4))
    )
    plain, lowered = in_onnx(made, "transformers-fusions", tmp_path)
    assert lowered == plain


def test_a_number_that_the_fusions_would_take_for_zero_keeps_them_away(tmp_path: Path) -> None:
    made = program(lambda m, x: (x.sin() * 0 + 4e-9 + 0) * 1e9 + m.n(x + x.cos()), n=nn.LayerNorm(4))
    plain, lowered = in_onnx(made, "transformers-fusions", tmp_path)
    assert lowered == plain


def linears(made: files.Prepared, place: Path) -> tuple[list[Any], Any]:
    """What a lowered ``.pt2`` file calls, and what it computes; after checking that it and TorchScript agree."""
    given = [{"x": torch.randn(*size, 4)} for size in ((1, 2), (7, 33), (0, 5))]
    for file_format in ("pt2", "torchscript"):
        plain, lowered = both(made, file_format, "onednn-linear", place)
        agree(lowered, plain, file_format, made, given)
        if file_format == "pt2":
            called = torch.export.load(lowered).graph.find_nodes(op="call_function", target=LINEAR)
    return [list(node.args[3:]) for node in called], given


@onednn
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_linear_layer_and_the_gelu_after_it_become_one_call_of_onednn(approximate: str, tmp_path: Path) -> None:
    made = program(lambda m, x: m.b(m.g(m.a(x))), a=nn.Linear(4, 8), g=nn.GELU(approximate), b=nn.Linear(8, 4, False))
    calls, _ = linears(made, tmp_path)
    assert [(attr, algorithm) for attr, _, algorithm in calls] == [("gelu", approximate), ("none", "")]


@onednn
def test_a_gelu_of_what_others_read_stays_a_call_of_its_own(tmp_path: Path) -> None:
    made = program(lambda m, x: (y := m.a(x), nn.functional.gelu(y)), a=nn.Linear(4, 8))
    calls, _ = linears(made, tmp_path)
    assert [attr for attr, *_ in calls] == ["none"]


class Overwritten(nn.Module):
    """Changes the input of a linear layer before the GELU of what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        y = self.a(z)
        z.mul_(2.0)
        return nn.functional.gelu(y) + z


@onednn
def test_what_is_changed_in_place_between_a_layer_and_its_gelu_is_read_before(tmp_path: Path) -> None:
    made = files.prepare(randomise(Overwritten()), {"x": X}, {"x": AXES})
    calls, _ = linears(made, tmp_path)
    assert [attr for attr, *_ in calls] == ["none"]


@onednn
def test_inputs_of_one_dimension_and_of_any_strides_are_taken(tmp_path: Path) -> None:
    model = Program(
        lambda m, x: (m.a(x[0, 0]), m.a(x.transpose(0, 1)), m.a(x[:, ::2]), m.a(x[:1, :1].expand(3, 5, 4))),
        a=nn.Linear(4, 6),
    )
    axes = {0: Dim("batch", 1, 16), 1: Dim("sequence", 3, 40)}
    made = files.prepare(randomise(model), {"x": X}, {"x": axes})
    plain, lowered = both(made, "pt2", "onednn-linear", tmp_path)
    agree(lowered, plain, "pt2", made, [{"x": torch.randn(*size, 4)} for size in ((1, 3), (7, 33))])
    assert len(torch.export.load(lowered).graph.find_nodes(op="call_function", target=LINEAR)) == 4


class Striding(nn.Module):
    """A bias of which every other number counts: oneDNN would read those between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("bias", torch.randn(12)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@onednn
@pytest.mark.parametrize(
    "make",
    [
        Striding,
        lambda: Program(lambda m, x: nn.functional.linear(x, x[0])),
        lambda: Program(lambda m, x: nn.functional.linear(x, m.w * 2), w=nn.Parameter(torch.randn(6, 4))),
        lambda: Program(lambda m, x: nn.functional.linear(x, m.w), w=nn.Parameter(torch.randn(4))),
        lambda: Program(lambda m, x: nn.functional.linear(x, m.w, x[0, 0, 0]), w=nn.Parameter(torch.randn(6, 4))),
        lambda: Program(lambda m, x: m.a(x.double()), a=nn.Linear(4, 2).double()),
        lambda: Program(lambda m, x: nn.functional.linear(x[..., :0], m.w), w=nn.Parameter(torch.empty(2, 0))),
    ],
    ids=["strided bias", "activation", "computed", "vector", "bias computed", "float64", "no features"],
)
def test_what_onednn_would_not_take_stays_a_linear_layer_of_torch(make: Any, tmp_path: Path) -> None:
    made = files.prepare(make().eval(), {"x": X}, {"x": {0: Dim("batch", 1, 16)}})
    plain, lowered = both(made, "pt2", "onednn-linear", tmp_path)
    agree(lowered, plain, "pt2", made, [{"x": torch.randn(size, 5, 4)} for size in (1, 7)])
    assert lowered.read_bytes() == plain.read_bytes()


@onednn
def test_numbers_that_are_none_stay_none(tmp_path: Path) -> None:
    made = program(lambda m, x: (nn.functional.gelu(m.a(x)), m.a(x).relu()), a=nn.Linear(4, 4))
    path = save(made, "pt2", tmp_path / "model", ("onednn-linear",))
    got = runtimes.open_pt2(path, made.signature.output_names)({"x": torch.full((2, 3, 4), torch.nan)})
    assert all(value.isnan().all() for value in got.values())


def test_a_frozen_file_holds_its_weights_as_constants(tmp_path: Path) -> None:
    path = save(prepared("bert"), "torchscript", tmp_path / "model.pt", ("freeze",))
    assert not list(torch.jit.load(path).parameters())
    _, *arguments = torch.jit.load(path).forward.schema.arguments
    assert [argument.name for argument in arguments] == [spec.name for spec in prepared("bert").signature.inputs]


def test_those_of_a_format_come_in_the_order_in_which_they_are_applied() -> None:
    assert lowerings.of_format("onnx").index("sum-residuals") < lowerings.of_format("onnx").index(
        "transformers-fusions"
    )
    assert set(lowerings.of_format("pt2")) == {"onednn-linear"}
    assert all(lowerings.available(lowering.name) for lowering in lowerings.LOWERINGS)
