"""Moments: points in time of a watched loop, with a CUDA event on each device.

A moment is a float, the host's time, so that moments can be sorted without waiting for a device.
After the script has ended, `GpuTimes` returns the time at which each device reached the event of a
moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from dpbench.hardware.device import Device
from dpbench.measure.clocks import CudaClock


class Moment(float):
    """The host's time in seconds at which an event was queued on some devices, in an update.

    `events` has the event of each device. It is empty while a CUDA graph is captured: an event
    would become a part of the graph, and never have a time.
    """

    __slots__ = ("events", "update")
    events: dict[int, Any]
    update: int


def capturing() -> bool:
    """Return whether the calling thread's current stream captures a CUDA graph."""
    # a CPU build of torch has the function, which raises
    return torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


class GpuTimes:
    """The clock of a recorder of a loop on GPUs: a `CudaClock` whose steps are the updates.

    It waits for the devices when it starts and when it stops, never in between.
    """

    def __init__(
        self, devices: Sequence[Device], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = CudaClock(devices, now)
        self._stack = ExitStack()
        self._now = now
        self._updates = 0
        self._stack.enter_context(self._clock.block())
        self._place: Any = None

    def now(self, devices: Sequence[int] | None = None) -> Moment:
        """Return the present moment, with an event queued on each device (default: on all).

        `devices` are indices of devices.
        """
        moment = Moment(self._now())
        moment.update = self._updates
        moment.events = {} if capturing() else self._clock.events(devices)
        return moment

    def updated(self) -> None:
        """End an update, whose end is the beginning of the next one."""
        with self._clock.step(warmup=False):
            pass
        self._updates += 1

    def stop(self) -> None:
        """Wait for the devices, so that every event has its time."""
        self.updated()  # the moments after the last update get a step
        self._stack.close()
        self._place = self._clock.placing()

    def seconds(self, moment: float, device: int) -> float:
        """Return when a device reached a moment; the host's time without an event on it."""
        if not isinstance(moment, Moment) or device not in moment.events:
            return float(moment)
        return float(self._place(moment.update, device, moment.events[device]))
