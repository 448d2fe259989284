"""The command that measures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpbench.cli.ending import EXIT_FAILED, last_words
from dpbench.cli.options import (  # fmt: skip
    AUTO_BUDGET_S,
    REPORT,
    Bytes,
    Names,
    Numbers,
    Rounds,
    Schedules,
    cases_of,
    patience_option,
    store_option,
)
from dpbench.cli.showing import choose, print_table, print_verdict, report_of, write_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpbench.records import Case, Trial

RESUMES = "what was measured is stored, the same command goes on from there"
SELF_CHECK_SCALE = 1.0
"""How long the self-check takes, over its usual minute."""


@click.command()
@click.option("--models", type=Names(), help="Reference models.  [default: mlp,resnet18]")
@click.option("--model", "own", multiple=True, help="Your own model, package.module:name; may be repeated.")
@click.option("--strategies", type=Names(), help="Ways to train.  [default: all that this machine can do]")
@click.option(
    "--strategy",
    "own_strategies",
    multiple=True,
    help="Your own strategy, file.py:name or package.module:name, next to the others; may be repeated.",
)
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
@patience_option
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
    from dpbench.cli.progress import Progress
    from dpbench.measure import run as runner
    from dpbench.measure.rounds import UntilPrecise
    from dpbench.store import Store

    if options["find_max_batch"]:
        from dpbench.measure import batch_search

        cases, _ = cases_of(batch_search.axes(options))
        batch_search.check(cases)
        sys.exit(_find_max_batch(cases, store, options["limit"]))
    cases, budget_s = cases_of(options)
    auto = options["rounds"] == "auto"
    retry = runner.statuses(options["retry"])
    with Store.create(store) as opened:
        try:
            with Progress() as progress:
                outcome = runner.run(
                    cases, opened, rounds=UntilPrecise(options["within"]) if auto else options["rounds"],
                    paired=options["paired"], budget_s=AUTO_BUDGET_S if auto and not budget_s else budget_s,
                    limit_s=options["limit"], retry=retry, patience_s=options["patience"], listen=progress.listen,
                    traces=store.with_name(f"{store.name}.traces") if options["profile"] else None,
                )  # fmt: skip
        except KeyboardInterrupt:
            click.echo(f"interrupted; {RESUMES}", err=True)
            sys.exit(130)
        except BrokenPipeError:  # nobody reads on, as in `dpbench run 2>&1 | head`
            last_words(f"the output was closed; {RESUMES}")
        if options["self_check"]:
            opened.annotate(outcome.run_id, "self_check", _self_check(cases))
        chosen = choose(opened.runs(), outcome.run_id)
        shown = report_of(chosen, opened.summaries(outcome.run_id))
    # the page first: what follows may have no reader left
    write_report(report, shown)
    try:
        print_table(shown)
        print_verdict(shown)
        click.echo(f"report: {report}   store: {store}   run: {outcome.run_id[:8]}", err=True)
    except BrokenPipeError:
        last_words(f"the output was closed; the run is complete: `dpbench report --run {outcome.run_id[:8]}` shows it")
    lost = any(outcome.counts.get(bad) for bad in ("failed", "oom", "timeout"))
    sys.exit(EXIT_FAILED if lost or not any(row.step for row in shown.rows) else 0)


def _find_max_batch(cases: Sequence[Case], store: Path, limit_s: float) -> int:
    """Search, tell of every try on stderr and of the answers on stdout; return the exit code."""
    from dpbench.measure import batch_search
    from dpbench.records import Status
    from dpbench.store import Store

    def listen(trial: Trial) -> None:
        words = "fits" if trial.status is Status.OK else f"{trial.status}: {trial.reason.partition(chr(10))[0]}"
        click.echo(f"{trial.case.label}: {words}", err=True)

    with Store.create(store) as opened:
        try:
            outcome = batch_search.run(cases, opened, limit_s=limit_s, listen=listen)
        except KeyboardInterrupt:
            click.echo(f"interrupted; {RESUMES}", err=True)
            return 130
    click.echo(batch_search.table(outcome.found))
    click.echo(f"store: {store}   run: {outcome.run_id[:8]}", err=True)
    return EXIT_FAILED if any(one.largest is None for one in outcome.found) else 0


def _self_check(cases: Sequence[Case]) -> dict[str, Any]:
    """Measure what measuring costs on the kind of device that the cases use."""
    from dpbench.measure import selfcheck
    from dpbench.measure.run import ordinals

    click.echo("self-check: what measuring costs here; about a minute", err=True)
    widest = max(cases, key=lambda case: case.devices)
    devices = widest.devices if widest.placement == "spread" else 1
    return selfcheck.measure(widest.device_kind, devices, ordinals(cases), scale=SELF_CHECK_SCALE)
