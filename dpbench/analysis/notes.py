"""Notes: the sentences of a report on its ladders, on habits and on noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpbench.analysis import stats
from dpbench.analysis.ladder import Ladder
from dpbench.analysis.summary import Row
from dpbench.hardware import foreign_load
from dpbench.records import HABITS, Case, Trial, fake, words
from dpbench.records.trial import Estimate


def habits(rows: Sequence[Row], trials: Sequence[Trial]) -> list[str]:
    """Return sentences on the effects of habits, a concurrent model, and compilation.

    An effect is the ratio of the step times of two cases that differ in one habit only. Of more
    than three pairs, the sentence gives only the smallest and the largest effect.
    """
    table = {row.key: row for row in rows if row.series and not row.on_fake_gpus}
    effects: dict[str, list[tuple[Case, Estimate]]] = {}
    neighbours: dict[str, list[tuple[Case, Estimate]]] = {}
    for (case, source), row in table.items():
        for name in HABITS:
            habit = case.habit(name)
            usual = table.get((case.without(name), source)) if habit else None
            if usual and usual is not row:
                group = neighbours if name == "neighbour" else effects
                group.setdefault(habit, []).append(
                    (usual.case, stats.ratio(row.series, usual.series))
                )
    clauses = [_of_habit(habit, pairs) for habit, pairs in effects.items()]
    concurrent = [_of_habit(habit, pairs) for habit, pairs in neighbours.items()]
    longest_s = max((trial.setup.get("compile_s", 0.0) for trial in trials), default=0.0)
    compiled = (
        f"Compilation, which no step includes, took at most {words.time(longest_s)}."
        if longest_s
        else ""
    )
    settings = (
        "Loop settings, as the step time with the setting divided by the step time without it"
    )
    compared = f"{settings}: {'; '.join(clauses)}." if clauses else ""
    beside = "Interference, as the step time beside another model divided by the step time alone"
    disturbed = f"{beside}: {'; '.join(concurrent)}." if concurrent else ""
    return [sentence for sentence in (compared, disturbed, compiled) if sentence]


def _of_habit(habit: str, pairs: Sequence[tuple[Case, Estimate]]) -> str:
    """Return a clause such as "loss read: 1.04× (1.01–1.07) in mlp single x1 batch 64"."""
    kept = sorted(pairs, key=lambda pair: pair[1].value)
    joiner, kept = (" to ", [kept[0], kept[-1]]) if len(kept) > 3 else (", ", kept)
    return f"{habit}: " + joiner.join(
        f"{words.times(effect)} in {case.label}" for case, effect in kept
    )


def climbs(ladders: Sequence[Ladder]) -> str:
    """Return a sentence on each ladder's best rung and its largest decided gain."""
    if not ladders:
        return ""
    several = len({ladder.case.devices for ladder in ladders}) > 1
    parts = []
    for ladder in ladders:
        many = f" ×{ladder.case.devices}" if several else ""
        batch = _batch(ladder.fastest.row, [one.fastest.row for one in ladders])
        where = f"{ladder.case.model}{many}{batch}"
        if ladder.fastest is ladder.rungs[0]:
            parts.append(f"on {where} no rung is faster than {ladder.fastest.name}")
            continue
        if ladder.whole.ratio.doubt:
            parts.append(f"on {where} there are {words.NOT_ENOUGH} to determine the best rung")
            continue
        doubt = " (undecided)" if ladder.whole.verdict == "undecided" else ""
        first = f"{words.times(ladder.whole.ratio)} over {ladder.whole.over}{doubt}"
        big = ladder.biggest
        gain = f"{big.name}, {words.times(big.ratio)} over {big.over}" if big else ""
        step = f", and the rung with the largest gain is {gain}" if gain else ""
        parts.append(f"on {where} the best rung is {ladder.fastest.name}, {first}{step}")
    host_only = " (host time alone)" if ladders[0].case.device_kind == "emulated" else ""
    fakes = f" ({fake.WHY})" if ladders[0].fastest.row.on_fake_gpus else ""
    return f"Ladder of schedules{host_only}{fakes}: {'; '.join(parts)}."


def _batch(row: Row, rows: Sequence[Row]) -> str:
    """Return the details that distinguish a row from its model's others, in parentheses, or "".

    They are the batch size, if `rows` has several for this model, and habits that are not the
    default.
    """
    several = len({r.case.batch_size for r in rows if r.case.model == row.case.model}) > 1
    found = [*([f"batch {row.case.batch_size}"] if several else []), *row.case.habits]
    return f" ({', '.join(found)})" if found else ""


def noisy(provenance: Mapping[str, Any]) -> str:
    """Return NOISY and its reasons if others used too much of the cores, else ""."""
    reasons = provenance.get("noisy")
    return f"{foreign_load.NOISY}: {'; '.join(reasons.values())}." if reasons else ""
