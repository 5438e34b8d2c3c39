"""``[register]``: names, aliases, limits, and conflicts with other tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexport.config.load import parse_config
from optexport.errors import ConfigError
from tests._helpers.config_errors import MODEL

REGISTER = f'{MODEL}\n[register]\nname = "minilm"\n'


def test_name_is_sufficient() -> None:
    config = parse_config(REGISTER, Path("mine.toml"))
    assert config.registering is not None
    assert (config.registering.name, config.registering.alias) == ("minilm", "champion")
    max_regression = config.registering.max_regression
    assert (max_regression.parity, max_regression.latency, max_regression.size) == (0.25, 0.05, 0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{MODEL}\n[register]\n", "register.name: this required key is missing"),
        (f'{MODEL}\n[register]\nname = ""\n', 'register.name: "" is not a valid name'),
        (f'{MODEL}\n[register]\nname = "a/b"\n', 'register.name: "a/b" is not a valid name'),
        (f"{MODEL}\n[register]\nname = 'a\"b'\n", 'register.name: "a\\"b" is not a valid name'),
        (f"{MODEL}\n[register]\nname = 'a\\'\n", 'register.name: "a\\\\" is not a valid name'),
        (f'{MODEL}\n[register]\nname = "a?b"\n', 'register.name: "a?b" is not a valid name'),
        (f'{MODEL}\n[register]\nname = "a\\nb"\n', 'register.name: "a\\nb" is not a valid name'),
        (f'{MODEL}\n[register]\nname = "a\\u0000b"\n', 'register.name: "a\\u0000b" is not a valid name'),
        (f'{MODEL}\n[register]\nname = ".."\n', 'register.name: ".." is not a valid name'),
        (f'{MODEL}\n[register]\nname = "."\n', 'register.name: "." is not a valid name'),
        (f'{MODEL}\n[register]\nname = "{"a" * 257}"\n', "register.name: expected at most 256 characters, found 257"),
        (
            f'{MODEL}\n[tracking]\nexperiment = "{"a" * 501}"\n',
            "tracking.experiment: expected at most 500 characters, found 501",
        ),
        (f'{REGISTER}alias = "latest"\n', 'register.alias: "latest" is not a valid alias'),
        (
            f'{REGISTER}alias = "{"a" * 201}"\n',
            "register.alias: expected an alias of at most 200 characters, found 201",
        ),
        (f'{REGISTER}alias = "v3"\n', 'register.alias: "v3" is not a valid alias'),
        (f'{REGISTER}alias = "the best"\n', 'register.alias: "the best" is not a valid alias'),
        (f'{REGISTER}alia = "x"\n', 'register.alia: unknown key "alia"\nHint: Did you mean "alias"?'),
        (f"{REGISTER}[register.max_regression]\nparity = -1.0\n", "register.max_regression.parity: "),
        (f"{REGISTER}[register.max_regression]\nspeed = 1.0\n", 'register.max_regression.speed: unknown key "speed"'),
        (f"{MODEL}\n[registr]\n", 'registr: unknown table "registr"\nHint: Did you mean "register"?'),
        (
            f'{REGISTER}[export]\nformats = ["pt2"]\n',
            "register: the ONNX file is registered, and export.formats is pt2",
        ),
        (
            f"{REGISTER}[tracking]\nenabled = false\n",
            "register: models are registered in MLflow, and tracking.enabled is false",
        ),
        (f"{REGISTER}[generation]\nnew_tokens = 3\n", "register: register cannot be combined with [generation]"),
    ],
)
def test_invalid_registration_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, Path("mine.toml"))
    assert words in str(caught.value)
