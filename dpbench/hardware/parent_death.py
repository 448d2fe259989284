"""Parent death: end a child process when its parent ends, and describe exit statuses as text."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """Make the kernel send the signal `by` to this process when `parent` dies; exit now if `parent` has died already.

    The signal comes when the parent's *thread* that started this process ends: that thread must live as long as the
    child is needed.

    This works on Linux only. Elsewhere children end when their stdin is closed or their work is done.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def ending(exit_status: int | None) -> str:
    """Return how a process ended, as text; a negative status is a signal, None an unknown status."""
    if exit_status is None or exit_status >= 0:
        return f"exit status {exit_status}"
    known = {each.value: each.name for each in signal.Signals}
    return f"killed by {known.get(-exit_status, f'signal {-exit_status}')}"


def advice(exit_status: int | None) -> str:
    """Return the likely cause of a process's end and the remedy; empty where no cause is known."""
    no_memory = "; the kernel ends processes in this way when memory runs out: use a smaller batch"
    return no_memory if exit_status == -signal.SIGKILL else ""
