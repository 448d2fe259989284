"""Launches: start on this machine the processes that torchrun or srun would start on several."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.commands import Folder
from tests.marked import patience

MODELS = """
import os
import time
from types import SimpleNamespace

import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.layer, self.fault = nn.Linear(16, 4), fault

    def forward(self, x):
        time.sleep(float(os.environ.get("SLOW_S", "0")))
        if self.fault and torch.distributed.is_initialized():
            self.fault()
        return self.layer(x)


def batch(n, seed, size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 16, generator=generator), torch.randint(4, (n,), generator=generator)


def model(fault=None):
    return SimpleNamespace(
        build=lambda size: Net(fault), batch=batch, loss=nn.functional.cross_entropy
    )


def raises():
    if RANK == 1:
        raise RuntimeError("a planted error")


def dies():
    if RANK == 2:
        os.abort()


def waits():
    if RANK == 2:
        time.sleep(100)


good, broken, dead, late = model(), model(raises), model(dies), model(waits)
"""
"""A module of models: good, and of which one rank raises, dies, or does not go on."""


@dataclass
class Launched:
    """The processes of a launch in the order of their ranks: `nodes` machines, `each` ranks."""

    folder: Folder
    processes: list[subprocess.Popen[str]]

    def out(self, rank: int = 0) -> str:
        return (self.folder.path / f"{rank}.out").read_text()

    def err(self, rank: int = 0) -> str:
        return (self.folder.path / f"{rank}.err").read_text()

    def codes(self, timeout_s: float = 150) -> list[int]:
        """Wait for all processes, and return their exit codes."""
        return [process.wait(patience(timeout_s)) for process in self.processes]


def free_port() -> int:
    """Return a port of the loopback interface at which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def launch(
    folder: Folder,
    *arguments: str,
    program: Sequence[str] = ("-m", "dpbench", "run"),
    nodes: int = 2,
    each: int = 1,
    slow: Mapping[int, float] | None = None,
) -> Launched:
    """Start a program as torchrun does, with `each` ranks on `nodes` machines.

    `slow` has seconds by machine.
    """
    (folder.path / "nets.py").write_text(MODELS)
    common = {
        "TORCHELASTIC_RUN_ID": "a test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(nodes * each),
        "LOCAL_WORLD_SIZE": str(each),
    }
    processes = []
    for rank in range(nodes * each):
        node, local = divmod(rank, each)
        env = (
            folder.env
            | common
            | {
                "RANK": str(rank),
                "GROUP_RANK": str(node),
                "LOCAL_RANK": str(local),
            }
        )
        env |= {"SLOW_S": str(slow[node])} if slow and node in slow else {}
        with (
            (folder.path / f"{rank}.out").open("w") as out,
            (folder.path / f"{rank}.err").open("w") as err,
        ):
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                cwd=folder.path,
                env=env,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        processes.append(process)
    return Launched(folder, processes)
