"""Examine: collect what the doctor's rules judge, in under a minute and without changing anything.

Copies and collectives run in processes of their own, so that a hang or a crash is a result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dpbench.doctor import system, transfers
from dpbench.doctor.faults import AllReduce, Examined
from dpbench.doctor.probe import all_reduce
from dpbench.hardware import gpus
from dpbench.hardware.nvml import Nvml, open_nvml

LIMIT_S = 20.0
"""The seconds in which the all-reduces must end."""
SIZES = (2**20, 2**25)
"""The bytes of the all-reduces."""
EACH_S = 0.2
"""The seconds between two readings of the GPUs' clocks during the copies."""
_QUESTION = """
import json, time, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
peers = [[a, b] for a in range(count) for b in range(count)
         if a != b and torch.cuda.can_device_access_peer(a, b)]
source, target = torch.zeros(2**26), torch.zeros(2**26)
seconds = []
for _ in range(4):
    begin = time.perf_counter()
    target.copy_(source)
    seconds.append(time.perf_counter() - begin)
print(json.dumps([torch.version.cuda or "", peers, 2 * source.nbytes / min(seconds)]))
"""


def examine(say: Callable[[str], None] = lambda _: None) -> Examined:
    """Return what this machine shows; `say` is called with each line of progress."""
    described = gpus.describe()
    count = len(gpus.of_torch().gpus)
    say("the build of torch and the host's memory ...")
    build, peers, memory_bytes_per_s = _torch()
    readings: dict[int, int] = {}
    copied: list[transfers.Transfer] = []
    reduced = None
    foreign: dict[int, dict[int, int | None]] = {}
    if count:
        with open_nvml() as nvml:
            foreign = _processes(nvml)
            with _watched(nvml, readings):
                copied = transfers.measured(transfers.copies(count), say)
    if count > 1:
        say("all-reduces over all GPUs ...")
        reduced = _all_reduce(count)
    return Examined(
        system=system.read(),
        gpus=described["gpus"],
        unused=gpus.unused(),
        peers=peers if count > 1 else None,
        transfers=copied,
        all_reduce=reduced,
        foreign=foreign,
        readings=readings,
        build=build,
        memory_bytes_per_s=memory_bytes_per_s,
        driver_cuda=described.get("cuda_driver", ""),
        variables=dict(os.environ),
    )


def _torch() -> tuple[str, frozenset[tuple[int, int]] | None, float]:
    """Return torch's CUDA version, the pairs with peer access, and the rate of the host's memory.

    A process of its own answers, so that this one does not start CUDA.
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
        return "", None, 0.0
    build, pairs, rate = json.loads(answer.stdout.splitlines()[-1])
    return build, frozenset((one, other) for one, other in pairs), rate


def _processes(nvml: Nvml | None) -> dict[int, dict[int, int | None]]:
    """Return the bytes that each other process holds on each GPU, before this one uses any."""
    return {gpu.index: gpu.processes() for gpu in nvml.gpus} if nvml else {}


@contextmanager
def _watched(nvml: Nvml | None, readings: dict[int, int]) -> Iterator[None]:
    """Collect the throttle reasons of each GPU in `readings` while the body runs."""
    ended = threading.Event()

    def read() -> None:
        while nvml and not ended.wait(EACH_S):
            for gpu in nvml.gpus:
                reasons = gpu.read("throttle_reasons")
                readings[gpu.index] = readings.get(gpu.index, 0) | int(reasons or 0)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _all_reduce(count: int) -> AllReduce:
    try:
        figures = {
            one.name: one.value for one in all_reduce.figures(count, sizes=SIZES, limit_s=LIMIT_S)
        }
    except all_reduce.NoResult as failed:
        return AllReduce(failure=str(failed))
    return AllReduce(bytes_per_s=figures["all_reduce_bytes_per_s"])
