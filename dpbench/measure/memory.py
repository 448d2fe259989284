"""Peaks: listens to marks, and tells how much memory each device held at most while a phase was open.

A phase is open from the first device that begins it to the last that ends it, so that what one device does can be
compared with what the others hold meanwhile. Reading peaks takes time: for a step that nobody times.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dpbench.hardware.device import Device
from dpbench.records import UNATTRIBUTED, Memory, Phase

WHOLE = ""
"""The phase of peaks over the whole step."""


class Peaks:
    """Peaks of one step, by device, phase and kind."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._listening = False
        self._open: list[Phase] = []
        self._most: dict[tuple[int, str, str], int] = {}

    @contextmanager
    def mark(self, phase: Phase, device: int) -> Iterator[None]:
        """Credit what is held from here to the phase; to both, where two are open."""
        with self._lock:
            self._settle()
            self._open.append(phase)
        try:
            yield
        finally:
            with self._lock:
                self._settle()
                self._open.remove(phase)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Listen to one step; before and after, marks do nothing."""
        for device in self._devices:
            device.take_peaks()
        self._listening = True
        yield
        with self._lock:
            self._settle()
            self._listening = False

    def _settle(self) -> None:
        """Credit the peaks since the last border to what has been open since then."""
        if not self._listening:
            return
        names = {WHOLE, *(phase.value for phase in self._open)} if self._open else {WHOLE, UNATTRIBUTED}
        for device in self._devices:
            for kind, peak in device.take_peaks().items():
                for name in names:
                    key = (device.index, name, kind)
                    self._most[key] = max(self._most.get(key, 0), peak)

    def memory(self, source: str) -> tuple[Memory, ...]:
        """Return the peaks, by device, in the order of the step, the whole step first."""
        order = [WHOLE, *(phase.value for phase in Phase), UNATTRIBUTED]
        found = sorted(self._most, key=lambda key: (key[0], order.index(key[1]), key[2]))
        return tuple(Memory(d, self._most[d, name, kind], source, name, kind) for d, name, kind in found)
