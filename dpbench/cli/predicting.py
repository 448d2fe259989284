"""Predicting: the commands `dpbench predict`, for other machines, and `dpbench probe`, which measures this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dpbench.cli.ending import EXIT_FAILED
from dpbench.cli.options import Names, Numbers, Schedules, patience_option

DEVICES = (1, 2, 4, 8)


@click.command()
@click.option("--machine", "machine_name", help="A machine of `dpbench list machines`, or a TOML file.")
@click.option("--models", type=Names(), default=(), help="Reference models or known ones: resnet50,bert-base.")
@click.option("--model", "own", multiple=True, help="Your own model, package.module:name; may be repeated.")
@click.option("--strategies", type=Names(), default=(), help="[default: single,torch_dp,dp,ddp]")
@click.option("--schedules", type=Schedules(), multiple=True, help="Schedules of dp.  [default: reference]")
@click.option("--devices", type=Numbers(), default=(), help="Device counts.  [default: 1,2,4,8, up to the machine's]")
@click.option("--batch-sizes", type=Numbers(), default=(), help="Global batch sizes (strong scaling).")
@click.option(
    "--batch-per-device", type=Numbers(), default=(), help="Batch sizes per device (weak scaling).  [default: 32]"
)
@click.option(
    "--size", type=click.Choice(["small", "full"]), default="full", show_default=True, help="Size of reference models."
)
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--step-s", type=click.FloatRange(min=0, min_open=True), help="Measured seconds per step on one device.")
@click.option(
    "--from", "measured", type=click.Path(path_type=Path, exists=True),
    help="A results file with steps of the strategy `single` that were measured on one device of this machine.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Use formulas only: no phases, and only the schedule reference.")
@click.option("--memory", is_flag=True, help="Predict each device's peak memory too; takes seconds per model.")
@click.option("--max-batch", is_flag=True, help="Search the largest batch that fits; slower than --memory.")
@click.option(
    "--score",
    "table",
    type=click.Path(path_type=Path, exists=True),
    help="Score predictions against the measurements in this CSV file.",
)
@click.option("--json", "as_json", is_flag=True, help="With --score: print JSON.")
@click.option("--all-rows", is_flag=True, help="With --score: include repeats, and suspect and low-trust rows.")
@click.option("--store", type=click.Path(path_type=Path), help="Write the predictions as a run of this results file.")
def predict(table: Path | None, as_json: bool, all_rows: bool, **options: Any) -> None:
    """Predict steps on another machine, phase by phase, with 80 % intervals; or score predictions.

    --score takes a CSV file of published measurements, in which each group of rows must include a row of one device.
    """
    if table:
        _score(table, as_json, all_rows)
        return
    from dataclasses import replace

    from dpbench.predict import cases, stored, what_if
    from dpbench.predict import table as text
    from dpbench.predict.needs import needs
    from dpbench.records import machine

    models = (*options["models"], *options["own"])
    if not options["machine_name"] or not models:
        raise click.UsageError("give --machine and --models, such as --machine dgx-a100 --models resnet50; or --score")
    described = machine.load(options["machine_name"])
    batches = {name: options[name] for name in ("batch_sizes", "batch_per_device")}
    if not any(batches.values()):
        batches["batch_per_device"] = (32,)
    asked = cases.sweep(
        models, "cpu" if described.logical else "cuda",
        strategies=options["strategies"] or cases.strategies(described),
        devices=options["devices"] or tuple(n for n in DEVICES if n <= cases.most_devices(described)),
        schedules=tuple(one for given in options["schedules"] for one in given) or ("reference",),
        size=options["size"], precision=options["precision"], **batches,
    )  # fmt: skip
    # only ddp runs on more than one node; if no other case is left, the prediction explains why it refuses
    asked = [case for case in asked if case.traits.ranks or case.devices <= described.gpu.count] or asked
    _check(described, options)
    samples = next(iter(batches["batch_per_device"] or batches["batch_sizes"]))
    known = (options["step_s"], samples) if options["step_s"] else None
    steps = stored.read(options["measured"], asked, described) if options["measured"] else {}
    predictor = cases.Predictor(
        described, given=known, by_formula=options["quick"], measured={key: one.profile for key, one in steps.items()}
    )
    found = [predictor.predict(case) for case in asked]
    basis = "only steps on one device were measured there" if described.logical else "all steps below are predictions"
    click.echo(f"{described.name}: {described.description}; {basis}")
    click.echo("".join(f"{one.words}\n" for one in steps.values()))
    click.echo(text.predictions(found))
    if options["memory"] or options["max_batch"]:
        held = list(needs(asked, described, largest=options["max_batch"]))
        found = [replace(one, need=need) for one, need in zip(found, held, strict=True)]
        click.echo(f"\n{text.needs(held)}")
    if not (options["quick"] or described.logical) and (changes := what_if.what_ifs(predictor, asked)):
        click.echo(f"\n{text.what_ifs(changes)}")
    if options["store"]:
        run_id = cases.keep(options["store"], found, described)
        click.echo(f"store: {options['store']}   run: {run_id[:8]}", err=True)


def _check(machine: Any, options: Mapping[str, Any]) -> None:
    """Check that the options agree with each other and with the machine. Raises UsageError otherwise."""
    if options["step_s"] and options["measured"]:
        raise click.UsageError("--step-s and --from both give the step time on one device: leave out one of them")
    given = [flag for flag in ("step_s", "quick", "memory", "max_batch") if options[flag]]
    if machine.logical and given:
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in given)
        raise click.UsageError(
            f"{flags} can be used for GPUs only. {machine.name} has logical CPU devices, which share one memory; they "
            "are predicted from measured phases: give only --from FILE"
        )


def _score(path: Path, as_json: bool, all_rows: bool) -> None:
    """Print the prediction errors for published measurements."""
    import json

    from dpbench.predict import calibration
    from dpbench.predict import table as text
    from dpbench.predict.scoring import score

    scored, excluded = score.score(path, all_rows=all_rows)
    lines = score.lines(scored, excluded)
    if as_json:
        click.echo(json.dumps(score.as_json(lines), indent=1))
        return
    click.echo(text.scores(lines))
    if known := calibration.lines([one.matched for one in scored]):
        click.echo(f"\npredictions of each model with a machine calibrated on other models:\n{text.scores(known)}")
    if excluded:
        click.echo(f"\nleft out:\n{text.excluded(excluded)}")


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="The TOML file to write.  [default: stdout]")
@patience_option
@click.option("--anyway", is_flag=True, help="Measure even if the machine is busy, and label the file NOISY.")
def probe(output: Path | None, patience: float | None, anyway: bool) -> None:
    """Measure this machine in a minute, while nothing else runs, and write a machine file for predictions."""
    from dpbench.probe import Busy, measure_toml

    try:
        text = measure_toml(lambda line: click.echo(line, err=True), patience_s=patience, anyway=anyway)
    except Busy as busy:
        click.echo(f"error: {busy}", err=True)
        sys.exit(EXIT_FAILED)
    click.echo(text, nl=False) if output is None else output.write_text(text)
