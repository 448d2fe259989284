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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dpbench.hardware.nvml import Library, NvmlGpu, open_nvml
from dpbench.hardware.processes import CORES, TICKS_PER_S, Ticks, parse_ticks
from dpbench.hardware.samplers.host import descendants
from dpbench.records import Case, Trial, words

LIMIT = 0.10
"""The fraction of the cores' capacity, or of a GPU's time, that others may take.

Above it, a measurement is NOISY. For the cores, `tolerated` may be less or more.
"""
SPARE_CORES = 0.25
"""The number of cores, besides those that a case leaves free, that others may take in a trial.

A rank that shares its core delays all ranks: on a machine with many cores, half a core is a small
fraction of the capacity, but may double the step of a case with a rank on each core.
"""
WINDOW_S = 0.5
GPU_WINDOW_S = 1.0
"""The duration of a measurement of GPUs: the longest time over which a driver averages."""
SHORTEST_S = 0.2
"""The minimum duration of a measurement, below which the rounding to ticks would dominate."""
PATIENCE_S = 30.0
PATIENCE = "DPBENCH_PATIENCE"
"""The environment variable that sets the default of --patience, in seconds."""
COUNTED = 0.5
"""If the kernel counts at most this fraction of the core-seconds, the load is unknown."""
NOISY = "NOISY"
FACT = "foreign_load"
"""The key of the foreign load of the cores in the provenance of a run and of a trial."""
GPUS = "foreign_gpus"
"""The key of what others used of the case's GPUs before the trial's round."""
GPU_BUSY = "gpu_busy_s"
"""The key of the seconds in which the busiest GPU of a case computes in a step, by the profiler."""

_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""The files of a container's CPU quota and of its period.

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
    raise ValueError(
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
    load = replace(measure(), gpus=of_gpus(gpus))
    if busy(load, cases) and patience_s > 0:
        say(
            f"busy machine: {told(load, cases)}; dpbench waits up to {patience_s:.0f} s for a low"
            " load (see --patience)"
        )
    while busy(load, cases) and time.monotonic() < deadline_s:
        load = replace(measure(), gpus=of_gpus(gpus))
    return load


def measure(seconds: float = WINDOW_S) -> Measured:
    """Return the foreign load during the next `seconds` seconds."""
    before = snapshot()
    time.sleep(seconds)
    return since(before)


def since(before: Snapshot | UnknownLoad, roots: Collection[int] = ()) -> Measured:
    """Return the foreign load between the snapshot `before` and now.

    For `roots`, see `snapshot`.
    """
    if isinstance(before, UnknownLoad):
        return before
    now = snapshot(roots)
    return now if isinstance(now, UnknownLoad) else between(before, now)


def busy(load: Measured, cases: Collection[Case] = ()) -> bool:
    """Return whether others take too much of the cores for `cases`, or of a GPU, if it is known."""
    return _takes_cores(load, cases) or any(gpu.busy for gpu in load.gpus)


def _takes_cores(load: Measured, cases: Collection[Case]) -> bool:
    return isinstance(load, Load) and load.taken > _limit(cases, load.cores)


def _limit(cases: Collection[Case], cores: int) -> float:
    """Return the fraction of the cores that others may take before a run of `cases`.

    Cases on GPUs tolerate what leaves them the cores that they need.
    """
    if not cases or any(case.device_kind != "cuda" for case in cases):
        return LIMIT
    return min(tolerated(case, cores) for case in cases) / cores


def told(load: Measured, cases: Collection[Case] = ()) -> str:
    """Return, as text, what others use too much of, or why the load is unknown."""
    found = [str(gpu) for gpu in load.gpus if gpu.busy]
    if isinstance(load, Load) and (not found or _takes_cores(load, cases)):
        found.insert(0, f"{load}; the limit for the sum is {_limit(cases, load.cores):.0%}")
    return "; ".join(found) or str(load)


def during(trial: Trial) -> Measured:
    """Return the foreign load of the cores that is stored with a trial."""
    facts = trial.provenance.get(FACT)
    if facts is None:
        return UnknownLoad("no load is stored with the trial")
    return msgspec.convert(facts, Load)


def gpus_during(trial: Trial) -> tuple[GpuLoad, ...]:
    """Return what others used of the trial's GPUs before its round; empty if it is unknown."""
    return msgspec.convert(trial.provenance.get(GPUS, ()), tuple[GpuLoad, ...])


def noisy(trial: Trial) -> bool:
    """Return whether others used a GPU of the trial, or took too many cores, if this is known."""
    load = during(trial)
    taken = isinstance(load, Load) and load.taken * load.cores > tolerated_in(trial, load.cores)
    return taken or any(gpu.busy for gpu in gpus_during(trial))


def tolerated_in(trial: Trial, cores: int) -> float:
    """Return the number of cores that others may take during a trial before it is NOISY.

    If a GPU computes for nearly the whole step, it is all `cores`: the host cannot have lengthened
    the step by more than the fraction `LIMIT`. Otherwise it is that of `tolerated`.
    """
    share = gpu_share(trial)
    gpu_bound = share is not None and share >= 1 - LIMIT
    return float(cores) if gpu_bound else tolerated(trial.case, cores)


def gpu_share(trial: Trial) -> float | None:
    """Return the share of the median step in which the busiest GPU computes; None if unknown."""
    busy_s = trial.provenance.get(GPU_BUSY)
    return busy_s / statistics.median(trial.timed) if busy_s and trial.timed else None


def gpu_busy_s(trial: Trial) -> float | None:
    """Return the seconds in which the busiest GPU computes in a profiled step; None if unknown."""
    profiled = trial.readings("kernel_busy_s").values()
    return max((statistics.median(each) for each in profiled), default=None)


def tolerated(case: Case, cores: int) -> float:
    """Return the number of cores that others may take during a case's trial before it is NOISY.

    For CPU devices, it is the fraction `LIMIT` of the `cores` of a machine or, if this is less, the
    number of cores that the devices leave free, plus `SPARE_CORES`. For GPUs, each of which needs
    a core, and each worker of a DataLoader another one, it is the number that these leave free,
    plus `SPARE_CORES`.
    """
    if case.traits.observed or case.device_kind not in ("cpu", "cuda"):
        return LIMIT * cores
    free = max(0.0, cores - needed_cores(case, cores)) + SPARE_CORES
    return free if case.device_kind == "cuda" else min(LIMIT * cores, free)


def shared(case: Case) -> str:
    """Return, as text, what other processes may take from a case."""
    return "the cores or a GPU" if case.device_kind == "cuda" else "the cores"


def needed_cores(case: Case, cores: int) -> float:
    """Return how many of the `cores` of each machine a case keeps busy."""
    if case.traits.loads:
        return max(1, case.loader)
    if case.device_kind == "cuda":
        return case.devices / case.hosts + max(0, case.loader)
    return cores if case.traits.all_cores else case.devices / case.hosts


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
            f"a quota of {most:g} CPUs limits this container to less than its {len(CORES)}"
            " core(s), and /proc/stat ignores quotas"
        )
    try:
        ticks = parse_ticks(Path("/proc/stat").read_bytes())
    except (OSError, ValueError) as error:
        return UnknownLoad(f"/proc/stat cannot be read: {error}")
    usable = {core: ticks[core] for core in CORES if core in ticks}
    return Snapshot(time_s=time.monotonic(), ticks=usable, own_s=_own_s({os.getpid(), *roots}))


def between(before: Snapshot, now: Snapshot) -> Measured:
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
    """Return the CPU quota of this container in CPUs, such as 1.5; None if there is none.

    `root` is the folder with the kernel's file system `sys`.
    """
    for files in _QUOTAS:
        with suppress(OSError, ValueError):
            texts = [(root / "sys/fs/cgroup" / one).read_text(encoding="utf-8") for one in files]
            limit, period = map(float, " ".join(texts).split())
            return limit / period if limit > 0 else None
    return None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The cumulative CPU times at the moment `time_s` of the monotonic clock.

    `ticks` has the times of each core in kernel ticks of 1/`TICKS_PER_S` seconds. `own_s` is the
    CPU time of this process tree in seconds.
    """

    time_s: float
    ticks: Mapping[int, Ticks]
    own_s: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """The fractions, from 0 to 1, of the cores' time that others took during a period.

    Other processes used `foreign`, and a hypervisor gave `steal` to other virtual machines. `cores`
    is the number of cores, and `seconds` the duration of the period. `gpus` has what others used of
    the GPUs, if these were measured.
    """

    foreign: float
    steal: float
    cores: int
    seconds: float
    gpus: tuple[GpuLoad, ...] = ()

    @property
    def taken(self) -> float:
        """Return the sum of `foreign` and `steal`."""
        return self.foreign + self.steal

    def __str__(self) -> str:
        return (
            f"other processes took {self.foreign:.0%}, and other virtual machines took"
            f" {self.steal:.0%}, of the time of {self.cores} core(s) during {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class UnknownLoad:
    """A foreign load of the cores that could not be measured, with the reason.

    `gpus` has what others used of the GPUs, if these were measured.
    """

    reason: str
    gpus: tuple[GpuLoad, ...] = ()

    def __str__(self) -> str:
        return f"the load of other processes is unknown: {self.reason}"


Measured = Load | UnknownLoad


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """Another process on a GPU: the share of the time that it uses, and the bytes that it holds.

    Both are None if unknown.
    """

    pid: int
    share: float | None
    memory_bytes: int | None

    def __str__(self) -> str:
        return f"pid {self.pid}" + _holding(self.memory_bytes)


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """What other processes used of the GPU with the CUDA ordinal `gpu`.

    `share` is the share of the time in which their kernels ran, and `memory_bytes` the memory that
    they hold; None if unknown. `processes` is empty where NVML lists none, as in a container.
    """

    gpu: int
    share: float | None
    memory_bytes: int | None
    processes: tuple[GpuProcess, ...]

    @property
    def busy(self) -> bool:
        """Return whether the share is known, and above `LIMIT`."""
        return self.share is not None and self.share > LIMIT

    def __str__(self) -> str:
        """Return who uses how much, as in "GPU 1: pid 4242 uses 62%, 10.3 GiB"."""
        return f"GPU {self.gpu}: {', '.join(self._uses())}"

    def _uses(self) -> Iterator[str]:
        apart = [one for one in self.processes if one.share is not None]
        for one in apart:
            yield f"pid {one.pid} uses {one.share:.0%}" + _holding(one.memory_bytes)
        if apart or self.share is None:
            return
        who = " and ".join(map(str, self.processes))
        memory = "" if self.processes else _holding(self.memory_bytes)
        yield f"{who or 'other processes'} use {self.share:.0%}{memory}"


def _holding(size: int | None) -> str:
    return "" if size is None else f", {words.size(size)}"


def plain(load: Measured) -> dict[str, Any]:
    """Return the load of the cores as a dict to store.

    An unknown one has the key `unknown`, with the reason.
    """
    if isinstance(load, UnknownLoad):
        return {"unknown": load.reason}
    return {name: value for name, value in asdict(load).items() if name != "gpus"}
