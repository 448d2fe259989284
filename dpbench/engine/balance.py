"""Balance: unequal shares of a batch, so that a device with more other work gets fewer rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dpbench.engine.containers import first_tensor
from dpbench.hardware.device import Device
from dpbench.records import HOST, Mark, Phase

AUTO = "auto"
SETTLING = 8
"""The number of steps that "auto" times before it decides. The first half of them is warm-up."""


class Shares:
    """The number of rows per device, in proportion to given weights or to the speed measured in the first steps."""

    def __init__(self, chunk_sizes: Sequence[float] | str | None, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._auto = chunk_sizes == AUTO
        if isinstance(chunk_sizes, str) and not self._auto:
            raise ValueError(f"chunk_sizes must be one weight per device, or {AUTO!r}; got {chunk_sizes!r}")
        self.weights: tuple[float, ...] | None = None
        if chunk_sizes is not None and not isinstance(chunk_sizes, str):
            self.weights = tuple(chunk_sizes)
            if len(self.weights) != len(devices) or min(self.weights, default=0) <= 0:
                raise ValueError(
                    f"chunk_sizes needs one weight above 0 for each of the {len(devices)} devices, got {chunk_sizes}"
                )
        self._busy: list[dict[int, float]] = []
        self._rows: list[int] = []

    def sizes(self, value: Any) -> list[int] | None:
        """Return the rows per device for a batch, or None for torch's equal chunks."""
        if self.weights is None and not self._auto:
            return None
        tensor = first_tensor(value)
        if tensor is None or not tensor.dim():
            return None
        self._rows = apportion(tensor.size(0), self.weights or [1.0] * len(self._devices))
        return self._rows if self.weights else None

    @property
    def settled(self) -> bool:
        """Return whether no further steps need to be timed."""
        return not self._auto or len(self._devices) == 1

    @contextmanager
    def timed(self, mark: Mark) -> Iterator[Mark]:
        """Yield the mark to use in this step; until "auto" has decided, a mark that also times the devices."""
        if self.settled:
            yield mark
            return
        busy: dict[int, float] = {}

        @contextmanager
        def watching(phase: Phase, device: int) -> Iterator[None]:
            start_s = time.perf_counter()
            with mark(phase, device):
                yield
            if device != HOST:
                busy[device] = busy.get(device, 0.0) + time.perf_counter() - start_s

        yield watching
        self._busy.append(busy)
        if len(self._busy) == SETTLING:
            self._decide()

    def _decide(self) -> None:
        """Set the devices' weights in inverse proportion to their costs.

        A device's cost is its measured time per row, which includes its other work, or, where all devices report it,
        its peak memory, whichever is relatively higher.
        """
        seen = self._busy[SETTLING // 2 :]
        cost = [
            statistics.median(step.get(d.index, 0.0) for step in seen) / max(rows, 1)
            for d, rows in zip(self._devices, self._rows, strict=True)
        ]
        memory = [device.memory() for device in self._devices]
        if all(size is not None for size in memory):  # the scarcer of time and memory decides
            peaks = [float(size or 1) for size in memory]
            cost = [max(c / min(cost), m / min(peaks)) for c, m in zip(cost, peaks, strict=True)]
        if min(cost) > 0:
            self.weights = tuple(1 / one for one in cost)
        self._auto = False


def apportion(rows: int, weights: Sequence[float]) -> list[int]:
    """Return the rows per device: one each, and the rest in proportion to the weights, rounded by largest remainder.

    With fewer rows than devices, only the first devices get one row each, and the list is shorter.
    """
    whole = sum(weights)
    if rows < len(weights):
        return [1] * rows
    exact = [1 + (rows - len(weights)) * weight / whole for weight in weights]
    sizes = [int(one) for one in exact]
    order = sorted(range(len(weights)), key=lambda i: sizes[i] - exact[i])
    for i in order[: rows - sum(sizes)]:
        sizes[i] += 1
    return sizes
