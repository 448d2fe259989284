"""Siblings: packages that no other package imports, and without which dpbench works.

Each hands over one value, the object `SIBLING` of its package, with all that it adds to the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SIBLINGS = ("observe", "predict", "doctor", "gating")


@dataclass(frozen=True, kw_only=True)
class Sibling:
    """What one package adds: places of objects, which are imported on first use.

    A place is `package.module:object`; "" adds nothing. `commands` are those of the command line,
    and `functions` those of the module dpbench, by name; `listed` maps what `dpbench list` lists to
    a function that returns its names and descriptions. `rules` is a sequence of rules of findings
    about cases that are judged alone, `answers` a function that returns the answers on them, and
    `statements` a sequence of kinds of statements. `outlook` predicts, from a step on one GPU, what
    several would give, and `prediction` returns the command that predicts a case. `section` and
    `links` are given the text that the package has stored with a run's machine: `section` returns a
    section of the run's page, and `links` a clause on links between GPUs.
    """

    commands: Mapping[str, str]
    functions: Mapping[str, str] = field(default_factory=dict)
    listed: Mapping[str, str] = field(default_factory=dict)
    rules: str = ""
    statements: str = ""
    answers: str = ""
    outlook: str = ""
    prediction: str = ""
    section: str = ""
    links: str = ""


def present(package: str) -> bool:
    """Return whether this installation has a package, such as "predict"."""
    return (Path(__file__).parents[1] / package / "__init__.py").is_file()


@cache
def installed() -> tuple[Sibling, ...]:
    """Import the siblings that this installation has, and return what they add."""
    return tuple(import_module(f"dpbench.{one}").SIBLING for one in SIBLINGS if present(one))


def at(place: str) -> Any:
    """Import and return the object at a place."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def added(part: str) -> list[Any]:
    """Import and return a part, such as "rules", of each sibling that adds it."""
    return [at(place) for one in installed() if (place := getattr(one, part))]


def named(part: str) -> dict[str, str]:
    """Return the places of a part that siblings add by name, such as "commands"."""
    return {name: place for one in installed() for name, place in getattr(one, part).items()}
