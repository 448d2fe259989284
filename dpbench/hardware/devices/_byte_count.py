"""Byte count: count the bytes of tensor storages on each emulated device, and enforce a limit."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict

import torch


class DeviceFull(torch.OutOfMemoryError):
    """An allocation would exceed the limit of the emulated device with the index `ordinal`."""

    ordinal: int | None = None


class ByteCount:
    """A count of the bytes of the tensor storages on each emulated device.

    All methods are thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer may run within any of these methods
        self._owned: dict[int, tuple[torch.device, int, weakref.ref[torch.UntypedStorage]]] = {}
        self._now: dict[torch.device, int] = defaultdict(int)
        self._peak: dict[torch.device, int] = defaultdict(int)
        self._bound: dict[torch.device, int] = {}

    def own(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Count the bytes of `storage` as bytes of `device` until the storage is freed.

        If the storage is counted already, update its size. Raises DeviceFull, and leaves the count
        unchanged, if the device would exceed its limit.
        """
        key = id(storage)
        size = storage.nbytes()
        with self._lock:
            entry = self._owned.get(key)
            before = None if entry is None else entry[1]
            bound = self._bound.get(device)
            if bound is not None and self._now[device] + size - (before or 0) > bound:
                full = DeviceFull(
                    f"emulated device {device.index} has a total capacity of {bound} bytes, of"
                    f" which {self._now[device]} are in use; tried to allocate"
                    f" {size - (before or 0)} more bytes"
                )
                full.ordinal = device.index
                raise full
            if before != size:
                kept = (
                    entry[2] if entry else weakref.ref(storage, functools.partial(self._free, key))
                )
                self._owned[key] = (device, size, kept)
                self._now[device] += size - (before or 0)
                self._peak[device] = max(self._peak[device], self._now[device])

    def _free(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            device, size, _ = self._owned.pop(key)
            self._now[device] -= size

    def now(self, device: torch.device) -> int:
        """Return the bytes that are allocated on `device` now."""
        with self._lock:
            return self._now[device]

    def take(self, device: torch.device) -> int:
        """Return the peak of the bytes allocated on `device` since the last reset, and reset it."""
        with self._lock:
            peak = self._peak[device]
            self._peak[device] = self._now[device]
            return peak

    def bind(self, device: torch.device, size: int | None) -> None:
        """Limit the bytes allocated on `device` to `size`; None removes the limit."""
        with self._lock:
            if size is None:
                self._bound.pop(device, None)
            else:
                self._bound[device] = size

    def reset(self, device: torch.device) -> None:
        """Reset the peak of `device` to the bytes that are allocated now."""
        with self._lock:
            self._peak[device] = self._now[device]


byte_count = ByteCount()
"""The only count of the process, because storages may outlive device objects."""
