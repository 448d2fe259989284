"""Lifeline: a child process ends when its parent ends, and an exit status becomes text."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when `parent` dies; end at once if it already has.

    The parent's *thread* counts that started this process: it must last as long as the child is wanted.

    Linux only; elsewhere children end when their stdin or their work does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def ending(exit_status: int | None) -> str:
    """Return how a process ended; a negative status is a signal, None an unknown one."""
    if exit_status is None or exit_status >= 0:
        return f"exit status {exit_status}"
    known = {each.value: each.name for each in signal.Signals}
    return f"killed by {known.get(-exit_status, f'signal {-exit_status}')}"


def advice(exit_status: int | None) -> str:
    """Return the likely cause of a process's end and the remedy; empty where none is known."""
    no_memory = "; the kernel ends processes in this way when memory runs out: use a smaller batch"
    return no_memory if exit_status == -signal.SIGKILL else ""
