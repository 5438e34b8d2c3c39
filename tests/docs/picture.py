"""Runs a config, and takes the pictures of its summary and its report for the README.

    python -m tests.docs.picture examples/minilm.toml

Needs Debian's packages chromium and chromium-driver. Writes docs/images/terminal.svg and docs/images/report.png.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
_COLUMNS = 80
_WIDTH, _HEIGHT, _SCALE = 1180, 980, 1.25
_COLORS = 128  # keeps the file small


def run(config: Path) -> tuple[str, Path]:
    """Returns the end of what a run prints in a terminal, with its colors, and the bundle."""
    environment = {**os.environ, "COLUMNS": str(_COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "optexport", "run", str(config), "--quiet"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    lines = done.stdout.replace(f"{ROOT}/", "").splitlines()
    plain = [Text.from_ansi(line).plain for line in lines]
    first = next(index for index, line in enumerate(plain) if line.startswith(" target"))
    last = next(index for index, line in enumerate(plain) if line.startswith("report"))
    bundle = next(line for line in plain if line.startswith("bundle")).removeprefix("bundle").strip()
    return "\n".join(lines[first : last + 1]), ROOT / bundle


def draw(text: str, config: Path, picture: Path) -> None:
    """Writes the picture of a terminal."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ optexport run {config}"))
    console.print(Text.from_ansi(text))
    console.save_svg(str(picture), title="optexport", theme=DEFAULT_TERMINAL_THEME)


def take(report: Path, picture: Path) -> None:
    """Writes the top of a page as a PNG file, in light colors."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        size = {"width": _WIDTH, "height": _HEIGHT, "deviceScaleFactor": _SCALE, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(report.resolve().as_uri())
        shot = Image.open(io.BytesIO(driver.get_screenshot_as_png()))
        few_colors = shot.convert("RGB").quantize(_COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few_colors.save(picture, optimize=True)
    finally:
        driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    config = parser.parse_args().config
    text, bundle = run(config)
    draw(text, config, IMAGES / "terminal.svg")
    take(bundle / "report.html", IMAGES / "report.png")


if __name__ == "__main__":
    main()
