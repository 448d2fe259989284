"""Reading: the commands that read a store: report, explain, list, export.

`dpbench list` also prints the values that options of `dpbench run` accept. It reads the
descriptions of dpbench's models from their files, without importing them.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import click

from dpbench.api.reports import report_of, write_report
from dpbench.api.stored import choose, list_unreadable
from dpbench.cli import managing, shapes
from dpbench.cli.options import (
    Documented,
    json_option,
    report_option,
    run_option,
    store_option,
)
from dpbench.cli.showing import read
from dpbench.records import registry, siblings, words
from dpbench.records.schedule import COPYING, EFFECTS, FASTEST, Schedule

METRICS = {
    "busy_s": "CPU seconds that the threads of one logical CPU device spend in a step",
    "kernel_busy_s": (
        "seconds in which a GPU ran kernels and copies other than communication, in a profiled step"
    ),
    "collective_busy_s": (
        "seconds in which a GPU ran collectives or copies to other GPUs, in a profiled step"
    ),
    "exposed_communication_s": (
        "the part of collective_busy_s in which the GPU ran no compute kernel"
    ),
    "exposed_reduction_s": (
        "the part of exposed_communication_s in collectives that reduce gradients; for a rank's GPU"
    ),
    "rank_wait_s": "seconds in which a rank waited in a collective for the last rank, from traces",
    "host_reads_s": "seconds of a step in which a GPU's host waited for its values, from a trace",
    "host_waits_s": (
        "seconds of a step in which a GPU's host waited for values, blocking copies or a batch,"
        " from a trace"
    ),
    "outlasting_ratio": (
        "time that GPUs need to finish after a block of steps, less one step; as a share of the"
        " block"
    ),
    "utilization_ratio": (
        "fraction of the last 1/6 to 1 second in which a GPU ran any kernel, from NVML"
    ),
    "buffered_utilization_ratio": (
        "fraction of the time since the previous sample in which a GPU ran any kernel, from the"
        " driver's buffer"
    ),
    "memory_used_bytes": "memory in use on a GPU, from NVML",
    "foreign_memory_bytes": "memory of other processes on a GPU, from NVML",
    "power_w": "power of a GPU; on some models the mean of the last second",
    "energy_j": "cumulative energy counter of a GPU",
    "power_limit_w": "power limit that the driver enforces on a GPU",
    "sm_clock_hz": "clock of a GPU's multiprocessors",
    "memory_clock_hz": "clock of a GPU's memory",
    "temperature_c": "temperature of a GPU",
    "throttle_reasons": "NVML's bit mask of reasons for lower clocks",
    "cpu_clock_hz": "the highest clock of the cores that the run may use",
    "core{i}_utilization_ratio": "fraction of the time in which core i was busy",
}

KINDS = (
    "models",
    "strategies",
    "schedules",
    *siblings.named("listed"),
    "metrics",
    "runs",
)
"""What `dpbench list` lists."""


def rows(kind: str) -> list[tuple[str, str]]:
    """Return the name and a one-line description of each model, strategy, schedule and so on.

    `kind` is an argument of `dpbench list`, such as "models".
    """
    if place := siblings.named("listed").get(kind):
        found: list[tuple[str, str]] = siblings.at(place)()
        return found
    if kind == "metrics":
        return sorted(METRICS.items())
    if kind == "schedules":
        return [
            (
                Schedule.REFERENCE,
                "the work of torch.nn.DataParallel, in phases that can be timed",
            ),
            *EFFECTS.items(),
            (
                COPYING,
                (
                    "TrainStep's default: the fastest exact schedule that copies device 0's weights"
                    " in every step"
                ),
            ),
            (FASTEST, "the fastest exact schedule; devices may update their own weights"),
        ]
    names = registry.own(kind)
    if kind == "strategies":
        return [
            (name, _summary(registry.strategy(name)))
            for name in [*names, *sorted({*registry.names(kind)} - {*names})]
        ]
    return [(name, _first_line(registry.folder_of(kind) / f"{name}.py")) for name in names]


def _summary(strategy: object) -> str:
    return (type(strategy).__doc__ or "").strip().partition("\n")[0]


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


@click.command(cls=Documented, short_help="Write the report of a run as a page, Markdown or JSON.")
@report_option
@click.option("--md", is_flag=True, help="Print Markdown for a pull request and write no page.")
@json_option
@run_option
@store_option
def report(store: Path, run_id: str | None, report: Path | None, md: bool, as_json: bool) -> None:
    """Write the report of a run as one HTML file, or print it as Markdown or JSON."""
    if md and as_json:
        raise click.UsageError(
            "--md and --json are two formats of one output: leave out one of them"
        )
    chosen, trials, unreadable = read(store, run_id)
    result = report_of(chosen, trials, store, unreadable)
    if as_json:
        shapes.show(shapes.RunResult.of(chosen, result))
        return
    if md:
        from dpbench.report import markdown

        click.echo(markdown.render(result))
        return
    click.echo(str(write_report(report, result)))


@click.command(cls=Documented, short_help="Explain whether, why and how several devices help.")
@click.option(
    "--all",
    "full",
    is_flag=True,
    help="Also print every finding with its evidence, remedy and command.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    help="Number of samples in an epoch, to state the time of an epoch.",
)
@json_option
@run_option
@store_option
def explain(
    store: Path, run_id: str | None, full: bool, samples: int | None, as_json: bool
) -> None:
    """Explain a run: for each model, whether to use several devices, why, and which change helps.

    With --all, the findings follow, the most costly first. Each finding has its evidence and its
    remedy. If the run has a case with this remedy, the finding also has the measured gain.
    """
    from dpbench.analysis.findings import text

    chosen, trials, unreadable = read(store, run_id)
    result = report_of(chosen, trials, unreadable=unreadable)
    if as_json:
        shapes.show(shapes.Explanation.of(chosen, result, samples or 0))
        return
    click.echo(
        text.explain(
            result.answers,
            result.diagnoses,
            result.rows,
            samples or 0,
            statements=result.statements,
            full=full,
        )
    )
    number = sum(len(one.findings) for one in result.diagnoses)
    if number and not full:
        click.echo(f"\n{words.count(number, 'finding')}; for the evidence: dpbench explain --all")


@click.command(
    "list", cls=Documented, short_help="List models, strategies, machines, runs and more."
)
@click.argument("kind", type=click.Choice(KINDS))
@click.option(
    "--last", type=click.IntRange(1), help="With runs: only this number of runs, the newest."
)
@json_option
@store_option
def list_(kind: str, last: int | None, as_json: bool, store: Path) -> None:
    """List the names that options accept, or the runs of a store: one per line, with a description.

    The line of a run has its id, start, commit, number of cases, state, name, models, host and
    command.
    """
    if last and kind != "runs":
        raise click.UsageError(f"--last can be used with runs only, not with {kind}: leave it out")
    record: object
    if kind == "runs":
        listed = managing.runs(store, last)
        record, shown = shapes.RunList(runs=listed), managing.lines(listed)
    else:
        named = rows(kind)
        names = [shapes.Name(name=name, description=text) for name, text in named]
        record, shown = shapes.NameList(kind=kind, names=names), words.in_columns(named)
    if as_json:
        shapes.show(record)
        return
    if sys.stdout.isatty():
        click.echo(f"{kind}:")
    for line in shown:
        click.echo(line)


@click.command(cls=Documented, short_help="Export trials for other tools.")
@click.argument("format", type=click.Choice(["jsonl", "csv", "parquet", "trace", "pyperf"]))
@click.option(
    "--output", type=click.Path(path_type=Path), help="The file to write.  [default: stdout]"
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Export every run of the store; with trace, every trial of one run.",
)
@click.option(
    "--case",
    "part",
    help="With trace: only the case with this number, or cases with this text in the name.",
)
@click.option(
    "--split",
    type=click.Path(path_type=Path),
    help="With trace: the folder in which to write one case, as one file per device.",
)
@run_option
@store_option
def export(
    store: Path, run_id: str | None, format: str, every: bool, output: Path | None, **only: Any
) -> None:
    """Export trials for other tools.

    jsonl: one trial per line, with the phases of each step. csv: one row per case and run. parquet:
    one row per step. trace: a timeline of each case's first trial with usable step times, for
    Perfetto or speedscope; with --split, a folder of timelines of one case, for Holistic Trace
    Analysis. pyperf: a suite of one benchmark per case, for `pyperf stats` and `compare_to`; its
    values are the rounds' median steps.
    """
    from dpbench.analysis import frames, summary
    from dpbench.store import Store, export

    export.check(format, every=every, output=output, **only)
    with Store.read(store, list_unreadable) as opened:
        several = every and format != "trace"
        chosen = opened.runs()[::-1] if several else [choose(opened, run_id)]
        # only a timeline needs all spans
        read = opened.trials if format == "trace" else opened.summaries
        runs = [(run, read(run.id)) for run in chosen]
    if format == "parquet":
        assert output is not None  # export.check has refused stdout
        frames.parquet([(run.id, trials) for run, trials in runs], output)
        return
    if format == "csv":
        table = frames.cases(
            [(run.id, summary.rows(trials), trials) for run, trials in runs], raw=True
        )
        pieces = iter([frames.csv(table)])
    else:
        pieces = export.pieces(format, runs, summary.labels, every=every, **only)
    export.write(pieces, output)
