"""Processes: bind threads to cores, make malloc keep memory, end a process with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from dpbench.hardware import cgroups
from dpbench.records import signals

_TOPOLOGY = Path("/sys/devices/system/cpu")
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""The kernel ticks per second; the kernel counts the CPU time of cores in ticks."""
_here = threading.local()


def spread(cores: Sequence[int], topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """Return the logical `cores` in an order that uses each physical core before any is used again.

    `topology` is the folder in which the kernel lists the logical cores of each physical core.
    """
    seen: Counter[str] = Counter()
    turn = {}
    for core in sorted(cores):
        whole = str(core)
        with suppress(OSError):  # not every system provides the topology
            whole = (topology / f"cpu{core}" / "topology" / "thread_siblings_list").read_text(
                encoding="utf-8"
            )
        turn[core] = seen[whole]
        seen[whole] += 1
    return tuple(sorted(turn, key=lambda core: (turn[core], core)))


CORES: tuple[int, ...] = (
    spread([*os.sched_getaffinity(0)]) if hasattr(os, "sched_getaffinity") else ()
)
"""The cores of this process at import, ordered by `spread`; empty if threads cannot be bound."""


def stay(number: int) -> None:
    """Bind the calling thread, and the threads that it starts, to core `number` of `CORES`.

    Positions beyond the last core start again at the first. Without this binding, schedulers that
    pack threads on few cores leave two threads on one core for milliseconds after they wake. Does
    nothing on systems that cannot bind threads.
    """
    core = CORES[number % len(CORES)] if CORES else None
    if core is None or getattr(_here, "core", None) == core:
        return
    with suppress(OSError):  # binding is forbidden, or the core was removed: run unbound
        if getattr(_here, "before", None) is None:
            _here.before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        _here.core = core


def roam() -> None:
    """Undo `stay`: allow the calling thread to use all cores that it could use before."""
    if (before := getattr(_here, "before", None)) is not None:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
    _here.core = _here.before = None


@contextmanager
def staying(number: int) -> Iterator[None]:
    """Bind the calling thread to a core inside the context, as `stay` does."""
    stay(number)
    try:
        yield
    finally:
        roam()


def parse_ticks(stat: bytes) -> dict[int, Ticks]:
    """Return the times of each core in kernel ticks, from the content of /proc/stat."""
    cores: dict[int, Ticks] = {}
    for line in stat.splitlines()[1:]:  # the first line is the sum
        if not line.startswith(b"cpu"):
            break
        name, *columns = line.split()
        # user nice system idle iowait irq softirq steal; user includes guest time
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, columns[:8])
        busy = user + nice + system + irq + softirq
        cores[int(name[3:])] = Ticks(busy, steal, busy + idle + iowait + steal)
    return cores


class Ticks(NamedTuple):
    """The cumulative times of a core in kernel ticks of 1/`TICKS_PER_S` seconds.

    `busy` excludes idle time, `steal` is the time in which a hypervisor ran other virtual machines,
    and `total` is the sum of busy, idle and steal time.
    """

    busy: int
    steal: int
    total: int


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # M_... of glibc's malloc.h
_OPTIONS = {
    # the largest value glibc accepts; it maps and unmaps larger blocks each time
    _MMAP_THRESHOLD: 2**25,
    _TRIM_THRESHOLD: 2**31 - 1,
    # the maximum size of a thread's heap, so that no heap is returned to the system
    _TOP_PAD: 2**26,
}


@cache
def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") else None


def keep() -> None:
    """Make malloc keep freed memory, in this process and in processes forked from it.

    By default, malloc returns large freed blocks to the system, and every page of the blocks that a
    step allocates next causes a page fault: a tenth of the time of a small transformer's step on
    two threads. Does nothing unless malloc is glibc's.
    """
    if libc := _libc():
        for option, value in _OPTIONS.items():
            libc.mallopt(ctypes.c_int(option), ctypes.c_int(value))


def release() -> None:
    """Return the unused memory that malloc keeps to the system; memory freed later is kept."""
    if libc := _libc():
        libc.malloc_trim(ctypes.c_size_t(0))


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
CHILD_POLL_S = 0.002
"""The seconds between two checks whether killed children have ended."""


def die_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """Make the kernel send the signal `by` to this process when its parent ends.

    Exit if the parent, whose process id is `parent`, has ended already. The signal is sent as soon
    as the parent's *thread* that started this process ends; that thread must live as long as the
    child is needed. Only Linux sends this signal; on other systems, children end when their stdin
    is closed or their work is done.
    """
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


def adopt() -> None:
    """Make this process the parent of descendants whose own parents end, on Linux.

    See `end_children`.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_children() -> None:
    """Kill all children of this process, and adopted descendants, and wait until all have ended."""
    import psutil

    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    child.kill()
            time.sleep(CHILD_POLL_S)


def end_tree(pid: int) -> None:
    """Kill the descendants of a process, and then the process."""
    import psutil

    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for child in root.children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
        root.kill()


def ending(exit_status: int | None) -> str:
    """Return text on how a process ended; a negative status is a signal, None an unknown status."""
    if exit_status is None or exit_status >= 0:
        return f"exit status {'unknown' if exit_status is None else exit_status}"
    names = {each.value: each.name for each in signal.Signals}
    return f"killed by {names.get(-exit_status, f'signal {-exit_status}')}"


def last_line(text: str) -> str:
    """Return the last line of the error output of a process, which has the error."""
    return (text.strip().splitlines() or ["(none)"])[-1][:500]


def killed_for_memory(root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel has killed because memory ran out; None if unknown.

    The number is that of this process's control group or, if it cannot be read, of the nearest one
    above it or the whole system. `root` is the folder with the kernel's file systems `proc` and
    `sys`.
    """
    counters = product(cgroups.folders("memory", root), ("memory.events", "memory.oom_control"))
    for file in (*(folder / name for folder, name in counters), root / "proc/vmstat"):
        with suppress(OSError, ValueError):
            for line in file.read_text(encoding="utf-8").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process may use; None if unknown.

    Its control group limits them, those above it, and the memory of the machine.
    """
    limits = []
    names = ("memory.max", "memory.limit_in_bytes")
    for folder, name in product(cgroups.folders("memory", root), names):
        with suppress(OSError, ValueError):  # the word "max" means no limit
            limits.append(int((folder / name).read_text(encoding="utf-8")))
    with suppress(OSError, ValueError, IndexError):
        limits.append(int((root / "proc/meminfo").read_text(encoding="utf-8").split()[1]) * 1024)
    return min(limits, default=None)


NEARLY_ALL = 0.8
"""The fraction of the memory limit at which a killed process probably lacked memory."""


def advice(
    exit_status: int | None, killed_before: int | None, peak_bytes: int | None = None
) -> str:
    """Return the likely cause of a process's end and the remedy, as a clause to append to `ending`.

    The clause is empty if SIGKILL did not end the process. `killed_before` is the result of
    `killed_for_memory` before the process began, and `peak_bytes` the peak of its resident set.
    Lack of memory is named only if `killed_for_memory` has increased, or if the resident set
    reached the fraction `NEARLY_ALL` of the memory limit.
    """
    if exit_status != -signal.SIGKILL:
        return ""
    killed, resident, nearly_all = _lack(killed_before, peak_bytes)
    if killed:
        return "; the kernel killed a process because memory ran out; use a smaller batch"
    if nearly_all:
        return f"{resident}, so memory probably ran out; use a smaller batch"
    if killed is None:
        return (
            f"{resident}; the kernel does not report whether memory ran out; if it did, use a"
            " smaller batch"
        )
    return (
        f"{resident}; another process sent the signal: the kernel has not killed any process for"
        " lack of memory"
    )


def killed_from_outside(
    exit_status: int | None, killed_before: int | None, peak_bytes: int | None = None
) -> bool:
    """Return whether a signal of another process ended a process, without a sign of lacking memory.

    The signal is SIGKILL, or one that asks a process to end. It tells nothing about the case that
    was measured, unlike signals of a crash, such as SIGSEGV. The arguments are those of `advice`.
    This process must not have sent the signal.
    """
    if exit_status != -signal.SIGKILL:
        return exit_status in [-number for number in signals.ENDING]
    killed, _, nearly_all = _lack(killed_before, peak_bytes)
    return not (killed or nearly_all)


def _lack(killed_before: int | None, peak_bytes: int | None) -> tuple[bool | None, str, bool]:
    """Return the signs that memory ran out; the arguments are those of `advice`.

    They are whether the kernel has killed a process for it, None if unknown; the resident set as a
    clause, "" if unknown; and whether it reached nearly all memory.
    """
    now, limit = killed_for_memory(), memory_limit()
    killed = None if now is None or killed_before is None else now > killed_before
    if not peak_bytes or not limit:
        return killed, "", False
    gib = f"{peak_bytes / 2**30:.3g} of {limit / 2**30:.3g} GiB"
    return killed, f"; its resident set reached {gib}", peak_bytes >= NEARLY_ALL * limit


def peak_of_children() -> int:
    """Return the largest peak of the resident sets, in bytes, of children that have ended."""
    import resource  # not on every system

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def resident_peak() -> int:
    """Return the peak of this process's resident set in bytes."""
    import resource  # not on every system

    with suppress(OSError):
        # in bytes, because the name of this process may be no text
        for line in Path("/proc/self/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
