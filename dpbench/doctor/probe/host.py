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
from dpbench.doctor.probe.figures import Figure, Work, time_call, time_together
from dpbench.engine.replicate import rebuild
from dpbench.hardware import processes


def figures() -> Iterator[Figure]:
    """Yield all figures of the host."""
    yield _module_copy()
    yield _joined_tensors()
    yield _new_thread()
    yield _interpreter_lock()


def _module_copy() -> Figure:
    """Return the time per module to rebuild a ResNet-18 for a replica, without tensors."""
    module = models.load("resnet18", "small", 0).module
    modules = sum(1 for _ in module.modules())
    table = {id(t): t.detach() for t in (*module.parameters(), *module.buffers())}
    return "module_replica_s", time_call(lambda: rebuild(module, table)) / modules


def _joined_tensors() -> Figure:
    """Return the time per tensor to join small tensors and to split them again."""
    count = 200
    tensors = [torch.zeros(16) for _ in range(count)]
    spent_s = time_call(lambda: _unflatten_dense_tensors(_flatten_dense_tensors(tensors), tensors))
    return "tensor_s", spent_s / count


def _new_thread() -> Figure:
    """Return the time to start and to join a Python thread on another core."""

    def start() -> None:
        thread = threading.Thread(target=processes.stay, args=(1,), daemon=True)
        thread.start()
        thread.join()

    return "thread_s", time_call(start)


def _interpreter_lock() -> Figure:
    """Return the slowdown of operations in two threads; 1 if they take turns without a loss.

    More is the cost of passing the interpreter lock between threads. Without the lock, it is 0.5
    if neither thread slows down the other.
    """
    count = 2
    size = 4096
    alone_s = time_call(_addition(size), setting=torch.inference_mode)
    several_s = time_together([_addition(size) for _ in range(count)], setting=torch.inference_mode)
    return "long_ops_2_threads_ratio", several_s / alone_s / count


def _addition(size: int) -> Work:
    values = torch.ones(size)
    return lambda: torch.add(values, 1.0)
