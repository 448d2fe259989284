"""Notes: the sentences of a report on habits and on noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpbench.analysis import stats
from dpbench.analysis.summary import Row
from dpbench.hardware import foreign_load
from dpbench.records import HABITS, Case, Trial, words
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


def noisy(provenance: Mapping[str, Any]) -> str:
    """Return NOISY and its reasons if others used too much of the cores, else ""."""
    reasons = provenance.get("noisy")
    return f"{foreign_load.NOISY}: {'; '.join(reasons.values())}." if reasons else ""
