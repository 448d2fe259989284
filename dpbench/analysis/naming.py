"""Naming: how texts name the strategy and the devices of a case."""

from __future__ import annotations

from dpbench.records import Case, words


def strategy(case: Case) -> str:
    """Return the name of a case's strategy, with the short name of any schedule in brackets."""
    if case.traits.all_cores:
        return "one device with all cores"
    return f"{case.strategy}[{case.schedule}]" if case.schedule else case.strategy


def devices(case: Case) -> str:
    """Return the number and the kind of a case's devices as text, such as "4 GPUs"."""
    if case.placement == "colocated":
        return f"{words.count(case.devices, 'replica')} sharing one GPU"
    noun = {"cpu": "logical CPU device", "cuda": "GPU"}.get(
        case.device_kind, f"{case.device_kind} device"
    )
    return words.count(case.devices, noun)
