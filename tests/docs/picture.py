"""Takes the picture of a report for the README: python -m tests.docs.picture BUNDLE

Needs Debian's packages chromium and chromium-driver. Writes docs/images/report.png.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "report.png"
_WIDTH, _HEIGHT, _SCALE = 1180, 980, 1.25
_COLORS = 128  # keeps the file small


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
    parser.add_argument("bundle", type=Path)
    take(parser.parse_args().bundle / "report.html", PICTURE)


if __name__ == "__main__":
    main()
