"""Engine cost: compare the step time of the engine, dpbench's own DataParallel, with that of torch.nn.DataParallel.

The engine runs under the schedule `reference`, which does the same work in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpbench.analysis import stats
from dpbench.analysis.diagnosis import devices_in_words
from dpbench.analysis.summary import Row
from dpbench.records import Case, Source, Trial, plan, words
from dpbench.records.trial import DISPATCHED, Estimate

GOAL = 1.03
"""The goal: the interval of the engine's step time over torch.nn.DataParallel's ends at or below this ratio."""


@dataclass(frozen=True)
class Dispatched:
    """The counts of one step: operators (copies included), copies between two devices, and bytes of these copies."""

    operators: int
    copies: int
    copied_bytes: int


@dataclass(frozen=True, kw_only=True)
class EngineCost:
    """The cost of the engine compared with torch.nn.DataParallel.

    `case` is the engine's case under the schedule `reference`. `ratio` is the step time of this case divided by
    that of torch.nn.DataParallel on the same work. `engine` and `torch` are the counts of one step of each side; they
    are None unless the devices are emulated, because only emulated devices count operators.
    """

    case: Case
    ratio: Estimate
    engine: Dispatched | None = None
    torch: Dispatched | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict on the goal: "met", "missed" or "cannot tell".

        The verdict is "met" if the interval of `ratio` ends at or below `GOAL`, and "missed" if it begins above. It is
        "cannot tell" if the interval contains `GOAL`, or if there are not enough rounds.
        """
        if self.ratio.doubt or self.ratio.low <= GOAL < self.ratio.high:
            return "cannot tell"
        return "met" if self.ratio.high <= GOAL else "missed"


def engine_costs(rows: Iterable[Row], trials: Iterable[Trial]) -> list[EngineCost]:
    """Return one cost for each case measured under `reference` and, on the same work, with torch.nn.DataParallel."""
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
    """Return one sentence with the ratio and the verdict of every engine cost; "" if `costs` is empty."""
    if not costs:
        return ""
    case = costs[0].case
    kind = devices_in_words(case) + (" (host time alone)" if case.device_kind == "emulated" else "")
    parts = "; ".join(_of_model(cost, costs) for cost in costs)
    goal = f"with a goal of at most {GOAL}"
    return (
        f"Ratio of the engine's step time (dp[reference]) to that of torch.nn.DataParallel on {kind}, {goal}: {parts}."
    )


def _of_model(cost: EngineCost, costs: Sequence[EngineCost]) -> str:
    """Return a clause with the ratio, the model, the habits of the loop and the verdict of `cost`.

    The clause also gives the number of devices if this number differs among `costs`.
    """
    devices = f" ×{cost.case.devices}" if len({one.case.devices for one in costs}) > 1 else ""
    habits = "".join(f", {habit}" for habit in cost.case.habits)
    return f"{words.times(cost.ratio)} on {cost.case.model}{devices}{habits} ({cost.verdict})"


def counts(costs: Sequence[EngineCost]) -> list[str]:
    """Return one line of text for each cost that has counts; the line gives the counts of both sides."""
    return [
        f"one step on {cost.case.model}: {_said(cost.engine)} by the engine, "
        f"{_said(cost.torch)} by torch.nn.DataParallel"
        for cost in costs
        if cost.engine and cost.torch
    ]


def _said(found: Dispatched) -> str:
    copies = words.count(found.copies, "copy", "copies")
    return f"{words.count(found.operators, 'operator')}, {copies} ({words.size(found.copied_bytes)} in all)"
