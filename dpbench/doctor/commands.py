"""Commands: `dpbench doctor`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from dpbench.cli import shapes
from dpbench.cli.options import (
    EXIT_FAILED,
    EXIT_USAGE,
    EXIT_WORSE,
    Documented,
    json_option,
    option_of,
    store_option,
)
from dpbench.cli.showing import check_page
from dpbench.records import files
from dpbench.records.errors import UsageError


@click.command(
    cls=Documented,
    short_help="Find out why this machine is slow for several GPUs.",
    exits={
        0: "nothing wrong was found",
        EXIT_WORSE: "something is wrong",
        EXIT_FAILED: (
            "for --output: other processes use the cores (see --anyway), a pass failed, or the file"
            " cannot be written"
        ),
        EXIT_USAGE: "wrong usage, or --output on a machine without GPUs",
    },
)
@json_option
@click.option("--report", type=click.Path(path_type=Path), help="A page to write, with a picture.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Also measure this machine's GPUs for one or two minutes, and write the machine file that"
    " `dpbench predict --machine FILE.toml` reads.",
)
@option_of("patience")
@click.option(
    "--anyway",
    is_flag=True,
    help="With --output: measure even if the machine is busy, and label the file NOISY.",
)
@store_option
def doctor(
    as_json: bool,
    report: Path | None,
    output: Path | None,
    patience: float | None,
    anyway: bool,
    store: Path,
) -> None:
    """Examine this machine: copies between GPUs, links, sockets, limits, settings.

    It takes less than a minute, needs no root, and changes nothing of the machine. Copies are
    compared on arrival; one that hangs is named. Each finding has its evidence, its cost, the
    change that helps, and how to undo it. A store that exists keeps the result for the pages of its
    runs on this machine, and the costs are then shares of the steps of the last run.
    """
    from dpbench.doctor import stored, words
    from dpbench.doctor.examine import examine
    from dpbench.doctor.result import result

    _refuse_others()
    check_page(report)
    if output is not None:
        files.check_writable(output)
        _write_machine(output, patience, anyway=anyway)
    started_s = time.time()
    machine = examine(_say)
    host = stored.host_of(machine)
    machine = replace(machine, steps=stored.steps(store, host))
    found = result(machine, started_s)
    stored.keep(store, host, found)
    if report is not None:
        from dpbench.doctor import page

        files.write(report, page.render(found))
    if as_json:
        shapes.show({**msgspec.to_builtins(found), "schema": shapes.SCHEMA})
    else:
        click.echo(words.text(machine, found))
    sys.exit(EXIT_WORSE if found.faults else 0)


def _refuse_others() -> None:
    """Raise UsageError for GPUs of which the examination knows neither counters nor links."""
    from dpbench.hardware import gpus

    vendor = gpus.of_torch().vendor
    if not vendor.counters and gpus.of_torch().gpus:
        raise UsageError(
            f"dpbench doctor examines NVIDIA's GPUs, and this torch uses those of {vendor.maker}:"
            " their counters and links are not read; dpbench run measures them"
        )


def _say(line: str) -> None:
    click.echo(line, err=True)


def _write_machine(output: Path, patience: float | None, *, anyway: bool) -> None:
    from dpbench.doctor.probe import BusyMachine, PassFailed, probe, to_toml

    try:
        text = to_toml(probe(_say, patience_s=patience, anyway=anyway))
    except (BusyMachine, PassFailed) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    files.write(output, text)
    click.echo(f"machine file: {output}", err=True)
