"""Heap: memory that was freed stays with the process, as CUDA's caching allocator keeps it for a GPU."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # M_... of glibc's malloc.h
_OPTIONS = {
    _MMAP_THRESHOLD: 2**25,  # glibc takes no more: larger blocks are mapped and unmapped each time
    _TRIM_THRESHOLD: 2**31 - 1,
    _TOP_PAD: 2**26,  # a thread's heap is no larger, so none is given back
}


@cache
def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") else None


def keep() -> None:
    """Keep freed memory in this process, and in those that it forks; nothing happens where malloc is not glibc's.

    By default blocks of a step's size go back to the system when they are freed, and every page of the next ones is
    faulted in anew: a tenth of a small transformer's step on two threads here.
    """
    if libc := _libc():
        for option, value in _OPTIONS.items():
            libc.mallopt(ctypes.c_int(option), ctypes.c_int(value))


def release() -> None:
    """Give back, once, what is kept and not in use."""
    if libc := _libc():
        libc.malloc_trim(ctypes.c_size_t(0))
