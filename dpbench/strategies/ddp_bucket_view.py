"""DistributedDataParallel whose gradients are views of the communication buckets, which saves one copy per gradient."""

from dpbench.strategies.ddp import DistributedDataParallel

STRATEGY = DistributedDataParallel(gradient_as_bucket_view=True)
