"""The command `dpbench predict`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.option("--machine", "machine_name", help="A machine of `dpbench list machines`, or a TOML file of your own.")
@click.option("--models", help="Models: dpbench's, or well-known ones, such as resnet50,bert-base.")
@click.option("--model", "own", multiple=True, help="Your own model, package.module:name; may be repeated.")
@click.option("--strategies", default="single,torch_dp,dp,ddp", show_default=True)
@click.option("--schedules", multiple=True, help="Schedules of the strategy dp.  [default: reference]")
@click.option("--devices", default="1,2,4,8", help="Device counts.  [default: 1,2,4,8]")
@click.option("--batch-sizes", help="Global batch sizes (strong scaling).")
@click.option("--batch-per-device", help="Batch sizes per device (weak scaling).  [default: 32]")
@click.option("--size", type=click.Choice(["small", "full"]), default="small", show_default=True)
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--step-s", type=click.FloatRange(min=0, min_open=True), help="The known step of one device, seconds.")
@click.option("--quick", is_flag=True, help="By formula: no phases, no schedules above reference.")
@click.option("--score", "table", type=click.Path(path_type=Path, exists=True), help="Predict published rows instead.")
@click.option("--json", "as_json", is_flag=True, help="With --score: print JSON.")
@click.option("--all-rows", is_flag=True, help="With --score: repeats, suspect and low-trust rows too.")
@click.option("--store", type=click.Path(path_type=Path), help="Write the predictions as a run of this results file.")
def predict(table: Path | None, as_json: bool, all_rows: bool, **options: Any) -> None:
    """Predict steps on a machine that is not here, phase by phase, with 80 % intervals; or score predictions.

    --score takes a CSV of published measurements, in which the rows of a group have their own one-device row.
    """
    if table:
        _score(table, as_json, all_rows)
        return
    from dpbench import machine, plan
    from dpbench.predict import cases, remedies
    from dpbench.predict import table as text

    models = (*_names(options["models"]), *options["own"])
    if not options["machine_name"] or not models:
        raise click.UsageError("give --machine and --models, as in: --machine dgx-a100 --models resnet50; or --score")
    described = machine.load(options["machine_name"])
    batches = {name: _numbers(options[name], name) for name in ("batch_sizes", "batch_per_device")}
    if not any(batches.values()):
        batches["batch_per_device"] = (32,)
    asked = cases.sweep(
        models, strategies=_names(options["strategies"]),
        devices=tuple(count for count in _numbers(options["devices"], "devices") if count <= described.devices),
        schedules=tuple(one for given in options["schedules"] for one in plan.split_schedules(given)) or ("reference",),
        size=options["size"], precision=options["precision"], **batches,
    )  # fmt: skip
    asked = [case for case in asked if case.strategy == "ddp" or case.devices <= described.gpu.count]
    samples = next(iter(batches["batch_per_device"] or batches["batch_sizes"]))
    known = (options["step_s"], samples) if options["step_s"] else None
    predictor = cases.Predictor(described, given=known, by_formula=options["quick"])
    found = [predictor.predict(case) for case in asked]
    click.echo(f"{described.name}: {described.description}; nothing here was measured on it\n")
    click.echo(text.predictions(found))
    if not options["quick"] and (changes := remedies.remedies(predictor, asked)):
        click.echo(f"\n{text.remedies(changes)}")
    if options["store"]:
        run_id = cases.keep(options["store"], found, described)
        click.echo(f"store: {options['store']}   run: {run_id[:8]}", err=True)


def _score(path: Path, as_json: bool, all_rows: bool) -> None:
    """Print how well published rows are predicted."""
    import json

    from dpbench.predict import calibrate, score
    from dpbench.predict import table as text

    scored, excluded = score.score(path, all_rows=all_rows)
    lines = score.lines(scored, excluded)
    if as_json:
        click.echo(json.dumps(score.as_json(lines), indent=1))
        return
    click.echo(text.scores(lines))
    if known := calibrate.lines([one.matched for one in scored]):
        click.echo(f"\nwith a machine calibrated on other models than the one predicted:\n{text.scores(known)}")
    if excluded:
        click.echo(f"\nleft out:\n{text.excluded(excluded)}")


def _names(text: str | None) -> tuple[str, ...]:
    """Split at commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _numbers(text: str | None, option: str) -> tuple[int, ...]:
    """Split whole numbers at commas."""
    try:
        return tuple(int(part) for part in _names(text))
    except ValueError:
        name = f"--{option.replace('_', '-')}"
        raise click.UsageError(f"{name} {text!r} is no comma-separated list of whole numbers, such as 1,2,4") from None
