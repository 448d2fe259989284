"""Running: the command `dpbench run`, which measures cases."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dpbench.api import STORE
from dpbench.api.reports import report_of
from dpbench.api.stored import choose
from dpbench.cli import shapes, streams
from dpbench.cli.options import (
    EXIT_FAILED,
    EXIT_USAGE,
    Documented,
    has_defaults,
    json_option,
    option_of,
    report_option,
    store_option,
)
from dpbench.cli.showing import (
    check_page,
    expectation,
    print_plan,
    print_results,
    print_warnings,
    try_report,
)
from dpbench.cli.streams import last_words
from dpbench.records.options import OPTIONS, Options

if TYPE_CHECKING:
    from dpbench.api.progress import Detail
    from dpbench.measure.cluster import Cluster
    from dpbench.measure.run import Listener, Outcome
    from dpbench.records import Case, Trial
    from dpbench.store import Naming, Store


RESUMES = "the finished trials are stored; to resume the run, give the same command again"


@dataclass(frozen=True, kw_only=True)
class Output:
    """The options for the output of a run."""

    store: Path
    report: Path | None
    as_json: bool
    detail: Detail
    dry_run: bool = False
    command: str = ""
    """The command that repeats the run if a file has defaults of options; else empty."""


def _run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(OPTIONS):
        command = option_of(name)(command)
    return command


@click.command(
    cls=Documented,
    grouped=True,
    short_help="Measure cases, and print an answer and a table.",
    exits={
        0: "every case was measured, or skipped with a reason",
        EXIT_FAILED: "a trial failed, nothing was measured, or a file cannot be read or written",
        EXIT_USAGE: "wrong usage",
        130: "interrupted; the same command resumes the run",
    },
)
@_run_options
@report_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the cases, the rounds and the expected time; measure and store nothing.",
)
@json_option
@click.option(
    "-q", "--quiet", is_flag=True, help="Print no progress; results, warnings and errors stay."
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Also print the stages, steps and memory of each trial."
)
@store_option
def run(
    store: Path,
    report: Path | None,
    as_json: bool,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Measure cases in fresh processes, store every trial, and print the answers and a table.

    Without options of the first group, dpbench selects cases that fit this machine. The same
    command resumes an interrupted run. Started by torchrun, or as several tasks by srun, the
    processes are the ranks of one launch, which measure together; rank 0 stores the trials and
    prints the results.
    """
    from dpbench.api.progress import Detail
    from dpbench.measure import launch

    detail = Detail.of(quiet=quiet, verbose=verbose)
    selected = Options.of(**options)
    given = has_defaults(click.get_current_context())
    output = Output(
        store=store,
        report=report,
        as_json=as_json,
        dry_run=dry_run,
        detail=detail,
        command=selected.command("--store", str(store), config=False) if given else "",
    )
    placed = launch.of_environment()
    if placed is None:
        _measure(output, None, selected)
    from dpbench.measure.cluster import Cluster
    from dpbench.measure.group import Group

    with Group(placed) as group:
        if placed.rank == 0:
            _measure(output, Cluster(group), selected)
        group.serve()


def _measure(output: Output, cluster: Cluster | None, selected: Options) -> NoReturn:
    """Measure the cases, print only their plan, or search their largest batches; exit."""
    from dpbench.measure import selection

    naming = selection.naming(selected, output.command)
    if selected.find_max_batch:
        from dpbench.measure import batch_search

        cases, _ = selection.cases_of(batch_search.axes(selected), cluster)
        batch_search.check(cases)
        sys.exit(_find_max_batch(cases, naming, selected.limit, output))
    cases, budget_s = selection.cases_of(selected, cluster)
    if output.dry_run:
        print_plan(
            selection.forecast(output.store, selected, cases, naming, cluster, budget_s),
            as_json=output.as_json,
        )
        sys.exit(0)
    check_page(output.report)
    planned = selection.forecast(output.store, selected, cases, naming, cluster, budget_s)
    measure_and_show(
        output,
        naming,
        lambda store, listen: selection.measure(
            selected, cases, store, budget_s=budget_s, cluster=cluster, listen=listen
        ),
        plan=expectation(planned),
    )


def measure_and_show(
    output: Output, naming: Naming, measure: Callable[[Store, Listener], Outcome], *, plan: str = ""
) -> NoReturn:
    """Call `measure`, print the results of the run, write its page; exit.

    `plan` is a text to print at the start.
    """
    from dpbench.api.progress import Progress
    from dpbench.store import FINISHED, OPEN, Store

    with Store.create(output.store, naming) as opened:
        try:
            with Progress(output.detail, plan=plan) as progress:
                outcome = measure(opened, progress.listen)
        except KeyboardInterrupt:
            click.echo(f"interrupted; {RESUMES}", err=True)
            sys.exit(130)
        except BrokenPipeError:  # the reader has closed the output, as in `dpbench run 2>&1 | head`
            last_words(f"the output was closed; {RESUMES}")
        chosen = choose(opened, outcome.run_id)
        shown = report_of(chosen, opened.summaries(outcome.run_id), output.store)
    shows = f"the run is complete: `dpbench report --run {outcome.run_id[:8]}` shows it"
    streams.remedy(shows)
    closed = False
    try:
        if output.as_json:
            print_warnings(shown)
            shapes.show(shapes.RunResult.of(chosen, shown))
        else:
            where = [] if output.store == STORE else ["--store", str(output.store)]
            print_results(shown, shlex.join(["dpbench", "explain", "--run", chosen.id[:8], *where]))
        sys.stdout.flush()
    except BrokenPipeError:
        closed = True
    written = try_report(output.report, shown, output.store)
    if closed:
        last_words(f"the output was closed; {shows}")
    lost = any(
        outcome.counts.get(bad) for bad in ("failed", "oom", "timeout")
    ) or chosen.status not in (FINISHED, OPEN)
    sys.exit(EXIT_FAILED if lost or not written or not any(row.step for row in shown.rows) else 0)


def _find_max_batch(cases: Sequence[Case], naming: Naming, limit_s: float, output: Output) -> int:
    """Search for the largest batch of each case that fits in memory; return the exit code.

    Each attempt is printed to stderr, and the results to stdout.
    """
    from dpbench.api.progress import Detail, brief
    from dpbench.cli.tables import searches
    from dpbench.measure import batch_search
    from dpbench.records import Status
    from dpbench.store import Store

    if output.dry_run:
        raise click.UsageError(
            "leave out --dry-run: it cannot list the batch sizes of a search, each of which depends"
            " on the previous one"
        )

    def listen(trial: Trial) -> None:
        words = "fits" if trial.status is Status.OK else f"{trial.status}: {brief(trial)}"
        click.echo(f"{trial.case.label}: {words}", err=True)

    with Store.create(output.store, naming) as opened:
        try:
            quiet = output.detail is Detail.QUIET
            outcome = batch_search.run(
                cases, opened, limit_s=limit_s, listen=(lambda trial: None) if quiet else listen
            )
        except KeyboardInterrupt:
            click.echo(f"interrupted; {RESUMES}", err=True)
            return 130
    if output.as_json:
        shapes.show(shapes.Searches(run_id=outcome.run_id, found=outcome.found))
    else:
        click.echo(searches(outcome.found))
    click.echo(f"store: {output.store}   run: {outcome.run_id[:8]}", err=True)
    return EXIT_FAILED if any(one.largest is None for one in outcome.found) else 0
