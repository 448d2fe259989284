"""Commands: `dpbench predict`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dpbench.api import STORE
from dpbench.api.stored import choose, list_unreadable
from dpbench.cli import shapes
from dpbench.cli.options import (
    EXIT_USAGE,
    EXITS,
    Documented,
    json_option,
    option_of,
)
from dpbench.cli.showing import print_answers
from dpbench.predict.tables import (
    PredictedCase,
    Predictions,
    needs_table,
    predictions_table,
    published_table,
    unmodelled,
    what_ifs_table,
)
from dpbench.records import words
from dpbench.records.files import UnreadableFile
from dpbench.records.options import OPTIMIZERS, PREDICTABLE

if TYPE_CHECKING:
    from dpbench.analysis.answer import Answer
    from dpbench.analysis.summary import Row
    from dpbench.predict.cases import Need, Prediction, Predictor
    from dpbench.predict.machine import Machine
    from dpbench.predict.observed_loop import ObservedLoop
    from dpbench.predict.stored import Stored
    from dpbench.predict.what_if import WhatIf
    from dpbench.records import Case

DEVICES = (1, 2, 4, 8)


@click.command(
    cls=Documented,
    short_help="Predict steps on another machine.",
    exits=EXITS | {EXIT_USAGE: "wrong usage, or a machine or model that lacks a needed value"},
)
@click.option(
    "--machine",
    "machine_name",
    help=(
        'A name from `dpbench list machines`, a TOML file, or a line such as "8x A100 PCIe 40GB, 2'
        ' sockets, PCIe 4", whose machine file is shown.'
    ),
)
@option_of(
    "models",
    help="Reference models, well-known ones such as resnet50, and your own as file.py:name or"
    " package.module:name.",
)
@option_of(
    "strategies",
    help="Strategies, such as ddp or dp[cached].  [default: single,torch_dp,dp,ddp]",
)
@option_of("schedules", help="Schedules of dp.  [default: reference]")
@option_of("devices", help="Numbers of devices.  [default: 1,2,4,8 if available]")
@option_of("batch_sizes", help="Global batch sizes (strong scaling).")
@option_of("batch_per_device", help="Batch sizes per device (weak scaling).  [default: 32]")
@option_of("size", default="full", help="Size of reference models.")
@option_of("precision", choices=PREDICTABLE, help="")
@option_of(
    "optimizer",
    choices=OPTIMIZERS[:-1],
    help="The optimizer of the predicted step and memory; sgd has momentum.",
)
@click.option(
    "--step-s", type=click.FloatRange(1e-9, 1e9), help="Measured seconds of a step on one device."
)
@click.option(
    "--from",
    "measured",
    help=(
        "Predict from measured steps. With --models: FILE, a results file with steps of the"
        " strategy `single` on one device of the machine; steps on several of its GPUs correct the"
        " predictions. Without --models: a watched or imported run, as FILE, FILE:RUN, or RUN in"
        " dpbench.db."
    ),
)
@click.option(
    "--bus",
    metavar="GB/S|FILE",
    help=(
        "The measured bus bandwidth of an all-reduce in GB/s, or a file with the output of"
        " nccl-tests."
    ),
)
@click.option(
    "--memory",
    is_flag=True,
    help="Also predict each device's peak memory; takes seconds per model.",
)
@click.option(
    "--max-batch", is_flag=True, help="Search for the largest batch that fits into memory."
)
@json_option
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="Store the predictions as a run in this results file.",
)
def predict(as_json: bool, **options: Any) -> None:
    """Predict steps on another machine with GPUs, phase by phase, with 80 % intervals."""
    from dpbench.analysis.answer import answers
    from dpbench.analysis.summary import rows
    from dpbench.predict import cases, counts, machine, stored, what_if
    from dpbench.predict.cases import needs
    from dpbench.records.resources import Resources

    models = options["models"]
    path, run = _source(options["measured"]) if options["measured"] else (None, None)
    loop = _loop(path, run) if path and not models else None
    models = (loop.case.model,) if loop else models
    if not options["machine_name"] or not models:
        raise click.UsageError(
            "give --machine and --models, such as --machine dgx-a100 --models resnet50"
        )
    if run and not loop:
        raise click.UsageError(
            "with --models, --from reads measured steps from a whole file: give --from FILE without"
            " a run"
        )
    described = machine.load(options["machine_name"])
    in_words = machine.is_line(options["machine_name"])
    file = machine.text_of_machine(options["machine_name"]) if in_words else ""
    if options["bus"]:
        described = _with_bus(described, options["bus"])
    batches = {name: options[name] for name in ("batch_sizes", "batch_per_device")}
    if not any(batches.values()):
        batches |= {"batch_sizes": (loop.case.batch_size,)} if loop else {"batch_per_device": (32,)}
    precision = loop.case.precision if loop else options["precision"]
    profile = loop.on(described) if loop else None  # raises for a loop that lacks a needed fact
    selected = _asked(
        described, models, options, observed=bool(loop), precision=precision, **batches
    )
    _check(described, selected, loop, options)
    samples = next(iter(batches["batch_per_device"] or batches["batch_sizes"]))
    given = (options["step_s"], samples) if options["step_s"] else None
    steps = stored.read(path, selected, described) if path and not profile else {}
    if profile:
        steps = {counts.key(case): profile for case in selected}
    predictor = cases.Predictor(
        described,
        given=given,
        measured={key: one.profile for key, one in steps.items()},
        lost=stored.lost(path, steps, described) if path and not profile else {},
    )
    predictions = [predictor.predict(case) for case in selected]
    memory = options["memory"] or options["max_batch"]
    held = list(needs(selected, described, largest=options["max_batch"])) if memory else []
    if held:
        predictions = [replace(one, need=need) for one, need in zip(predictions, held, strict=True)]
    changes = what_if.what_ifs(predictor, selected)
    found = {row.case: row for row in rows([one.trial() for one in predictions])}
    answered = answers([*found.values()], Resources(described=options["machine_name"]))
    if as_json:
        shapes.show(
            Predictions(
                machine=described.name,
                description=described.description,
                machine_file=file,
                assumed=described.assumptions,
                peer_access=described.peer_access,
                what_ifs=changes,
                answers=[shapes.AnswerFacts.of(one) for one in answered],
                cases=[
                    PredictedCase.of(one, found[one.case], predictor.published(one.case))
                    for one in predictions
                ],
                measured_steps=[one.words for one in steps.values()],
            )
        )
    else:
        tables = _tables(predictor, predictions, found)
        _print(described, [*steps.values()], answered, tables, held, changes)
    if options["store"]:
        run_id = cases.keep(options["store"], predictions, described)
        click.echo(f"store: {options['store']}   run: {run_id[:8]}", err=True)


def _asked(
    described: Machine, models: Sequence[str], options: Mapping[str, Any], **axes: Any
) -> list[Case]:
    """Return the cases to predict; `axes` are further arguments of `cases.sweep`.

    Cases in one process that need the GPUs of several nodes are left out, and listed on stderr.
    """
    from dpbench.predict import cases

    selected = cases.sweep(
        models,
        strategies=options["strategies"] or cases.STRATEGIES,
        devices=options["devices"] or tuple(n for n in DEVICES if n <= described.devices),
        schedules=options["schedules"] or ("reference",),
        size=options["size"],
        **axes,
    )
    selected = [replace(case, optimizer=options["optimizer"]) for case in selected]
    within = [case for case in selected if case.traits.ranks or case.devices <= described.gpu.count]
    if within and (beyond := [case for case in selected if case not in within]):
        labels = ", ".join(dict.fromkeys(case.label for case in beyond))
        click.echo(
            f"left out, because one process cannot use the GPUs of several nodes: {labels}",
            err=True,
        )
    return within or selected  # if no case is left, the predictor gives the reason


def _given() -> list[str]:
    context = click.get_current_context()
    source = context.get_parameter_source
    return [name for name in context.params if source(name) is ParameterSource.COMMANDLINE]


def _refuse_without_effect(selected: Sequence[Case]) -> None:
    """Raise UsageError for an option without effect, and for --step-s with several models."""
    from dpbench.predict import counts

    models = list(dict.fromkeys(case.model for case in selected))
    problems = {
        "size": (
            all(map(counts.named, models)),
            "dpbench knows only one size of each well-known model",
        ),
        "schedules": (
            not any(case.schedule for case in selected),
            "none of the strategies has schedules",
        ),
        "bus": (all(case.devices == 1 for case in selected), "no case has several devices"),
        "step_s": (
            len(models) > 1,
            f"it is the step time of one model, and {len(models)} models are given",
        ),
    }
    for name in _given():
        wrong, reason = problems.get(name, (False, ""))
        if wrong:
            raise click.UsageError(f"--{name.replace('_', '-')}: {reason}: leave it out")


def _with_bus(described: Machine, given: str) -> Machine:
    """Return the machine with the bus bandwidth `given`: GB/s, or a file that nccl-tests printed.

    Raises BadParameter for a number out of range, and UnreadableFile for an unreadable file.
    """
    from dpbench.predict import network

    try:
        return replace(described, collective=network.collective(given))
    except UnreadableFile as error:
        raise UnreadableFile("{}: {why}", option="bus", why=error) from None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--bus") from None


def _source(source: str) -> tuple[Path, str | None]:
    """Return the results file and the run that --from names, None for a file alone.

    Raises UnreadableFile if there is no such file.
    """
    name, _, run = source.rpartition(":")
    if Path(source).is_file():
        return Path(source), None
    if name and Path(name).is_file():
        return Path(name), run
    if STORE.is_file():
        return STORE, source
    raise UnreadableFile(
        f"--from {source}: there is no such file, and no file {STORE} in this folder: give FILE or"
        " FILE:RUN"
    )


def _loop(path: Path, run: str | None) -> ObservedLoop:
    """Return the watched or imported loop of a run, by default the newest that has one.

    Raises UsageError if there is none.
    """
    from dpbench.predict import observed_loop
    from dpbench.records.resources import Resources
    from dpbench.store import Store

    with Store.read(path, list_unreadable) as opened:
        for one in [choose(opened, run)] if run else opened.newest():
            if found := observed_loop.of_run(opened.trials(one.id), Resources.of(one.facts).gpu):
                return found
    what = f"the run {run}" if run else f"{path}"
    raise click.UsageError(
        f"--from: {what} has no watched or imported loop; to use its steps of the strategy single"
        " instead, also give --models"
    )


def _tables(
    predictor: Predictor, predictions: Sequence[Prediction], rows: Mapping[Case, Row]
) -> Iterator[str]:
    """Yield the table of predictions, what it includes beyond the model, and others' measurements.

    `rows` has the row of each case.
    """
    yield predictions_table(predictions, [rows[one.case] for one in predictions])
    if sentence := unmodelled(predictions):
        yield sentence
    if near := [step for one in predictions for step in predictor.published(one.case)]:
        yield f"measured by others, nearest to these cases:\n{published_table(near)}"


def _print(
    machine: Machine,
    steps: Iterable[Stored],
    answered: Sequence[Answer],
    tables: Iterable[str],
    held: Sequence[Need],
    changes: Sequence[WhatIf],
) -> None:
    click.echo(f"{machine.name}: {machine.description}; all steps below are predictions")
    for assumption in machine.assumptions:
        click.echo(f"assumed: {assumption}")
    if machine.gpu.count > 1:
        click.echo(f"peer access between GPUs: {'yes' if machine.peer_access else 'no'}")
    click.echo("".join(f"{one.words}\n" for one in steps))
    click.echo("\n\n".join(tables))
    if held:
        click.echo(f"\n{needs_table(held)}")
    if changes:
        click.echo(f"\n{what_ifs_table(changes)}")
    print_answers(answered)


def _check(
    machine: Machine,
    selected: Sequence[Case],
    loop: ObservedLoop | None,
    options: Mapping[str, Any],
) -> None:
    """Raise UsageError if options conflict with each other, the machine, the cases or the loop."""
    nodes = [case for case in selected if case.devices > machine.gpu.count]
    if options["bus"] and nodes:
        raise click.UsageError(
            f"--bus is the bandwidth within a node of {words.count(machine.gpu.count, 'GPU')}, and"
            f" {nodes[0].label} runs on {-(-nodes[0].devices // machine.gpu.count)} nodes: give"
            " fewer --devices, or a machine file with the table [collective], whose bandwidth"
            " dpbench uses for any number of nodes"
        )
    given = [f"--{name}" for name in ("precision", "size", "optimizer") if name in _given()]
    if loop and given:
        raise click.UsageError(
            f"{' and '.join(given)} cannot change a step that was watched or imported: leave out"
            f" {' and '.join(given)}"
        )
    if options["step_s"] and options["measured"]:
        raise click.UsageError(
            "--step-s and --from both give the step time on one device: leave out one of them"
        )
    _refuse_without_effect(selected)
