"""Examine: collect what the doctor's rules judge, in under a minute and without changing anything.

Copies and collectives run in processes of their own, so that a hang or a crash is a result.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dpbench.doctor import system, transfers
from dpbench.doctor.faults import AllReduce, Examined
from dpbench.doctor.probe import all_reduce
from dpbench.hardware import foreign_load, gpus, interpreter
from dpbench.hardware.nvml import Nvml, NvmlGpu, open_nvml
from dpbench.records.disturbance import busy, told
from dpbench.records.facts import Gpu
from dpbench.records.load import Measured

LIMIT_S = 20.0
"""The seconds in which the all-reduces must end."""
SIZES = (2**20, 2**25)
"""The bytes of the all-reduces."""
EACH_S = 0.2
"""The seconds between two readings of the GPUs' clocks during the copies."""
_QUESTION = """
import json, sys, time, torch
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    # imports what a training imports, such as triton
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
peers = [[a, b] for a in range(count) for b in range(count)
         if a != b and torch.cuda.can_device_access_peer(a, b)]
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
source, target = torch.zeros(2**26), torch.zeros(2**26)
seconds = []
for _ in range(4):
    begin = time.perf_counter()
    target.copy_(source)
    seconds.append(time.perf_counter() - begin)
print(json.dumps({
    "versions": {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl and count else "",
    },
    "kernels": torch.cuda.get_arch_list() if count else [],
    "peers": peers,
    "memory_bytes_per_s": 2 * source.nbytes / min(seconds),
}))
"""


def examine(say: transfers.Say = lambda _: None) -> Examined:
    """Return what this machine shows; `say` is called with each line of progress."""
    before = foreign_load.snapshot()
    described = gpus.describe()
    usable = gpus.of_torch().gpus
    count = len(usable)
    say("the build of torch and the host's memory ...")
    answer = _torch()
    watched = Watched()
    copied: list[transfers.Transfer] = []
    reduced = None
    foreign: dict[int, dict[int, int | None]] = {}
    if count:
        with open_nvml() as nvml:
            # before this process uses any
            foreign = {gpu.index: gpu.processes() for gpu in nvml.gpus} if nvml else {}
            with _watching(nvml, watched):
                copied = transfers.measured(transfers.copies(count), say)
    if count > 1:
        say("all-reduces over all GPUs ...")
        reduced = _all_reduce(count)
    peers = answer.get("peers")
    load = Measured(foreign_load.since(before))
    return Examined(
        system=system.read(),
        gpus=msgspec.convert(described["gpus"], tuple[Gpu, ...]),
        described=described["gpus"],
        unused=gpus.unused(),
        peers=frozenset(map(tuple, peers)) if peers is not None and count > 1 else None,
        transfers=copied,
        all_reduce=reduced,
        foreign=foreign,
        busy=told(load) if busy(load) else "",
        readings=watched.reasons,
        generations=watched.generations,
        software={
            **answer.get("versions", {}),
            "driver": described.get("driver", ""),
            "driver_cuda": described.get("cuda_driver", ""),
        },
        no_kernels=without_kernels(
            answer.get("kernels", ()), [gpu["capability"] for gpu in usable]
        ),
        memory_bytes_per_s=answer.get("memory_bytes_per_s", 0.0),
        variables=dict(os.environ),
        switching=answer.get("switching", ""),
    )


def without_kernels(kernels: Sequence[str], capabilities: Sequence[Sequence[int]]) -> list[int]:
    """Return the GPUs, by their compute capability, for which a build of torch has no kernels.

    `kernels` are such as sm_86, which run on capability 8.6 and later ones of the same generation,
    or compute_90, which the driver compiles for 9.0 and all later ones. Others, such as gfx90a, say
    nothing about a capability.
    """
    names = (re.fullmatch(r"(sm|compute)_(\d+)[a-z]?", name) for name in kernels)
    built = [(name[1], *divmod(int(name[2]), 10)) for name in names if name]

    def runs(major: int, minor: int) -> bool:
        return any(
            (its_major, its_minor) <= (major, minor) and (kind == "compute" or its_major == major)
            for kind, its_major, its_minor in built
        )

    return [gpu for gpu, one in enumerate(capabilities) if built and not runs(*one)]


def _torch() -> dict[str, Any]:
    """Return the answer of a process with torch, {} without one.

    It is a process of its own, so that this one does not start CUDA.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", _QUESTION],
            capture_output=True,
            text=True,
            timeout=gpus.ASK_LIMIT_S,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return {}
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return {**found, "switching": interpreter.switching(answer.stderr)}


@dataclass
class Watched:
    """What NVML says about GPUs during the copies: all throttle reasons, the best generation."""

    reasons: dict[int, int] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)

    def read(self, gpu: NvmlGpu) -> None:
        """Add what NVML says now."""
        reasons = int(gpu.read("throttle_reasons") or 0)
        self.reasons[gpu.index] = self.reasons.get(gpu.index, 0) | reasons
        generation = int(gpu.read("pcie_generation_now") or 0)
        self.generations[gpu.index] = max(self.generations.get(gpu.index, 0), generation)


@contextmanager
def _watching(nvml: Nvml | None, watched: Watched) -> Iterator[None]:
    """Read the GPUs again and again while the body runs."""
    ended = threading.Event()

    def read() -> None:
        while nvml and not ended.wait(EACH_S):
            for gpu in nvml.gpus:
                watched.read(gpu)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _all_reduce(count: int) -> AllReduce:
    try:
        figures = dict(all_reduce.figures(count, sizes=SIZES, limit_s=LIMIT_S))
    except all_reduce.NoResult as failed:
        return AllReduce(failure=str(failed))
    return AllReduce(bytes_per_s=figures["all_reduce_bytes_per_s"])
