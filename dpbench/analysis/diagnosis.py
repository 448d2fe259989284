"""Diagnosis: the notes on ladders and habits, the cost of the engine, and the tiles of a report.

A tile is one headline number. The cost of the engine is its step time under the schedule `reference`, which does the
same work as torch.nn.DataParallel in the same way, compared with the step time of torch.nn.DataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpbench.analysis import stats
from dpbench.analysis.ladder import Ladder, label, short
from dpbench.analysis.summary import Row
from dpbench.records import HABITS, Case, Source, Trial, plan, words
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
    call_counts = {trial.case: Dispatched(**found) for trial in trials if (found := trial.provenance.get(DISPATCHED))}
    pairs = [(case, plan.wrapped_as(case)) for case in measured if case.devices > 1]
    return [
        EngineCost(
            case=case, ratio=stats.ratio(measured[case].series, measured[wrapped].series),
            engine=call_counts.get(case), torch=call_counts.get(wrapped),
        )
        for case, wrapped in pairs
        if wrapped in measured
    ]  # fmt: skip


def engine_cost(costs: Sequence[EngineCost]) -> str:
    """Return one sentence with the ratio and the verdict of every engine cost; "" if `costs` is empty."""
    if not costs:
        return ""
    case = costs[0].case
    kind = devices_in_words(case) + (" (host time alone)" if case.device_kind == "emulated" else "")
    parts = "; ".join(_of_one_model(cost, costs) for cost in costs)
    goal = f"with a goal of at most {GOAL}"
    return (
        f"Ratio of the engine's step time (dp[reference]) to that of torch.nn.DataParallel on {kind}, {goal}: {parts}."
    )


def _of_one_model(cost: EngineCost, costs: Sequence[EngineCost]) -> str:
    """Return a clause with the ratio, the model, the habits of the loop and the verdict of `cost`.

    The clause also gives the number of devices if this number differs among `costs`.
    """
    devices = f" ×{cost.case.devices}" if len({one.case.devices for one in costs}) > 1 else ""
    habits = "".join(f", {habit}" for habit in cost.case.habits)
    return f"{words.times(cost.ratio)} on {cost.case.model}{devices}{habits} ({cost.verdict})"


def call_counts(costs: Sequence[EngineCost]) -> list[str]:
    """Return a line of text for each cost that has counts: those of one step of the engine, and those of torch."""
    return [
        f"one step on {cost.case.model}: {_counted(cost.engine)} by the engine, "
        f"{_counted(cost.torch)} by torch.nn.DataParallel"
        for cost in costs
        if cost.engine and cost.torch
    ]


def _counted(found: Dispatched) -> str:
    copies = words.count(found.copies, "copy", "copies")
    return f"{words.count(found.operators, 'operator')}, {copies} ({words.size(found.copied_bytes)} in all)"


@dataclass(frozen=True)
class Tile:
    """One headline number of a report as text, with its caption and the labels (such as MEASURED) of its case."""

    value: str
    caption: str
    labels: tuple[str, ...] = ()


def habits(rows: Sequence[Row], trials: Sequence[Trial]) -> list[str]:
    """Return sentences on the effects of loop settings (habits), a concurrent model, and compilation; empty if none.

    An effect is the ratio of the step times of two cases that differ in one habit only. If more than three
    pairs of cases show the effect of a habit, the sentence gives only the smallest and the largest effect.
    """
    table = {(row.case, row.source): row for row in rows if row.series}
    found: dict[str, list[tuple[Case, Estimate]]] = {}
    neighbours: dict[str, list[tuple[Case, Estimate]]] = {}
    for (case, source), row in table.items():
        for name in HABITS:
            habit = case.habit(name)
            usual = table.get((case.without(name), source)) if habit else None
            if usual and usual is not row:
                group = neighbours if name == "neighbour" else found
                group.setdefault(habit, []).append((usual.case, stats.ratio(row.series, usual.series)))
    clauses = [_of_habit(habit, pairs) for habit, pairs in found.items()]
    concurrent = [_of_habit(habit, pairs) for habit, pairs in neighbours.items()]
    longest_s = max((trial.setup.get("compile_s", 0.0) for trial in trials), default=0.0)
    compiled = f"Compilation, which no step includes, took at most {words.time(longest_s)}." if longest_s else ""
    settings = "Loop settings, as the step time with the setting divided by the step time without it"
    compared = f"{settings}: {'; '.join(clauses)}." if clauses else ""
    beside = "Interference, as the step time beside another model divided by the step time alone"
    disturbed = f"{beside}: {'; '.join(concurrent)}." if concurrent else ""
    return [sentence for sentence in (compared, disturbed, compiled) if sentence]


def _of_habit(habit: str, pairs: Sequence[tuple[Case, Estimate]]) -> str:
    """Return a clause with the effects of a habit, such as "loss read: 1.04× (1.01–1.07) in mlp single x1 batch 64"."""
    kept = sorted(pairs, key=lambda pair: pair[1].value)
    joiner, kept = (" to ", [kept[0], kept[-1]]) if len(kept) > 3 else (", ", kept)
    return f"{habit}: " + joiner.join(f"{words.times(effect)} in {label(case)}" for case, effect in kept)


def _shown(estimate: Estimate | None) -> bool:
    """Return whether `estimate` is not None and may be shown: it has enough rounds and a narrow enough interval."""
    return estimate is not None and not estimate.doubt


def climbs(ladders: Sequence[Ladder]) -> str:
    """Return a sentence that names, for each ladder, the best rung and the rung with the largest gain over a lower one.

    The largest gain is left out if no gain has the verdict "faster". Return "" without ladders.
    """
    if not ladders:
        return ""
    several = len({found.case.devices for found in ladders}) > 1
    parts = []
    for found in ladders:
        many = f" ×{found.case.devices}" if several else ""
        where = f"{found.case.model}{many}{_batch(found.fastest.row, [one.fastest.row for one in ladders])}"
        if found.fastest is found.rungs[0]:
            parts.append(f"on {where} no rung is faster than {found.fastest.name}")
            continue
        if found.whole.ratio.doubt:
            parts.append(f"on {where} there are {words.NOT_ENOUGH} to determine the best rung")
            continue
        doubt = " (undecided)" if found.whole.verdict == "undecided" else ""
        first = f"{words.times(found.whole.ratio)} over {found.whole.over}{doubt}"
        big = found.biggest
        gain = f"{big.name}, {words.times(big.ratio)} over {big.over}" if big else ""
        step = f", and the rung with the largest gain is {gain}" if gain else ""
        parts.append(f"on {where} the best rung is {found.fastest.name}, {first}{step}")
    host_only = " (host time alone)" if ladders[0].case.device_kind == "emulated" else ""
    return f"Ladder of schedules{host_only}: {'; '.join(parts)}."


def _batch(row: Row, rows: Sequence[Row]) -> str:
    """Return the details that distinguish a row from others of its model, as text in parentheses; "" if none.

    The details are the batch size, if `rows` has several for this model, and the habits of the training loop that
    differ from the default, such as reading the loss in every step.
    """
    several = len({r.case.batch_size for r in rows if r.case.model == row.case.model}) > 1
    found = [*([f"batch {row.case.batch_size}"] if several else []), *row.case.habits]
    return f" ({', '.join(found)})" if found else ""


def devices_in_words(case: Case) -> str:
    """Return the kind of a case's devices as plural text, such as "GPUs".

    For replicas that share one GPU, the text also states the limits of such a measurement.
    """
    if case.placement == "colocated":
        return "replicas sharing one GPU (COLOCATED: they show correctness and host cost, not speed-up)"
    return {"cpu": "logical CPU devices", "cuda": "GPUs"}.get(case.device_kind, f"{case.device_kind} devices")


def tiles(rows: Sequence[Row], ladders: Sequence[Ladder] = ()) -> list[Tile]:
    """Return four tiles on one case: speed-up, efficiency, imbalance of device 0, share of the step that moves data.

    The candidates are the best rungs of the ladders; if there are none, the engine's cases on several devices; if there
    are none either, all cases on several devices. Only cases with a speed-up that may be shown are candidates. Of the
    candidates on the most devices, the one with the longest step is taken. Without candidates, the list is empty.
    """
    best = [found.fastest.row for found in ladders if _shown(found.fastest.row.speedup)]
    done = best or [row for row in rows if _shown(row.speedup) and row.efficiency and row.case.devices > 1]
    engine = [row for row in done if row.case.traits.scheduled] or done
    if not engine:
        return []
    row = max(engine, key=lambda r: (r.case.devices, sum(r.phases.values())))
    schedule = f"[{short(row.case.schedule)}]" if best else ""
    where = ", ".join([f"{row.case.strategy}{schedule} x{row.case.devices}", row.case.model, *row.case.habits])
    assert row.speedup is not None
    assert row.efficiency is not None
    if row.memory_imbalance is not None:
        balance = Tile(
            f"{words.number(row.memory_imbalance)}×",
            f"device 0's peak memory relative to the mean of the others ({where})",
            row.labels,
        )
    elif row.imbalance is not None and not row.imbalance.doubt:
        balance = Tile(
            f"{words.number(row.imbalance.value)}×",
            f"device 0's busy time relative to the mean of the others ({where})",
            row.labels,
        )
    else:
        balance = Tile("n/a", f"the imbalance of device 0 is unknown ({where})", row.labels)
    return [
        Tile(f"{words.number(row.speedup.value)}×", f"speed-up, ideal {row.case.devices}× ({where})", row.labels),
        Tile(words.percent(row.efficiency.value), f"parallel efficiency ({where})", row.labels),
        balance,
        Tile(words.percent(row.moving_share), f"share of the step spent on moving data ({where})", row.labels),
    ]
