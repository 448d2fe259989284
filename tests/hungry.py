"""Models that ask for more memory than there is, or misbehave: `--models tests.hungry:CPU`."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.models import mlp
from dpbench.records import files


def _plug(forward: Any) -> SimpleNamespace:
    """Return a model whose forward does `forward(x)` before the real work."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp.build("small")

        def forward(self, x: Tensor) -> Tensor:
            forward(x)
            return self.inner(x)

    return SimpleNamespace(build=lambda size: Net(), batch=mlp.batch, loss=mlp.loss)


PETABYTE = 1 << 50

CPU = _plug(lambda x: torch.empty(PETABYTE, dtype=torch.uint8))
GPU = _plug(lambda x: torch.empty(PETABYTE, dtype=torch.uint8, device=x.device))
HANGS = _plug(lambda x: time.sleep(3600))
DIES = _plug(lambda x: os.abort())
KILLED = _plug(lambda x: os.kill(os.getpid(), signal.SIGKILL))
RAISES = _plug(lambda x: (_ for _ in ()).throw(ArithmeticError("planted in forward")))


def _rank() -> str | None:
    """Return the rank of this process from its environment; None outside a process group."""
    return os.environ.get("RANK")


def _hang(x: Tensor) -> None:
    deliberately_asleep()


def deliberately_asleep() -> None:
    """Sleep under a name that a stack shows."""
    time.sleep(3600)


def _stay(x: Tensor) -> None:
    """Hang as native code does, which no KeyboardInterrupt reaches."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    deliberately_asleep()


_seen = False


def when_told(act: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    """Act if the file `passing` of this folder has a 0; else reduce its number, once a process."""

    def told(x: Tensor) -> None:
        global _seen
        if len(x) <= 4 or _seen:  # so few rows are the verification's
            return
        _seen, passing = True, Path("passing")
        number = int(passing.read_text())
        passing.write_text(str(number - 1))
        if number == 0:
            act(x)

    return told


def _fill_the_disk(x: Tensor) -> None:
    """Let the file system of temporary files look full to this worker and to its server."""
    for folder in Path(tempfile.gettempdir()).glob("trial-*"):
        (folder / "probe").symlink_to("/dev/full")
    files._beside = _on_the_full_disk


def _on_the_full_disk(target: Path) -> Path:
    part = target.with_name("full")
    part.symlink_to("/dev/full")
    return part


def _leave_a_child(x: Tensor) -> None:
    subprocess.Popen(["sleep", "3600"])


def _raise_surrogate(x: Tensor) -> None:
    raise FileNotFoundError("no weights at model-\udcff.pt")


def _slow(x: Tensor) -> None:
    time.sleep(0.02)


def in_rank_1(act: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Act in rank 1 of a distributed run alone."""
    return lambda x: act(x) if _rank() == "1" else None


def _raise(x: Tensor) -> None:
    raise ArithmeticError("planted in one rank")


SLEEPS = _plug(_hang)
STUBBORN_IN_RANK_1 = _plug(in_rank_1(_stay))
STUBBORN_WHEN_TOLD = _plug(in_rank_1(when_told(_stay)))
FILLS_THE_DISK_WHEN_TOLD = _plug(when_told(_fill_the_disk))
SLEEPS_IN_RANK_1 = _plug(in_rank_1(_hang))
RAISES_IN_RANK_1 = _plug(in_rank_1(_raise))
DIES_IN_RANK_1 = _plug(in_rank_1(lambda x: os.abort()))
CPU_IN_RANK_1 = _plug(in_rank_1(lambda x: torch.empty(PETABYTE, dtype=torch.uint8)))
LEAVES_A_CHILD = _plug(_leave_a_child)
RAISES_SURROGATE = _plug(_raise_surrogate)
SLOW = _plug(_slow)
WRITES_NO_FILES = _plug(lambda x: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
EXITS = _plug(lambda x: sys.exit("planted exit"))
VANISHES = _plug(lambda x: os._exit(0))
INTERRUPTS = _plug(lambda x: (_ for _ in ()).throw(KeyboardInterrupt()))


def in_replica_1(act: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Act in the engine's second replica alone."""
    return lambda x: act(x) if threading.current_thread().name == "replica-1" else None


CPU_IN_REPLICA_1 = _plug(in_replica_1(lambda x: torch.empty(PETABYTE, dtype=torch.uint8)))
SLEEPS_IN_REPLICA_1 = _plug(in_replica_1(_hang))
OVER_VALID_ITEMS = SimpleNamespace(
    build=mlp.build,
    batch=mlp.batch,
    loss=lambda out, y: F.cross_entropy(out, y.masked_fill(y % 2 == 0, -100)),
)
TWICE_THE_ROWS = SimpleNamespace(
    build=mlp.build, batch=lambda n, seed, size: mlp.batch(2 * n, seed, size), loss=mlp.loss
)
