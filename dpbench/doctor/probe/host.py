"""Host: figures of the host's work in a step on several GPUs of one process.

The host copies modules for the replicas, joins tensors into messages, and starts threads, which
compete for the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dpbench import models
from dpbench.doctor.probe.figures import Figure, Work, figure, spread, time_call, time_together
from dpbench.engine.replicate import rebuild
from dpbench.hardware import processes


def figures() -> Iterator[Figure]:
    """Yield all figures of the host."""
    yield _module_copy()
    yield _joined_tensors()
    yield _new_thread()
    yield _interpreter_lock()


def _module_copy() -> Figure:
    module = models.load("resnet18", "small", 0).module
    modules = sum(1 for _ in module.modules())
    table = {id(t): t.detach() for t in (*module.parameters(), *module.buffers())}
    return figure(
        "module_replica_s",
        time_call(lambda: rebuild(module, table)),
        f"the time per module when dpbench rebuilds a ResNet-18 of {modules} modules for a replica,"
        " without tensors",
        per=modules,
    )


def _joined_tensors() -> Figure:
    count = 200
    tensors = [torch.zeros(16) for _ in range(count)]
    return figure(
        "tensor_s",
        time_call(lambda: _unflatten_dense_tensors(_flatten_dense_tensors(tensors), tensors)),
        f"the time per tensor when {count} tensors of 64 bytes are joined and split again",
        per=count,
    )


def _new_thread() -> Figure:
    def start() -> None:
        thread = threading.Thread(target=processes.stay, args=(1,))
        thread.start()
        thread.join()

    how = "the start and the join of a Python thread on another core"
    return figure("thread_s", time_call(start), how)


def _interpreter_lock() -> Figure:
    """Return the slowdown of operations in two threads; 1 if they take turns without a loss."""
    count = 2
    size = 4096
    alone = time_call(_addition(size), setting=torch.inference_mode)
    several = time_together([_addition(size) for _ in range(count)], setting=torch.inference_mode)
    pairs = (
        (several.seconds, alone.seconds),
        (several.low_s, alone.high_s),
        (several.high_s, alone.low_s),
    )
    return spread(
        "long_ops_2_threads_ratio",
        [together_s / alone_s / count for together_s, alone_s in pairs],
        f"torch.add of {size} elements in {count} threads, relative to the same total number of"
        " calls in one thread: the cost of passing the interpreter lock between threads",
    )


def _addition(size: int) -> Work:
    values = torch.ones(size)
    return lambda: torch.add(values, 1.0)
