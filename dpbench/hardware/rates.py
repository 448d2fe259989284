"""Rates: how fast a link copies and a device multiplies matrices, timed in one way for all who ask.

A rate is that of the `fastest` repetition. Repetitions are timed by the device's events, which the
host's launches do not lengthen; where a device has none, and where the host itself makes a copy, by
the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, permutations

import torch

from dpbench.hardware.device import Device
from dpbench.records import HOST
from dpbench.records.work import CopyTimes, fastest

LINK_BYTES = 128 * 2**20
"""The bytes of each copy that times a link; smaller ones do not reach the rate of NVLink."""
LINK_LEAST_BYTES = 8 * 2**20
"""The least size of such a copy; without memory for it, no link is timed."""
COPIES = 3
"""The copies of a link in a pass."""
PASSES, PRODUCTS = 3, 5
"""The repetitions that time a matrix product, and the products in each."""
SIDES = {"cuda": (2048, 4096, 8192), "cpu": (256, 1024)}
"""The rows of the square matrices, by the type of the device; the best of them counts."""
LONGEST_S = 1.0
"""The longest repetition, at the rate of the smaller matrices: larger matrices are left out.

On a CPU without instructions for bf16, one of 1024 rows would take about ten seconds.
"""


def times(
    device: Device,
    work: Callable[[], object],
    repeats: int,
    cover: Callable[[], object] = lambda: None,
) -> tuple[float, ...]:
    """Return the seconds of each of `repeats` calls of `work`, which queues work on `device`.

    One call that is not timed precedes them; it sets up and loads what the others need. `cover`
    then queues work that lasts while the host queues the calls: without it, short work on a fast
    device would wait for the host.
    """

    def mark() -> float | torch.cuda.Event:
        event: torch.cuda.Event | None = device.event()
        return time.perf_counter() if event is None else event

    device.synchronize()
    with device.guard():
        work()
        cover()
        marks = [mark()]
        for _ in range(repeats):
            work()
            marks.append(mark())
    device.synchronize()
    return tuple(_between_s(start, end) for start, end in pairwise(marks))


def _between_s(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    return float(start.elapsed_time(end)) / 1e3  # type: ignore[union-attr, arg-type]


def links(devices: Sequence[Device], passes: int = 1) -> Iterator[CopyTimes]:
    """Time copies from the host's pinned memory to each device, and from each device to the others.

    Each of the `passes` yields every link once, as soon as its copies are done, so that a caller
    can read counters between two links. Copies have `LINK_BYTES`, or the largest half, quarter and
    so on for which all devices have memory. Raises torch.OutOfMemoryError if that is less than
    `LINK_LEAST_BYTES`.
    """
    buffer, places = _buffers(devices)
    ends = list(zip(devices, places, strict=True))
    for _ in range(passes):
        for device, place in ends:
            yield CopyTimes(
                source=HOST,
                target=device.index,
                bytes=buffer.nbytes,
                seconds=copy_times(device, place, buffer, buffer),
            )
        for (source, there), (target, here) in permutations(ends, 2):
            target.synchronize()
            yield CopyTimes(
                source=source.index,
                target=target.index,
                bytes=buffer.nbytes,
                seconds=copy_times(source, here, there, buffer),
            )


def _buffers(devices: Sequence[Device]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a buffer in the host's pinned memory and its copy on each device, all of one size."""
    size = LINK_BYTES
    while True:
        buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        try:
            return buffer, [buffer.to(device.torch_device) for device in devices]
        except torch.OutOfMemoryError:
            if size // 2 < LINK_LEAST_BYTES:
                raise
        size //= 2


def copy_times(
    queue: Device, target: torch.Tensor, source: torch.Tensor, buffer: torch.Tensor
) -> tuple[float, ...]:
    """Return the seconds of each of `COPIES` copies of `source` to `target`, on `queue`'s stream.

    Torch queues a copy between two GPUs on the stream of its source: events of the target would
    also time how the streams wait for each other. The copies run one after the other, and allocate
    no memory. They are covered by a copy of the beginning of `buffer`, in the host's pinned memory,
    to the tensor on `queue`.
    """
    cover = slice(LINK_LEAST_BYTES)
    own = target if target.device == queue.torch_device else source
    return times(
        queue,
        lambda: target.copy_(source, non_blocking=True),
        COPIES,
        lambda: own[cover].copy_(buffer[cover], non_blocking=True),
    )


def product_per_s(device: Device, dtype: torch.dtype) -> float:
    """Return the best rate of products of large square matrices on a device, in FLOP/s.

    Their values are random, because products of equal values take less power, and thus let a GPU
    have a higher clock. Raises RuntimeError for too little memory.
    """
    place = device.torch_device
    generator = torch.Generator(place).manual_seed(0)
    best = 0.0
    with device.guard(), torch.no_grad():
        for side in SIDES[place.type]:
            operations = PRODUCTS * 2.0 * side**3
            if best and operations / best > LONGEST_S:
                break
            matrix = torch.randn(side, side, generator=generator, device=place).to(dtype)
            product = torch.empty_like(matrix)

            def multiply(one: torch.Tensor = matrix, out: torch.Tensor = product) -> None:
                for _ in range(PRODUCTS):
                    torch.mm(one, one, out=out)

            best = max(best, fastest(operations, times(device, multiply, PASSES)))
    return best
