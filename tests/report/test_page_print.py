"""Reports on paper: pages that Chromium prints, and the sheets of the PDF."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import browsing
from tests.browsing import MARKS, show

pytestmark = MARKS


@pytest.fixture(scope="module")
def files(once: Any) -> dict[str, Path]:
    return once("pages", browsing.written)


def test_the_printed_page_has_two_drawings_a_row_and_no_lonely_heading(
    browser: Any, files: dict[str, Path]
) -> None:
    show(browser, files["gpu"], 718)  # the width of a sheet of A4 without its margins
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        lefts, breaks, hidden = browser.execute_script("""
            const style = (e) => getComputedStyle(e);
            return [
              [...document.querySelectorAll('#steps figure')].map(
                e => e.getBoundingClientRect().left),
              [...document.querySelectorAll('h2, h3, .head')].map(e => style(e).breakAfter),
              [...document.querySelectorAll('aside, .tools, .copy')].map(e => e.checkVisibility()),
            ];
            """)
        assert len(set(lefts)) == 2 <= len(lefts)
        assert set(breaks) == {"avoid"}
        assert not any(hidden)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 718
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


HEADINGS = """
return [...document.querySelectorAll('main :is(h2, h3)')].filter(e => e.checkVisibility())
  .map(e => e.childNodes[0].textContent.replace(/\\s+/g, ' ').trim());
"""
HEADING_PT = 11
"""The least size of a heading in print, in points.

All other texts at the end of a page are smaller.
"""


Line = Sequence[tuple[str, float]]
"""The texts at one height of a printed page, each with the size of its letters in points."""


def printed_lines(pdf: bytes) -> list[list[Line]]:
    """Return the lines of each sheet of a PDF, the lowest first."""
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    found = []
    for sheet in pypdf.PdfReader(io.BytesIO(pdf)).pages:
        lines: dict[int, list[tuple[str, float]]] = {}

        def visit(
            text: str,
            outer: Sequence[float],
            inner: Sequence[float],
            font: Any,
            size: float,
            lines: Any = lines,
        ) -> None:
            if text.strip():
                height = round(inner[4] * outer[1] + inner[5] * outer[3] + outer[5])
                lines.setdefault(height, []).append(
                    (" ".join(text.split()), size * abs(inner[3] * outer[3]))
                )

        sheet.extract_text(visitor_text=visit)
        found.append([lines[height] for height in sorted(lines)])
    return found


@pytest.mark.parametrize(("name", "height"), [("cpu", 9.5), ("ladder", 11.69), ("compared", 7.0)])
def test_no_sheet_of_the_printed_page_ends_with_a_heading(
    browser: Any, files: dict[str, Path], name: str, height: float
) -> None:
    show(browser, files[name])
    headings = browser.execute_script(HEADINGS)
    printed = browser.execute_cdp_cmd(
        "Page.printToPDF", {"paperWidth": 8.27, "paperHeight": height}
    )
    sheets = printed_lines(base64.b64decode(printed["data"]))
    large = [
        text for lines in sheets for line in lines for text, points in line if points > HEADING_PT
    ]
    assert {"Answers", "Step time by phase"} & {*headings} & {*large}
    ends = [line for lines in sheets[:-1] if lines for line in lines[0]]
    assert ends
    # of a heading of several lines, the last line would end the sheet
    lonely = [
        text
        for text, points in ends
        if points > HEADING_PT and any(one.endswith(text) for one in headings)
    ]
    assert lonely == []
