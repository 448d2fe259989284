"""The calls with which the engine orders streams or keeps memory, and how to leave one out.

A place is such a call (`wait`, `borrow`, ...), named by its module, function and text.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dpbench
from dpbench.hardware.devices.cuda import CudaDevice, Nccl

ROOT = Path(dpbench.__file__).parent
FOLDERS = (ROOT / "engine", ROOT / "strategies")
FILES = [
    *(file for folder in FOLDERS for file in sorted(folder.rglob("*.py"))),
    *(ROOT / "hardware" / "devices" / name for name in ("cuda.py", "__init__.py")),
]
ORDERING: dict[type, tuple[str, ...]] = {
    CudaDevice: ("wait", "borrow", "_follow", "hold"),
    Nccl: ("follow", "lead"),
    torch.cuda.Stream: ("wait_stream",),
    torch.Tensor: ("record_stream",),
}
"""The methods that order streams or keep memory, by class."""
OTHERS = (
    "self.wait()",
    "calls.wait()",
    "ended.wait()",
    "self._ends[i].wait()",
    "self._ended[i - 1].wait(PATIENCE_S)",
)
"""Calls of such names that are not in question: threads wait for latches."""


@dataclass(frozen=True)
class Place:
    """A call that orders streams or keeps memory: its line, and the name that tests know it by."""

    file: str
    line: int
    name: str


@functools.cache
def places() -> dict[str, Place]:
    """Return all such calls of the engine and of CudaDevice, by name.

    Equal calls in a function are numbered.
    """
    methods, found = {name for names in ORDERING.values() for name in names}, dict[str, Place]()
    for file in FILES:
        tree = ast.parse(file.read_text())
        owners = {
            call: function
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
        }
        for call, function in sorted(owners.items(), key=lambda pair: pair[0].lineno):
            if (
                isinstance(call.func, ast.Attribute)
                and call.func.attr in methods
                and ast.unparse(call) not in OTHERS
            ):
                name = f"{file.stem}.{function.name}: {ast.unparse(call)}"
                while name in found:
                    name += " again"
                found[name] = Place(str(file), call.lineno, name)
    return found


@contextmanager
def without(place: Place) -> Iterator[list[Place]]:
    """Leave out the call at `place` inside the context.

    Yield a list with the place for each time that it was reached.
    """
    left: list[Place] = []

    def skipping(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if caller.f_lineno == place.line and caller.f_code.co_filename == place.file:
                left.append(place)
                return nullcontext()
            return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, names in ORDERING.items():
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, skipping(getattr(owner, name))))
        yield left
