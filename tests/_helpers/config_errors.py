"""Invalid config files, with the errors that they must cause."""

from __future__ import annotations

import json

MODEL = '[model]\nsource = "org/name"\n'


def model(line: str) -> str:
    return f"{MODEL}{line}\n"


def source(text: str) -> str:
    return f"[model]\nsource = {json.dumps(text)}\n"


def table(name: str, *lines: str) -> str:
    return "\n".join([MODEL, f"[{name}]", *lines, ""])


def rule(*lines: str) -> str:
    return "\n".join([MODEL, "[[transformations]]", *lines, ""])


# Text of the config, the key that the message must name, and a part of the message.
MISTAKES: dict[str, tuple[str, str, str]] = {
    # unknown keys, at every level
    "unknown table": (MODEL + "[modle]\n", "modle", 'Did you mean "model"?'),
    "unknown key of model": (model("taks = 1"), "model.taks", 'Did you mean "task"?'),
    "unknown key of inputs": (table("inputs", 'text = ["a"]'), "inputs.text", 'Did you mean "texts"?'),
    "unknown key of a tensor": (
        table("inputs.tensors.x", "shape = [1]", "shpe = [1]"),
        "inputs.tensors.x.shpe",
        'Did you mean "shape"?',
    ),
    "unknown key of parity": (table("parity", "atoll = 1.0"), "parity.atoll", 'Did you mean "atol"?'),
    "unknown key of export": (table("export", "format = []"), "export.format", 'Did you mean "formats"?'),
    "unknown key of tracking": (table("tracking", 'url = "x"'), "tracking.url", 'Did you mean "uri"?'),
    "unknown key far from any": (table("tracking", "zzz = 1"), "tracking.zzz", "Choose one of: enabled, uri"),
    "key of another table": (model("atol = 1.0"), "model.atol", 'unknown key "atol"\nHint: Choose one of: source, '),
    # missing keys and values
    "empty file": ("", "model", 'required key is missing\nHint: Add [model] with source = "./my-model".'),
    "no source": ("[model]\n", "model.source", "required key is missing"),
    "no use": (rule("exact = true"), "transformations[0].use", "required key is missing"),
    "no shape": (table("inputs.tensors.x", 'dtype = "int64"'), "inputs.tensors.x.shape", "required key is missing"),
    # wrong types and values
    "text for a table": ('model = "x"\n', "model", 'expected a table, found "x"'),
    "list for a table": ("model = []\n", "model", "found []"),
    "number for the source": ("[model]\nsource = 3\n", "model.source", "expected a text, found 3"),
    "empty source": (source(""), "model.source", 'the text is empty\nHint: Write source = "./my-model".'),
    "text for a flag": (
        model('trust_remote_code = "yes"'),
        "model.trust_remote_code",
        'expected true or false, found "yes"',
    ),
    "number for a flag": (
        table("tracking", "enabled = 1"),
        "tracking.enabled",
        "found 1\nHint: Write true or false, without quotes.",
    ),
    "unknown dtype": (model('dtype = "int8"'), "model.dtype", 'expected "float32", '),
    "unknown task": (model('task = "feature-extractoin"'), "model.task", 'Did you mean "feature-extraction"?'),
    "text for texts": (
        table("inputs", 'texts = "a"'),
        "inputs.texts",
        'expected a list, found "a"\nHint: Write ["a"].',
    ),
    "no texts": (table("inputs", "texts = []"), "inputs.texts", "the list is empty"),
    "number among texts": (table("inputs", 'texts = ["a", 3]'), "inputs.texts[1]", "found 3"),
    "length of zero": (
        table("inputs", "max_length = 0"),
        "inputs.max_length",
        "expected at least 1, found 0\nHint: Write 1 or a larger number.",
    ),
    "text for axes": (table("inputs.axes", 'x = "a"'), "inputs.axes.x", 'found "a"'),
    "tensor of unknown dtype": (
        table("inputs.tensors.x", "shape = [1]", 'dtype = "float"'),
        "inputs.tensors.x.dtype",
        'or "bool", found "float"\nHint: Write one of these values, in quotes.',
    ),
    "size below zero": (table("inputs.tensors.x", "shape = [-1]"), "inputs.tensors.x.shape[0]", "found -1"),
    "half a size": (table("inputs.tensors.x", "shape = [1.5]"), "inputs.tensors.x.shape[0]", "found 1.5"),
    "shape that is a number": (table("inputs.tensors.x", "shape = 3"), "inputs.tensors.x.shape", "found 3"),
    "constant with ragged rows": (
        table("inputs.constants", "grid = [[1, 2], [3]]"),
        "inputs.constants.grid",
        "differ in length",
    ),
    "constant of numbers and rows": (
        table("inputs.constants", "grid = [1, [3]]"),
        "inputs.constants.grid",
        "differ in length",
    ),
    "constant of texts": (
        table("inputs.constants", 'grid = ["a"]'),
        "inputs.constants.grid",
        'expected a list of numbers or of true and false, found "a"',
    ),
    "constant beyond 64 bits": (
        table("inputs.constants", "grid = [9223372036854775808]"),
        "inputs.constants.grid[0]",
        "64 bits",
    ),
    "constant that is a table": (
        table("inputs.constants", "grid = { a = 1 }"),
        "inputs.constants.grid",
        "found { a = 1 }",
    ),
    "constant that is infinite": (table("inputs.constants", "low = [-inf]"), "inputs.constants.low", "finite"),
    "range reversed": (table("inputs.dynamic", "batch = [5, 3]"), "inputs", "Write batch = [3, 5]."),
    "range from zero": (table("inputs.dynamic", "batch = [0, 3]"), "inputs.dynamic.batch.min", "found 0"),
    "range of one": (
        table("inputs.dynamic", "batch = [5]"),
        "inputs.dynamic.batch",
        "expected the smallest and the largest size, found [5]\nHint: Write two sizes, such as [1, 64]",
    ),
    "range of three": (
        table("inputs.dynamic", "batch = [1, 2, 3]"),
        "inputs.dynamic.batch",
        "expected the smallest and the largest size, found [1, 2, 3]",
    ),
    "range that is a number": (
        table("inputs.dynamic", "batch = 3"),
        "inputs.dynamic.batch",
        "found 3\nHint: Write two sizes, such as [1, 64], or a table",
    ),
    "range of text": (table("inputs.dynamic", 'batch = ["a", 3]'), "inputs.dynamic.batch.min", 'found "a"'),
    "range of fractions": (table("inputs.dynamic", "batch = [1, 2.0]"), "inputs.dynamic.batch.max", "found 2.0"),
    "range without a maximum": (
        table("inputs.dynamic", "height = { min = 4 }"),
        "inputs.dynamic.height.max",
        "this required key is missing",
    ),
    "range with a misspelt key": (
        table("inputs.dynamic", "height = { max = 64, multiples_of = 8 }"),
        "inputs.dynamic.height.multiples_of",
        'Did you mean "multiple_of"?',
    ),
    "range without multiples": (
        table("inputs.dynamic", "height = { min = 9, max = 15, multiple_of = 8 }"),
        "inputs",
        "no multiple of 8 lies in the range 9 to 15\nHint: Write a max of at least 16.",
    ),
    "multiple of zero": (
        table("parity", "noise_multiple = 0.0"),
        "parity.noise_multiple",
        "expected at least 1, found 0.0",
    ),
    "multiple that is nan": (table("parity", "noise_multiple = nan"), "parity.noise_multiple", "found nan"),
    "tolerance below zero": (table("parity", "atol = -1e-6"), "parity.atol", "found -1e-06"),
    "tolerance as text": (table("parity", 'rtol = "1e-6"'), "parity.rtol", 'expected a number, found "1e-6"'),
    "seed of fractions": (table("parity", "seed = 1.5"), "parity.seed", "expected a whole number, found 1.5"),
    "unknown format": (
        table("export", 'formats = ["onx"]'),
        "export.formats[0]",
        'unknown format "onx"',
    ),
    "no format": (table("export", "formats = []"), "export.formats", "the list is empty"),
    "format not in a list": (table("export", 'formats = "onnx"'), "export.formats", 'Write ["onnx"].'),
    "provider without its suffix": (
        table("export", 'onnx.providers = ["OpenVINO"]'),
        "export.onnx.providers[0]",
        'Write a name such as "OpenVINOExecutionProvider".',
    ),
    "provider that sends inputs away": (
        table("export", 'onnx.providers = ["AzureExecutionProvider"]'),
        "export.onnx.providers[0]",
        "AzureExecutionProvider sends inputs to a server",
    ),
    "provider without an ONNX file": (
        table("export", 'formats = ["pt2"]\nonnx.providers = ["CPUExecutionProvider"]'),
        "export.onnx.providers",
        "the format onnx is not exported (export.formats is pt2)",
    ),
    "opset of the past": (table("export", "opset = 17"), "export.opset", "expected at least 18, found 17"),
    "opset of the future": (table("export", "opset = 27"), "export.opset", "expected at most 26, found 27"),
    "store misspelt": (table("tracking", 'uri = "sqllite:///m.db"'), "tracking.uri", 'Did you mean "sqlite"?'),
    "store of another name": (table("tracking", 'uri = "postgres://h/db"'), "tracking.uri", '"postgresql"?'),
    "server without a name": (table("tracking", 'uri = "http://"'), "tracking.uri", "the URI has no host"),
    "empty output": (table("export", 'output = ""'), "export.output", "the text is empty"),
    "output at the root": (table("export", 'output = "/"'), "export.output", '"/" cannot be the folder of a bundle'),
    "empty experiment": (table("tracking", 'experiment = ""'), "tracking.experiment", "the text is empty"),
    # benchmarks and gates
    "size of zero": (table("bench", "shapes = [{ batch = 0 }]"), "bench.shapes[0].batch", "found 0"),
    "shape that is a list": (
        table("bench", "shapes = [[1, 16]]"),
        "bench.shapes[0]",
        "expected a table, found [1, 16]",
    ),
    "shape of no declared dimension": (
        table("bench", "shapes = [{ bach = 1 }]", "[inputs.dynamic]", "batch = [1, 8]"),
        "bench.shapes[0].bach",
        'Did you mean "batch"?',
    ),
    "shape beyond the declared sizes": (
        table("bench", "shapes = [{ batch = 9 }]", "[inputs.dynamic]", "batch = [1, 8]"),
        "bench.shapes[0].batch",
        "expected a size from 1 to 8, the range of inputs.dynamic.batch, found 9",
    ),
    "no round": (table("bench", "rounds = 0"), "bench.rounds", "found 0"),
    "text for a gate": (table("gate", 'max_size_mb = "1"'), "gate.max_size_mb", "a number above 0, or a table"),
    "truth for a gate": (table("gate", "max_size_mb = true"), "gate.max_size_mb", "a number above 0, or a table"),
    "gate of zero": (table("gate", "max_latency_ms = 0"), "gate.max_latency_ms", "a number above 0, or a table"),
    "gate beyond 64 bits": (table("gate", f"max_size_mb = {'9' * 50}"), "gate.max_size_mb", "more than 64 bits"),
    "budget of years": (table("tune", 'budget = "999999h"'), "tune.budget", 'Write "168h" or less.'),
    "gate on an unknown format": (
        table("gate", "min_speedup = { onx = 1 }"),
        "gate.min_speedup",
        'Did you mean "onnx"?',
    ),
    "gate on a format that is not exported": (
        table("gate", "max_size_mb = { pt2 = 1 }", "[export]", 'formats = ["onnx"]'),
        "gate.max_size_mb.pt2",
        "the format pt2 is not exported (export.formats is onnx)",
    ),
    "gate on too few rounds": (
        table("gate", "min_speedup = 1", "[bench]", "rounds = 4"),
        "bench.rounds",
        "gate.min_speedup needs at least 12 rounds, found 4",
    ),
    # processing
    "unknown processing": (table("processing", 'outputs = "max"'), "processing.outputs", 'found "max"'),
    "processing in British": (table("processing", "normalise = true"), "processing.normalise", '"normalize"?'),
    "k of all classes": (table("processing", 'outputs = "argmax"', "k = 3"), "processing", 'k needs outputs = "top_k"'),
    "k of zero": (table("processing", 'outputs = "top_k"', "k = 0"), "processing.k", "found 0"),
    "gate on labels": (
        table("processing", 'outputs = "argmax"', "[parity]", "metrics.argmax_agreement = 0.9"),
        "parity.metrics.argmax_agreement",
        'Write processing.outputs = "probabilities"',
    ),
    "real numbers for images that are scaled": (
        table("processing", "normalize = true", "[inputs.tensors.pixel_values]", 'shape = ["batch", 3, 8, 8]'),
        "inputs.tensors.pixel_values",
        'dtype = "uint8"',
    ),
    "processing of parts": (table("processing", "normalize = true", "[generation]"), "processing", "[generation]"),
    # kinds of inputs
    "two kinds of inputs": (table("inputs", 'texts = ["a"]', 'data = "a.npz"'), "inputs", "texts and data exclude"),
    "data and tensors": (
        table("inputs", 'data = "a.npz"', "tensors.x.shape = [1]"),
        "inputs",
        "data and tensors exclude each other\nHint: Keep one of them.",
    ),
    "dimension of no shape": (
        table("inputs", 'tensors.x.shape = ["batch", 4]', "dynamic.bach = [1, 8]"),
        "inputs.dynamic.bach",
        'no input has a dimension "bach"\nHint: Did you mean "batch"? Use this name in the shape',
    ),
    "dimension of no text": (
        table("inputs", 'texts = ["a"]', "dynamic.seqence = [1, 8]"),
        "inputs.dynamic.seqence",
        'Did you mean "sequence"?',
    ),
    "axes of no tensor": (
        table("inputs", "tensors.x.shape = [1]", 'axes.y = ["batch"]'),
        "inputs.axes.y",
        '[inputs.tensors] has no input "y"\nHint: Choose one of: x.',
    ),
    "values of no tensor": (
        table("inputs", "tensors.x.shape = [1]", 'values.y = { indexes = "batch" }'),
        "inputs.values.y",
        '[inputs.tensors] has no input "y"\nHint: Choose one of: x.',
    ),
    "values of no dimension": (
        table("inputs", 'tensors.x.shape = ["batch", 4]', 'values.x = { indexes = ["bach"] }'),
        "inputs.values.x",
        'no input has a dimension "bach"\nHint: Did you mean "batch"?',
    ),
    "values without quotes": (
        table("inputs", 'tensors.x.shape = ["batch", 4]', "values.x = { indexes = 3 }"),
        "inputs.values.x.indexes",
        "expected the name of a dimension, found 3",
    ),
    # rules
    "activation that changes the numbers": (
        rule('use = "replace-activation"'),
        "transformations[0]",
        "Set parity.atol or parity.rtol",
    ),
    "precision that changes the numbers": (
        rule(
            'use = "merge-linears"', "[[transformations]]", 'use = "CastPrecision"', "[parity]", "noise_multiple = 9.0"
        ),
        "transformations[1]",
        "cast-precision changes the numbers",
    ),
    # CUDA devices
    "unknown device": (model('device = "gpu"'), "model.device", 'expected "cpu" or "cuda", found "gpu"'),
    "precision of files for a card": (
        model('device = "cuda"\n[precision]\npt2 = "float16"\n[parity]\nmetrics.cosine = 0.9'),
        "precision",
        'precision is only supported on the CPU, and model.device is "cuda"',
    ),
    "generation on a card": (model('device = "cuda"\n[generation]'), "generation", "only supported on the CPU"),
    "registering files for a card": (
        model('device = "cuda"\n[register]\nname = "m"'),
        "register",
        "only supported on the CPU",
    ),
    "files for a card in a repository": (
        model('device = "cuda"\n[export]\nlayout = "triton"'),
        "export.layout",
        "only supported on the CPU",
    ),
    "lowering of the CPU for a card": (
        model('device = "cuda"\n[export.passes]\ntorchscript = ["freeze", "onednn-linear"]'),
        "export.passes.torchscript: onednn-linear",
        "only supported on the CPU",
    ),
    "rules in one table": (
        table("transformations", 'use = "merge-linears"'),
        "transformations",
        "Write [[transformations]] in double brackets.",
    ),
    "rules that are a number": ("transformations = 3\n" + MODEL, "transformations", "found 3"),
    "rule that is a name": (
        'transformations = ["merge-linears"]\n' + MODEL,
        "transformations[0]",
        'Write { use = "merge-linears" }.',
    ),
    "unknown rule": (rule('use = "merge-linear"'), "transformations[0].use", 'Did you mean "merge-linears"?'),
    "expectation of zero": (
        rule('use = "merge-linears"', "min_matches = 0"),
        "transformations[0].min_matches",
        "found 0",
    ),
    "expectation with a typo": (
        rule('use = "merge-linears"', "min_match = 1"),
        "transformations[0].min_match",
        'Did you mean "min_matches"',
    ),
    "a name where a list of names belongs": (
        rule('use = "keep-outputs"', 'outputs = "a"'),
        "transformations[0].outputs",
        "expected a list of names",
    ),
    "rule far from any": (rule('use = "zzz"'), "transformations[0].use", "Choose one of: keep-outputs"),
    "empty rule": (rule('use = ""'), "transformations[0].use", "the text is empty"),
    "unknown option": (
        rule('use = "change-true-div-to-mul-by-inverse"', "exakt = true"),
        "transformations[0].exakt",
        'Did you mean "exact"?',
    ),
    "option of a rule without": (
        rule('use = "merge-linears"', "exact = true"),
        "transformations[0].exact",
        "Remove it: merge-linears has no options.",
    ),
    "option of wrong type": (
        rule('use = "change-true-div-to-mul-by-inverse"', "exact = 1"),
        "transformations[0].exact",
        "expected a bool, found 1",
    ),
    "mistake in the second rule": (
        rule('use = "merge-linears"', "[[transformations]]", 'use = "x"'),
        "transformations[1].use",
        'unknown rule "x"',
    ),
    "plugin without a class": (rule('use = "python:mine"'), "transformations[0].use", '"python:module:Class"'),
    "plugin without a module": (rule('use = "python::Mine"'), "transformations[0].use", '"python:module:Class"'),
    # sources and files
    "source of words": (source("my model"), "model.source", 'Write a path, "org/name"'),
    "package without a name": (
        source("package:"),
        "model.source",
        '"package:" has no name of a package\nHint: Write "package:NAME/PATH".',
    ),
    "factory by a path": (source("python:m:net/x"), "model.source", '"python:module:factory"'),
    "gate without a bound": (table("gate", "min_speedup = {}"), "gate.min_speedup", "the gate has no bound"),
    "file of another kind": (
        source("mine.toml"),
        "model.source",
        "mine.toml is not a file that a model can be loaded from",
    ),
    "missing folder": (source("./nowhere"), "model.source", "the folder ./nowhere does not exist"),
    "missing program": (source("nowhere.pt2"), "model.source", "the file nowhere.pt2 does not exist"),
    "missing weights": (source("nowhere.pth"), "model.source", "the file nowhere.pth does not exist"),
    "missing weights in a folder": (source("./nowhere.bin"), "model.source", "the file ./nowhere.bin does not exist"),
    "missing package": (source("package:not_installed/x"), "model.source", "Run pip install not_installed"),
    "missing folder of a package": (source("package:click/nowhere"), "model.source", "nowhere"),
    "module without a factory": (source("python:m"), "model.source", '"python:module:factory"'),
    "module by its path": (
        source("python:./m.py:load"),
        "model.source",
        './m.py is a file, not a module\nHint: Write "python:m:load".',
    ),
    "module by its file": (source("python:net/m.py:load"), "model.source", 'Write "python:net.m:load".'),
    "module of no name": (source("python:/m:load"), "model.source", "the module /m does not exist"),
    "missing module": (source("python:not_there:load"), "model.source", "put not_there.py in the folder of the config"),
    "mlflow address without a kind": (source("mlflow:name"), "model.source", '"mlflow:models:/NAME@ALIAS"'),
    "arguments for a folder": (model("arguments = { a = 1 }"), "model.arguments", "only a python: source"),
    "no such adapter": (model('adapter = "nowhere"'), "model.adapter", "the folder nowhere does not exist"),
    "missing data": (table("inputs", 'data = "nowhere.npz"'), "inputs.data", "the file nowhere.npz does not exist"),
    "missing image": (
        table("inputs", 'images = ["nowhere.png"]'),
        "inputs.images",
        "the file nowhere.png does not exist",
    ),
}

# Bytes that are not valid TOML.
NO_TOML: dict[str, bytes] = {
    "not TOML": b"model: x\n",
    "a key twice": b"[model]\nsource = 'a'\nsource = 'b'\n",
    "a string without an end": b"[model]\nsource = 'a\n",
    "no unicode": b"[model]\nsource = '\xff'\n",
    "utf-16": MODEL.encode("utf-16"),
    "a null byte": b"\0",
    "an impossible date": MODEL.encode() + b"x = 2021-02-30\n",
    "too deep": MODEL.encode() + b"x = " + b"[" * 5000,
    "too many digits": MODEL.encode() + b"x = " + b"1" * 5000 + b"\n",
}
