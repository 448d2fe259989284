"""Choice: select the trials of a run to export, and name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpbench.records import Case, Trial

Labels = Callable[[Trial], tuple[str, ...]]
"""A function that returns the labels that must accompany a trial's numbers."""

IN_LABEL = frozenset(
    {"model", "size", "strategy", "schedule", "devices", "device_kind", "placement", "batch_size", "precision"}
)
"""The fields of a case that its label includes."""


def name(case: Case) -> str:
    """Return a unique name of a case: its label, then other fields whose values differ from their defaults."""
    rest = {field: value for field, value in case.to_dict().items() if field not in IN_LABEL}
    return " ".join([case.label, *(f"{field}={_plain(value)}" for field, value in sorted(rest.items()))])


def _plain(value: Any) -> str:
    """Return the value of a field as text without brackets."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(":".join(part) if isinstance(part, tuple) else str(part) for part in value)


def title(trial: Trial, labels: Labels) -> str:
    """Return the title of a trial: its case, its round, and the labels that must accompany its numbers."""
    said = [*labels(trial), *([trial.fault.upper()] if trial.fault else [])]
    ended = "" if trial.status == "ok" else f" {trial.status}"
    return f"{name(trial.case)} round {trial.round}{ended} [{' '.join(said)}]"


def pick(trials: Sequence[Trial], part: str | None = None, *, every: bool = False) -> list[Trial]:
    """Return the first trusted trial of each case that `part` selects; with `every`, all trials of these cases.

    `part` is the number of a case, from 1 in the order in which the run started them, or a part of its name. A
    complete name selects that case only. Raises ValueError, with the existing cases, if no trial is selected.
    """
    names = list(dict.fromkeys(name(trial.case) for trial in trials))
    wanted = set(_named(names, part)) if part is not None else set(names)
    fitting = [trial for trial in trials if name(trial.case) in wanted]
    found = [trial for trial in fitting if every or (trial.trusted and trial.timed)]
    if not every:
        first: dict[str, Trial] = {}
        for trial in found:
            first.setdefault(name(trial.case), trial)
        found = [first[one] for one in names if one in first]
    if not found:
        ends = ", ".join(f"{trial.case.label}: {trial.fault or trial.status}" for trial in fitting[:8]) or "no trials"
        raise ValueError(f"the selected cases have no measured trial ({ends})")
    return found


def _named(names: Sequence[str], part: str) -> list[str]:
    """Return the names that a number or a part of a name selects. Raises ValueError if nothing is selected."""
    if part.isdigit() and 1 <= int(part) <= len(names):
        return [names[int(part) - 1]]
    found = [part] if part in names else [name for name in names if part in name]
    if not found or part.isdigit():
        raise ValueError(f"no case {part}; the run has: {numbered(names)}")
    return found


def numbered(names: Sequence[str]) -> str:
    """Return the names as a list with the numbers that `pick` accepts, as text."""
    return "; ".join(f"{number} {name}" for number, name in enumerate(names, 1)) or "none"


def nameless(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's provenance without the host name, for files that leave the machine."""
    host = {key: value for key, value in provenance.get("host", {}).items() if key != "name"}
    return {**provenance, **({"host": host} if host else {})}
