"""Comparing: the command `dpbench compare`, which compares two runs case by case."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dpbench.api.reports import report_of
from dpbench.api.stored import side
from dpbench.cli import shapes
from dpbench.cli.options import (
    EXIT_FAILED,
    EXIT_UNDECIDED,
    EXIT_USAGE,
    EXIT_WORSE,
    Documented,
    json_option,
    store_option,
)
from dpbench.cli.shapes import AnswerFacts, EstimateFacts, RunFacts
from dpbench.records import files

if TYPE_CHECKING:
    from dpbench.analysis.report import Report
    from dpbench.store import StoredRun


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs in the JSON of `dpbench compare`.

    `project_commit` is the git commit of the folder in which the run was started. A run from an
    exported file lacks the facts on machine and code; its `started` is the beginning of 1970,
    because its start is unknown.
    """

    run: RunFacts
    project_commit: str
    answers: Sequence[AnswerFacts]

    @classmethod
    def of(cls, run: StoredRun, report: Report) -> ComparedRun:
        """Return the record of `run`, with the cases and the answers of its report."""
        cases = [*dict.fromkeys(row.case for row in report.rows)]
        answers = [AnswerFacts.of(one) for one in report.answers]
        return cls(
            run=RunFacts.of(run, cases),
            project_commit=run.facts.project.commit or "",
            answers=answers,
        )


class ComparedCase(msgspec.Struct, frozen=True, kw_only=True):
    """One case in the JSON of `dpbench compare`: the values of `analysis.comparison.Comparison`.

    `before_s` and `after_s` are seconds per step. `ratio` is above 1 if the second run is faster.
    `phase` is the phase that changed most, and `phase_s` its change in seconds per step.
    `phase_share` is the size of this change as a share of the sizes of all phases' changes.
    """

    name: str = msgspec.field(name="label")
    labels: Sequence[str]
    verdict: str
    reason: str
    before: EstimateFacts = msgspec.field(name="before_s")
    after: EstimateFacts = msgspec.field(name="after_s")
    ratio: EstimateFacts
    phase: str
    phase_s: float
    share: float = msgspec.field(name="phase_share")


class ComparedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench compare`.

    Relative differences below `margin` count as equal. `across` has the differences that were asked
    for with --across, `unlike` those for which the runs are only compared with --unlike, and
    `notes` the others, such as a fact that one of them did not record; its last entry names the
    cases that only one of the runs has. `lost` maps the label of each case that is in both runs but
    has no ratio, such as one without a result in one of them, to the reason.
    """

    before: ComparedRun
    after: ComparedRun
    margin: float
    across: Sequence[str]
    unlike: Sequence[str]
    notes: Sequence[str]
    cases: Sequence[ComparedCase]
    lost: Mapping[str, str]
    schema: int = shapes.SCHEMA


@click.command(
    cls=Documented,
    short_help="Compare two runs case by case.",
    exits={
        0: "no case became slower",
        EXIT_WORSE: "at least one case became slower",
        EXIT_FAILED: "a file cannot be read",
        EXIT_UNDECIDED: (
            "no case is known to have become slower, but for some the measurements cannot tell"
        ),
        EXIT_USAGE: "wrong usage, unlike machines, or no case in common",
    },
)
@click.argument("before")
@click.argument("after")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Relative differences below this margin count as equal.",
)
@click.option(
    "--across",
    multiple=True,
    metavar="FACT,...",
    help="Compare runs that differ in these facts, such as torch or python, but in no others.",
)
@click.option(
    "--unlike",
    is_flag=True,
    help="Compare even if machines, kinds of devices or software differ.",
)
@click.option("--md", is_flag=True, help="Print Markdown for a pull request.")
@json_option
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Also write an HTML page with both runs to this file.",
)
@store_option
def compare(
    before: str,
    after: str,
    margin: float,
    across: tuple[str, ...],
    unlike: bool,
    md: bool,
    as_json: bool,
    report: Path | None,
    store: Path,
) -> None:
    """Compare two runs case by case; a ratio above 1 means that AFTER is faster than BEFORE.

    BEFORE and AFTER each name a run. @last, @NAME and the beginning of an id name a run of the
    store. The beginning of a git commit names the newest run with this commit, either of dpbench or
    of the folder in which the run was started. FILE:RUN names a run of another store, or of a file
    that `dpbench export jsonl` wrote. FILE alone names the newest run of a store, or the only run
    of an exported file.

    The command refuses two runs that differ in a fact on which step times depend: processor, cores,
    GPUs and their power limits, versions of the driver, CUDA, cuDNN, NCCL, torch, numpy and Python,
    its build, its GIL (on or off), variables such as NCCL_P2P_DISABLE, and kinds of devices. It
    also refuses if only one of the runs is an imported trace. Notes name each fact that one of the
    runs did not record, and cases that only one of them has.

    --across torch compares runs with two versions of torch, and still refuses any other difference;
    ratios then have the label ACROSS. `python` means version, build, GIL and variables of Python
    together. --unlike compares whatever differs, with the label UNLIKE.
    """
    if md and as_json:
        raise click.UsageError("--md and --json are two formats of stdout: leave out one of them")
    from dpbench.analysis import comparison
    from dpbench.report import comparing

    sides = [
        (run, report_of(run, trials))
        for run, trials in (side(store, one) for one in (before, after))
    ]
    first, second = (report for _, report in sides)
    if first.run.id == second.run.id:
        click.echo(f"note: {before} and {after} are the same run, {first.run.id[:8]}", err=True)
    comparisons = comparison.between(first, second, margin=margin, across=across, unlike=unlike)
    if as_json:
        both = [ComparedRun.of(*one) for one in sides]
        lost = {case.label: reason for case, reason in comparisons.lost.items()}
        shapes.show(
            ComparedRuns(
                before=both[0],
                after=both[1],
                margin=margin,
                across=[str(one) for one in comparisons.across],
                unlike=[str(one) for one in comparisons.unlike],
                notes=comparisons.notes,
                cases=[shapes.made(ComparedCase, line) for line in comparisons.lines],
                lost=lost,
            )
        )
    else:
        click.echo((comparing.as_markdown if md else comparing.text)(first, second, comparisons))
    if report:  # a page that cannot be written must not hide the result
        files.write(report, comparing.page(first, second, comparisons))
        click.echo(f"page: {report}", err=True)
    verdicts = comparisons.verdicts
    sys.exit(EXIT_WORSE if verdicts["slower"] else EXIT_UNDECIDED if verdicts["undecided"] else 0)
