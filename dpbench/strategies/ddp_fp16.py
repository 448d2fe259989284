"""DistributedDataParallel with torch's communication hook that rounds gradients to fp16 for the all-reduce."""

from dpbench.strategies.ddp import DistributedDataParallel

STRATEGY = DistributedDataParallel(hook="fp16_compress_hook", rounds_gradients=True)
