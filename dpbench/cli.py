"""The command line: parse, call, print. Computes nothing, and imports what it needs when it needs it."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dpbench import __version__
from dpbench.options import AUTO_BUDGET_S, Bytes, Names, Numbers, Rounds, Schedules, cases_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpbench.records import Case
    from dpbench.store import Run

EXIT_WORSE, EXIT_FAILED, EXIT_UNDECIDED, EXIT_USAGE = 1, 2, 3, 64
EXIT_CLOSED = 128 + signal.SIGPIPE
RESUMES = "what was measured is stored, the same command goes on from there"
REPORT = Path("reports/latest/index.html")
SELF_CHECK_SCALE = 1.0
"""How long the self-check takes, over its usual minute."""

store_option = click.option(
    "--store", type=click.Path(path_type=Path), default=Path("dpbench.db"), show_default=True, help="The results file."
)
run_option = click.option("--run", "run_id", help="The run to take, by the beginning of its id.  [default: the newest]")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dpbench")
def cli() -> None:
    """Measure single-machine data parallelism in PyTorch, phase by phase.

    Start with `dpbench run`: it measures what this machine can do, prints a verdict and leaves a report.
    """


@cli.command()
@click.option("--models", type=Names(), help="Reference models.  [default: mlp,resnet18]")
@click.option("--model", "own", multiple=True, help="Your own model, package.module:name; may be repeated.")
@click.option("--strategies", type=Names(), help="Ways to train.  [default: all that this machine can do]")
@click.option(
    "--schedules",
    type=Schedules(),
    multiple=True,
    help="Schedules of the strategy dp: rungs, or switches such as workers=pool,replicas=cached, of which neighbours "
    "make one schedule; a ';' between two, or the option twice, keeps them apart.  [default: reference]",
)
@click.option(
    "--ladder",
    is_flag=True,
    help="Measure every rung of the ladder, and the best without each of its switches, beside single and ddp. On the "
    "most devices that are here, unless --devices says more; two models take about five minutes.",
)
@click.option("--devices", type=Numbers(), help="Device counts.  [default: what is here]")
@click.option("--device-ids", type=Numbers(), default=(), help="GPUs to use, in order.  [default: the first ones]")
@click.option("--device-kind", type=click.Choice(["cpu", "cuda", "emulated"]), help="[default: cuda if there is a GPU]")
@click.option("--placement", type=click.Choice(["spread", "colocated"]), help="colocated: replicas share one GPU.")
@click.option("--batch-sizes", type=Numbers(), help="Global batch sizes (strong scaling).  [default: 64]")
@click.option("--batch-per-device", type=Numbers(), help="Batch sizes per device (weak scaling).")
@click.option("--size", type=click.Choice(["small", "full"]), default="small", show_default=True, help="Model size.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option(
    "--rounds",
    type=Rounds(),
    default=3,
    show_default=True,
    help="Fresh processes per case; auto: as many as it takes to know each speed-up --within its interval.",
)
@click.option(
    "--within",
    type=click.FloatRange(1e-4, 1),
    default=0.01,
    show_default=True,
    help="With --rounds auto: how narrow a speed-up's 95 % interval must get, as a fraction.",
)
@click.option(
    "--paired",
    is_flag=True,
    help="Measure cases side by side in one process, their blocks of steps in turn: far steadier ratios, but no "
    "memory of each alone. ddp keeps processes of its own.",
)
@click.option(
    "--budget",
    type=click.FloatRange(1),
    help="Seconds for the whole run.  [without axes: 60, or 180 on GPUs; with --rounds auto: 300]",
)
@click.option("--limit", type=click.FloatRange(1), default=120.0, show_default=True, help="Seconds a trial may take.")
@click.option("--retry", type=Names(), default=(), help="Final statuses to measure again on resume: failed,oom,...")
@click.option("--profile", is_flag=True, help="Profile one more step of each trial, as Chrome traces beside the store.")
@click.option("--find-max-batch", is_flag=True, help="Search each case's largest batch that fits, measure nothing.")
@click.option("--device-memory", type=Bytes(), default=0, help="What an emulated device may hold, such as 8GiB.")
@click.option("--report", type=click.Path(path_type=Path), default=REPORT, show_default=True, help="The page to write.")
@click.option(
    "--self-check",
    is_flag=True,
    help="Measure too what measuring costs here: marks, samplers, and the engine beside torch's; about a minute more.",
)
@store_option
def run(store: Path, report: Path, **options: Any) -> None:
    """Measure cases in fresh processes, store every trial, print a table and a verdict.

    Without axes it picks what this machine can do. The same command again resumes a run that was interrupted.
    """
    from dpbench import run as runner
    from dpbench.progress import Progress
    from dpbench.rounds import UntilPrecise
    from dpbench.store import Store

    if options["find_max_batch"]:
        from dpbench import find_batch

        cases, _ = cases_of(find_batch.axes(options))
        sys.exit(find_batch.command(cases, store, limit_s=options["limit"]))
    cases, budget_s = cases_of(options)
    auto = options["rounds"] == "auto"
    retry = runner.statuses(options["retry"])
    with Store.create(store) as opened:
        try:
            with Progress() as progress:
                outcome = runner.run(
                    cases, opened, rounds=UntilPrecise(options["within"]) if auto else options["rounds"],
                    paired=options["paired"], budget_s=AUTO_BUDGET_S if auto and not budget_s else budget_s,
                    limit_s=options["limit"], retry=retry, listen=progress.listen,
                    traces=store.with_name(f"{store.name}.traces") if options["profile"] else None,
                )  # fmt: skip
        except KeyboardInterrupt:
            click.echo(f"interrupted; {RESUMES}", err=True)
            sys.exit(130)
        except BrokenPipeError:  # nobody reads on, as in `dpbench run 2>&1 | head`
            _last_words(f"the output was closed; {RESUMES}")
        if options["self_check"]:
            opened.annotate(outcome.run_id, "self_check", _self_check(cases))
        chosen = _choose(opened.runs(), outcome.run_id)
        content = _content(chosen, opened.trials(outcome.run_id))
    # the page first: what follows may have no reader left
    _write_report(report, content)
    try:
        _print_table(content)
        _print_verdict(content)
        click.echo(f"report: {report}   store: {store}   run: {outcome.run_id[:8]}", err=True)
    except BrokenPipeError:
        _last_words(f"the output was closed; the run is complete: `dpbench report --run {outcome.run_id[:8]}` shows it")
    sys.exit(EXIT_FAILED if any(outcome.counts.get(bad) for bad in ("failed", "oom", "timeout")) else 0)


def _self_check(cases: Sequence[Case]) -> dict[str, Any]:
    """Measure what measuring costs on the kind of device that the cases use."""
    from dpbench import selfcheck
    from dpbench.run import ordinals

    click.echo("self-check: what measuring costs here; about a minute", err=True)
    widest = max(cases, key=lambda case: case.devices)
    devices = widest.devices if widest.placement == "spread" else 1
    return selfcheck.measure(widest.device_kind, devices, ordinals(cases), scale=SELF_CHECK_SCALE)


def _last_words(text: str) -> NoReturn:
    """End as a command does whose output was closed, with a word on stderr if that is still open."""
    with suppress(OSError):
        click.echo(text, err=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # what is left in their buffers is for nobody
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    sys.exit(EXIT_CLOSED)


@cli.command()
@click.option("--html", type=click.Path(path_type=Path), default=REPORT, show_default=True, help="The page to write.")
@click.option("--md", is_flag=True, help="Print Markdown for a pull request instead.")
@run_option
@store_option
def report(store: Path, run_id: str | None, html: Path, md: bool) -> None:
    """Make the report of a run: one HTML file that needs no network, or Markdown."""
    chosen, trials = _read(store, run_id)
    content = _content(chosen, trials)
    if md:
        from dpbench.report import markdown

        click.echo(markdown.render(**content))
        return
    _write_report(html, content)
    click.echo(str(html))


@cli.command()
@run_option
@store_option
def explain(store: Path, run_id: str | None) -> None:
    """Explain a run: what more devices gave, where the lost time goes, and what change helps by how much.

    The answer first, then the findings by the time at stake, each with its evidence, its remedy, and what that gave
    where the same run has measured it.
    """
    from dpbench.findings import text

    chosen, trials = _read(store, run_id)
    click.echo(text.render(_content(chosen, trials)["diagnoses"]))


@cli.command("list")
@click.argument("kind", type=click.Choice(["models", "strategies", "schedules", "metrics", "runs"]))
@store_option
def list_(kind: str, store: Path) -> None:
    """List what there is to choose from, or the runs of the store; one name first on each line."""
    from dpbench import listing

    rows = listing.runs(_runs(store)) if kind == "runs" else listing.rows(kind)
    width = max((len(name) for name, _ in rows), default=0)
    if sys.stdout.isatty():
        click.echo(f"{kind}:")
    for name, words in rows:
        click.echo(f"{name:<{width}}  {words}".rstrip())


def _runs(store: Path) -> list[tuple[Run, int]]:
    """Return the runs of a store, the newest first, and how many cases each has."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        return [(run, opened.cases(run.id)) for run in opened.runs()]


@cli.command()
@click.argument("format", type=click.Choice(["jsonl", "csv", "parquet", "trace", "pyperf"]))
@click.option("--output", type=click.Path(path_type=Path), help="A file.  [default: stdout]")
@click.option("--all", "every", is_flag=True, help="Every run of the store; with trace, every trial of one run.")
@click.option("--case", "part", help="trace: only the case of this number, or those whose name has this part.")
@click.option("--split", type=click.Path(path_type=Path), help="trace: one case, a file per device into this folder.")
@run_option
@store_option
def export(store: Path, run_id: str | None, format: str, every: bool, output: Path | None, **only: Any) -> None:
    """Export trials for other tools.

    jsonl: one trial a line with the phases of each step. csv: one row per case and run. parquet: one row a step.
    trace: the first good trial of each case on a time line, for Perfetto or speedscope; with --split for Holistic
    Trace Analysis. pyperf: a suite of one benchmark per case, for `pyperf stats` and `compare_to`.
    """
    from dpbench import analyse, export, imbalance
    from dpbench.store import Store

    export.check(format, every=every, output=output, **only)
    with Store.read(store) as opened:
        several = every and format != "trace"
        chosen = opened.runs()[::-1] if several else [_choose(opened.runs(), run_id)]
        runs = [(run, opened.trials(run.id)) for run in chosen]
    if format == "csv":
        tables = [(run.id, row) for run, trials in runs for row in analyse.rows(trials)]
        ids = [run for run, _ in tables]
        beside = imbalance.columns(
            [(run.id, trials) for run, trials in runs], [(i, r.case, r.source) for i, r in tables]
        )
        pieces = iter([analyse.frame([row for _, row in tables], ids, beside).to_csv(index=False)])
    else:
        pieces = export.pieces(format, runs, analyse.trusted, analyse.labels, every=every, output=output, **only)
    try:
        export.write(pieces, None if format == "parquet" else output)
    except BrokenPipeError:
        _last_words("the output was closed")


@cli.command()
@click.argument("before")
@click.argument("after")
@click.option("--margin", type=click.FloatRange(0, 1), default=0.01, show_default=True, help="What counts as the same.")
@store_option
def compare(before: str, after: str, margin: float, store: Path) -> None:
    """Compare two runs case by case: how many times as fast AFTER is as BEFORE.

    Each is the beginning of a run's id in the store, or a store file, whose newest run is taken. Exit code 0: no
    case got slower; 1: one did; 3: none did, but some are undecided.
    """
    from dpbench import analyse

    first, second = (_side(store, name) for name in (before, after))
    lines = analyse.compare(first, second, margin=margin)
    if not lines:
        raise click.UsageError(f"{before} and {after} have no measured case in common")
    for line in lines:
        e = line.ratio
        moved = "" if line.verdict in ("same", "undecided") else f"; {line.phase} {line.phase_s * 1e3:+.2f} ms"
        click.echo(f"{line.verdict:<9}  {e.value:6.3f}x [{e.low:.3f}-{e.high:.3f}]  {line.case.label}{moved}")
    verdicts = {line.verdict for line in lines}
    sys.exit(EXIT_WORSE if "slower" in verdicts else EXIT_UNDECIDED if "undecided" in verdicts else 0)


def _side(store: Path, name: str) -> Any:
    """Return the trials that one side of a comparison names."""
    path = Path(name)
    return _read(path, None)[1] if path.is_file() else _read(store, name)[1]


def _read(store: Path, run_id: str | None) -> tuple[Run, Any]:
    """Return a run of a store and its trials."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        chosen = _choose(opened.runs(), run_id)
        return chosen, opened.trials(chosen.id)


def _choose(runs: Any, run_id: str | None) -> Run:
    """Return the newest run, or the one whose id begins so."""
    found = [run for run in runs if run.id.startswith(run_id or "")]
    if not found:
        known = ", ".join(run.id[:8] for run in runs) or "none"
        raise click.UsageError(f"no run {run_id or ''} in the store; it has: {known}")
    if run_id and len(found) > 1:
        raise click.UsageError(f"{run_id} fits {len(found)} runs: {', '.join(run.id[:12] for run in found)}")
    chosen: Run = found[0]
    return chosen


def _content(chosen: Run, trials: Any) -> dict[str, Any]:
    """Return what every form of the report shows."""
    from dpbench import analyse, diagnose, findings, ladder

    table = analyse.rows(trials)
    cores = chosen.provenance.get("host", {}).get("cores", 0)
    ladders = ladder.ladders(table)
    return {
        "rows": table, "trials": trials, "provenance": chosen.provenance, "run_id": chosen.id,
        "started": chosen.started, "ladders": ladders, "verdict": diagnose.verdict(table, ladders),
        "tiles": diagnose.tiles(table, ladders), "diagnoses": findings.diagnose(table, trials, cores),
        "warnings": [*_unfinished(chosen), *diagnose.warnings(table, trials, chosen.provenance)],
    }  # fmt: skip


def _unfinished(chosen: Run) -> list[str]:
    """Warn of a run that has not measured all it was asked to."""
    if chosen.status == "finished":
        return []
    return [f"incomplete: this run is {chosen.status}; the same `dpbench run` command goes on where it is"]


def _write_report(path: Path, content: dict[str, Any]) -> None:
    from dpbench.report import page

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.render(**content))


def _print_table(content: dict[str, Any]) -> None:
    """Print one line a case to stdout."""
    from dpbench.progress import table

    click.echo(table(content["rows"], content["ladders"]))


def _print_verdict(content: dict[str, Any]) -> None:
    """Print the verdict to stdout, and what the self-check found; the warnings to stderr."""
    from dpbench import selfcheck

    for warning in content["warnings"]:
        click.echo(f"warning: {warning}", err=True)
    for case, ended in content["provenance"].get("rounds", {}).items():
        click.echo(f"{case}: {ended}", err=True)
    click.echo(f"\n{content['verdict']}")
    for line in selfcheck.words(content["provenance"]):
        click.echo(f"self-check: {line}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors say what, where and the way out, and exit as the design says."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is tidied up on the way out
    try:
        cli.main(arguments, prog_name="dpbench", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except (ValueError, LookupError) as error:
        click.echo(f"error: {error.args[0] if error.args else error}", err=True)
        sys.exit(EXIT_USAGE)
    except RuntimeError as error:
        from dpbench.store import StoreError

        if not isinstance(error, StoreError):
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
