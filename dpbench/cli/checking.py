"""Checking: `dpbench check` takes a step with a model and prints the results; `dpbench init` writes a model file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from dpbench.cli.config import EXITS, Documented
from dpbench.cli.options import EXIT_FAILED, EXIT_USAGE, json_option


@click.command(
    cls=Documented,
    short_help="Take a step with your model, and print its faults.",
    exits={0: "the model can be measured", EXIT_FAILED: "the model has a fault", EXIT_USAGE: "wrong usage"},
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

    Each fault names the function of the model's file that must change. `dpbench run` begins with the same check, but on
    one device only.
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
