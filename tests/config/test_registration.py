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
        (f"{MODEL}\n[register]\n", "register.name: it is required"),
        (f'{MODEL}\n[register]\nname = ""\n', "register.name: '' is no name"),
        (f'{MODEL}\n[register]\nname = "a/b"\n', "register.name: 'a/b' is no name"),
        (f"{MODEL}\n[register]\nname = 'a\"b'\n", "register.name: 'a\"b' is no name"),
        (f"{MODEL}\n[register]\nname = 'a\\'\n", "register.name: 'a\\\\' is no name"),
        (f'{MODEL}\n[register]\nname = "a?b"\n', "register.name: 'a?b' is no name"),
        (f'{MODEL}\n[register]\nname = "a\\nb"\n', "register.name: 'a\\nb' is no name"),
        (f'{MODEL}\n[register]\nname = "a\\u0000b"\n', "register.name: 'a\\x00b' is no name"),
        (f'{MODEL}\n[register]\nname = ".."\n', "register.name: '..' is no name"),
        (f'{MODEL}\n[register]\nname = "."\n', "register.name: '.' is no name"),
        (f'{MODEL}\n[register]\nname = "{"a" * 257}"\n', "register.name: string should have at most 256 characters"),
        (f'{MODEL}\n[tracking]\nexperiment = "{"a" * 501}"\n', "tracking.experiment: string should have at most 500"),
        (f'{REGISTER}alias = "latest"\n', "register.alias: 'latest' is no alias"),
        (f'{REGISTER}alias = "{"a" * 201}"\n', "register.alias: it is 201 characters long, and may be 200"),
        (f'{REGISTER}alias = "v3"\n', "register.alias: 'v3' is no alias"),
        (f'{REGISTER}alias = "the best"\n', "register.alias: 'the best' is no alias"),
        (f'{REGISTER}alia = "x"\n', 'register.alia: there is no such key\nHint: Did you mean "alias"?'),
        (f"{REGISTER}[register.max_regression]\nparity = -1.0\n", "register.max_regression.parity: "),
        (f"{REGISTER}[register.max_regression]\nspeed = 1.0\n", "register.max_regression.speed: there is no such key"),
        (f"{MODEL}\n[registr]\n", 'registr: there is no such key\nHint: Did you mean "register"?'),
        (f'{REGISTER}[export]\nformats = ["pt2"]\n', "register: the ONNX file is what is registered"),
        (f"{REGISTER}[tracking]\nenabled = false\n", "register: only what MLflow keeps can be registered"),
        (f"{REGISTER}[generation]\nnew_tokens = 3\n", "register: it does not go with [generation]"),
    ],
)
def test_invalid_registration_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, Path("mine.toml"))
    assert words in str(caught.value)
