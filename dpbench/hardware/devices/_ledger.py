"""Bytes that live on each emulated device, and the bounds within which they may."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict

import torch


class DeviceFull(torch.OutOfMemoryError):
    """An emulated device would hold more bytes than its bound. `ordinal` is the device's number."""

    ordinal: int | None = None


class Ledger:
    """Bytes that each device holds, by the lifetime of the storages; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in the midst of any of these methods
        self._owned: dict[int, tuple[torch.device, int]] = {}
        self._now: dict[torch.device, int] = defaultdict(int)
        self._peak: dict[torch.device, int] = defaultdict(int)
        self._bound: dict[torch.device, int] = {}

    def own(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Count a storage until it is freed; a storage counted before changes its size at most.

        Raises torch.OutOfMemoryError, and counts nothing, where the device would hold more than its bound.
        """
        key, size = id(storage), storage.nbytes()
        with self._lock:
            _, before = self._owned.get(key, (device, None))
            bound = self._bound.get(device)
            if bound is not None and self._now[device] + size - (before or 0) > bound:
                full = DeviceFull(
                    f"emulated device {device.index} has a total capacity of {bound} bytes, of which "
                    f"{self._now[device]} are in use; tried to allocate {size - (before or 0)}"
                )
                full.ordinal = device.index
                raise full
            if before is None:
                weakref.finalize(storage, self._free, key).atexit = False
            if before != size:
                self._owned[key] = (device, size)
                self._now[device] += size - (before or 0)
                self._peak[device] = max(self._peak[device], self._now[device])

    def _free(self, key: int) -> None:
        """Forget a storage."""
        with self._lock:
            device, size = self._owned.pop(key)
            self._now[device] -= size

    def now(self, device: torch.device) -> int:
        """Return the bytes that live on `device`."""
        with self._lock:
            return self._now[device]

    def peak(self, device: torch.device) -> int:
        """Return the most bytes that lived on `device` since `reset`."""
        with self._lock:
            return self._peak[device]

    def take(self, device: torch.device) -> int:
        """Return the peak and let it start anew, with nothing in between."""
        with self._lock:
            peak = self._peak[device]
            self._peak[device] = self._now[device]
            return peak

    def bind(self, device: torch.device, size: int | None) -> None:
        """Let the device hold so many bytes at most; None lifts the bound."""
        with self._lock:
            if size is None:
                self._bound.pop(device, None)
            else:
                self._bound[device] = size

    def reset(self, device: torch.device) -> None:
        """Let the peak start anew from what lives now."""
        with self._lock:
            self._peak[device] = self._now[device]


ledger = Ledger()
"""The one of this process: storages outlive the device objects that made them."""
