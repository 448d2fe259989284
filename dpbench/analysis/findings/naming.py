"""Naming: strategies and devices as text in findings, for a terminal as for a page."""

from __future__ import annotations

from dpbench.analysis.ladder import short
from dpbench.records import Case, words


def strategy(case: Case) -> str:
    """Name a strategy with its schedule."""
    if case.traits.all_cores:
        return "one device with all cores"
    return f"{case.strategy}[{short(case.schedule)}]" if case.schedule else case.strategy


def devices(case: Case) -> str:
    """Say how many devices of which kind a case has."""
    if case.placement == "colocated":
        return f"{words.count(case.devices, 'replica')} sharing one GPU"
    noun = {"cpu": "logical CPU device", "cuda": "GPU"}.get(case.device_kind, f"{case.device_kind} device")
    return words.count(case.devices, noun)
