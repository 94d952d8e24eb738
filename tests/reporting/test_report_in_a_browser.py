"""The report in headless Chromium. Skipped where Selenium, Chromium or its driver is missing."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ood_toolkit.reporting.report import report

MakeFolder = Callable[..., Path]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"

pytestmark = pytest.mark.slow


@pytest.fixture
def page(make_folder: MakeFolder, tmp_path: Path) -> Path:
    folder = make_folder(detectors=(("msp", "logits"), ("energy", "logits"), ("vim", "features")), rows=60)
    return report(folder, tmp_path / "page.html")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("Chromium is not installed (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def show(browser: Any, page: Path, size: str, scheme: str, *, script: bool = True) -> None:
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
    browser.get(page.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits_and_neither_complains_nor_asks_the_network(
    browser: Any, page: Path, size: str, scheme: str
) -> None:
    show(browser, page, size, scheme)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith(("data:", "chrome:"))} == {page.as_uri()}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= SIZES[size][0]
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}[scheme]


def test_a_column_head_sorts_best_first_then_worst_first_then_restores(browser: Any, page: Path) -> None:
    show(browser, page, "desktop", "light")
    read = (
        "return [...document.querySelector('table.sortable').querySelectorAll('tbody tr:not(.group)')]"
        ".map(row => parseFloat(row.cells[{}].dataset.value))"
    )
    for column, higher_is_better in ((1, True), (3, False)):
        before = browser.execute_script(read.format(column))
        button = browser.find_elements("css selector", "table.sortable thead tr:last-child th button")[column]
        for expected in (
            sorted(before, reverse=higher_is_better),
            sorted(before, reverse=not higher_is_better),
            before,
        ):
            button.send_keys("\ue007")  # Enter: it works by keyboard
            assert browser.execute_script(read.format(column)) == expected


def test_without_javascript_everything_is_there(browser: Any, page: Path) -> None:
    show(browser, page, "phone", "light", script=False)
    assert browser.find_elements("css selector", "th button") == []
    text = browser.find_element("css selector", "main").text
    for words in ("In short", "AUROC ↑", "vim", "What the numbers mean", "ood-bench --ood"):
        assert words in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_accessibility_fault(browser: Any, page: Path, scheme: str) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed (npm install axe-core)")
    show(browser, page, "desktop", scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found = browser.execute_async_script(
        "const done = arguments[0]; axe.run().then(r => done(r.violations.map(v => [v.id, v.nodes[0].html])))"
    )
    assert found == []
