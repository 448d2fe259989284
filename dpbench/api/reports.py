"""Reports: make the report of a run, and write its page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.api import LATEST, REPORTS
from dpbench.api.stored import listing
from dpbench.report import check_drawings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpbench.analysis.report import Report
    from dpbench.records import Trial
    from dpbench.store import PastRun, StoredRun, UnreadableRow


def report_of(
    chosen: StoredRun,
    trials: Sequence[Trial],
    store: Path | None = None,
    unreadable: Sequence[UnreadableRow] = (),
) -> Report:
    """Return the report of a run, which is the analysis for HTML, Markdown and the terminal."""
    from dpbench.analysis.report import Report

    rows = [*unreadable]
    past = _past(store, chosen.id, trials, listing(rows)) if store else ()
    return Report.of(chosen, trials, past, rows)


def _past(
    store: Path, run_id: str, trials: Sequence[Trial], unreadable: Callable[[UnreadableRow], None]
) -> tuple[PastRun, ...]:
    from dpbench.store import Store

    with Store.read(store, unreadable) as opened:
        return opened.past(run_id, trials)


def write_report(path: Path | None, report: Report) -> Path:
    """Write a report as an HTML page, and return the page's file.

    If `path` is None, the page is kept in the archive `REPORTS`; the file returned is then `LATEST`
    if `LATEST` shows this run, and otherwise the run's page in the archive. Raises NoDrawings
    without matplotlib.
    """
    check_drawings()
    from dpbench.records import files
    from dpbench.report import page

    if path is not None:
        return files.write(path, page.render(report))
    kept = page.keep(report, REPORTS)
    if kept.latest_run == report.run.id:
        return LATEST
    if not any(row.step for row in report.rows):
        print(
            f"no case has a result, so {LATEST} remains {_owner(kept.latest_run)}", file=sys.stderr
        )
    return kept.page


def _owner(run_id: str) -> str:
    return f"the page of run {run_id[:8]}" if run_id else "unchanged"
