"""Tests of the pages in headless Chromium."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from optexport.bundle.measurements import read_measured
from optexport.report import bundle_comparison
from optexport.report.difference import Side
from optexport.report.html import page
from tests._helpers import stores
from tests._helpers.servers import Server
from tests.report.html import bundles

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>\u202e"


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    # Root has no sandbox. The browser's own network requests are disabled.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pages")
    clean = bundles.copied(place / "clean")
    hostile = bundles.hostile(bundles.copied(place / "hostile"), HOSTILE)
    sides = (Side(folder, bundles.manifest_of(folder), read_measured(folder)) for folder in (clean, hostile))
    both = bundle_comparison.compare(*sides)
    (place / "diff.html").write_text(page.render_difference(both), encoding="utf-8")
    return {"report": clean / "report.html", "hostile": hostile / "report.html", "diff": place / "diff.html"}


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    server = Server(folder, stores.store(folder))
    yield server
    server.stop()


def show(browser: webdriver.Chrome, address: str, width: int = 1280, **media: str) -> None:
    """Opens a page with a width and color scheme, and clears the logs."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    media_features = {"prefers-color-scheme": media.get("scheme", "light"), "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in media_features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media.get("media", ""), "features": features})
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(address)


def requested(browser: webdriver.Chrome) -> list[str]:
    """Returns the addresses requested since `show`."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["report", "hostile", "diff"])
def test_page_logs_nothing_and_fits_the_screen(
    browser: webdriver.Chrome, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    show(browser, pages[name].as_uri(), width, scheme=scheme)
    assert browser.get_log("browser") == []  # no script errors and no policy violations
    assert requested(browser) == [pages[name].as_uri()]
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    colour = browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
    assert (min(map(int, colour[4:-1].split(","))) < 64) == (scheme == "dark")
    assert len(browser.find_elements(By.CSS_SELECTOR, "script")) == 1
    assert browser.find_elements(By.CSS_SELECTOR, "img, iframe, [onerror]") == []


def test_drawings_zoom_by_button_and_keyboard(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    show(browser, pages["report"].as_uri())
    drawing = browser.find_element(By.CSS_SELECTOR, "details[open] .graph")
    widths = [drawing.rect["width"]]
    browser.find_element(By.CSS_SELECTOR, "details[open] [data-zoom=in]").click()
    widths.append(drawing.rect["width"])
    browser.find_element(By.CSS_SELECTOR, "details[open] .pane").send_keys("+")
    widths.append(drawing.rect["width"])
    assert widths[1] == pytest.approx(1.25 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(1.25**2 * widths[0], rel=0.01)
    browser.find_element(By.CSS_SELECTOR, "details[open] .pane").send_keys("0")
    natural = browser.execute_script("return arguments[0].viewBox.baseVal.width", drawing)
    assert drawing.rect["width"] == pytest.approx(natural, rel=0.01)


def test_drawings_before_and_after_have_one_scale(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    show(browser, pages["report"].as_uri())
    (before, after) = browser.find_elements(By.CSS_SELECTOR, "details[open] .pair .graph")[:2]
    for step in ("in", "fit", "whole"):
        browser.find_element(By.CSS_SELECTOR, f"details[open] .before [data-zoom={step}]").click()
        scales = [
            browser.execute_script("return arguments[0].clientWidth / arguments[0].viewBox.baseVal.width", drawing)
            for drawing in (before, after)
        ]
        assert scales[0] == pytest.approx(scales[1], rel=0.02)


def test_search_shows_and_counts_the_changes_of_a_node(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    show(browser, pages["report"].as_uri())
    changes = browser.find_elements(By.CSS_SELECTOR, "details.change")
    assert len(changes) == 2
    field = browser.find_element(By.ID, "find")
    field.send_keys("query_key_value")
    assert [change.is_displayed() for change in changes] == [True, False]
    assert browser.find_element(By.ID, "found").text == "1 change"
    assert len(browser.find_elements(By.CSS_SELECTOR, ".node.hit")) >= 1
    field.send_keys(Keys.CONTROL + "a", Keys.DELETE)
    assert [change.is_displayed() for change in changes] == [True, True]
    assert browser.find_elements(By.CSS_SELECTOR, ".node.hit") == []
    field.send_keys("no such node")
    assert [change.is_displayed() for change in changes] == [False, False]


def test_first_tab_stop_is_the_skip_link(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    show(browser, pages["report"].as_uri())
    browser.switch_to.active_element.send_keys(Keys.TAB)
    skip = browser.switch_to.active_element
    assert skip.text == "Skip to content"
    assert skip.rect["x"] >= 0
    assert browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", skip) == "solid"
    skip.send_keys(Keys.ENTER)
    assert browser.execute_script("return document.activeElement.id") == "main"


@pytest.mark.parametrize("name", ["report", "diff"])
def test_controls_and_tables_have_accessible_names(
    browser: webdriver.Chrome, pages: dict[str, Path], name: str
) -> None:
    show(browser, pages[name].as_uri())
    tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    nodes = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n["ignored"] and "role" in n]
    roles = [role for role, _ in nodes]
    assert [roles.count(role) for role in ("main", "banner", "contentinfo", "navigation")] == [1, 1, 1, 1]
    named = ("table", "region", "button", "searchbox", "link", "heading", "navigation", "columnheader")
    assert [node for node in nodes if node[0] in named and not node[1].strip()] == []
    assert "table" in roles


def test_print_opens_everything_in_black_on_white(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    show(browser, pages["report"].as_uri(), scheme="dark", media="print")
    assert not browser.find_element(By.CSS_SELECTOR, "details.whole").is_displayed()  # it would take many sheets
    for closed in browser.find_elements(By.CSS_SELECTOR, "details:not([open], .whole)"):
        table = closed.find_element(By.CSS_SELECTOR, "table")
        assert browser.execute_script(
            "return arguments[0].checkVisibility({contentVisibilityAuto: true}) && arguments[0].clientHeight > 0", table
        )
    colour = "return getComputedStyle(document.documentElement)"
    assert browser.execute_script(f"{colour}.backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script(f"{colour}.color") == "rgb(0, 0, 0)"
    assert not browser.find_element(By.CSS_SELECTOR, "nav").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert printed.startswith(b"%PDF")


def wait_for(find: Callable[[], Any], seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while not (value := find()):
        assert time.monotonic() < end, "timeout"
        time.sleep(0.2)
    return value


@pytest.mark.parametrize("name", ["report", "hostile"])
def test_page_works_inside_mlflow(
    browser: webdriver.Chrome, pages: dict[str, Path], tracking: Server, name: str
) -> None:
    client = mlflow.MlflowClient(tracking.uri)
    run = client.create_run(client.create_experiment(name))
    client.log_artifact(run.info.run_id, str(pages[name]))
    path = f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}/artifacts/report.html"
    show(browser, f"{tracking.uri}/#/{path}")
    (frame,) = wait_for(lambda: browser.find_elements(By.TAG_NAME, "iframe"))
    browser.switch_to.frame(frame)
    try:
        wait_for(lambda: browser.find_elements(By.TAG_NAME, "footer"))
        assert browser.find_element(By.CSS_SELECTOR, ".verdict strong").text == "Passed"
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        field = browser.find_element(By.ID, "find")  # shows that the frame runs our script
        assert field.is_displayed()
        field.send_keys("no such node")
        assert not browser.find_element(By.CSS_SELECTOR, "details.change").is_displayed()
        browser.find_element(By.LINK_TEXT, "Files").send_keys(Keys.ENTER)
        assert browser.execute_script("return scrollY") > 0
    finally:
        browser.switch_to.default_content()
    refused = [
        entry["message"] for entry in browser.get_log("browser") if "Content Security Policy" in entry["message"]
    ]
    assert refused == []
    assert [url for url in requested(browser) if not url.startswith((tracking.uri, "blob:", "data:"))] == []
