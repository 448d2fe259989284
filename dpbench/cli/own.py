"""Own: the commands for the user's model and DataLoader.

`dpbench init` writes a model file. `dpbench check` takes a step with a model and prints the
results. `dpbench loaders` finds how many workers a DataLoader needs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dpbench.cli.options import (
    EXIT_FAILED,
    EXIT_USAGE,
    EXITS,
    Documented,
    Value,
    json_option,
    one_model,
    option_of,
    report_option,
    store_option,
)
from dpbench.cli.showing import check_page
from dpbench.records import files
from dpbench.records.options import OPTIONS

if TYPE_CHECKING:
    from dpbench.records import Case


@click.command(
    cls=Documented,
    short_help="Take a step with your model, and print the model's faults.",
    exits={
        0: "the model can be measured",
        EXIT_FAILED: "the model has a fault, or a file cannot be read",
        EXIT_USAGE: "wrong usage",
    },
)
@option_of(
    "models",
    required=True,
    help="A model: file.py:name, package.module:name, library:name, or a reference model.",
    form="NAME",
)
@option_of("size")
@click.option(
    "--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Rows of the batch."
)
@option_of("optimizer", help="own: the optimizer that the model's file defines.")
@option_of("limit", help="Seconds after which the check fails.")
@json_option
def check(
    models: tuple[str, ...],
    size: str,
    batch_size: int,
    optimizer: str,
    limit: float,
    as_json: bool,
) -> None:
    """Take one step of a model on one device and one verified step on two; print the results.

    Each fault names the function that you must change in the model's file. `dpbench run` begins
    with the same check, but on one device only.
    """
    from dpbench.measure import checks, scratch
    from dpbench.measure.server import Server
    from dpbench.records import Case, Status, plan
    from dpbench.records.options import check_model
    from dpbench.records.words import dumps

    model = one_model(models, "check")
    check_model(model)
    case = plan.model_check(
        Case(model=model, strategy="", batch_size=batch_size, size=size, optimizer=optimizer)
    )
    click.echo(f"{model}: a step on one device, then a verified step on two ...", err=True)
    with scratch.folder() as folder, Server(folder) as server:
        checked = server.check(replace(case, batch_size=batch_size, devices=2), limit)
    if as_json:
        click.echo(
            dumps(
                {
                    "model": model,
                    "status": checked.status.value,
                    "reason": checked.reason,
                    **msgspec.to_builtins(checked.facts.model_check or {}),
                }
            )
        )
    else:
        click.echo("\n".join(checks.model_words(checked)))
    sys.exit(0 if checked.status is Status.OK else EXIT_FAILED)


@click.command(
    cls=Documented,
    short_help="Write a commented example of a model file that runs.",
    exits=EXITS
    | {
        0: "the file was written",
        EXIT_USAGE: "the file exists already, or wrong usage",
    },
)
@click.argument("file", type=click.Path(path_type=Path), default="model.py")
def init(file: Path) -> None:
    """Write FILE (default: model.py) with a model that runs; comments mark the parts to change."""
    from dpbench.records import registry

    if file.exists():
        raise click.UsageError(f"{file} exists already: give another name")
    template = registry.folder_of("models") / "_template.py"
    files.write(file, template.read_text(encoding="utf-8").replace("{file}", str(file)))
    click.echo(f"wrote {file}; next: dpbench check --models {file}:model")


@click.command(
    cls=Documented,
    short_help="Find how many workers a DataLoader needs.",
    exits={
        0: "all measurements succeeded",
        EXIT_FAILED: "a measurement failed, or a file cannot be read or written",
        EXIT_USAGE: "wrong usage",
        130: "interrupted; the same command resumes the run",
    },
)
@click.option(
    "--dataset",
    required=True,
    help=(
        "Your dataset, file.py:name or package.module:name: a map-style Dataset, or a callable"
        " without arguments that returns one."
    ),
)
@click.option(
    "--workers",
    type=Value(replace(OPTIONS["devices"], least=0, most=1024)),
    help=(
        "The numbers of workers to measure.  [default: 0, and powers of two up to the number of"
        " cores]"
    ),
)
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True)
@click.option(
    "--examples",
    type=click.IntRange(1, 10**7),
    default=1024,
    show_default=True,
    help="Minimum number of timed examples per measurement; they are drawn at random.",
)
@click.option("--pin-memory", is_flag=True, help="Copy each batch into pinned memory.")
@click.option("--prefetch-factor", type=click.IntRange(1, 1000), default=2, show_default=True)
@click.option("--persistent-workers", is_flag=True, help="Keep the workers between epochs.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Fresh processes per setting.",
)
@option_of("limit", help="Seconds per measurement.")
@option_of(
    "models",
    help=(
        "Compare the loading rate with a step of this model on data in memory: a reference model,"
        " or your own, file.py:name or package.module:name."
    ),
    form="NAME",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(0, min_open=True),
    help="Compare the loading rate with a step of this length.",
)
@report_option
@json_option
@option_of("patience")
@store_option
def loaders(
    dataset: str,
    store: Path,
    report: Path | None,
    rounds: int,
    limit: float,
    as_json: bool,
    patience: float | None,
    **options: Any,
) -> None:
    """Measure a DataLoader's rate by number of workers, and compare it with that of a step.

    The recommended number of workers is the least with which an epoch, computed from the batches,
    the start of the workers and the step, takes at most 5 % longer than the shortest.
    """
    from dpbench.api.progress import Detail
    from dpbench.cli.running import Output, measure_and_show
    from dpbench.measure import run as runner
    from dpbench.records import objects
    from dpbench.store import Naming

    objects.check(dataset, "dataset")
    check_page(report)
    cases = _loader_cases(dataset, **options)
    output = Output(store=store, report=report, as_json=as_json, detail=Detail.USUAL)
    how = runner.How(rounds=rounds, limit_s=limit, patience_s=patience)
    measure_and_show(
        output,
        Naming(),
        lambda opened, listen: runner.run(cases, opened, how, listen=listen),
    )


def _loader_cases(
    dataset: str,
    *,
    workers: tuple[int, ...] | None,
    batch_size: int,
    models: tuple[str, ...],
    step_ms: float | None,
    **loading: Any,
) -> list[Case]:
    """Return the cases of the DataLoader, and with a model, that of the step to compare with."""
    from dpbench.hardware.provenance import usable_cores
    from dpbench.records.loading import Loading, workers_default

    if models and step_ms:
        raise click.UsageError(
            "--models and --step-ms both give the step to compare with: leave out one of them"
        )
    counts = workers or workers_default(usable_cores())
    settings = Loading(**loading, step_s=(step_ms or 0.0) / 1e3)
    cases = [settings.case(dataset, count, batch_size) for count in dict.fromkeys(counts)]
    return [*cases, *([_step_of(one_model(models, "loaders"), batch_size)] if models else [])]


def _step_of(model: str, batch_size: int) -> Case:
    """Return the case of a step on one device, without importing the user's model."""
    from dpbench.measure.selection import default_kind
    from dpbench.records import plan
    from dpbench.records.options import check_model

    check_model(model)
    return plan.baseline(model=model, batch_size=batch_size, device_kind=default_kind())
