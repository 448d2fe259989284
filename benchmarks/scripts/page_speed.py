"""Page speed: how long the report page takes to open and to filter in headless Chromium.

    python -m benchmarks.scripts.page_speed [--cases 60] [--times 7]

The page has that many fabricated cases of three models. Opening lasts from the start of the navigation to the end of
the page's load event, as the browser records it. Filtering lasts from a click on a model to the end of the layout that
follows. The script prints the median and the range of both in milliseconds; it needs Chromium and its driver.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dpbench.report import page
from tests.report_rows import many, ran, run_of
from tests.test_browser import FLAGS, driven, show

OPENED = """
const navigation = performance.getEntriesByType('navigation')[0];
return navigation.loadEventEnd - navigation.startTime;
"""
FILTERED = """
const box = document.querySelectorAll('#filters input[name=model]')[arguments[0] % 3];
document.body.offsetHeight;
const begun = performance.now();
box.click();
document.body.offsetHeight;
return performance.now() - begun;
"""


def said(name: str, found: Sequence[float]) -> str:
    """Return the median and the range of durations in milliseconds as text."""
    return f"{name}: median {statistics.median(found):.0f} ms, {min(found):.0f} to {max(found):.0f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--times", type=int, default=7)
    given = parser.parse_args()
    rows = many(given.cases)
    text = page.render(run_of(*rows, trials=[trial for row in rows for trial in ran(row)]))
    with tempfile.TemporaryDirectory() as folder, driven(Path(folder) / "profile", FLAGS) as browser:
        file = Path(folder) / "page.html"
        file.write_text(text, encoding="utf-8")
        opened, filtered = [], []
        for number in range(given.times):
            show(browser, file)
            opened.append(browser.execute_script(OPENED))
            filtered += [browser.execute_script(FILTERED, number + one) for one in range(3)]
    print(f"{len(rows)} cases, {len(text.encode()) / 1024:.0f} KiB")
    print(said("open", opened))
    print(said("filter", filtered))


if __name__ == "__main__":
    main()
