"""Collectives: the probe's figures that need several processes.

They are the duration of all-reduces, the slowdown of nets that train in several processes at once, and the host's cost
of DistributedDataParallel. A fresh process forks the ranks, because a process that has run tensor operations must not
fork.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpbench.hardware import processes
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.measure import scratch
from dpbench.measure.clocks import HostClock
from dpbench.measure.ranks import run
from dpbench.probe import engine, host
from dpbench.probe.figures import WARM, Figure, Timing, figure, makespans, ratio, spread, timing
from dpbench.records import UNATTRIBUTED, Case, Trial, plan, registry
from dpbench.records.registry import Role
from dpbench.records.trial import joined
from dpbench.strategies import ddp, single

KIB, MIB = 2**10, 2**20
SIZES = tuple(32 * KIB * 4**i for i in range(6))
"""The sizes of the measured all-reduces in bytes, from 32 KiB to 32 MiB."""
COMPUTED_S = 1e-3
"""The duration in seconds of the computation before each all-reduce and after each barrier."""
LIMIT_S = 60.0


def figures(rows: Mapping[str, int], sizes: Sequence[int] = SIZES, ranks: int = 2) -> Iterator[Figure]:
    """Yield all figures that need several processes on the host; the ranks are started once for all figures.

    `rows` maps the name of each net to its number of samples per rank. `sizes` has the bytes of each all-reduce; if
    `sizes` is empty, no all-reduce is measured.
    """
    found = _measured(ranks, "gloo", {"nets": dict(rows), "chains": engine.LAYERS, "reduce": sizes})
    yield from _of_nets(found["nets"], rows, ranks)
    yield from _of_chains(found["chains"], ranks)
    if sizes:
        yield from _of_reductions(found["reduce"], ranks, "gloo")


def all_reduce(ranks: int = 2, backend: str = "gloo", sizes: Sequence[int] = SIZES) -> Iterator[Figure]:
    """Yield the seconds of an all-reduce of each size, and the start-up time and bandwidth of a line fitted to them.

    `sizes` are in bytes. `backend` is the backend of torch.distributed: "gloo" or "nccl".
    """
    yield from _of_reductions(_measured(ranks, backend, {"reduce": sizes})["reduce"], ranks, backend)


def _of_reductions(found: Sequence[tuple[int, Mapping[str, float]]], ranks: int, backend: str) -> Iterator[Figure]:
    """Yield the figures of `all_reduce` from measurements: pairs of a size in bytes and the fields of its `Timing`.

    The line is fitted to the seconds as a function of the bytes that each rank sends in a ring all-reduce. For n ranks,
    these bytes are 2 (n - 1) / n times the size.
    """
    timed = [(size, Timing(**seconds)) for size, seconds in found]
    for size, spent in timed:
        how = f"all_reduce of {size // KIB} KiB between {ranks} ranks with {backend}, after {COMPUTED_S * 1e3:g} ms of "
        how += "computation"
        yield figure(f"all_reduce_{size // KIB}_kib_s", spent, how)
    sent = 2 * (ranks - 1) / ranks
    starts_s, per_bytes = host.lines([(sent * size, spent) for size, spent in timed])
    line = "a line fitted to the seconds of an all_reduce as a function of the bytes that each rank sends"
    yield spread("all_reduce_start_s", starts_s, f"the intercept of {line}")
    rates = [1 / per_byte for per_byte in per_bytes]
    how = f"the inverse slope of {line}, or the best rate of any size if the seconds do not grow with the bytes"
    yield spread("all_reduce_bytes_per_s", rates, how)


def _of_nets(found: Mapping[str, Any], rows: Mapping[str, int], ranks: int) -> Iterator[Figure]:
    """Yield, for each net, the slowdown of its forward and of its training when all ranks run it at the same time.

    `found` has, by the net's name, the timings in one rank alone and in all ranks at once, as `_nets` returns them.
    """
    for name, (alone, together) in found.items():
        how = f"of {name} on {rows[name]} rows in all ranks at once, until the last rank ends, relative to rank 0 alone"
        for what, whole, one in zip(("forward", "training"), together, alone, strict=True):
            said = {"forward": "the forward of a step", "training": "forward and backward"}[what]
            label = f"{name}_{what}_{ranks}_processes_ratio"
            yield ratio(label, Timing(**whole), Timing(**one), f"{said} {how}")


def _of_chains(found: Sequence[tuple[int, Mapping[str, engine.Phases]]], ranks: int) -> Iterator[Figure]:
    """Yield the host's cost of DistributedDataParallel in each phase, measured on chains of tiny layers.

    The time that the chains themselves take in a phase is subtracted. `found` is the result of `_chains`.
    """
    alone, beside, joint, joint_long = (
        {layers: sides[side] for layers, sides in found} for side in ("alone", "beside", "ddp", "ddp_long")
    )
    # minus the durations in concurrent ranks, because the nets' ratios already contain the slowdown by other ranks
    net = engine.beyond(joint, beside, dict.fromkeys(("forward", "backward"), 1))
    rest = engine.beyond(joint, alone, dict.fromkeys(("loss", "optimizer"), 1))
    more = {layers: [{**a, **b} for a, b in zip(net[layers], rest[layers], strict=True)] for layers in net}
    how = f"torch's DistributedDataParallel, {ranks} ranks, gloo"
    yield from engine.of_chains("ddp", joint, ("scatter", "reduce", UNATTRIBUTED), more, how)
    yield from engine.of_chains("ddp_long", joint_long, ("reduce",), {}, f"{how}{engine.OF_LONG}")


def _measured(ranks: int, backend: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Start a fresh process that forks the ranks; return the measurements of rank 0, by the names in `wanted`.

    `wanted` maps the name of each measurement to its argument. Raises RuntimeError if a rank fails.
    """
    processes.roam()  # each rank will be pinned to a different core
    with scratch.folder() as folder:
        command = [sys.executable, "-m", "dpbench.probe.collective", str(os.getpid()), str(folder), str(ranks), backend]
        done = subprocess.run(
            [*command, json.dumps(wanted)], timeout=LIMIT_S, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(
            f"the probe's ranks ended with exit status {done.returncode}; their error output ends with: "
            f"{done.stderr[-500:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _start(parent: int, folder: Path, ranks: int, backend: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Fork the ranks from this process, and return the measurements of rank 0, by the names in `wanted`.

    This process ends when the process with the id `parent` ends.
    """
    processes.die_with_parent(parent)
    importlib.import_module("torch._dynamo")  # each rank would import it for its first optimizer
    measured: dict[str, Any] = run(partial(_rank, backend, wanted), ranks, folder, backend)[0]
    return measured


def _rank(backend: str, wanted: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the measurements of one rank, by name; `wanted` maps the name of each measurement to its argument."""
    torch.set_num_threads(1)
    processes.keep()
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        processes.stay(rank)  # after gloo's own threads have started, as in the workers
    measure: dict[str, Callable[[Any], Any]]
    measure = {"reduce": lambda sizes: _reduce(sizes, device), "nets": _nets, "chains": _chains}
    return {what: measure[what](arguments) for what, arguments in wanted.items()}


def _reduce(sizes: Sequence[int], device: torch.device) -> list[tuple[int, dict[str, float]]]:
    """Return, for each size in bytes, a pair of the size and the fields of the `Timing` of an all-reduce.

    As in a step, each all-reduce follows a computation, because an idle or waiting core takes longer to respond than a
    busy one. An all-reduce lasts from the time at which the last rank starts it to the time at which the last rank
    finishes it.
    """
    found = []
    for size in sizes:
        value = torch.zeros(size // 4, device=device)
        mine = []
        for _ in range(WARM + (20 if size <= MIB else 8)):  # the first all-reduces connect ranks and allocate pages
            _compute()
            begin = time.perf_counter()
            dist.all_reduce(value)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            mine.append((begin, time.perf_counter()))
        ranks = list(zip(*_gathered(mine), strict=True))[WARM:]
        spent = timing([max(end for _, end in one) - max(begin for begin, _ in one) for one in ranks])
        found.append((size, asdict(spent)))
    return found


def _nets(rows: Mapping[str, int]) -> dict[str, Any]:
    """Return a pair for each net, by name: the timings in rank 0 while the other ranks wait, and in all ranks at once.

    Each item of the pair has two timings, of forward and of the whole step, as dictionaries of the fields of `Timing`.
    In all ranks except rank 0, the first item is None. `rows` maps the name of each net to its samples per rank.
    """
    found = {}
    for name, count in rows.items():
        step, times = host.timed_training(name, count), _agreed(host.repeats(name, count))
        alone, joint = [], []
        for _ in range(WARM + times if dist.get_rank() == 0 else 0):
            _compute()
            alone.append(step())
        dist.barrier()
        for _ in range(WARM + times):
            dist.barrier()
            _compute()  # long enough for gloo's threads to fall asleep
            joint.append(step())
        # a step ends when its last rank ends
        last = [max(ranks, key=lambda times: times[-1]) for ranks in zip(*_gathered(joint), strict=True)]
        found[name] = tuple([asdict(one) for one in makespans([each])] if each else None for each in (alone, last))
    return found


def _compute() -> None:
    """Keep the core busy for `COMPUTED_S` seconds."""
    square, begin = torch.ones(64, 64), time.perf_counter()
    while time.perf_counter() < begin + COMPUTED_S:
        torch.mm(square, square)


def _agreed(count: int) -> int:
    """Return the value that rank 0 passes as `count`; all ranks must call this function."""
    number = torch.tensor(count)
    dist.broadcast(number, 0)
    return int(number)


def _gathered(mine: Any) -> list[Any]:
    """Return the objects that all ranks pass as `mine`, in the order of the ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _chains(lengths: Sequence[int]) -> list[Any]:
    """Return a pair for each number of layers in `lengths`: this number, and a chain's seconds by setting and phase.

    A chain is a net of tiny layers; see `engine.chain`. In the setting `alone`, rank 0 runs the chain while the other
    ranks wait; only the result of rank 0 has this setting. In `beside`, all ranks run it at once, without
    communication. In `ddp` and `ddp_long`, all ranks run it with DistributedDataParallel; the kernels are short in
    `ddp`, and take milliseconds in `ddp_long`.
    """
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), []
    devices = open_devices("cpu", ranks)[rank : rank + 1]
    for layers in lengths:
        sides = {}
        if rank == 0:
            sides["alone"] = engine.seconds_of(_alone(layers, devices, ranks))
        dist.barrier()
        sides["beside"] = _together(_alone(layers, devices, ranks, before=dist.barrier))
        for name, swept in (("ddp", engine.SHORT), ("ddp_long", engine.LONG)):
            sides[name] = _together(_joint(layers, swept, devices, ranks))
        found.append((layers, sides))
    return found


def _alone(layers: int, devices: Sequence[Device], ranks: int, before: Callable[[], Any] = tuple) -> Trial:
    """Run a chain's steps without DistributedDataParallel, and return the trial.

    `before` is called before each step; it may be a barrier that all ranks enter.
    """
    case, clock = plan.baseline(model="chain", batch_size=engine.ROWS // ranks), HostClock()
    with single.SINGLE.start(case, engine.chain(layers), devices, clock.mark) as step:

        def synchronised(*batch: Any) -> None:
            before()
            step(*batch)

        return engine.trial_of(synchronised, clock, case.batch_size)


def _joint(layers: int, swept: int, devices: Sequence[Device], ranks: int) -> Trial:
    """Run a chain's steps with DistributedDataParallel in all ranks, and return the trial of this rank.

    `swept` is the number of bytes that the chain reads at the end of forward and of backward.
    """
    case, clock = (
        Case(model="chain", strategy=registry.of_role(Role.CONTROL), devices=ranks, batch_size=engine.ROWS),
        HostClock(),
    )
    with ddp.DDP.start(case, engine.chain(layers, swept), devices, clock.mark) as step:
        return engine.trial_of(step, clock, case.batch_size, step.observe)


def _together(mine: Trial) -> engine.Phases:
    """Merge the trials that all ranks pass as `mine`, and return the typical seconds of a merged step by phase."""
    steps, spans = joined(_gathered(mine))
    return engine.seconds_of(replace(mine, steps=steps, spans=spans))


if __name__ == "__main__":
    parent, folder, ranks, backend, wanted = sys.argv[1:]
    print(json.dumps(_start(int(parent), Path(folder), int(ranks), backend, json.loads(wanted))), flush=True)
