"""The folders that a run writes whole, in which nothing else may be written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from optexport.config import Config
from optexport.errors import ConfigError


def output_of(config: Config, folder: Path) -> Path:
    """The bundle's folder, of a config that lies in a folder."""
    return (folder / Path(config.export.output).expanduser()).resolve()


def beside(output: Path, what: str) -> Path:
    """What lies beside an output: its "baseline", or what a "failure" of its proof left."""
    return output.with_name(f"{output.name}-{what}")


def kept(output: Path) -> tuple[Path, ...]:
    """The folders that a run with this output may write, replace or remove."""
    return tuple(place for each in (output, beside(output, "baseline")) for place in (each, beside(each, "failure")))


def check_outside(option: str, path: Path, places: Iterable[Path], *, is_file: bool = True) -> None:
    """Checks that what an option names does not lie in a folder, or over a file, that must stay as it is.

    Args:
        is_file: Whether a file is named, which cannot lie where a folder has to be either.

    Raises:
        ConfigError: It does.
    """
    named = path.resolve()
    for place in places:
        if named.is_relative_to(place.resolve()) or (is_file and named in place.resolve().parents):
            raise ConfigError(f"it would change {place}", place=f"{option} {path}", mend="Name another place.")
