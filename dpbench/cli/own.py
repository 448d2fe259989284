"""Own: the commands for the user's model and DataLoader, `dpbench init`, `dpbench check` and `dpbench loaders`.

`dpbench init` writes a model file. `dpbench check` takes a step with a model and prints the results. `dpbench loaders`
finds how many workers a DataLoader needs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpbench.cli.options import (
    EXIT_FAILED,
    EXIT_USAGE,
    EXITS,
    NUMBERS,
    SWITCHES,
    Bytes,
    Documented,
    json_option,
    patience_option,
)

if TYPE_CHECKING:
    from dpbench.measure.loaders import LoaderPlan, Sweep
    from dpbench.records import Case

LOADERS_REPORT = Path("reports/loaders/index.html")
MOST_WORKERS = 1024


@click.command(
    cls=Documented,
    short_help="Take a step with your model, and print the model's faults.",
    exits={
        0: "the model can be measured",
        EXIT_FAILED: "the model has a fault, or a file cannot be read",
        EXIT_USAGE: "wrong usage",
    },
)
@click.option("--model", required=True, help="file.py:name, package.module:name or library:name.")
@click.option("--size", type=click.Choice(["small", "full"]), default="small", show_default=True, help="Model size.")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Rows of the batch.")
@click.option(
    "--optimizer",
    default="sgd",
    show_default=True,
    help="sgd, adam, adamw, or own: the optimizer that the model's file defines.",
)
@click.option("--limit", type=float, default=120.0, show_default=True, help="Seconds after which the check fails.")
@json_option
def check(model: str, size: str, batch_size: int, optimizer: str, limit: float, as_json: bool) -> None:
    """Build a model, take one step on one device and one verified step on two, and print the results.

    Each fault names the function that you must change in the model's file. `dpbench run` begins with the same check,
    but on one device only.
    """
    from dpbench.measure import checks, scratch
    from dpbench.measure.server import Server
    from dpbench.records import Case, Status, plan, registry
    from dpbench.records.options import check_model
    from dpbench.records.words import dumps

    if ":" in model:
        registry.check_module(model)
    else:
        check_model(model)
    case = plan.model_check(Case(model=model, strategy="", batch_size=batch_size, size=size, optimizer=optimizer))
    with scratch.folder() as folder, Server(folder) as server:
        found = server.check(replace(case, batch_size=batch_size, devices=2), limit)
    if as_json:
        click.echo(dumps({"model": model, "status": found.status.value, "reason": found.reason,
                          **found.provenance.get("model_check", {})}))  # fmt: skip
    else:
        click.echo("\n".join(checks.model_words(found)))
    sys.exit(0 if found.status is Status.OK else EXIT_FAILED)


@click.command(
    cls=Documented,
    short_help="Write a commented example of a model file that runs.",
    exits=EXITS | {0: "the file was written", EXIT_USAGE: "the file exists already, or wrong usage"},
)
@click.argument("file", type=click.Path(path_type=Path), default="model.py")
def init(file: Path) -> None:
    """Write FILE (default: model.py) with a model that runs; comments mark the parts to change."""
    from dpbench.records import registry

    if file.exists():
        raise click.UsageError(f"{file} exists already: give another name")
    template = registry.folder_of("models") / "_template.py"
    file.write_text(template.read_text(encoding="utf-8").replace("{file}", str(file)), encoding="utf-8")
    click.echo(f"wrote {file}; next: dpbench check --model {file}:model")


@click.command(
    cls=Documented,
    short_help="Find how many workers a DataLoader needs.",
    exits={
        0: "all measurements succeeded",
        EXIT_FAILED: "a measurement failed, or a file cannot be read or written",
        EXIT_USAGE: "wrong usage",
        130: "interrupted",
    },
)
@click.option(
    "--dataset",
    help="Your dataset, file.py:name or package.module:name: a map-style Dataset, or a callable without arguments that "
    "returns one.  [default: a synthetic dataset]",
)
@click.option(
    "--workers",
    type=NUMBERS,
    help="The numbers of workers to measure.  [default: 0, and powers of two up to the number of cores]",
)
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True)
@click.option(
    "--examples",
    type=click.IntRange(1),
    help="Minimum number of examples per measurement.  [default: as many as load in about a second]",
)
@click.option("--pin-memory", type=SWITCHES, default="off", show_default=True)
@click.option("--prefetch-factor", type=NUMBERS, default="2", show_default=True)
@click.option("--persistent-workers", type=SWITCHES, default="off", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Fresh processes per setting.")
@click.option("--limit", type=click.FloatRange(0.1), default=60.0, show_default=True, help="Maximum seconds per batch.")
@click.option("--model", default="", help="Compare the loading rate with a step of this model on data in memory: a "
              "reference model, or your own, package.module:name.")  # fmt: skip
@click.option(
    "--step-ms", type=click.FloatRange(0, min_open=True), help="Compare the loading rate with a step of this length."
)
@click.option(
    "--cpu-ms", type=click.FloatRange(0), help="Synthetic dataset: CPU milliseconds per example.  [default: 1]"
)
@click.option(
    "--wait-ms", type=click.FloatRange(0), help="Synthetic dataset: milliseconds of waiting per example.  [default: 4]"
)
@click.option("--example-bytes", type=Bytes(), help="Synthetic dataset: bytes per example.  [default: 150528]")
@click.option("--examples-per-s", type=click.FloatRange(0, min_open=True), help="Synthetic dataset: largest "
              "total rate of all workers, like the rate of a disk.  [default: none]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print all measurements as JSON instead of the table.")
@click.option(
    "--report", type=click.Path(path_type=Path), default=LOADERS_REPORT, show_default=True,
    help="The page to write; the measurements go into a JSON file in the same folder.",
)  # fmt: skip
@patience_option
def loaders(report: Path, as_json: bool, patience: float | None, **options: Any) -> None:
    """Measure a DataLoader's rate with several numbers of workers, and compare it with the rate of a training step.

    The recommended number of workers, the knee, is the least whose rate is within 5 % of the best.
    """
    from dpbench.measure import loaders as measuring

    plan = _loaders_plan(options)
    try:
        sweep = measuring.run(plan, lambda line: click.echo(line, err=True), patience_s=patience)
    except measuring.Failed as failed:
        click.echo(f"error: {failed}", err=True)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    _show_loaders(sweep, report, as_json)
    sys.exit(EXIT_FAILED if sweep.failed else 0)


def _loaders_plan(options: dict[str, Any]) -> LoaderPlan:
    """Return the measurements that the options select. Raises UsageError if the options contradict each other."""
    from dpbench.hardware.provenance import usable_cores
    from dpbench.measure import loaders as measuring
    from dpbench.measure.request import Synthetic
    from dpbench.records import registry

    if options["model"] and options["step_ms"]:
        raise click.UsageError("--model and --step-ms both give the step to compare with: leave out one of them")
    costs = ("cpu_ms", "wait_ms", "example_bytes", "examples_per_s")
    given = [f"--{name.replace('_', '-')}" for name in costs if options[name] is not None]
    if options["dataset"] is not None:
        if given:
            said = ", ".join(given)
            raise click.UsageError(f"{said}: for the synthetic dataset only; leave out --dataset, or {said}")
        registry.check_module(options["dataset"], "--dataset")
    cpu_ms, wait_ms, example_bytes, rate = (options[name] for name in costs)
    synthetic = Synthetic(
        cpu_s=(1.0 if cpu_ms is None else cpu_ms) / 1e3, wait_s=(4.0 if wait_ms is None else wait_ms) / 1e3,
        example_bytes=150_528 if example_bytes is None else example_bytes, examples_per_s=rate or 0.0,
    )  # fmt: skip
    workers = options["workers"] or measuring.default_workers(usable_cores())
    if min(workers) < 0 or max(workers) > MOST_WORKERS:
        raise click.UsageError(f"--workers must be from 0 to {MOST_WORKERS}, got {','.join(map(str, workers))}")
    if min(options["prefetch_factor"]) < 1:
        raise click.UsageError(f"--prefetch-factor must be at least 1, got {min(options['prefetch_factor'])}")
    return measuring.LoaderPlan(
        dataset=options["dataset"] or synthetic, batch_size=options["batch_size"], examples=options["examples"],
        settings=measuring.settings(
            workers, options["pin_memory"], options["prefetch_factor"], options["persistent_workers"]
        ),
        rounds=options["rounds"], limit_s=options["limit"], step=_step_of(options),
    )  # fmt: skip


def _step_of(options: dict[str, Any]) -> Case | float | None:
    """Return the step to compare with: a case on one device for --model, seconds for --step-ms, None without both."""
    from dpbench.hardware.nvml import cuda_device_count
    from dpbench.hardware.provenance import torch_has_cuda
    from dpbench.records import Case, registry
    from dpbench.records.registry import Role

    if not options["model"]:
        return options["step_ms"] / 1e3 if options["step_ms"] else None
    if ":" in options["model"]:
        registry.check_module(options["model"])
    else:
        registry.check("models", options["model"])
    return Case(
        model=options["model"], strategy=registry.of_role(Role.BASELINE), batch_size=options["batch_size"],
        device_kind="cuda" if cuda_device_count() and torch_has_cuda() else "cpu",
    )  # fmt: skip


def _show_loaders(sweep: Sweep, report: Path, as_json: bool) -> None:
    """Print the table and the verdict of a sweep, and write its page and its JSON file."""
    from dpbench.analysis import loaders as analysis
    from dpbench.records.words import aligned
    from dpbench.report import loaders as page

    found, step = analysis.curves(sweep.readings, sweep.step), analysis.step_time(sweep.step)
    verdict = analysis.said(found, step)
    measurements, plain = report.with_suffix(".json"), sweep.to_json()
    for warning in sweep.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(plain)
    else:
        click.echo("\n".join(aligned([page.COLUMNS, *page.lines(found)], left=(0, 7, 8))))
        click.echo("\n" + "\n".join(verdict))
    # files that cannot be written must not hide the results
    report.parent.mkdir(parents=True, exist_ok=True)
    measurements.write_text(plain, encoding="utf-8")
    report.write_text(page.render(found, step, [*verdict, *sweep.warnings], sweep.facts), encoding="utf-8")
    click.echo(f"report: {report}   measurements: {measurements}", err=True)
