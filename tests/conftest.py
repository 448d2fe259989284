"""What all tests share: one thread per operation, a fixed seed, and marks that skip by name where no GPU is."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import hypothesis
import pytest

from dpbench.hardware import affinity

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # before torch is loaded: later has no effect
os.environ["DPBENCH_PATIENCE"] = "0"  # runs neither wait for a quiet machine nor repeat trials

hypothesis.settings.register_profile("dpbench", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("dpbench")


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    affinity.roam()  # a trial in this process stays on its device's core


@contextmanager
def lock(path: Path, kind: int) -> Iterator[IO[str]]:
    """Hold a lock that all processes of this run know, exclusive (fcntl.LOCK_EX) or shared (fcntl.LOCK_SH)."""
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield file


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run no other test at the same time as one marked `alone`.

    Processes queue for their turn: without the first lock, tests that share the second could keep a test that wants
    it alone waiting for ever.
    """
    if not hasattr(item.config, "workerinput"):  # pytest-xdist's: this process runs all tests, one after the other
        return (yield)
    folder = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with lock(folder / "queue", fcntl.LOCK_EX) as queue, lock(folder / "turn", kind):
        fcntl.flock(queue, fcntl.LOCK_UN)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than this machine has, with the reason; start with the slow ones.

    A slow test at the end would run alone while the other process has nothing left to do.
    """
    import torch

    items.sort(key=lambda item: item.get_closest_marker("slow") is None)

    count = torch.cuda.device_count()
    for mark, needed in (("gpu", 1), ("multi_gpu", 2)):
        if count < needed:
            reason = f"{mark}: needs {needed} CUDA device(s), torch sees {count} here"
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=reason))


# a suite started in the background inherits an ignored SIGINT, and so would every command that a test interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
