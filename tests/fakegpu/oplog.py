"""The log of operations of this process's fake GPUs: start it, add notes to it, and read it.

`src/oplog.cpp` writes it. Its order is that in which the operations were booked.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

RECORD, WAIT, NOTE = "record", "wait", "note"
"""Kinds of lines that are no operation: of an event, of a stream that waits for one, and a note."""


class Line(NamedTuple):
    """One operation, event record, wait for an event, or note; `name` is a note's text.

    `gpu` and `stream` are where it runs. Of an event, both times are the event's. `thread` has
    launched it at `host_ns`, when the GPU `current` was the thread's current one. `source` is the
    GPU of an event, of a collective's rank, or from which a copy between GPUs reads; `target` is
    that to which it writes. Times are in nanoseconds, on the clock of `time.perf_counter`.
    """

    gpu: int
    stream: int
    kind: str
    name: str
    start_ns: int
    end_ns: int
    thread: int
    current: int
    host_ns: int
    bytes: int
    source: int
    target: int
    event: int


@cache
def _library() -> ctypes.CDLL:
    """Return the fake libraries, which the environment's path file has loaded."""
    library = ctypes.CDLL("libfakecuda.so")
    library.fakecuda_submit.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double, ctypes.c_double),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    ]
    return library


@contextmanager
def logging(file: Path) -> Iterator[Path]:
    """Log what this process does in the context; yield the log's path, complete at its end."""
    path = file.with_name(f"{file.name}.{os.getpid()}")
    path.touch()
    _library().fakecuda_log(os.fsencode(file))
    try:
        yield path
    finally:
        _library().fakecuda_log(None)


def note(text: str) -> None:
    """Add a note to the log."""
    _library().fakecuda_note(text.encode())


def submit(stream: int, name: str, *, flops: float) -> None:
    """Queue a kernel of a number of floating-point operations on a stream, given its address.

    0 is the default stream of the current GPU.
    """
    submitted = _library().fakecuda_submit(stream, name.encode(), flops, 0.0, None, None, None)
    assert submitted == 0


def read(path: Path) -> list[Line]:
    """Return the lines of a log in their order."""
    return [Line(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
