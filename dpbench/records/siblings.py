"""Siblings: packages that no other package imports, and without which dpbench works.

The module `commands` of a sibling adds its commands to the command line; a module `findings`, if
there is one, has its rules about observed loops as `RULES`; a module `outlook` predicts, from a
step on one GPU, what several would give.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

SIBLINGS = ("observe", "predict", "doctor")


def present(package: str) -> bool:
    """Return whether this installation has a package, such as "predict"."""
    return (Path(__file__).parents[1] / package / "__init__.py").is_file()


def modules(name: str) -> list[ModuleType]:
    """Import and return the module `name` of each sibling that this installation has."""
    package = Path(__file__).parents[1]
    return [
        import_module(f"dpbench.{one}.{name}")
        for one in SIBLINGS
        if (package / one / f"{name}.py").is_file()
    ]
