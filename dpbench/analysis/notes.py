"""Notes: the sentences of a report on habits."""

from __future__ import annotations

from collections.abc import Sequence

from dpbench.analysis import stats
from dpbench.analysis.summary import Row
from dpbench.records import HABITS, Case, Trial, words
from dpbench.records.estimate import Estimate
from dpbench.records.grouping import grouped

_SETTINGS = "Loop settings, as the step time with the setting divided by the step time without it"
_BESIDE = "Interference, as the step time beside another model divided by the step time alone"


def habits(rows: Sequence[Row], trials: Sequence[Trial]) -> list[str]:
    """Return sentences on the effects of habits, a concurrent model, and compilation.

    An effect is the ratio of the step times of two cases that differ in one habit only. Of more
    than three pairs, the sentence gives only the smallest and the largest effect.
    """
    table = {row.key: row for row in rows if row.series and not row.on_fake_gpus}
    effects = grouped(
        (
            (_BESIDE if name == "neighbour" else _SETTINGS, habit),
            (usual.case, stats.ratio(row.series, usual.series)),
        )
        for (case, source), row in table.items()
        for name in HABITS
        if (habit := case.habit(name))
        and (usual := table.get((case.without(name), source)))
        and usual is not row
    )
    clauses = grouped((title, _of_habit(habit, pairs)) for (title, habit), pairs in effects.items())
    sentences = [
        f"{title}: {'; '.join(clauses[title])}."
        for title in (_SETTINGS, _BESIDE)
        if title in clauses
    ]
    longest_s = max((trial.setup.get("compile_s", 0.0) for trial in trials), default=0.0)
    if longest_s:
        sentences.append(
            f"Compilation, which no step includes, took at most {words.time(longest_s)}."
        )
    return sentences


def _of_habit(habit: str, pairs: Sequence[tuple[Case, Estimate]]) -> str:
    """Return a clause such as "loss read: 1.04× (1.01–1.07) in mlp single x1 batch 64"."""
    kept = sorted(pairs, key=lambda pair: pair[1].value)
    joiner, kept = (" to ", [kept[0], kept[-1]]) if len(kept) > 3 else (", ", kept)
    return f"{habit}: " + joiner.join(
        f"{words.times(effect)} in {case.label}" for case, effect in kept
    )
