"""Imports: act at the moment at which a script has imported a module.

`dpbench watch` needs torch, but a script may set the environment first: the number of threads, for
example, which is read when torch is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after(module: str, call: Callable[[], object]) -> None:
    """Call a function once, when this process has imported a module; at once if it has before."""
    if module in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Awaited(module, call))


class _Awaited(MetaPathFinder):
    """A finder of one module, whose loader makes the call; it leaves with the call."""

    def __init__(self, module: str, call: Callable[[], object]) -> None:
        self._module = module
        self._call = call
        self._process = os.getpid()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have for the module."""
        if fullname != self._module or os.getpid() != self._process:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        loader: Any = spec.loader if spec else None
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._imported()

        loader.exec_module = exec_module
        return spec

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()
