"""Page: the report of a run as one HTML file that needs neither a network nor scripts to be read."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dpbench.analysis.findings import text
from dpbench.analysis.report import Report
from dpbench.records import words
from dpbench.report import devices, figures, naming, table


def render(report: Report) -> str:
    """Return the HTML text of the page."""
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    rendered = jinja.get_template("page.html").render(
        report=report,
        facts=naming.facts(report),
        command=str(report.provenance.get("command", "")),
        badges=naming.badges(report.rows),
        count=words.count,
        intervals=words.INTERVALS,
        withheld=words.WITHHELD,
        headline=text.headline,
        parts=text.parts,
        findings_note=text.NOTE,
        sections=figures.sections(report),
        drawing=Markup,  # svg.render has escaped all text
        device_parts=devices.parts(report),
        columns=table.COLUMNS,
        text_columns=table.TEXT_COLUMNS,
        lines=table.lines(report.rows, report.trials),
        phase_columns=table.PHASE_COLUMNS,
        phase_lines=table.phase_lines(report.rows),
        environment=naming.environment(report.provenance, report.trials),
        numbers=Markup(table.as_json(report.rows)),
    )
    # a name that was not UTF-8 contains lone surrogates, which cannot be encoded
    return rendered.encode("utf-8", "replace").decode()
