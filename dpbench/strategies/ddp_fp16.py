"""DistributedDataParallel whose gradients are rounded to fp16 for the all-reduce, by torch's communication hook."""

from dpbench.strategies.ddp import DistributedDataParallel

STRATEGY = DistributedDataParallel(hook="fp16_compress_hook", rounds_gradients=True)
