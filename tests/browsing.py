"""A real browser for tests: from files, with the network off."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.analysis import comparison
from dpbench.report import comparing, page
from dpbench.store.export import read_run
from tests import golden
from tests.analysis import test_comparison as test_compare
from tests.analysis.test_ladder import content
from tests.report_rows import colocated_cpu_and_weak, gpu_page, gpu_run, ran, run_of
from tests.trials import report_on

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium on this system"),
    pytest.mark.skipif(not DRIVER, reason="there is no chromedriver on this system"),
]
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


@contextmanager
def driven(profile: Path, flags: Sequence[str]) -> Iterator[Any]:
    """Run a browser with a separate profile, and record its console."""
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*flags, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def show(
    browser: Any, file: Path, width: int = 1280, scheme: str = "light", *, folded: bool = False
) -> None:
    """Open a page, with its details shown unless `folded`."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get("about:blank")  # else only the fragment may change, and the page stays
    browser.get(file.as_uri())
    if not folded:
        browser.execute_script("document.querySelectorAll('#details').forEach(e => e.open = true)")


def _cpu() -> str:
    rows = colocated_cpu_and_weak()
    return page.render(
        run_of(*rows, trials=[trial for row in rows for trial in ran(row, spans=True)])
    )


def _default() -> str:
    """Return the page of two models and twelve cases, as reports/default has them."""
    _, trials = read_run(golden.REPORTS / "default" / golden.TRIALS)
    with_spans = [golden.with_spans(trial) for trial in trials]
    facts = trials[0].provenance
    return page.render(report_on(with_spans, facts))


def _compared() -> str:
    sides = [test_compare.report(trials) for trials in (test_compare.BEFORE, test_compare.AFTER)]
    return comparing.page(*sides, comparison.between(*sides))


PAGES: dict[str, Callable[[], str]] = {
    "gpu": gpu_page,
    "cpu": _cpu,
    "ladder": lambda: page.render(content()),
    "default": _default,
    "empty": lambda: page.render(run_of()),
    "compared": _compared,
}


def written(folder: Path) -> dict[str, Path]:
    """Write all pages and the list of runs into a folder; return the files by the pages' names."""
    found = {}
    for name, page_of in PAGES.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(page_of(), encoding="utf-8")
    page.keep(replace(run_of(), answers=gpu_run().answers), folder)
    found["runs"] = folder / "runs" / "index.html"
    return found
