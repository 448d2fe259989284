"""Row weights: divide the rows of a batch unequally over the devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpbench.hardware.device import Device
from dpbench.records.words import count


def weights_of(
    chunk_sizes: Sequence[float] | None, devices: Sequence[Device]
) -> tuple[float, ...] | None:
    """Return the weights by which a batch's rows are divided; None means torch's equal chunks.

    Raises ValueError unless there is one finite weight above 0 per device.
    """
    if chunk_sizes is None:
        return None
    weights = tuple(chunk_sizes)
    if len(weights) != len(devices) or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(
            f"chunk_sizes needs one weight above 0 per device, for {count(len(devices), 'device')};"
            f" got {chunk_sizes}"
        )
    return weights


def apportion(rows: int, weights: Sequence[float]) -> list[int]:
    """Return each device's number of rows: one, and a share of the rest proportional to its weight.

    Fractions are rounded by the method of largest remainders. If there are fewer rows than devices,
    only the first devices get a row, and the list is shorter.
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
