"""Schedules: which of the engine's ways to run a step is used. A schedule is named by its rung on the ladder."""

from __future__ import annotations

from dpbench.records import FASTEST, RUNGS


def parse(name: str) -> str:
    """Return the rung that `name` stands for; ValueError lists the known ones."""
    if name == FASTEST:
        return RUNGS[-1]
    if name not in RUNGS:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join((*RUNGS, FASTEST))}")
    return name
