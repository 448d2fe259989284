"""Page: a run as one HTML file that needs no network, and no script to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dpbench.analysis.diagnosis import Tile
from dpbench.analysis.findings import Diagnosis, text
from dpbench.analysis.ladder import Ladder
from dpbench.analysis.summary import Row
from dpbench.measure import selfcheck
from dpbench.records import Trial, words
from dpbench.report import devices, figures, header, table


def render(
    *,
    rows: Sequence[Row],
    trials: Sequence[Trial],
    provenance: Mapping[str, Any],
    run_id: str,
    started: float,
    verdict: str,
    warnings: Sequence[str],
    tiles: Sequence[Tile],
    ladders: Sequence[Ladder] = (),
    diagnoses: Sequence[Diagnosis] = (),
) -> str:
    """Return the whole page."""
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    rendered = jinja.get_template("page.html").render(
        run_id=run_id,
        facts=header.facts(provenance, run_id, started),
        command=str(provenance.get("command", "")),
        badges=header.badges(rows),
        verdict=verdict,
        warnings=warnings,
        tiles=tiles,
        diagnoses=diagnoses,
        count=words.count,
        intervals=words.INTERVALS,
        withheld=words.WITHHELD,
        headline=text.headline,
        parts=text.parts,
        findings_note=text.NOTE,
        self_check=selfcheck.words(provenance),
        sections=figures.sections(rows, trials, ladders),
        drawing=Markup,  # svg.render escapes every text it was given
        device_parts=devices.parts(trials, {row.case: row.labels for row in rows}),
        columns=table.COLUMNS,
        text_columns=table.TEXT_COLUMNS,
        lines=table.lines(rows, trials),
        phase_columns=table.PHASE_COLUMNS,
        phase_lines=table.phase_lines(rows),
        environment=header.environment(provenance, trials),
        numbers=Markup(table.as_json(rows)),
    )
    # a name that was not UTF-8 arrives as lone surrogates, which no file can hold
    return rendered.encode("utf-8", "replace").decode()
