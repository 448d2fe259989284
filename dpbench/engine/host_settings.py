"""Host: how logical CPU devices share a user's process: its threads for operations, and its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from dpbench.hardware.device import Device
from dpbench.hardware.malloc import keep

KEEP_MEMORY = "DPBENCH_KEEP_MEMORY"
"""The variable that leaves the allocator unchanged, if it is 0."""


def keep_memory(devices: Sequence[Device]) -> None:
    """Keep freed memory in this process, for logical CPU devices, unless DPBENCH_KEEP_MEMORY=0.

    Process-wide, and for as long as the process lasts: see `heap.keep`, which does nothing where malloc is not glibc's.
    """
    if len(devices) > 1 and devices[0].torch_device.type == "cpu" and os.environ.get(KEEP_MEMORY) != "0":
        keep()


class IntraOp:
    """The caller's threads for operations, shared by logical CPU devices that work at the same time.

    Inside, an operation runs on max(1, threads // devices) threads; after it, the caller's number is restored. The
    number is the same on every schedule, since some operations round by it.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = len(devices) if devices and devices[0].torch_device.type == "cpu" else 1
        self._before = 0

    def __enter__(self) -> None:
        self._before = 0
        if self._devices > 1 and (threads := torch.get_num_threads()) > 1:
            self._before = threads
            torch.set_num_threads(max(1, threads // self._devices))

    def __exit__(self, *error: object) -> None:
        if self._before:
            torch.set_num_threads(self._before)
