"""Statements: what dpbench did not understand of a loop."""

from __future__ import annotations

from collections.abc import Iterator

from dpbench.analysis.statements import Kind, Observation, Said
from dpbench.records import words


def _not_understood(seen: Observation) -> Iterator[Said]:
    unknown = {
        (trial.case, part): None
        for trial in seen.trials
        if (loop := trial.facts.loop)
        for part in loop.unknown
    }
    for case, part in unknown:
        detail = f"in {words.count(part.steps, 'step')}" if part.steps else ""
        yield str(part), ((case, detail),)


KINDS = (
    Kind(
        key="not_understood",
        when="dpbench did not understand a part of an observed loop",
        warns=True,
        find=_not_understood,
    ),
)
