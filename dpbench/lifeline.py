"""Lifeline: a child process must not outlive its parent, however that one dies."""

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
