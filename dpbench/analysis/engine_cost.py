"""Engine cost: the step of the engine's `reference` compared with that of torch.nn.DataParallel on equal work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpbench.analysis import stats
from dpbench.analysis.diagnosis import devices_in_words
from dpbench.analysis.summary import Row
from dpbench.records import Case, Source, Trial, plan, words
from dpbench.records.trial import DISPATCHED, Estimate

GOAL = 1.03
"""The largest ratio of the engine's step time to torch's that the project aims at, for the upper end of an interval."""


@dataclass(frozen=True)
class Dispatched:
    """The operators that one step dispatches, and those among them that copy between devices, with their bytes."""

    operators: int
    copies: int
    copied_bytes: int


@dataclass(frozen=True, kw_only=True)
class EngineCost:
    """The cost of the engine compared with torch.nn.DataParallel.

    `case` is the engine's case under the schedule `reference`. `ratio` is its step time divided by the step time of
    torch.nn.DataParallel. `engine` and `torch` are counts of one step; None where the devices do not count.
    """

    case: Case
    ratio: Estimate
    engine: Dispatched | None = None
    torch: Dispatched | None = None

    @property
    def verdict(self) -> str:
        """Return "met" or "missed" where the interval decides about the goal, else "cannot tell"."""
        if self.ratio.doubt or self.ratio.low <= GOAL < self.ratio.high:
            return "cannot tell"
        return "met" if self.ratio.high <= GOAL else "missed"


def engine_costs(rows: Iterable[Row], trials: Iterable[Trial]) -> list[EngineCost]:
    """Return the cost of the engine for each case that ran with `reference` and with torch.nn.DataParallel."""
    measured = {row.case: row for row in rows if row.series and row.source is Source.MEASURED}
    counts = {trial.case: Dispatched(**found) for trial in trials if (found := trial.provenance.get(DISPATCHED))}
    pairs = [(case, plan.wrapped_as(case)) for case in measured if case.devices > 1]
    return [
        EngineCost(
            case=case, ratio=stats.ratio(measured[case].series, measured[wrapped].series),
            engine=counts.get(case), torch=counts.get(wrapped),
        )
        for case, wrapped in pairs
        if wrapped in measured
    ]  # fmt: skip


def sentence(costs: Sequence[EngineCost]) -> str:
    """Return the engine costs as one sentence; "" if there are none."""
    if not costs:
        return ""
    case = costs[0].case
    kind = devices_in_words(case) + (" (host time alone)" if case.device_kind == "emulated" else "")
    parts = "; ".join(_of_model(cost, costs) for cost in costs)
    goal = f"goal: at most {GOAL}"
    return f"Step time of the engine's reference over that of torch.nn.DataParallel on {kind}, {goal}: {parts}."


def _of_model(cost: EngineCost, costs: Sequence[EngineCost]) -> str:
    """Return the ratio on one model, with the verdict on the goal."""
    devices = f" ×{cost.case.devices}" if len({one.case.devices for one in costs}) > 1 else ""
    return f"{words.times(cost.ratio)} on {cost.case.model}{devices} ({cost.verdict})"


def counts(costs: Sequence[EngineCost]) -> list[str]:
    """Return one line of text for each cost whose operators and copies were counted."""
    return [
        f"one step on {cost.case.model}: {_said(cost.engine)} by the engine, "
        f"{_said(cost.torch)} by torch.nn.DataParallel"
        for cost in costs
        if cost.engine and cost.torch
    ]


def _said(found: Dispatched) -> str:
    copies = words.count(found.copies, "copy", "copies")
    return f"{words.count(found.operators, 'operator')}, {copies} of {words.size(found.copied_bytes)}"
