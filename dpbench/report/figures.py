"""Figures: the list of the sections with drawings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from dpbench.analysis.ladder import notable
from dpbench.analysis.report import Report
from dpbench.analysis.summary import Row
from dpbench.report import loaders, speedup, svg, swim_lanes, timeline
from dpbench.report.section import Section

ENDS = (
    "Of each ladder, only the rung `reference`, the best rung and the schedule that TrainStep"
    " selected are drawn; the table of the ladder has the other schedules."
)
DRAWN: Mapping[str, Callable[[Report, Sequence[Row], str], Section | None]] = {
    "lanes": swim_lanes.section,
    "speedup": lambda _, rows, key: speedup.section(rows, key),
    "steps": timeline.steps,
    "utilisation": timeline.utilisation,
}
"""By id: how a section with drawings of a run that trains is made.

A function gets the report, the rows to draw, and how the ids in its drawings begin.
"""


def sections(report: Report, ids: Collection[str] = DRAWN, key: str = "") -> list[Section]:
    """Return the sections with drawings that have one of these ids; those of a DataLoader always.

    They show only the lowest rung of each ladder, the best rung, and the schedule that TrainStep
    selected. The ids in the drawings begin with `key`.
    """
    rows = notable(report.rows, report.ladders)
    with svg.theme():
        if report.loading:
            return [loaders.section(report.loading, report.trials, f"{key}loaders")]
        made = [DRAWN[name](report, rows, f"{key}{name}") for name in ids]
    found = [section for section in made if section]
    # without a baseline there is no speed-up, and two runs are compared in some of the sections
    if report.in_parts or report.compared:
        return [section for section in found if section.panels]
    if not report.ladders:
        return found
    return [replace(one, note=f"{one.note} {ENDS}".strip()) for one in found]
