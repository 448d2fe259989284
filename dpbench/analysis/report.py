"""Report: the analysis of one run, which the HTML page, Markdown, terminal and `explain` show.

A report is built once, from trials without spans (`Trial.summary`), so that a run with many trials
fits in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from dpbench.analysis import (
    answer,
    comparison,
    findings,
    ladder,
    lanes,
    loaders,
    notes,
    summary,
)
from dpbench.analysis.lanes import Lanes
from dpbench.analysis.statements import Statement, made
from dpbench.records import Case, Trial, hidden, session, siblings
from dpbench.records.resources import Resources
from dpbench.records.trial import Key, by_key
from dpbench.store import OPEN, PastRun, StoredRun, UnreadableRow


@dataclass(frozen=True, kw_only=True)
class Report:
    """The analysis of one run.

    `notes` are sentences on habits and DataLoaders. `past` are the runs of the store that have
    cases of this run; see `Store.past`.
    """

    run: StoredRun
    trials: Sequence[Trial]
    rows: Sequence[summary.Row]
    ladders: Sequence[ladder.Ladder]
    notes: Sequence[str]
    statements: Sequence[Statement]
    diagnoses: Sequence[findings.Diagnosis]
    answers: Sequence[answer.Answer] = ()
    past: Sequence[PastRun] = ()
    loading: loaders.LoaderCurve | None = None
    """The results of `dpbench loaders`; None in another run."""

    @classmethod
    def of(
        cls,
        run: StoredRun,
        trials: Sequence[Trial],
        past: Sequence[PastRun] = (),
        unreadable: Sequence[UnreadableRow] = (),
    ) -> Self:
        """Return the report of a run with these trials; `unreadable` are rows of its store."""
        rows = summary.rows(trials)
        machine = Resources.of(run.facts, trials)
        ladders = ladder.ladders(rows, max((trial.facts.looks for trial in trials), default=1))
        loading = loaders.curve(rows, trials)
        diagnoses = findings.diagnose(rows, trials, machine, run.machine_result)
        goes_on = run.status == OPEN and not any(session.is_of(row.case.model) for row in rows)
        again = hidden.to_fill_in(run.facts.command) if goes_on else ""
        given = (
            ()
            if loading
            else (
                *(
                    one
                    for alone in siblings.added("answers")
                    for one in alone(rows, trials, diagnoses, machine)
                ),
                *answer.answers(rows, machine, again, trials),
            )
        )
        report = cls(
            run=run,
            trials=trials,
            rows=rows,
            ladders=ladders,
            notes=(
                *notes.habits(rows, trials),
                *(loaders.said(loading) if loading else ()),
            ),
            statements=made(rows, trials, run.facts, run.status, unreadable),
            diagnoses=diagnoses,
            past=past,
            loading=loading,
        )
        return replace(report, answers=tuple(map(report._with_earlier, given)))

    def _with_earlier(self, given: answer.Answer) -> answer.Answer:
        """Return an answer with a clause on its case in an earlier run."""
        before = [one for one in self.past if one.run.started < self.run.started]
        shown = given.row or next(iter(given.ranking), None)
        return (
            replace(given, earlier=comparison.earlier(shown.case, self, before)) if shown else given
        )

    @property
    def labels(self) -> Mapping[Case, tuple[str, ...]]:
        """Return the labels of each case, such as "MEASURED" and "CPU-ONLY"."""
        return {row.case: row.labels for row in self.rows}

    @property
    def compared(self) -> bool:
        """Return whether the report is on two runs, the rows of which it compares."""
        return any(row.run for row in self.rows)

    @property
    def warnings(self) -> list[Statement]:
        """Return the statements that may change what an answer says."""
        return [one for one in self.statements if one.warns]

    @property
    def remarks(self) -> list[Statement]:
        """Return the statements that explain figures."""
        return [one for one in self.statements if not one.warns]

    @property
    def in_parts(self) -> bool:
        """Return whether the rounds of all cases are parts of one execution, of a user's loop."""
        return bool(self.rows) and all(row.case.traits.in_parts for row in self.rows)

    def trials_of(self, row: summary.Row) -> Sequence[Trial]:
        """Return the trials of a row."""
        return self._trials_by_row.get(row.key, ())

    @cached_property
    def _trials_by_row(self) -> Mapping[Key, Sequence[Trial]]:
        return by_key(self.trials)

    def lanes_of(self, row: summary.Row) -> Lanes | None:
        """Return the timeline of a median step of a row; None without spans."""
        return self.lanes.get(row.key)

    @cached_property
    def lanes(self) -> Mapping[Key, Lanes]:
        """Return the timeline of a median step of each case and source with spans."""
        return lanes.of_rows(self.rows, self.trials)
