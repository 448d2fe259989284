"""Page: the doctor's result as one HTML file, and as a section of the pages of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from dpbench.doctor.examination import Examination, read
from dpbench.records import words
from dpbench.report import machine, templates
from dpbench.report.section import Detail

FOLDER = Path(__file__).parent


def render(examination: Examination) -> str:
    """Return the HTML text."""
    style = f"{templates.text_of('page.css')}{_style()}"
    return _filled(
        "page.html",
        examination,
        policy=Markup(f"default-src 'none'; style-src {templates.allowed(style)}"),
        style=Markup(style),
        day=words.day(examination.started_s),
    )


def section(stored: str) -> Detail | None:
    """Return the section on the machine of a stored examination; None if it cannot be read."""
    examination = read(stored)
    if examination is None:
        return None
    html = _filled("section.html", examination, date=words.minute)
    return Detail(id="machine", title="The machine", html=Markup(html), style=_style())


def _style() -> str:
    return templates.text_of("machine.css", FOLDER)


def _filled(name: str, examination: Examination, **more: Any) -> str:
    picture = machine.picture(examination.boxes, examination.links)
    return templates.template(name, FOLDER).render(examination=examination, picture=picture, **more)
