"""Turns: a process that takes blocks of steps when the gate asks for them.

The gate compares two commits of a project: it lets a process of each take blocks of steps in turn.
Such a process connects to the Unix socket that the variable `VARIABLE`, or its request, names. It
writes lines of JSON: first its id, then the seconds of each block and the peak of its memory, with
the first of them the files of its modules. The gate writes the number of steps of the next block,
one number a line, and closes the socket when there are no more.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from dpbench.hardware import processes

VARIABLE = "DPBENCH_TURNS"
"""The environment variable with the path of the socket."""


class Turns:
    """The process's end of the socket: it reads how many steps to take, and answers with times."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rb")
        self._began: tuple[float, float] | None = None
        self._told = False
        self._tell(pid=os.getpid())

    @classmethod
    def of_environment(cls) -> Self | None:
        """Return the turns that a gate gives this process; None if none has started it.

        Processes that this one starts take no turns, and this one ends with the gate.
        """
        path = os.environ.pop(VARIABLE, "")
        if not path:
            return None
        processes.die_with_parent(os.getppid())
        return cls(path)

    def next(self, prepare: Callable[[], object] = lambda: None) -> int:
        """End the block that was begun, if any; return the steps of the next one, 0 at the end.

        A block ends when the GPUs have done its work. The process waits until it is its turn, and
        then calls `prepare` before the block begins.
        """
        if self._began is not None:
            _wait_for_gpus()
            wall_s, cpu_s = (now - then for now, then in zip(_now(), self._began, strict=True))
            files = [] if self._told else _files()
            self._tell(wall_s=wall_s, cpu_s=cpu_s, memory_bytes=_memory_bytes(), files=files)
            self._told = True
        steps = int(self._lines.readline() or 0)
        prepare()
        self._began = _now()
        return steps

    def __iter__(self) -> Iterator[int]:
        """Yield the steps of each block, which the caller takes before it asks for the next."""
        while steps := self.next():
            yield steps

    def _tell(self, **facts: Any) -> None:
        self._socket.sendall(json.dumps(facts).encode() + b"\n")


def _now() -> tuple[float, float]:
    """Return the wall time and the CPU time of this process in seconds."""
    return time.perf_counter(), time.process_time()


def _used_gpus() -> Iterator[int]:
    """Yield the GPUs on which this process has memory; others would get a context if asked."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):
                yield device


def _wait_for_gpus() -> None:
    for device in _used_gpus():
        sys.modules["torch"].cuda.synchronize(device)
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available() and torch.accelerator.is_available():
        torch.accelerator.synchronize()  # such as that of Apple or Intel


def _memory_bytes() -> int:
    """Return the peak of the memory on all GPUs or, without any, that of the resident set."""
    peaks = [sys.modules["torch"].cuda.max_memory_allocated(gpu) for gpu in _used_gpus()]
    return sum(peaks) or processes.resident_peak()


def _files() -> list[str]:
    """Return the files of this process's modules."""
    named = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
    return sorted({os.path.realpath(file) for file in named if file})
