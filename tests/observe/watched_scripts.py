"""Scripts that are watched in this process, on a clock that only sleeping moves."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from dpbench.observe import loop, script, seams
from dpbench.observe.recorder import Recorder
from dpbench.records import ledger, signals

HEAD = """
import functools, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EVALUATE_S = 0.004


class Rows(Dataset):
    def __init__(self, n, batch_s=0.0):
        self.n, self.batch_s = n, batch_s

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i % 4 == 0:
            time.sleep(self.batch_s)
        return torch.full((8,), float(i % 7)), torch.tensor(i % 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.sleeps = nn.Linear(8, 3), 0.0

    def forward(self, x):
        time.sleep(self.sleeps)
        return self.layer(x)


def batches(n, batch_size=4, **options):
    return DataLoader(Rows(n * batch_size), batch_size=batch_size, **options)


def step(x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


@contextmanager
def lent() -> Iterator[None]:
    """Take back what this process gives to a script: arguments, path, main module and signals."""
    argv, path, main = sys.argv, [*sys.path], sys.modules["__main__"]
    replaced = {name: getattr(signal, name) for name in ("getsignal", "signal")}
    handlers = {number: signal.getsignal(number) for number in signals.ENDING}
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
        vars(signal).update(replaced)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run(file: Path, arguments: Sequence[str] = ()) -> int:
    """Run a script in this process, and take the process back; return the exit code."""
    with lent():
        return script.run(str(file), arguments)


class Clock:
    """A host clock that only sleeping moves, so that no other process lengthens a step.

    Each look at the clock takes a microsecond, so that no two moments are equal.
    """

    at = 0.0

    def now(self) -> float:
        self.at += 1e-6
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def watched(
    folder: Path, source: str, clock: Clock | None = None
) -> tuple[loop.WatchedLoop, Recorder]:
    """Run a script under the seams on the replaced clock; return its loop and the recorder."""
    clock = clock or Clock()
    with mock.patch("time.sleep", clock.sleep):
        return really_watched(folder, source, clock.now)


def really_watched(
    folder: Path, source: str, now: Callable[[], float] = time.perf_counter
) -> tuple[loop.WatchedLoop, Recorder]:
    """Run a script under the seams, on the host's time or another clock.

    Return its loop and the recorder.
    """
    file = folder / "train.py"
    file.write_text(HEAD + source)
    recorder = Recorder(now)
    with seams.installed(recorder):
        assert run(file) == 0
    recorder.stop()
    return loop.of(recorder), recorder


def phases_of(found: loop.WatchedLoop) -> tuple[dict[str, float], ...]:
    """Return the seconds of each step's phases."""
    return ledger.Ledger(found.steps, found.spans).phases


def problems(found: loop.WatchedLoop) -> str:
    return "\n".join(map(str, found.unknown))
