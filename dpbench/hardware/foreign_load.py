"""Foreign load: what other processes use of the cores and of the GPUs, and the wait for a low load.

The foreign load is the busy time of this process's cores minus the CPU time of this process tree
(with the children that it has reaped), as a fraction of the cores' capacity. Steal is the time that
a hypervisor gave to other virtual machines. If the kernel's counts do not exist, or do not describe
the capacity of this process (as in a container with a CPU quota), the load is unknown, never low.

The foreign load of a GPU is the share of a second in which kernels of others ran on it, measured
while this process tree uses no GPU. Memory alone is no load: it takes no time of a step.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from dpbench.hardware import cgroups
from dpbench.hardware.nvml import Library, NvmlGpu, open_nvml
from dpbench.hardware.processes import CORES, TICKS_PER_S, Ticks, parse_ticks
from dpbench.hardware.samplers.host import descendants
from dpbench.records import Case, words
from dpbench.records.disturbance import busy, told
from dpbench.records.errors import UsageError
from dpbench.records.load import GpuLoad, GpuProcess, Load, Measured, OfCores, UnknownLoad
from dpbench.records.spelling import dashed

WINDOW_S = 0.5
GPU_WINDOW_S = 1.0
"""The duration of a measurement of GPUs: the longest time over which a driver averages."""
SHORTEST_S = 0.2
"""The minimum duration of a measurement, below which the rounding to ticks would dominate."""
PATIENCE_S = 30.0
PATIENCE = "DPBENCH_PATIENCE"
"""The environment variable that sets the default of the option `patience`, in seconds."""
COUNTED = 0.5
"""If the kernel counts at most this fraction of the core-seconds, the load is unknown."""
_QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""The files of a control group's CPU quota and of its period.

Version 2 of control groups has both values in one file; version 1 has two files.
"""


def patience(given_s: float | None = None) -> float:
    """Return the maximum seconds to wait for a low load.

    This is `given_s`, else the value of DPBENCH_PATIENCE, else the default. Raises ValueError if
    the environment variable is not a number of 0 or more.
    """
    if given_s is not None:
        return given_s
    text = os.environ.get(PATIENCE, str(PATIENCE_S))
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds
    raise UsageError(
        f"the environment variable {PATIENCE} must be a number of seconds, 0 or more, but is"
        f" {text!r}"
    )


def wait(
    patience_s: float,
    say: Callable[[str], None],
    cases: Collection[Case] = (),
    gpus: Sequence[int] = (),
) -> Measured:
    """Return the first foreign load that is not high, or the last within `patience_s` seconds.

    `cases` are those to be measured, and `gpus` the CUDA ordinals of their GPUs. If the first
    measurement is high and `patience_s` is above 0, `say` is called with one line of text before
    the wait. An unknown load ends the wait.
    """
    deadline_s = time.monotonic() + patience_s
    load = Measured(measure(), of_gpus(gpus))
    if busy(load, cases) and patience_s > 0:
        say(
            f"busy machine: {told(load, cases)}. dpbench waits up to {patience_s:.0f} s for a lower"
            f" load. {dashed('patience', '0')} does not wait."
        )
    while busy(load, cases) and time.monotonic() < deadline_s:
        load = Measured(measure(), of_gpus(gpus))
    return load


def measure(seconds: float = WINDOW_S) -> OfCores:
    """Return the foreign load during the next `seconds` seconds."""
    before = snapshot()
    time.sleep(seconds)
    return since(before)


def since(before: Snapshot | UnknownLoad, roots: Collection[int] = ()) -> OfCores:
    """Return the foreign load between the snapshot `before` and now.

    For `roots`, see `snapshot`.
    """
    if isinstance(before, UnknownLoad):
        return before
    now = snapshot(roots)
    return now if isinstance(now, UnknownLoad) else between(before, now)


def of_gpus(gpus: Sequence[int], library: Library = None) -> tuple[GpuLoad, ...]:
    """Return what other processes use of the GPUs `gpus` (CUDA ordinals) in the next second.

    The processes of this process tree must not use the GPUs meanwhile. The result is empty without
    NVML; it waits only if there is a GPU to measure. `library` replaces pynvml in tests.
    """
    if not gpus:
        return ()
    with open_nvml(library) as nvml:
        watched = [gpu for gpu in nvml.gpus if gpu.index in gpus] if nvml else []
        if not watched:
            return ()
        began_s = time.time()
        time.sleep(GPU_WINDOW_S)
        own = descendants(os.getpid())
        return tuple(_of_gpu(gpu, began_s, own) for gpu in watched)


def _of_gpu(gpu: NvmlGpu, began_s: float, own: Collection[int]) -> GpuLoad:
    """Return what others use of a GPU; what this process tree itself may use is left out."""
    every = gpu.processes()
    shares = gpu.process_utilization(began_s)
    others = [pid for pid in (every | shares) if pid not in own]
    samples = [value for _, value in gpu.utilization_samples(began_s)]
    share = statistics.mean(samples) if samples else gpu.read("utilization_ratio")
    memory: float | None = 0
    if others:
        known = [shares[pid] for pid in others if pid in shares]
        share = sum(known) if known else share
        memory = sum(size for pid in others if (size := every.get(pid)) is not None)
        if len(others) == 1 and not known and share is not None:
            shares = {others[0]: share}
    elif every:
        share = 0.0
    else:  # NVML lists no processes, as in a container: nobody of this tree uses the GPU now
        memory = gpu.read("memory_used_bytes")
    return GpuLoad(
        gpu=gpu.index,
        share=share,
        memory_bytes=None if memory is None else int(memory),
        processes=tuple(
            GpuProcess(pid=pid, share=shares.get(pid), memory_bytes=every.get(pid))
            for pid in others
        ),
    )


def snapshot(roots: Collection[int] = ()) -> Snapshot | UnknownLoad:
    """Return the CPU time that the cores and this process tree have used until now.

    The processes `roots` and their descendants count as part of this tree. If the system does not
    provide these times, return an unknown load with the reason.
    """
    if not CORES:
        return UnknownLoad("this system does not provide the list of cores that a process may use")
    most = quota()
    if most is not None and most < len(CORES):
        return UnknownLoad(
            f"a quota of {most:g} CPUs limits this process to less than its"
            f" {words.count(len(CORES), 'core')}, and /proc/stat ignores quotas"
        )
    try:
        ticks = parse_ticks(Path("/proc/stat").read_bytes())
        own_s = _own_s({os.getpid(), *roots})
    except Exception as error:  # whatever it is, it is the reason
        return UnknownLoad(f"/proc/stat and the times of processes cannot be read: {error}")
    usable = {core: ticks[core] for core in CORES if core in ticks}
    return Snapshot(time_s=time.monotonic(), ticks=usable, own_s=own_s)


def between(before: Snapshot, now: Snapshot) -> OfCores:
    """Return the foreign load between two snapshots.

    It is unknown if the time between them is below `SHORTEST_S` seconds, or if the kernel counted
    at most the fraction `COUNTED` of the cores' time.
    """
    cores = before.ticks.keys() & now.ticks.keys()
    seconds = now.time_s - before.time_s
    capacity_s = len(cores) * seconds

    def passed_s(count: Callable[[Ticks], int]) -> float:
        return (
            sum(max(0, count(now.ticks[core]) - count(before.ticks[core])) for core in cores)
            / TICKS_PER_S
        )

    if seconds < SHORTEST_S:
        return UnknownLoad(
            f"the measurement took {seconds:.2f} s, which is less than the minimum of"
            f" {SHORTEST_S} s"
        )
    counted_s = passed_s(lambda ticks: ticks.total)
    if counted_s <= COUNTED * capacity_s:
        return UnknownLoad(
            f"the kernel's counts cover only {counted_s:.2f} of {capacity_s:.2f} core-seconds"
        )
    capacity_s = max(capacity_s, counted_s)  # whole ticks may cover more than the time passed
    foreign_s = max(0.0, passed_s(lambda ticks: ticks.busy) - (now.own_s - before.own_s))
    steal_s = passed_s(lambda ticks: ticks.steal)
    return Load(
        foreign=foreign_s / capacity_s,
        steal=steal_s / capacity_s,
        cores=len(cores),
        seconds=seconds,
    )


def _own_s(roots: Collection[int]) -> float:
    """Include the children that each process has reaped."""
    import psutil

    total = 0.0
    for root in roots:
        # a process that has ended is in its parent's count from now on
        with suppress(psutil.Error):
            top = psutil.Process(root)
            for process in (top, *top.children(recursive=True)):
                with suppress(psutil.Error):
                    spent = process.cpu_times()
                    total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process in CPUs, such as 1.5; None if there is none.

    The lowest quota of its control group and of those above holds. `root` is the folder with the
    kernel's file systems `proc` and `sys`.
    """
    quotas = []
    for folder, files in product(cgroups.folders("cpu", root), _QUOTAS):
        with suppress(OSError, ValueError):  # the word "max" means no limit
            texts = [(folder / one).read_text(encoding="utf-8") for one in files]
            limit, period = map(float, " ".join(texts).split())
            quotas += [limit / period] if limit > 0 else []
    return min(quotas, default=None)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The cumulative CPU times at the moment `time_s` of the monotonic clock.

    `ticks` has the times of each core in kernel ticks of 1/`TICKS_PER_S` seconds. `own_s` is the
    CPU time of this process tree in seconds.
    """

    time_s: float
    ticks: Mapping[int, Ticks]
    own_s: float
