"""Find plugs by name: the name of a file in a folder is the name of the plug."""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import pkgutil
import sys
from pathlib import Path
from types import ModuleType


def names(folder: str) -> list[str]:
    """Return the names of all plugs in `dpbench.<folder>`, sorted; files that begin with `_` are no plugs."""
    root = Path(__file__).parent / folder
    return sorted(m.name for m in pkgutil.iter_modules([str(root)]) if not m.name.startswith("_"))


def load(folder: str, name: str) -> ModuleType:
    """Import the plug `name` of `folder`; an unknown name raises LookupError that lists the known ones."""
    check(folder, name)
    return importlib.import_module(f"dpbench.{folder}.{name}")


def check(folder: str, name: str) -> None:
    """Raise LookupError unless `name` is a plug of `folder`, without importing anything."""
    known = names(folder)
    if name not in known:
        singular = folder[:-3] + "y" if folder.endswith("ies") else folder[:-1]
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
