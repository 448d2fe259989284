"""Memory by phase: take two more steps after timing, and record the second's peaks by phase."""

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
from dpbench.hardware.devices.host import bounded, bytes_only
from dpbench.models import Model
from dpbench.records import UNATTRIBUTED, Case, Memory, Phase
from dpbench.strategies import Strategy, begin, refusal


def by_phase(
    case: Case, strategy: Strategy, model: Model, devices: Sequence[Device], batch: tuple[Any, Any]
) -> tuple[tuple[Memory, ...], str]:
    """Return each device's memory peaks by phase, and the reason if there are none (else "").

    `model` is modified. Logical CPU devices share the host's memory. Their steps are therefore
    repeated on emulated devices, which count the bytes of tensors: first with tensors without
    values, which need no memory, and if this fails, with values.
    """
    on_host = case.device_kind == "cpu"
    if on_host:
        if fault := _unfit(case, strategy):
            return (), f"CPU memory by phase is measured on emulated devices, which {fault}"
        devices = open_devices("emulated", case.devices)
    source = "allocator" if case.device_kind == "cuda" else "ledger"
    attempts: list[AbstractContextManager[Any]] = (
        [bytes_only(), nullcontext()] if on_host else [nullcontext()]
    )
    reason = ""
    for number, numbers in enumerate(attempts):
        peaks = Peaks(devices)
        try:
            with numbers:
                # a failed attempt leaves the model on its devices: load it again
                used_model = models.load(case.model, case.size, case.seed) if number else model
                _watch(case, strategy, used_model, devices, batch, peaks)
        # the trial is valid without these peaks; if an op fails on tensors without values, retry
        # with values
        except Exception as error:
            # the error in the replica
            error = error.__cause__ if isinstance(error.__cause__, Exception) else error
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        else:
            found = peaks.memory(source)
            # peaks of whole steps are known from the timed steps, except for CPU devices
            return (found if on_host else tuple(m for m in found if m.phase)), ""
    return (), reason


def _unfit(case: Case, strategy: Strategy) -> str:
    """Return the reason why emulated devices cannot run the steps of a CPU case, as a verb."""
    if case.precision != "fp32":
        return f"do not support {case.precision}"
    if case.compile:
        return "cannot run compiled modules"
    reason = refusal(strategy, replace(case, device_kind="emulated"))
    return f"cannot run the case: {reason}" if reason else ""


def _watch(
    case: Case,
    strategy: Strategy,
    model: Model,
    devices: Sequence[Device],
    batch: tuple[Any, Any],
    peaks: Peaks,
) -> None:
    """Take two steps: the first creates the optimizer's state, `peaks` records the second."""
    for parameter in model.module.parameters():
        parameter.grad = None
    gc.collect()
    for device in devices:
        device.reset_memory()
    with begin(strategy, case, model, devices, peaks.mark) as step:
        step(*batch)
        gc.collect()
        with peaks.step():
            step(*batch)


@contextmanager
def bound(case: Case) -> Iterator[None]:
    """Limit the memory of emulated devices to the case's limit (if any) inside this context."""
    if case.device_kind != "emulated" or not case.device_memory_bytes:
        yield
        return
    with bounded(case.devices, case.device_memory_bytes):
        yield


WHOLE = ""
"""The name, in place of a phase, of the peaks of the whole step."""


class Peaks:
    """The memory peaks of one step in bytes, by device, phase and kind (allocated or reserved)."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._listening = False
        self._open: list[Phase] = []
        self._most: dict[tuple[int, str, str], int] = {}

    @contextmanager
    def mark(self, phase: Phase, device: int) -> Iterator[None]:
        """Attribute the memory peaks of all devices inside this context to `phase`.

        If the contexts of several phases overlap, the peaks are attributed to each of these phases.
        """
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
        """Record the memory peaks only inside this context, which encloses one step."""
        for device in self._devices:
            device.take_peaks()
        self._listening = True
        yield
        with self._lock:
            self._settle()
            self._listening = False

    def _settle(self) -> None:
        """Attribute the peaks since the last call to the whole step and every open phase.

        If no phase is open, the peaks are attributed to `UNATTRIBUTED`. No phase opens or closes
        between two calls.
        """
        if not self._listening:
            return
        names = (
            {WHOLE, *(phase.value for phase in self._open)} if self._open else {WHOLE, UNATTRIBUTED}
        )
        for device in self._devices:
            for kind, peak in device.take_peaks().items():
                for name in names:
                    key = (device.index, name, kind)
                    self._most[key] = max(self._most.get(key, 0), peak)

    def memory(self, source: str) -> tuple[Memory, ...]:
        """Return the recorded peaks by device: the whole step first, then each phase.

        `source` is stored with each peak: `allocator` (torch's statistics) or `ledger` (the byte
        count of emulated devices).
        """
        order = [WHOLE, *(phase.value for phase in Phase), UNATTRIBUTED]
        keys = sorted(self._most, key=lambda key: (key[0], order.index(key[1]), key[2]))
        return tuple(
            Memory(d, self._most[d, name, kind], source, name, kind) for d, name, kind in keys
        )
