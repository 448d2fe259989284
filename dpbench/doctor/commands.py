"""Commands: `dpbench doctor`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dpbench.cli import cli, shapes
from dpbench.cli.options import (
    EXIT_FAILED,
    EXIT_USAGE,
    EXIT_WORSE,
    Documented,
    json_option,
    option_of,
)

if TYPE_CHECKING:
    from dpbench.doctor.faults import Finding


class MadeCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy between two GPUs, or between the host (-1) and a GPU.

    `way` is "direct", "through the host", "pinned" or "pageable". `wrong` is the number of bytes
    that differed on arrival. `failure` is "" if the copy ended.
    """

    source: int
    target: int
    way: str
    bytes_per_s: float
    promised_bytes_per_s: float
    wrong: int
    failure: str


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench doctor`: the findings, the faults first, and what they are based on.

    `all_reduce_bytes_per_s` is what each GPU sent per second, null without a result.
    """

    findings: Sequence[Finding]
    checked: Sequence[str]
    unchecked: Sequence[str]
    gpus: Sequence[Mapping[str, object]]
    copies: Sequence[MadeCopy]
    all_reduce_bytes_per_s: float | None
    schema: int = shapes.SCHEMA


@cli.command(
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
def doctor(
    as_json: bool, report: Path | None, output: Path | None, patience: float | None, anyway: bool
) -> None:
    """Examine this machine: copies between GPUs, links, sockets, limits, settings.

    It takes less than a minute, needs no root, and changes nothing. Copies are compared on arrival;
    one that hangs is named. Each finding has its evidence, its cost, the change that helps, and how
    to undo it.
    """
    from dpbench.doctor import faults, words
    from dpbench.doctor.examine import examine

    if output is not None:
        _write_machine(output, patience, anyway=anyway)
    machine = examine(lambda line: click.echo(line, err=True))
    found = faults.found(machine)
    done, undone = faults.checked(machine)
    if report is not None:
        from dpbench.doctor import page

        report.write_text(page.render(machine, found, (done, undone)), encoding="utf-8")
    if as_json:
        shapes.show(
            Examination(
                findings=found,
                checked=done,
                unchecked=undone,
                gpus=machine.gpus,
                copies=[
                    MadeCopy(
                        source=one.copy.source,
                        target=one.copy.target,
                        way=one.copy.way,
                        bytes_per_s=one.bytes_per_s,
                        promised_bytes_per_s=words.promised_bytes_per_s(machine, one.copy),
                        wrong=one.wrong,
                        failure=one.failure,
                    )
                    for one in machine.transfers
                ],
                all_reduce_bytes_per_s=(
                    machine.all_reduce.bytes_per_s or None if machine.all_reduce else None
                ),
            )
        )
    else:
        click.echo(words.text(machine, found, (done, undone)))
    sys.exit(EXIT_WORSE if any(one.wrong for one in found) else 0)


def _write_machine(output: Path, patience: float | None, *, anyway: bool) -> None:
    from dpbench.doctor.probe import BusyMachine, PassFailed, measure_toml

    try:
        text = measure_toml(
            lambda line: click.echo(line, err=True), patience_s=patience, anyway=anyway
        )
    except (BusyMachine, PassFailed) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    output.write_text(text, encoding="utf-8")
    click.echo(f"machine file: {output}", err=True)
