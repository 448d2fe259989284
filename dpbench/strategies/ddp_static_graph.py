"""DistributedDataParallel with `static_graph=True`: torch assumes that every step uses the same parameters."""

from dpbench.strategies.ddp import DistributedDataParallel

STRATEGY = DistributedDataParallel(static_graph=True)
