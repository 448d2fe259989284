"""Forecasts: predicted next to measured step times of the same case on the same hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpbench.analysis import summary
from dpbench.analysis.summary import Row
from dpbench.records import Case, Source
from dpbench.records.environment import Environment, forbidding
from dpbench.records.estimate import Estimate
from dpbench.records.facts import RunFacts
from dpbench.store.runs import PastRun


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The predicted and the measured step time of a case, in seconds, and the predicted machine.

    The interval of `predicted` is the predictor's 80 % interval, that of `measured` a 95 %
    interval.
    """

    case: Case
    machine: str
    predicted: Estimate
    measured: Estimate
    labels: tuple[str, ...]

    @property
    def error(self) -> float:
        """Return the predicted over the measured step time, minus 1."""
        return self.predicted.value / self.measured.value - 1

    @property
    def inside(self) -> bool:
        """Return whether the measured step time is inside the interval of the prediction."""
        return self.predicted.low <= self.measured.value <= self.predicted.high


def forecasts(
    rows: Sequence[Row], past: Iterable[PastRun], facts: RunFacts
) -> tuple[Forecast, ...]:
    """Return the predictions of the measured cases among `rows`, in their order.

    `facts` are those of the run. Predictions are taken from `rows`, and from the runs of
    `past` that describe the same hardware: the newest for each case and machine. Cases whose
    measured step time is in doubt (`Estimate.doubt`) are left out.
    """
    measured = {
        row.case: row
        for row in rows
        if row.source is Source.MEASURED and row.step and not row.step.doubt
    }
    by_case: dict[tuple[Case, str], Forecast] = {}
    described = [one.trials for one in past if _same_hardware(one.run.facts, facts)]
    predicted = [
        (one, trials[0].facts.machine) for trials in described for one in summary.rows(trials)
    ]
    for row, machine in [*((row, "") for row in rows), *predicted]:
        there = measured.get(row.case)
        if not row.source.timed and row.step and there and there.step:
            by_case[row.case, machine] = Forecast(
                case=row.case,
                machine=machine,
                predicted=row.step,
                measured=there.step,
                labels=tuple(dict.fromkeys((*row.labels, *there.labels))),
            )
    order = list(measured)
    return tuple(sorted(by_case.values(), key=lambda one: order.index(one.case)))


def _same_hardware(described: RunFacts, machine: RunFacts) -> bool:
    """Return whether both have GPUs, all of the same kind.

    Of a described machine, nothing else need be as it is here: a case may use a part of its GPUs.
    """
    kind = Environment.of(described).gpus
    here = Environment.of(machine)
    one_kind = len(kind or ()) == len(here.gpus or ()) == 1
    return one_kind and not forbidding(Environment(gpus=kind), here)
