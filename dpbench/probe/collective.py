"""Between processes: an all-reduce of several sizes, and what two processes that train take from each other.

The ranks are processes of their own, started afresh, because a process that has run tensor operations must not fork.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dpbench.probe.figures import Figure, Timing, Work, figure, ratio, summary
from dpbench.records import UNATTRIBUTED

KIB, MIB = 2**10, 2**20
SIZES = tuple(32 * KIB * 2**i for i in range(12))
"""32 KiB to 64 MiB."""
COMPUTED_S = 1e-3
"""Of computing before each all-reduce."""
LIMIT_S = 60.0


def all_reduce(ranks: int = 2, backend: str = "gloo", sizes: tuple[int, ...] = SIZES) -> Iterator[Figure]:
    """Yield the seconds of an all-reduce of each size, and the line through them.

    The line is over W, the bytes that a ring sends on each link: 2 (n - 1) / n of the size.
    """
    from dpbench.probe.host import line

    found = [(size, summary(seconds)) for size, seconds in _measured(ranks, backend, "reduce", *map(str, sizes))]
    for size, timing in found:
        how = f"all_reduce of {size // KIB} KiB, {ranks} ranks, {backend}"
        yield figure(f"all_reduce_{size // KIB}_kib_s", timing, how)
    sent = 2 * (ranks - 1) / ranks
    start_s, per_byte = line([(sent * size, timing.best_s) for size, timing in found])
    yield Figure("all_reduce_start_s", start_s, "the start of the line through all sizes")
    yield Figure("all_reduce_bytes_per_s", 1 / per_byte, "its slope: bytes sent by each rank a second")


def nets(rows: dict[str, int], ranks: int = 2) -> Iterator[Figure]:
    """Yield how much longer forward and backward of each net take while another process does the same."""
    from dpbench.probe.host import repeats

    names = [f"{name}={count}={repeats(name, count)}" for name, count in rows.items()]
    for name, (alone, own, joint) in _measured(ranks, "gloo", "nets", *names):
        how = f"forward and backward of {name} on {rows[name]} rows beside another process's, against alone"
        yield ratio(f"{name}_{ranks}_processes_ratio", summary(own), summary(alone), how)
        # in step, as ranks that reduce gradients are: who is late makes all wait
        late = f"{how}, waiting for it each time"
        yield ratio(f"{name}_{ranks}_processes_in_step_ratio", summary(joint), summary(alone), late)


def data_parallel(ranks: int = 2) -> Iterator[Figure]:
    """Yield what torch's DistributedDataParallel costs the host beside a net: each phase's seconds on tiny chains."""
    from dpbench.probe import engine

    found: dict[str, dict[int, dict[str, Timing]]] = {"alone": {}, "ddp": {}}
    for layers, sides in _measured(ranks, "gloo", "chains", *map(str, engine.LAYERS)):
        for name, phases in sides.items():
            found[name][layers] = {phase: summary(seconds) for phase, seconds in phases.items()}
    more = engine.beyond(found["ddp"], found["alone"], dict.fromkeys(("forward", "loss", "backward", "optimizer"), 1))
    how = f"torch's DistributedDataParallel, {ranks} ranks, gloo"
    yield from engine.of_chains("ddp", found["ddp"], ("scatter", "reduce", UNATTRIBUTED), more, how)


def _measured(ranks: int, *arguments: str) -> list[Any]:
    """Start the ranks; return what rank 0 measured. Raises RuntimeError with what a rank said when it failed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "dpbench.probe.collective", *arguments]
    processes = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        answers = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, error)) in enumerate(zip(processes, answers, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank} of the probe ended with {process.returncode}: {error[-500:]}")
    found: list[Any] = json.loads(answers[0][0].splitlines()[-1])
    return found


def _rank(backend: str, what: str, *arguments: str) -> list[Any]:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    measure = {"reduce": lambda names: _reduce([int(name) for name in names], device), "nets": _nets, "chains": _chains}
    found: list[Any] = measure[what](arguments)
    dist.destroy_process_group()
    return found


def _reduce(sizes: Sequence[int], device: Any) -> list[Any]:
    """Time each size often, after a while of computing, as in a step: cores that idle, or wait, answer otherwise."""
    import torch
    import torch.distributed as dist

    found, square = [], torch.ones(256, 256)
    for size in sizes:
        value = torch.zeros(size // 4, device=device)
        seconds = []
        for i in range(63 if size <= MIB else 23):
            begin = time.perf_counter()
            while time.perf_counter() < begin + COMPUTED_S:
                torch.mm(square, square)
            begin = time.perf_counter()
            dist.all_reduce(value)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if i >= 3:  # the first ones connect, and fault pages in
                seconds.append(time.perf_counter() - begin)
        found.append((size, seconds))
    return found


def _nets(arguments: Sequence[str]) -> list[Any]:
    """Time each net in rank 0 alone, while the others wait, and in all ranks at once."""
    import torch.distributed as dist

    from dpbench.probe.host import training

    found = []
    for argument in arguments:
        name, rows, count = argument.split("=")
        work = training(name, int(rows))
        work()
        alone = [_spent(work) for _ in range(int(count))] if dist.get_rank() == 0 else []
        dist.barrier()
        own, joint = [], []
        for _ in range(int(count)):
            begin = time.perf_counter()
            work()
            own.append(time.perf_counter() - begin)
            dist.barrier()
            joint.append(time.perf_counter() - begin)
        found.append((name, (alone, own, joint)))
    return found


def _chains(arguments: Sequence[str]) -> list[Any]:
    """Time each chain's phases in rank 0 alone, and in all ranks at once under DistributedDataParallel."""
    import torch.distributed as dist

    from dpbench.clock import HostClock
    from dpbench.engine.devices import open_devices
    from dpbench.probe import engine
    from dpbench.records import Case
    from dpbench.strategies import ddp, single

    devices, ranks, found = open_devices("cpu", 1), dist.get_world_size(), []
    for layers in map(int, arguments):
        sides = {}
        one = Case(model="chain", strategy="single", batch_size=engine.ROWS // ranks)
        clock = HostClock()
        if dist.get_rank() == 0:
            with single.start(one, engine.chain(layers), devices, clock.mark) as step:
                sides["alone"] = engine.seconds_of(step, clock, one.batch_size)
        dist.barrier()
        every = Case(model="chain", strategy="ddp", devices=ranks, batch_size=engine.ROWS)
        clock = HostClock()
        with ddp.start(every, engine.chain(layers), devices, clock.mark) as rank:
            sides["ddp"] = engine.seconds_of(rank, clock, every.batch_size, rank.observe)
        found.append((layers, sides))
    return found


def _spent(work: Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(json.dumps(_rank(*sys.argv[1:])))
