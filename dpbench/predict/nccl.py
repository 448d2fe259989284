"""NCCL: the measured bus bandwidth of a machine, given as a number or as a file with the output of nccl-tests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from dpbench.predict.constants import DEFAULT
from dpbench.records import words
from dpbench.records.machine import Collective

GB = 1e9
_LINE = re.compile(
    r"^\s*(?P<size>\d+)\s+\d+\s+\w+\s+(?!none)\w+\s+-?\d+\s+(?P<time_us>[\d.]+)\s+[\d.]+\s+(?P<busbw>[\d.]+)\s", re.M
)
"""Matches a line of all_reduce_perf's output: size in bytes, count, type, operation, root, and for the out-of-place
all-reduce its time (µs), algbw and busbw (GB/s)."""
FEWEST = 3
"""The minimum number of different sizes to which a curve is fitted."""
MOST = 1.25
"""The maximum bandwidth of a fitted curve, divided by the best measured bandwidth."""
LIMITS = (0.01, 10_000.0)
"""The minimum and the maximum bus bandwidth in GB/s that is accepted; real networks and NVLinks lie well between."""
_OTHER = re.compile(r"\b(?!all_reduce)(\w+)_perf\b")
"""Matches the name of another program of nccl-tests, whose `busbw` has another meaning."""


def collective(given: str) -> Collective:
    """Return the durations of all-reduces as a curve, from a bus bandwidth in GB/s or a file with nccl-tests' output.

    `given` is the bandwidth as text or the path of the file. A bandwidth is the `busbw` that all_reduce_perf prints for
    its largest sizes; the start-up time and the root term are then those of `constants.DEFAULT`. Raises ValueError for
    a number outside `LIMITS`, and for a file from which no curve can be fitted.
    """
    try:
        rate = float(given)
    except ValueError:
        return _from_file(Path(given))
    low, high = LIMITS
    if not low <= rate <= high:
        raise ValueError(f"the bandwidth of the bus must be a number of GB/s from {low:g} to {high:g}, got {given}")
    return Collective(bytes_per_s=rate * GB, start_s=DEFAULT.start_s, root_s=DEFAULT.root_s)


def _from_file(path: Path) -> Collective:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(
            f"{path} is neither a bandwidth in GB/s nor a file that can be read ({error.strerror}); give the busbw of "
            "the largest sizes, such as 42.5, or a file with the output of all_reduce_perf"
        ) from None
    points = [
        (int(one["size"]), float(one["time_us"]) * 1e-6, float(one["busbw"]) * GB) for one in _LINE.finditer(text)
    ]
    if other := _OTHER.search(text):
        raise ValueError(f"{path} is the output of {other[0]}: give that of all_reduce_perf")
    usable = [point for point in points if min(point) > 0]
    if (sizes := len({size for size, _, _ in usable})) < FEWEST:
        raise ValueError(
            f"{path} has usable lines of all_reduce_perf for {words.count(sizes, 'size')}, but at least {FEWEST} sizes "
            "are needed; give the whole output, such as that of: all_reduce_perf -b 8 -e 1G -f 2 -g N"
        )
    return fitted(usable)


def fitted(points: Sequence[tuple[int, float, float]]) -> Collective:
    """Return the curve fitted to measured all-reduces, each given as (bytes, seconds, bus bandwidth in bytes/s).

    The fit minimises the sum of the squared relative errors of the seconds. The start-up time, the bandwidth and the
    root term are not negative.
    """
    import numpy as np
    from scipy.optimize import nnls

    seconds = np.array([spent for _, spent, _ in points])
    sent = np.array([spent * rate for _, spent, rate in points])  # the bytes that each device sends in a ring
    (start_s, per_byte, root), _ = nnls(
        np.stack([1 / seconds, sent / seconds, np.sqrt(sent) / seconds], 1), np.ones(len(points))
    )
    best = max(rate for _, _, rate in points)
    per_byte = max(per_byte, 1 / (MOST * best))  # noise may leave a curve without a linear part
    return Collective(bytes_per_s=float(1 / per_byte), start_s=float(start_s), root_s=float(root / math.sqrt(per_byte)))
