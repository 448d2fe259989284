"""Fake GPU mutex: what the fake CUDA library itself costs threads that call it at once.

    PYTHON_GIL=0 FAKECUDA_NUMERICS=0 FAKECUDA_DATA=0 FAKECUDA_DEVICES=8
        python -m benchmarks.scripts.fake_gpu_mutex FILE [--rounds 10]

The fake library guards its state by one mutex (tests/fakegpu/src/fake.h), and a real one does not
have this mutex. FILE, such as reports/without-the-gil/mutex.jsonl, gets a line per round: by the
number of threads, each with a GPU of its own, the microseconds of one `cudaMemsetAsync`, which
books an operation as a launch does, and of one `labs` of the C library, which costs threads only
the call from Python. The interpreter must run without its lock.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

THREADS = (1, 2, 4, 8)
CALLS = 10_000
Call = Callable[[], object]


def memset(gpu: int) -> Call:
    """Return a function that books an operation on a GPU."""
    torch.cuda.set_device(gpu)
    tensor = torch.empty(64, device="cuda")
    version = str(torch.version.cuda).partition(".")[0]
    function = ctypes.CDLL(f"libcudart.so.{version}").cudaMemsetAsync
    values = (ctypes.c_void_p(tensor.data_ptr()), 0, ctypes.c_size_t(64), ctypes.c_void_p(0))
    return lambda tensor=tensor: function(*values)


def labs(gpu: int) -> Call:
    """Return a function that calls one of the C library, which has no lock."""
    function, value = ctypes.CDLL(None).labs, ctypes.c_long(3)
    return lambda: function(value)


def per_call_us(threads: int, made: Callable[[int], Call]) -> float:
    """Return the microseconds in which each of several threads makes one call."""
    barrier = threading.Barrier(threads)
    times_s: list[float] = []

    def work(gpu: int) -> None:
        call = made(gpu)
        barrier.wait()
        times_s.append(time.perf_counter())
        for _ in range(CALLS):
            call()
        times_s.append(time.perf_counter())

    workers = [threading.Thread(target=work, args=(gpu,)) for gpu in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return 1e6 * (max(times_s) - min(times_s)) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        raise SystemExit("the interpreter's lock would be measured: set PYTHON_GIL=0")
    for _ in range(given.rounds):
        found = {
            made.__name__: {threads: round(per_call_us(threads, made), 3) for threads in THREADS}
            for made in (memset, labs)
        }
        with given.file.open("a") as lines:
            lines.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
