"""Bucketing: how torch and the engine join tensors into messages, calculated from the sizes of the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Size = TypeVar("Size", int, float)

COALESCED_BYTES = 10 * 2**20
"""The size limit of the flat buffers in which torch.nn.parallel.comm copies tensors."""
DDP_SYNC_BYTES = 250 * 2**20
"""The size limit of the buffers in which DistributedDataParallel broadcasts weights and buffers."""
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20
"""The bucket sizes of DistributedDataParallel. The engine's `overlap` uses 25 MiB for every bucket."""
SLOT_BYTES = 64
"""The alignment of parameters in a flat buffer."""


def chunks(sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Return the sizes in consecutive runs of at most `limit_bytes`, as torch's `take_tensors` forms them.

    A single tensor above the limit is a run by itself.
    """
    runs: list[list[int]] = [[]]
    for size in sizes_bytes:
        if runs[-1] and sum(runs[-1]) + size > limit_bytes:
            runs.append([])
        runs[-1].append(size)
    return [run for run in runs if run]


def buckets(sizes: Sequence[float], limit: float = BUCKET_BYTES, first: float | None = None) -> list[range]:
    """Return consecutive runs of indices; a run ends with the element at which the sum of its sizes reaches `limit`.

    `first` is the limit of the first run, by default `limit`.
    """
    runs, start, total, full = [], 0, 0.0, limit if first is None else first
    for i, size in enumerate(sizes):
        total += size
        if total >= full:
            runs.append(range(start, i + 1))
            start, total, full = i + 1, 0.0, limit
    return runs + ([range(start, len(sizes))] if start < len(sizes) else [])


def bucket_sizes(sizes: Sequence[Size]) -> list[list[Size]]:
    """Return gradient sizes, in the order in which they become ready, in the buckets of DistributedDataParallel."""
    return [[sizes[i] for i in run] for run in buckets(sizes, first=FIRST_BUCKET_BYTES)]


def owners(sizes: Sequence[int], devices: int) -> list[int]:
    """Return a device for each size, assigned from the largest to the device with the smallest load."""
    load, owner = [0] * devices, [0] * len(sizes)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner[n] = load.index(min(load))
        load[owner[n]] += sizes[n]
    return owner


def flat_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the size of a flat buffer that holds all tensors, each aligned to `SLOT_BYTES`."""
    return sum(-(-size // SLOT_BYTES) * SLOT_BYTES for size in sizes_bytes)
