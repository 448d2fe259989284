"""DistributedDataParallel with gradient accumulation: two micro-batches per step, the first of them under `no_sync`."""

from dpbench.strategies.ddp import DistributedDataParallel

STRATEGY = DistributedDataParallel(parts=2)
