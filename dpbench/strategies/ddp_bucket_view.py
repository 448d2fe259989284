"""DistributedDataParallel with gradients as views of the communication buckets, which saves a copy of each gradient."""

from dpbench.strategies.ddp import DistributedDataParallel

STRATEGY = DistributedDataParallel(gradient_as_bucket_view=True)
