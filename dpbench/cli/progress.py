"""Progress: show the progress of a run on stderr, and format its results as a plain table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from dpbench.analysis import ladder
from dpbench.records import Status, plan, words
from dpbench.records.trial import Estimate
from dpbench.records.words import aligned


class _Console(Console):
    """A console that raises BrokenPipeError if the reader has closed the output, where rich's own console exits."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the output was closed")


class Progress:
    """A context manager that prints one line per trial, and on a terminal also shows a progress bar."""

    def __init__(self) -> None:
        self._console = _Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = RichProgress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=self._console, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._task: Any = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def listen(self, event: Any) -> None:
        """Show an event of a run: a message, the start of the run, or the start or the end of a trial."""
        from rich.markup import escape

        if hasattr(event, "text"):
            self._console.print(escape(event.text))
        elif hasattr(event, "trial"):
            trial = event.trial
            why = "" if trial.status is Status.OK else f": {trial.reason.partition(chr(10))[0]}"
            what = f"{ladder.label(trial.case)} round {trial.round + 1}: {trial.status}{why}"
            self._console.print(escape(f"[{event.done}/{event.total}] {what}"))
            self._bar.update(self._task, completed=event.done, total=event.total)
        elif event.case is None:
            self._task = self._bar.add_task("starting", total=event.total, completed=event.done)
            if event.done:
                self._console.print(f"resuming run {event.run_id[:8]}: {event.done} of {event.total} trials are done")
        else:
            self._bar.update(self._task, description=escape(ladder.label(event.case)))


COLUMNS = ("model", "strategy", "devices", "batch", "ms/step", "95 % interval", "samples/s", "speed-up", "95 %",
           "effic.", "dev-0 imb.", "unattr.", "verified", "labels")  # fmt: skip


def table(rows: Sequence[Any], ladders: Sequence[ladder.Ladder] = ()) -> str:
    """Return the rows of an analysis as the text of a table with one line per case.

    A case without a measured step time shows its status. The fastest rung of each ladder is marked.
    """
    best = [found.fastest.row for found in ladders]
    lines = [COLUMNS, *(_cells(row, any(row is one for one in best)) for row in rows)]
    return "\n".join(aligned(lines, left=(0, 1, len(COLUMNS) - 1, len(COLUMNS) - 2)))


def _cells(row: Any, best: bool) -> tuple[str, ...]:
    """Return the cells of the line for one case; the name of the case says "best rung" if `best` is True.

    A case without a measured step time shows its status in place of the time.
    """
    case = row.case
    schedule = f"[{ladder.short(case.schedule)}]" if case.schedule not in ("", "reference") else ""
    name = ("single, all cores" if case.traits.all_cores else case.strategy) + schedule
    name += ", limit" if case.options == plan.LIMIT else " (best rung)" if best else ""
    name = ", ".join([name, *case.habits])
    head = (case.model, name, case.extent, str(case.batch_size))
    if row.step is None:
        return (*head, row.outcome, *[""] * (len(COLUMNS) - 6), " ".join(row.labels))
    efficiency, weak = row.efficiency, " weak" if row.scaling == "weak" else ""
    return (
        *head,
        *_estimate(row.step, 1e3),
        words.number(row.throughput.value) if not row.throughput.doubt else "",
        *_estimate(row.speedup, unit=f"x{weak}"),
        words.percent(efficiency.value) if efficiency and not efficiency.doubt else "",
        _estimate(row.imbalance)[0],
        words.percent(row.unattributed_share),
        row.verified.value if row.verified else "",
        " ".join(row.labels),
    )


def _estimate(estimate: Estimate | None, scale: float = 1.0, unit: str = "") -> tuple[str, str]:
    """Return the cell of an estimate's value and the cell of its interval; both are empty for None."""
    if estimate is None:
        return "", ""
    if estimate.doubt:
        return words.NOT_ENOUGH, ""
    return words.number(estimate.value * scale) + unit, words.interval(estimate, scale)
