"""Figures: the list of the sections with drawings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from dpbench.analysis.ladder import notable
from dpbench.analysis.report import Report
from dpbench.report import loaders, speedup, svg, swim_lanes, timeline
from dpbench.report.section import Section

ENDS = (
    "Of each ladder, only the rung `reference`, the best rung and the schedule that TrainStep"
    " selected are drawn; the table of the ladder has the other schedules."
)
DRAWN = ("lanes", "speedup", "steps", "utilisation")
"""The ids of the sections with drawings of a run that trains."""


def sections(report: Report, ids: Collection[str] = DRAWN, key: str = "") -> list[Section]:
    """Return the sections with drawings that have one of these ids; those of a DataLoader always.

    They show only the lowest rung of each ladder, the best rung, and the schedule that TrainStep
    selected. The ids in the drawings begin with `key`.
    """
    rows = notable(report.rows, report.ladders)
    drawn: dict[str, Callable[[], Section | None]] = {
        "lanes": lambda: swim_lanes.section(report, rows, f"{key}lanes"),
        "speedup": lambda: speedup.section(rows, f"{key}speedup"),
        "steps": lambda: timeline.steps(report, rows),
        "utilisation": lambda: timeline.utilisation(report, rows),
    }
    with svg.theme():
        if report.loading:
            return [loaders.section(report.loading, report.trials, f"{key}loaders")]
        found = [section for name in ids if (section := drawn[name]())]
    # without a baseline there is no speed-up, and two runs are compared in some of the sections
    if report.in_parts or report.compared:
        return [section for section in found if section.panels]
    if not report.ladders:
        return found
    return [replace(one, note=f"{one.note} {ENDS}".strip()) for one in found]
