"""Turns: a process that takes blocks of steps when the gate asks for them.

The gate compares two commits of a project: it lets a process of each take blocks of steps in turn.
Such a process connects to the Unix socket that the variable `VARIABLE`, or its request, names. It
writes lines of JSON: first its id, then the seconds of each block, the peak of its memory, and the
batches that the workers of its DataLoaders have fetched, with the first block the files of its
modules. The gate writes the number of steps of the next block, one number a line, and closes the
socket when there are no more.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
import weakref
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
        self._loaders = _Loaders()
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
            self._tell(
                wall_s=wall_s,
                cpu_s=cpu_s,
                memory_bytes=_memory_bytes(),
                files=files,
                **self._loaders.facts(),
            )
            self._told = True
        steps = int(self._lines.readline() or 0)
        if steps:
            self._loaders.observe()
        else:
            self._loaders.leave()
            self._lines.close()
            self._socket.close()
        prepare()
        self._began = _now()
        return steps

    def __iter__(self) -> Iterator[int]:
        """Yield the steps of each block, which the caller takes before it asks for the next."""
        while steps := self.next():
            yield steps

    def _tell(self, **facts: Any) -> None:
        self._socket.sendall(json.dumps(facts).encode() + b"\n")


class _Loaders:
    """The DataLoaders with workers from which this process takes batches."""

    def __init__(self) -> None:
        self._used: weakref.WeakSet[Any] = weakref.WeakSet()
        self._batches = 0
        self._leave: Callable[[], None] | None = None

    def observe(self) -> None:
        """Count the batches that this process takes, from the import of torch on."""
        loading = sys.modules.get("torch.utils.data.dataloader")
        kind: Any = getattr(loading, "_MultiProcessingDataLoaderIter", None)
        was = getattr(kind, "_next_data", None)
        if was is None or self._leave is not None:
            return

        @functools.wraps(was)
        def following(iterator: Any) -> Any:
            self._used.add(iterator)
            batch = was(iterator)
            self._batches += 1
            return batch

        kind._next_data = following
        self._leave = functools.partial(setattr, kind, "_next_data", was)

    def leave(self) -> None:
        """Leave torch as it was."""
        if self._leave is not None:
            self._leave()
            self._leave = None

    def facts(self) -> dict[str, int]:
        """Return the batches taken since the last call, and those that workers prepare.

        `ahead` is the most batches that the workers of all loaders in use fetch before they are
        needed, and `ready` are those of them that they have fetched.
        """
        batches = self._batches
        self._batches = 0
        # the iterator of a finished epoch has no tasks
        used = [one for one in [*self._used] if getattr(one, "_task_info", True)]
        most = [one._num_workers * one._prefetch_factor for one in used]
        ready = [min(number, _ready(one)) for one, number in zip(used, most, strict=True)]
        return {"batches": batches, "ahead": sum(most), "ready": sum(ready)}


def _ready(iterator: Any) -> int:
    """Return how many batches the workers of a loader have fetched; 0 if it is unknown."""
    try:
        early = sum(len(task) > 1 for task in iterator._task_info.values())
        # with pinned memory, a thread moves batches from one queue to the other
        queues = {iterator._data_queue, iterator._worker_result_queue}
        return early + sum(int(queue.qsize()) for queue in queues)
    except (AttributeError, NotImplementedError):  # another torch, or macOS
        return 0


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
