"""Diagnosis: the verdict and the tiles of a report.

The verdict is one or more sentences about the speed-ups. A tile is one headline number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpbench.analysis import stats
from dpbench.analysis.ladder import Ladder, label, notable, short
from dpbench.analysis.summary import Row
from dpbench.records import HABITS, UNATTRIBUTED, Case, Phase, Trial, words
from dpbench.records.trial import Estimate

ROUNDS_MOST = 50
"""The largest number of rounds that the verdict recommends. If more are needed, it recommends `--paired` instead."""


@dataclass(frozen=True)
class Tile:
    """One headline number of a report as text, with its caption and the labels (such as MEASURED) of its case."""

    value: str
    caption: str
    labels: tuple[str, ...] = ()


def verdict(rows: Sequence[Row], ladders: Sequence[Ladder] = ()) -> str:
    """Return the verdict of a run as one or more sentences.

    The first sentence gives the speed-up of each strategy on the largest number of devices, and the ideal speed-up. If
    no speed-up can be stated, it gives the reason instead. Of each ladder, it includes only the lowest rung. Further
    sentences give each ladder's best rung, and name the cases whose speed-up is undecided or needs more rounds.
    """
    kept = [row for row in notable(rows, ladders) if not _inside(row, ladders)]
    several = [row for row in kept if row.speedup and row.case.devices > 1]
    done = [row for row in several if _shown(row.speedup)]
    climbs, open_ = _climbs(ladders), _in_doubt([*several, *_of_all_cores(rows, several)])
    if not done:
        return " ".join(filter(None, ("" if open_ else _nothing(rows), climbs, open_)))
    most = max(row.case.devices for row in done)
    top = [row for row in done if row.case.devices == most]
    groups = {name: [row for row in top if row.case.strategy == name] for name in _strategies(top)}
    clauses = [_of_strategy(_named(name, group) if ladders else name, group) for name, group in groups.items()]
    sentence = (
        f"On {most} {devices_in_words(top[0].case)}{' (weak scaling)' if top[0].scaling == 'weak' else ''}, "
        + "; ".join(clauses)
        + f" (ideal {most}×)"
    )
    everything = [*top, *_of_all_cores(rows, top)]
    return " ".join(
        filter(None, (f"{sentence}{_cause(top)}{_all_cores(rows, top)}.", climbs, _decided(everything), open_))
    )


def habits(rows: Sequence[Row], trials: Sequence[Trial]) -> str:
    """Return sentences with the effect of each habit, and of another model, on the step; "" if none can be compared.

    An effect is the ratio of the step times of two cases that differ in this habit only. Of more than three cases with
    a habit, the sentence gives the smallest and the largest effect.
    """
    table = {(row.case, row.source): row for row in rows if row.series}
    found: dict[str, list[tuple[Case, Estimate]]] = {}
    neighbours: dict[str, list[tuple[Case, Estimate]]] = {}
    for (case, source), row in table.items():
        for name in HABITS:
            usual = table.get((case.without(name), source))
            if case.habit(name) and usual and usual is not row:
                group = neighbours if name == "neighbour" else found
                group.setdefault(case.habit(name), []).append((usual.case, stats.ratio(row.series, usual.series)))
    clauses = [_of_habit(habit, pairs) for habit, pairs in found.items()]
    concurrent = [_of_habit(habit, pairs) for habit, pairs in neighbours.items()]
    longest_s = max((trial.setup.get("compile_s", 0.0) for trial in trials), default=0.0)
    compiled = f"Compilation, which no step includes, took at most {words.time(longest_s)}." if longest_s else ""
    compared = f"Steps compared with a loop without the habit: {'; '.join(clauses)}." if clauses else ""
    disturbed = f"Interference, as the ratio to the same step alone: {'; '.join(concurrent)}." if concurrent else ""
    return " ".join(filter(None, [compared, disturbed, compiled]))


def _of_habit(habit: str, pairs: Sequence[tuple[Case, Estimate]]) -> str:
    """Return a clause with the effects of a habit, such as "loss read: 1.04× (1.01–1.07) in mlp single x1 batch 64"."""
    kept = sorted(pairs, key=lambda pair: pair[1].value)
    joiner, kept = (" to ", [kept[0], kept[-1]]) if len(kept) > 3 else (", ", kept)
    return f"{habit}: " + joiner.join(f"{words.times(effect)} in {label(case)}" for case, effect in kept)


def _shown(estimate: Estimate | None) -> bool:
    """Return whether `estimate` is not None and may be shown: it has enough rounds and a narrow enough interval."""
    return estimate is not None and not estimate.doubt


def _in_doubt(rows: Sequence[Row]) -> str:
    """Return a sentence that names the cases that need more rounds to show their speed-up; "" if there are none."""
    found = [row for row in rows if row.speedup and row.speedup.doubt]
    if not found:
        return ""
    names = ", ".join(dict.fromkeys(_of_row(row) for row in found[:3]))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{words.NOT_ENOUGH.capitalize()} for the speed-up of {names}{more}; {words.REMEDY} would help."


def _of_row(row: Row) -> str:
    """Return a row's strategy, model and habits as text, such as "dp on mlp (loss read)"."""
    return f"{row.case.strategy} on {row.case.model}{_batch(row, [row])}"


def _named(strategy: str, rows: Sequence[Row]) -> str:
    """Return the strategy's name, such as "dp", or "dp[cached]" if all `rows` have the same schedule."""
    schedules = {row.case.schedule for row in rows}
    return f"{strategy}[{short(schedules.pop())}]" if len(schedules) == 1 and schedules != {""} else strategy


def _inside(row: Row, ladders: Sequence[Ladder]) -> bool:
    """Return whether `row` is a rung of one of the ladders, but not the lowest rung of that ladder."""
    return any(row is rung.row for found in ladders for rung in found.rungs[1:])


def _climbs(ladders: Sequence[Ladder]) -> str:
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


def _nothing(rows: Sequence[Row]) -> str:
    """Return a sentence with the reason why no speed-up can be stated."""
    if not any(row.step for row in rows):
        return f"No result: {words.count(len(rows), 'case')} without a verified step; the warnings give the reasons."
    if all(row.case.device_kind == "emulated" for row in rows if row.step):
        return "Emulated devices show host cost only: no speed-up is computed."
    if all(row.case.devices == 1 for row in rows if row.step):
        return "No speed-up: all cases ran on one device; use several devices, such as --devices 1,2."
    return "No speed-up: the strategy single was not measured on the same work; add single to --strategies."


def _of_strategy(name: str, rows: Sequence[Row]) -> str:
    """Return a clause with the speed-ups in `rows`, such as "dp gives 1.5× (1.4–1.6) on mlp"; `name` is its subject.

    Of more than three rows, the clause gives only the lowest and the highest speed-up.
    """
    kept = sorted(rows, key=lambda row: row.speedup.value if row.speedup else 0.0)
    if len(kept) > 3:
        kept = [kept[0], kept[-1]]
    parts = [f"{words.times(row.speedup)} on {row.case.model}{_batch(row, rows)}" for row in kept if row.speedup]
    joiner = " to " if len(rows) > 3 else ", "
    return f"{name} gives {joiner.join(parts)}"


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


def _strategies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.case.strategy for row in rows))


def _cause(rows: Sequence[Row]) -> str:
    """Return a clause with the longest phase, other than forward and backward, of one case of the engine.

    The case is the one with the lowest speed-up in `rows`. Return "" if that phase takes less than 10% of the step, or
    if `rows` has no case of the engine.
    """
    engine = [row for row in rows if row.case.traits.scheduled and row.phases]
    if not engine:
        return ""
    worst = min(engine, key=lambda row: row.speedup.value if row.speedup else 0.0)
    compute = {Phase.FORWARD.value, Phase.BACKWARD.value, UNATTRIBUTED}
    rest = {name: seconds for name, seconds in worst.phases.items() if name not in compute}
    name = max(rest, key=lambda phase: rest[phase], default="")
    share = rest.get(name, 0.0) / sum(worst.phases.values())
    return f"; {share:.0%} of dp's step on {worst.case.model} is the phase {name}" if share >= 0.1 else ""


def _all_cores(rows: Sequence[Row], top: Sequence[Row]) -> str:
    """Return a clause with the speed-up of one CPU device that uses all cores; "" if unknown.

    The clause covers the models and batch sizes in `top`.
    """
    found = _of_all_cores(rows, top)
    found = [row for row in found if _shown(row.speedup)]
    return f"; without data parallelism, {_of_strategy('single, all cores,', found)}" if found else ""


def _of_all_cores(rows: Sequence[Row], top: Sequence[Row]) -> list[Row]:
    """Return the rows with a speed-up of one device that uses all cores, for the models and batch sizes in `top`."""
    work = {(row.case.model, row.case.batch_size) for row in top}
    alike = [row for row in rows if (row.case.model, row.case.batch_size) in work]
    return [row for row in alike if row.case.traits.all_cores and row.speedup]


def _decided(rows: Sequence[Row]) -> str:
    """Return a sentence that names the cases not known to be faster or slower than one device; "" if there are none.

    The sentence also recommends how many rounds to measure.
    """
    fast = [(row, row.speedup) for row in rows if row.speedup and not row.speedup.doubt]
    # Holm's correction: the confidence level applies to all verdicts together
    said = stats.verdicts([speedup for _, speedup in fast], alpha=1 - stats.CONFIDENCE)
    open_ = [pair for pair, verdict in zip(fast, said, strict=True) if verdict == "undecided"]
    if not open_:
        return ""
    names = ", ".join(_of_row(row) for row, _ in open_[:3])
    more = f" and {len(open_) - 3} more" if len(open_) > 3 else ""
    needed = max(stats.rounds_to_decide(speedup, alpha=1 - stats.CONFIDENCE) for _, speedup in open_)
    enough = f"about {needed} rounds (--rounds {needed}) should decide this"
    would = enough if needed <= ROUNDS_MOST else "--rounds auto --paired may decide this"
    return f"It is undecided whether these cases are faster or slower than one device: {names}{more}; {would}."


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
