"""Page: the doctor's result as one HTML file, with a picture of sockets, switches and links."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from dpbench.records import words
from dpbench.records.examination import Examination
from dpbench.report import machine, templates


def render(examination: Examination) -> str:
    """Return the HTML text."""
    style = f"{templates.text_of('page.css')}{templates.text_of('machine.css')}"
    return templates.template("page.html", Path(__file__).parent).render(
        policy=Markup(f"default-src 'none'; style-src {templates.allowed(style)}"),
        style=Markup(style),
        day=words.day(examination.started_s),
        examination=examination,
        picture=machine.picture(examination),
        summary=machine.summary(examination),
    )
