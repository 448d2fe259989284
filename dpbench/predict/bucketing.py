"""Bucketing: how torch and the engine join tensors into messages, calculated from the sizes of the tensors."""

from __future__ import annotations

from collections.abc import Sequence

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


def bucket_sizes(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Return the buckets that DistributedDataParallel forms of gradients with these sizes in bytes.

    The sizes are in the order in which the gradients become ready. A bucket is closed as soon as it reaches its limit:
    1 MiB for the first bucket, 25 MiB for the others.
    """
    runs: list[list[int]] = [[]]
    for size in sizes_bytes:
        runs[-1].append(size)
        if sum(runs[-1]) >= (FIRST_BUCKET_BYTES if len(runs) == 1 else BUCKET_BYTES):
            runs.append([])
    return [run for run in runs if run]


def flat_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the size of a flat buffer that holds all tensors, each aligned to `SLOT_BYTES`."""
    return sum(-(-size // SLOT_BYTES) * SLOT_BYTES for size in sizes_bytes)
