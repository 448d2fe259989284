"""Find plugs by name: the name of a file in a folder is the name of the plug."""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PACKAGES = {"models": "models", "strategies": "strategies", "samplers": "hardware.samplers"}
"""The package under `dpbench` in which each kind of plug lies."""


def folder_of(kind: str) -> Path:
    """Return the folder whose files are the plugs of a kind."""
    return ROOT.joinpath(*PACKAGES[kind].split("."))


def names(kind: str) -> list[str]:
    """Return the names of all plugs of a kind, sorted. Files whose names begin with `_` are not plugs."""
    return sorted(m.name for m in pkgutil.iter_modules([str(folder_of(kind))]) if not m.name.startswith("_"))


def load(kind: str, name: str) -> ModuleType:
    """Import the plug `name` of a kind. An unknown name raises LookupError, which lists the known names."""
    check(kind, name)
    return importlib.import_module(f"dpbench.{PACKAGES[kind]}.{name}")


def check(kind: str, name: str) -> None:
    """Raise LookupError unless `name` is a plug of a kind. Nothing is imported."""
    known = names(kind)
    if name not in known:
        singular = kind[:-3] + "y" if kind.endswith("ies") else kind[:-1]
        raise LookupError(unknown(singular, name, known))


def check_module(name: str) -> None:
    """Raise LookupError unless the module of `package.module:object` can be found, without importing anything."""
    top, here = name.partition(":")[0].partition(".")[0], str(Path.cwd())
    if importlib.machinery.PathFinder.find_spec(top, [here, *sys.path]) is None:
        raise LookupError(f"--model {name}: there is no module {top!r} in {here} or on Python's path")


def unknown(kind: str, name: str, known: list[str]) -> str:
    """Say that a name is unknown, which ones are known, and which was probably meant."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}; known: {', '.join(known)}{hint}"
