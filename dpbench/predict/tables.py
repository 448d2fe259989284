"""Tables and JSON of `dpbench predict`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from dpbench.cli import shapes
from dpbench.records import UNATTRIBUTED, Case, Step, ledger, names, words
from dpbench.records.schedule import EFFECTS, Schedule
from dpbench.records.spelling import dashed
from dpbench.records.words import aligned

if TYPE_CHECKING:
    from dpbench.analysis.summary import Row
    from dpbench.predict.cases import Need, Prediction
    from dpbench.predict.published import PublishedStep
    from dpbench.predict.what_if import WhatIf

SHOWN = 0.03
"""The smallest share of a step with which the table of predictions shows a phase."""


def predictions_table(predictions: Sequence[Prediction], rows: Sequence[Row]) -> str:
    """Return the predictions as a table with one line per case; `rows` has the row of each."""
    from dpbench.cli.tables import table

    profiles = [one.profile for one in predictions]
    return table(rows, more={"phases, ms": [_phases(row) for row in rows], "profile": profiles})


def _phases(row: Row) -> str:
    shown = {
        name: seconds
        for name, seconds in row.phases.items()
        if row.step and seconds >= SHOWN * row.step.value and name != UNATTRIBUTED
    }
    return " ".join(f"{name} {words.number(seconds * 1e3)}" for name, seconds in shown.items())


PUBLISHED = (
    "model",
    "strategy",
    "devices",
    "GPU",
    "slowest link",
    "batch per device",
    "precision",
    "ms/step",
    "label",
    "source",
)


def published_table(steps: Iterable[PublishedStep]) -> str:
    """Return a table of step times that others measured, each once."""
    lines = [PUBLISHED]
    for one in dict.fromkeys(steps):
        lines.append(
            (
                one.model,
                one.strategy,
                str(one.devices),
                one.gpu,
                one.link,
                f"{one.batch:g}" if one.batch else "unknown",
                one.precision,
                words.number(one.step_s * 1e3),
                one.label,
                one.source,
            )
        )
    return "\n".join(aligned(lines, left=(0, 1, 3, 4, 6, 8, 9)))


def unmodelled(predictions: Iterable[Prediction]) -> str:
    """Return a sentence on what the predictions include beyond the model; "" if nothing."""
    found = {one.deviation for one in predictions if one.deviation.mean or one.deviation.scale}
    if not found:
        return ""
    factors = [words.number(math.exp(mean)) for mean in sorted(one.mean for one in found)]
    between = " to ".join(dict.fromkeys((factors[0], factors[-1])))
    reason = (
        f"as those that others published were. A machine file of dpbench doctor, or"
        f" {dashed('from')} a file with steps on several of its GPUs, replaces this."
        if any(one.scale for one in found)
        else "as those measured on several GPUs were."
    )
    longer = f"{between} times as long as the model of a step gives"
    return f"Steps on several GPUs are {longer}, {reason}"


NEEDS = (
    "model",
    "strategy",
    "devices",
    "batch",
    "GPU 0 allocated",
    "other GPUs",
    "GPU 0 reserved",
    "with context and NCCL",
    "fits",
    "largest batch",
    "label",
)


def needs_table(needs: Iterable[Need]) -> str:
    """Return a table with each case's memory peaks and whether it fits."""
    lines: list[tuple[str, ...]] = [NEEDS]
    for need in needs:
        case = need.case
        head = (case.model, names.strategy(case), str(case.devices), str(case.batch_size))
        if need.reason:
            lines.append((*head, *["-"] * 4, need.reason, "", "PREDICTED"))
            continue
        allocated, reserved = need.peaks("allocated"), need.peaks("reserved")
        fits = {True: "yes", False: f"no: device {need.failed_device}", None: "unknown"}[need.fits]
        others = words.size(max(allocated[1:])) if allocated[1:] else ""
        held = (
            words.size(allocated[0]),
            others,
            words.size(reserved[0]),
            words.size(need.process_bytes[0]),
        )
        lines.append(
            (*head, *held, fits, "" if need.largest is None else str(need.largest), "PREDICTED")
        )
    return "\n".join(aligned(lines, left=(0, 1, 8, 10)))


def what_ifs_table(what_ifs: Sequence[WhatIf]) -> str:
    """Return a table of the predicted gains from changes of the schedule or of the machine.

    Schedules of one model share a line if the table would show the same gain for each. It describes
    the effect of the lowest rung among them.
    """
    lines = [
        (
            "model",
            "devices",
            "batch",
            "what if",
            "ms/step",
            "samples/s",
            "times as fast",
            "80 % interval",
        )
    ]
    rungs = ["", *EFFECTS]
    for _, tied in itertools.groupby(
        what_ifs, key=lambda one: (one.model, _gain(one) if one.schedule else one.change)
    ):
        group = sorted(tied, key=lambda one: rungs.index(one.schedule))
        lowest = group[0]
        change = lowest.change
        if lowest.schedule:
            names = ", ".join(one.schedule for one in group)
            change = f"schedule {names}: {EFFECTS[Schedule(lowest.schedule)]}"
        lines.append(
            (
                lowest.model,
                str(lowest.devices),
                str(lowest.batch),
                change,
                words.number(lowest.seconds * 1e3),
                words.number(lowest.batch / lowest.seconds),
                _gain(lowest),
                _between(lowest),
            )
        )
    return "\n".join(aligned(lines, left=(0, 3)))


def _gain(one: WhatIf) -> str:
    return f"{words.number(one.gain)}×"


def _between(one: WhatIf) -> str:
    return f"{words.number(one.gain_low)}–{words.number(one.gain_high)}"


class PredictedCase(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of one case; `step_s`, in seconds, and `speedup` have 80 % intervals.

    `speedup` is null for the strategy of one device, for a case or baseline that does not fit into
    memory, and if no prediction for one device can serve as its baseline. `profile` tells
    where the model's times come from: "measured" steps, a step time that was "given", or
    calculation, from the operators of the "traced" model or from FLOP and bytes ("counted").
    `memory` has each device's peaks in bytes and whether they fit; null unless asked for.
    `unmodelled` is the factor of the step beyond its model, by published steps, which is part of
    `step_s`. `published` has the nearest step times that others measured.
    """

    label: str
    labels: Sequence[str]
    case: Case
    step_s: shapes.EstimateFacts
    samples_per_s: float
    speedup: shapes.EstimateFacts | None
    scaling: str
    phases_s: Mapping[str, float]
    profile: str
    memory: Need | None
    unmodelled: float
    published: Sequence[PublishedStep]

    @classmethod
    def of(
        cls, prediction: Prediction, row: Row, published: Sequence[PublishedStep]
    ) -> PredictedCase:
        """Return a prediction as a record; `row` is that of its case."""
        return cls(
            label=prediction.case.label,
            labels=row.labels,
            case=prediction.case,
            profile=prediction.profile,
            scaling=row.scaling,
            step_s=shapes.made(shapes.EstimateFacts, prediction.step),
            samples_per_s=prediction.case.batch_size / prediction.seconds,
            memory=prediction.need,
            unmodelled=math.exp(prediction.deviation.mean),
            published=published,
            speedup=shapes.optional(shapes.EstimateFacts, row.speedup),
            phases_s=ledger.phases(
                Step(prediction.seconds, False, prediction.seconds), prediction.spans
            ),
        )


class Predictions(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench predict`.

    `machine_file` is the machine file that was made from a line of text; empty for other machines.
    `assumed` is what the description of the machine does not state, in words.
    `peer_access` is whether the predictions assume that GPUs access each other's memory.
    `what_ifs` has the predicted gains from changes of the schedule or of the machine.
    `measured_steps` says for each model predicted from measured steps where they were measured.
    """

    machine: str
    description: str
    machine_file: str
    assumed: Sequence[str]
    peer_access: bool
    answers: Sequence[shapes.AnswerFacts]
    cases: Sequence[PredictedCase]
    what_ifs: Sequence[WhatIf]
    measured_steps: Sequence[str]
    schema: int = shapes.SCHEMA
