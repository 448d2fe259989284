"""Comparing: the comparison of two runs as text, as Markdown, and as an HTML page."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from dpbench.analysis import statements
from dpbench.analysis.comparison import ORDER, SURE, Comparison, Comparisons
from dpbench.analysis.lanes import Lanes
from dpbench.analysis.quantities import entries
from dpbench.analysis.report import Report
from dpbench.analysis.summary import Row
from dpbench.records import Case, Trial, words
from dpbench.records.estimate import Estimate
from dpbench.records.grouping import grouped
from dpbench.report import check_drawings, markdown, naming, table
from dpbench.report.table import Cell

if TYPE_CHECKING:
    from dpbench.report.page import Card

COLUMNS = ("verdict", "case", "ratio", "99 %", "before, ms", "after, ms", "labels", "why")
TEXT_COLUMNS = ("verdict", "case", "labels", "why")
WIDTH = 100
"""The columns of the sentences below a printed table."""
NOTE = (
    "A ratio above 1 means that the second run (after) is faster. The intervals of all ratios"
    f" contain the true values with {SURE:.0%}; a verdict needs the whole interval."
)


def heading(report: Report) -> str:
    """Return a line on a run: its id, name, time, commits of dpbench and project, and machine."""
    facts = dict(naming.facts(report))
    name = report.run.facts.name
    code = [
        f"dpbench {facts['dpbench']}",
        *([f"project {facts['project']}"] if "project" in facts else []),
    ]
    gpus = [] if facts["GPUs"] == "none" else [facts["GPUs"]]
    return "  ".join(
        [
            report.run.id[:8],
            *([f"@{name}"] if name else []),
            facts["date"],
            *code,
            ", ".join([facts["host"], *gpus]),
        ]
    )


def cells(comparisons: Comparisons) -> list[tuple[Cell, ...]]:
    """Return the cells of each case in the order of `COLUMNS`; cases without a ratio are last."""
    lost = [
        ("undecided", case.label, *[""] * 5, reason) for case, reason in comparisons.lost.items()
    ]
    return [*map(_cells, comparisons.lines), *(tuple(map(Cell, line)) for line in lost)]


def _cells(line: Comparison) -> tuple[Cell, ...]:
    ratio = (Cell(""), Cell(""))
    if not line.ratio.doubt:
        ratio = (
            Cell(f"{_number(line.ratio.value)}×", sort=repr(line.ratio.value)),
            Cell(
                f"{_number(line.ratio.low)}–{_number(line.ratio.high)}", sort=repr(line.ratio.low)
            ),
        )
    return (
        Cell(line.verdict),
        Cell(line.name),
        *ratio,
        _ms(line.before),
        _ms(line.after),
        Cell(" ".join(line.labels)),
        Cell(why(line)),
    )


def _number(value: float) -> str:
    """Return a ratio with four digits, because two runs are compared with a margin of about 1 %."""
    return words.number(value, 4)


def _ms(step: Estimate) -> Cell:
    return Cell("" if step.doubt else words.number(step.value * 1e3), sort=repr(step.value))


def why(line: Comparison) -> str:
    """Return the reason for a verdict; if the case changed, after the phase that changed most."""
    phase = (
        f"{line.phase} {words.signed_time(line.phase_s)} ({words.percent(line.share)} of the"
        " changes of all phases)"
    )
    return "; ".join([*([phase] if line.decided else []), line.reason])


def summary(counts: Counter[str]) -> str:
    """Return the number of cases by verdict as text, such as "1 case slower, 2 cases undecided"."""
    return ", ".join(
        f"{words.count(counts[verdict], 'case')} {verdict}" for verdict in ORDER if counts[verdict]
    )


def facts(before: Report, after: Report, comparisons: Comparisons) -> list[tuple[str, str]]:
    """Return lines on both runs and on each fact in which they differ, with their names.

    The names are "before" and "after" for the runs, "ACROSS" for each difference that was asked
    for, "UNLIKE" for each other one that forbids to mix them, and "note" for the rest.
    """
    return [
        ("before", heading(before)),
        ("after", heading(after)),
        *(("ACROSS", str(one)) for one in comparisons.across),
        *(("UNLIKE", str(one)) for one in comparisons.unlike),
        *(("note", one) for one in comparisons.notes),
    ]


def note(comparisons: Comparisons) -> str:
    """Return the note on how to read a ratio, and on what intervals of one execution leave out."""
    in_parts = any(line.case.traits.in_parts for line in comparisons.lines)
    return f"{NOTE} {statements.PARTS[0].upper()}{statements.PARTS[1:]}." if in_parts else NOTE


def text(before: Report, after: Report, comparisons: Comparisons) -> str:
    """Return the comparison as plain text: the runs, a table of the cases, and reasons below it."""
    lines = [dict(zip(COLUMNS, line, strict=True)) for line in cells(comparisons)]
    labels = {line["labels"].text for line in lines} - {""}
    kept = [name for name in COLUMNS if name != "why" and (name != "labels" or len(labels) > 1)]
    aligned = words.aligned(
        [kept, *([line[name].text for name in kept] for line in lines)],
        left=[kept.index(name) for name in kept if name in TEXT_COLUMNS],
    )
    reasons = grouped((line["why"].text, line["case"].text) for line in lines)
    below = [
        *(f"compared cases: {one}" for one in labels if len(labels) == 1),
        *(_filled(f"{', '.join(cases)}: {why}") for why, cases in reasons.items() if why),
        "",
        _filled(f"{summary(comparisons.verdicts)}. {note(comparisons)}"),
    ]
    head = [f"{name:<7} {value}" for name, value in facts(before, after, comparisons)]
    return "\n".join([*head, "", *aligned, "", *below])


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False)


def as_markdown(before: Report, after: Report, comparisons: Comparisons) -> str:
    """Return the comparison in GitHub's Markdown, for a pull request."""
    head = facts(before, after, comparisons)
    return markdown.compared(
        f"dpbench: {summary(comparisons.verdicts)}",
        head,
        COLUMNS,
        cells(comparisons),
        TEXT_COLUMNS,
        note(comparisons),
    )


@dataclass(frozen=True, kw_only=True)
class TwoRuns(Report):
    """A report with the compared cases of two runs, each with a row of either run.

    `run` has the id and the start of the second run, and the provenance of both, whose facts are
    not read from it.
    `own` has the row of its own run for each row, by the run ("before" or "after") and the case.
    """

    before: Report
    after: Report
    own: Mapping[tuple[str, Case], Row]

    @classmethod
    def compared_by(cls, before: Report, after: Report, comparisons: Comparisons) -> Self:
        """Return the report on two runs that have been compared."""
        of_case = {
            run: {row.case: row for row in report.rows if row.source.timed}
            for run, report in (("before", before), ("after", after))
        }
        own = {
            (run, line.other): of_case[run][case]
            for line in comparisons.lines
            for run, case in (("before", line.case), ("after", line.other))
        }
        return cls(
            run=replace(
                after.run,
                provenance={"before": before.run.provenance, "after": after.run.provenance},
                machine_result="",
            ),
            trials=(),
            # the page identifies and filters a case by its id in the second run
            rows=[replace(row, case=case, run=run) for (run, case), row in own.items()],
            ladders=(),
            notes=(),
            statements=list(dict.fromkeys([*before.statements, *after.statements])),
            diagnoses=(),
            before=before,
            after=after,
            own=own,
        )

    def _run(self, row: Row) -> Report:
        return self.before if row.run == "before" else self.after

    def trials_of(self, row: Row) -> Sequence[Trial]:
        """Return the trials of a row in its run."""
        return self._run(row).trials_of(self.own[row.run, row.case])

    def lanes_of(self, row: Row) -> Lanes | None:
        """Return the timeline of a median step of a row in its run; None without spans."""
        return self._run(row).lanes_of(self.own[row.run, row.case])


def page(before: Report, after: Report, comparisons: Comparisons) -> str:
    """Return the comparison as the HTML page of a run, with a second row or line for each case.

    Its answers are the verdicts. Raises NoDrawings without matplotlib.
    """
    check_drawings()
    from dpbench.report import page as report_page

    cases = _cases(comparisons)
    verdicts = [verdict for verdict in ORDER if comparisons.verdicts[verdict]]
    return report_page.rendered(
        TwoRuns.compared_by(before, after, comparisons),
        report_page.Content(
            title=f"runs {before.run.id[:8]}-{after.run.id[:8]}",
            heading=summary(comparisons.verdicts),
            facts=facts(before, after, comparisons),
            cards=[
                _card(model, before, after, comparisons)
                for model in dict.fromkeys(case.model for case in cases)
            ],
            table=case_table(comparisons),
            text_columns=TEXT_COLUMNS,
            lead=note(comparisons),
            axes=[
                *naming.axes(cases),
                *([("verdict", "Verdict", verdicts)] if len(verdicts) > 1 else []),
            ],
            numbers=table.embedded(numbers(comparisons)),
            markdown=as_markdown(before, after, comparisons),
        ),
    )


def case_table(comparisons: Comparisons) -> table.CaseTable:
    """Return the table of all cases of a comparison."""
    lines = [
        table.TableLine(naming.case_id(case), line, line[0].text, ())
        for case, line in zip(_cases(comparisons), cells(comparisons), strict=True)
    ]
    return table.CaseTable(COLUMNS, lines, ())


def _cases(comparisons: Comparisons) -> list[Case]:
    """Return the cases in the order of the table, as they are in the second run."""
    return [*(line.other for line in comparisons.lines), *comparisons.lost]


def _card(model: str, before: Report, after: Report, comparisons: Comparisons) -> Card:
    """Return the verdicts on a model's cases, and the answers of both runs on the model."""
    from dpbench.report.page import Card, Place

    lines = [line for line in comparisons.lines if line.other.model == model]
    lost = sum(case.model == model for case in comparisons.lost)
    counts = Counter([*(line.verdict for line in lines), *["undecided"] * lost])
    sides = [
        "; ".join(one.headline for one in report.answers if one.home.model == model)
        for report in (before, after)
    ]
    alike = sides[0] == sides[1]
    said = {"Before and after": sides[0]} if alike else {"Before": sides[0], "After": sides[1]}
    return Card(
        subject=model,
        headline=summary(counts),
        tone=next((verdict for verdict in ("slower", "faster") if counts[verdict]), ""),
        columns=("changed", "ratio", f"{SURE:.0%}"),
        places=[
            Place(line.name, f"{words.number(line.ratio.value)}×", words.interval(line.ratio))
            for line in lines
            if line.decided
        ],
        sentences=[f"{run}: {headline or 'no answer'}." for run, headline in said.items()],
        labels=naming.union(line.labels for line in lines),
        cases=naming.case_ids(case for case in _cases(comparisons) if case.model == model),
    )


def numbers(comparisons: Comparisons) -> list[dict[str, object]]:
    """Return the settings, verdict and numbers of each case, in the order of the table.

    Times are in seconds.
    """
    return [
        *map(_record, comparisons.lines),
        *(_work(case, "undecided", reason) for case, reason in comparisons.lost.items()),
    ]


def _record(line: Comparison) -> dict[str, object]:
    record = _work(line.other, line.verdict, line.reason) | {"labels": " ".join(line.labels)}
    for name, estimate in (("ratio", line.ratio), ("before", line.before), ("after", line.after)):
        record |= entries(name, estimate)
    return record | {"phase": line.phase, "phase_s": line.phase_s, "phase_share": line.share}


def _work(case: Case, verdict: str, reason: str) -> dict[str, object]:
    names = ("model", "strategy", "schedule", "devices", "batch_size", "size", "precision")
    settings = {name: getattr(case, name) for name in names}
    return {"id": naming.case_id(case), **settings, "verdict": verdict, "reason": reason}
