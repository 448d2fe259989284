"""Messages: how torch and the engine join tensors before they move them, by their sizes alone."""

from __future__ import annotations

from collections.abc import Sequence

COALESCED_BYTES = 10 * 2**20
"""torch.nn.parallel.comm moves tensors in flat buffers of about so many bytes."""
DDP_SYNC_BYTES = 250 * 2**20
"""DistributedDataParallel's first broadcast of its weights takes such buffers."""
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20
"""What is reduced at a time beside backward: DistributedDataParallel's buckets, and the engine's overlapping ones."""
SLOT_BYTES = 64
"""Every parameter starts on such a boundary of a flat buffer."""


def chunks(sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Cut sizes into runs as torch's `take_tensors` does: a run ends before the tensor that would not fit."""
    runs: list[list[int]] = [[]]
    for size in sizes_bytes:
        if runs[-1] and sum(runs[-1]) + size > limit_bytes:
            runs.append([])
        runs[-1].append(size)
    return [run for run in runs if run]


def bucket_sizes(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Cut gradients, in the order in which they are ready, into DistributedDataParallel's buckets: 1 MiB, then 25."""
    runs: list[list[int]] = [[]]
    for size in sizes_bytes:
        runs[-1].append(size)
        if sum(runs[-1]) >= (FIRST_BUCKET_BYTES if len(runs) == 1 else BUCKET_BYTES):
            runs.append([])
    return [run for run in runs if run]


def flat_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the size of one buffer for all, each on a boundary of its own."""
    return sum(-(-size // SLOT_BYTES) * SLOT_BYTES for size in sizes_bytes)
