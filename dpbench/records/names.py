"""Names: how texts name a case: its model, settings, strategy and devices.

`Case.label` is the name in progress, errors and exports; it has everything on one line.
"""

from __future__ import annotations

from dpbench.records import words
from dpbench.records.case import Case
from dpbench.records.schedule import Schedule


def strategy(case: Case) -> str:
    """Return the name of a case's strategy, with any schedule but `reference` in brackets.

    The option for strategies takes this name.
    """
    schedule = f"[{case.schedule}]" if case.schedule not in ("", Schedule.REFERENCE) else ""
    return f"{case.strategy}{schedule}"


def in_words(case: Case) -> str:
    """Return the name of a case's strategy for a sentence."""
    return "one device with all cores" if case.traits.all_cores else strategy(case)


def devices(case: Case) -> str:
    """Return the number and the kind of a case's devices as text, such as "4 GPUs"."""
    if case.placement == "colocated":
        return f"{words.count(case.devices, 'replica')} sharing one GPU"
    noun = {"cpu": "logical CPU device", "cuda": "GPU"}.get(
        case.device_kind, f"{case.device_kind} device"
    )
    return words.count(case.devices, noun)


def settings(case: Case) -> list[str]:
    """Return the model's size, if it has one, and the case's settings that are not the default."""
    changed = [
        getattr(case, name)
        for name in ("precision", "optimizer")
        if getattr(case, name) != getattr(Case, name)
    ]
    bound = [f"within {words.size(case.device_memory_bytes)}"] if case.device_memory_bytes else []
    return [
        *([case.size] if case.traits.comparable else []),
        *changed,
        *bound,
        *case.habits,
    ]


def unusual(case: Case) -> list[str]:
    """Return `settings` without the default size."""
    return [one for one in settings(case) if one != Case.size]


def model(case: Case) -> str:
    """Return the name of a case's model, with its settings in parentheses if it has any."""
    found = ", ".join(settings(case))
    return f"{case.model} ({found})" if found else case.model
