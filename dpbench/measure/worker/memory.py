"""Memory by phase: two more steps after all timing, of which the second is watched; and the shapes behind them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from dpbench import models
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.hardware.devices.emulated import bounded, bytes_only
from dpbench.models import Model
from dpbench.records import UNATTRIBUTED, Case, Memory, Phase
from dpbench.strategies import Strategy


def by_phase(
    case: Case, strategy: Strategy, model: Model, devices: Sequence[Device], batch: tuple[Any, Any]
) -> tuple[tuple[Memory, ...], str]:
    """Return each device's peaks by phase, and why there are none; `model` is used up.

    Logical CPU devices have no memory of their own: emulated ones stand in for them, which hold no numbers.
    """
    on_host = case.device_kind == "cpu"
    if on_host:
        if case.precision != "fp32":
            return (), f"emulated devices stand in for the CPU's, and do not know autocast to {case.precision}"
        emulated = replace(case, device_kind="emulated")
        if reason := strategy.skip(emulated):
            return (), f"on emulated devices, which stand in for the CPU's: {reason}"
        devices = open_devices("emulated", case.devices)
    source = "allocator" if case.device_kind == "cuda" else "ledger"
    attempts: list[AbstractContextManager[Any]] = [bytes_only(), nullcontext()] if on_host else [nullcontext()]
    reason = ""
    for number, numbers in enumerate(attempts):
        peaks = Peaks(devices)
        try:
            with numbers:
                # a failed attempt has left the model where it was
                mine = models.load(case.model, case.size, case.seed) if number else model
                _watch(case, strategy, mine, devices, batch, peaks)
        # the trial is as good without; an op may refuse a tensor without numbers, and then works with them
        except Exception as error:
            error = error.__cause__ if isinstance(error.__cause__, Exception) else error  # what a replica raised
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        else:
            found = peaks.memory(source)
            # what whole steps held is known from the timed ones, but for the CPU
            return (found if on_host else tuple(m for m in found if m.phase)), ""
    return (), reason


def _watch(
    case: Case, strategy: Strategy, model: Model, devices: Sequence[Device], batch: tuple[Any, Any], peaks: Peaks
) -> None:
    """Take one step that makes the optimizer's state, and watch the next."""
    for parameter in model.module.parameters():
        parameter.grad = None
    gc.collect()
    for device in devices:
        device.reset_memory()
    with strategy.start(case, model, devices, peaks.mark) as step:
        step(*batch)
        gc.collect()
        with peaks.step():
            step(*batch)


@contextmanager
def bound(case: Case) -> Iterator[None]:
    """Hold emulated devices to the case's memory, if it has such."""
    if case.device_kind != "emulated" or not case.device_memory_bytes:
        yield
        return
    with bounded(case.devices, case.device_memory_bytes):
        yield


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
