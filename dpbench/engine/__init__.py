"""The DataParallel engine: functions for the phases of a step, and classes that combine them."""

from dpbench.engine.checkpoints import load_state_dict
from dpbench.engine.data_parallel import DataParallel, data_parallel
from dpbench.engine.gather import gather
from dpbench.engine.parallel_apply import parallel_apply
from dpbench.engine.reduce import reduce
from dpbench.engine.replicate import replicate
from dpbench.engine.scatter import scatter
from dpbench.engine.train_step import TrainStep
from dpbench.hardware.devices import resolve

__all__ = [
    "scatter",
    "replicate",
    "parallel_apply",
    "gather",
    "reduce",
    "data_parallel",
    "load_state_dict",
    "DataParallel",
    "TrainStep",
    "resolve",
]
