"""Reading: the commands that read a store: report, explain, compare, list, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpbench.cli.ending import EXIT_UNDECIDED, EXIT_WORSE, last_words
from dpbench.cli.options import REPORT, run_option, store_option
from dpbench.cli.showing import choose, read, report_of, write_report
from dpbench.records import words

if TYPE_CHECKING:
    from dpbench.records.estimate import Estimate
    from dpbench.store import StoredRun


@click.command()
@click.option("--html", type=click.Path(path_type=Path), default=REPORT, show_default=True, help="The page to write.")
@click.option("--md", is_flag=True, help="Print Markdown for a pull request and write no page.")
@run_option
@store_option
def report(store: Path, run_id: str | None, html: Path, md: bool) -> None:
    """Write the report of a run as one HTML file that needs no network, or print it as Markdown."""
    chosen, trials = read(store, run_id)
    found = report_of(chosen, trials)
    if md:
        from dpbench.report import markdown

        click.echo(markdown.render(found))
        return
    write_report(html, found)
    click.echo(str(html))


@click.command()
@run_option
@store_option
def explain(store: Path, run_id: str | None) -> None:
    """Explain a run: the speed-up of more devices, the causes of lost time, and the remedies with their gains.

    The answer comes first, then the findings in the order of the time at stake. Each finding has its evidence and its
    remedy, and the measured gain of the remedy if the same run includes it.
    """
    from dpbench.analysis.findings import text

    chosen, trials = read(store, run_id)
    found = report_of(chosen, trials)
    click.echo(text.render(found.diagnoses, found.rows))


@click.command("list")
@click.argument("kind", type=click.Choice(["models", "strategies", "schedules", "machines", "metrics", "runs"]))
@store_option
def list_(kind: str, store: Path) -> None:
    """List the available choices, or the runs of the store, one per line; each line starts with a name."""
    from dpbench.cli import listing

    rows = listing.runs(_runs(store)) if kind == "runs" else listing.rows(kind)
    width = max((len(name) for name, _ in rows), default=0)
    if sys.stdout.isatty():
        click.echo(f"{kind}:")
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}".rstrip())


def _runs(store: Path) -> list[tuple[StoredRun, int]]:
    """Return the runs of a store, the newest first, each with its number of cases."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        return [(run, opened.cases(run.id)) for run in opened.runs()]


@click.command()
@click.argument("format", type=click.Choice(["jsonl", "csv", "parquet", "trace", "pyperf"]))
@click.option("--output", type=click.Path(path_type=Path), help="The file to write.  [default: stdout]")
@click.option("--all", "every", is_flag=True, help="Every run of the store; with trace, every trial of one run.")
@click.option("--case", "part", help="trace: only the case with this number, or those with this text in their names.")
@click.option("--split", type=click.Path(path_type=Path), help="trace: a folder for one case, a file per device.")
@run_option
@store_option
def export(store: Path, run_id: str | None, format: str, every: bool, output: Path | None, **only: Any) -> None:
    """Export trials for other tools.

    jsonl: one trial per line, with the phases of each step. csv: one row per case and run. parquet: one row per step.
    trace: a timeline of the first good trial of each case, for Perfetto or speedscope; with --split for Holistic Trace
    Analysis. pyperf: a suite of one benchmark per case, for `pyperf stats` and `compare_to`.
    """
    from dpbench import export
    from dpbench.analysis import imbalance, summary
    from dpbench.store import Store

    export.check(format, every=every, output=output, **only)
    with Store.read(store) as opened:
        several = every and format != "trace"
        chosen = opened.runs()[::-1] if several else [choose(opened.runs(), run_id)]
        runs = [(run, opened.trials(run.id)) for run in chosen]
    if format == "csv":
        tables = [(run.id, row) for run, trials in runs for row in summary.rows(trials)]
        ids = [run for run, _ in tables]
        beside = imbalance.columns(
            [(run.id, trials) for run, trials in runs], [(i, r.case, r.source) for i, r in tables]
        )
        pieces = iter([summary.frame([row for _, row in tables], ids, beside).to_csv(index=False)])
    else:
        pieces = export.pieces(format, runs, summary.labels, every=every, output=output, **only)
    try:
        export.write(pieces, None if format == "parquet" else output)
    except BrokenPipeError:
        last_words("the output was closed")


@click.command()
@click.argument("before")
@click.argument("after")
@click.option(
    "--margin", type=click.FloatRange(0, 1), default=0.01, show_default=True, help="Smaller differences count as equal."
)
@store_option
def compare(before: str, after: str, margin: float, store: Path) -> None:
    """Compare two runs case by case; a ratio above 1 means that AFTER is faster than BEFORE.

    BEFORE and AFTER are each the beginning of a run's id in the store, or another store file, whose newest run is used.
    Exit code 0: no case became slower; 1: at least one case did; 3: none did, but some cases are undecided.
    """
    from dpbench.analysis import summary

    first, second = (_side(store, name) for name in (before, after))
    lines = summary.compare(first, second, margin=margin)
    lost = summary.uncompared(first, second)
    if not lines:
        reasons = "".join(f"; {case.label}: {reason}" for case, reason in lost.items())
        raise click.UsageError(f"{before} and {after} have no measured case in common{reasons}")
    for line in lines:
        decided = line.verdict not in ("same", "undecided")
        moved = f"; {line.phase} {words.signed_time(line.phase_s)}" if decided else ""
        click.echo(f"{line.verdict:<9}  {_ratio(line.ratio)}  {line.case.label}{moved}")
    for case, reason in lost.items():
        click.echo(f"undecided  {case.label}: {reason}")
    verdicts = {line.verdict for line in lines} | {"undecided" for _ in lost}
    sys.exit(EXIT_WORSE if "slower" in verdicts else EXIT_UNDECIDED if "undecided" in verdicts else 0)


def _ratio(estimate: Estimate) -> str:
    """Return a ratio and its interval as text, with four digits: the default margin is 1 %."""
    if estimate.doubt:
        return f"{words.NOT_ENOUGH} ({words.doubt(estimate)}; {words.REMEDY} would help)"
    value, low, high = (words.number(part, 4) for part in (estimate.value, estimate.low, estimate.high))
    return f"{value:>6}x [{low}-{high}]"


def _side(store: Path, name: str) -> Any:
    """Return the trials of one side of a comparison."""
    path = Path(name)
    return read(path, None)[1] if path.is_file() else read(store, name)[1]
