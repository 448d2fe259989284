"""Trains under torch.cuda._sanitizer (CSAN), and prints what it finds.

    python -m tests.gpu.sanitized

CSAN records the operators, events and stream waits of this process, and reports two accesses to the
same tensor that no wait orders. It catches a missing `wait_stream` between streams with handles of
their own, here of replicas that share a GPU. It cannot catch

- anything between the default streams of different GPUs, which have the same handle for it;
- operators of threads that torch starts without Python's modes, NCCL, and a graph's replay;
- memory that is reused too early (a missing `record_stream`): it forgets a tensor when its memory
  is freed;
- accesses to parts of one buffer by other views: it knows a tensor by its first address.

It is not safe with threads: it counts an operator, and then takes the number of another thread's.
That gives false alarms in about one of three trainings. `_one_at_a_time` prevents them.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.cuda import _sanitizer

from dpbench import models
from dpbench.engine import TrainStep
from dpbench.hardware.devices.cuda import CudaDevice
from dpbench.records.schedule import Schedule

SPREAD = [0, 1, 2, 3]
COLOCATED = [0, 0, 0]
FAULTS = {"no wait": "wait", "no follow": "_follow"}  # the method of CudaDevice that does nothing


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    lock = threading.RLock()
    launched = _sanitizer.EventHandler._handle_kernel_launch

    def locked(*arguments: object) -> object:
        with lock:
            return launched(*arguments)

    with (
        mock.patch.object(_sanitizer.EventHandler, "_handle_kernel_launch", locked),
        # it reads only where memory is, which CSAN takes for a read of what the memory holds
        mock.patch.object(torch.Tensor, "is_set_to", _at_one_address),
    ):
        yield


def _at_one_address(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr()


def _errors(rung: str, ids: list[int], without: str = "") -> int:
    """Train two steps, without a method of the devices; return how many races CSAN reports."""
    fault = mock.patch.object(CudaDevice, without, return_value=None) if without else nullcontext()
    loaded = models.load("mlp", "small", 0)
    module = loaded.module.cuda(ids[0])
    try:
        with (
            TrainStep(
                module, loaded.loss, lambda ps: torch.optim.SGD(ps, lr=0.05), ids, rung
            ) as step,
            fault,
        ):
            for seed in range(2):
                step(*loaded.batch(8 * len(ids) + 3, seed))
    except _sanitizer.CUDASanitizerErrors as found:
        return len(found.errors)
    finally:
        torch.cuda.synchronize()
    return 0


def main() -> None:
    torch.set_num_threads(1)
    _sanitizer.enable_cuda_sanitizer()
    gpus = SPREAD[: torch.cuda.device_count()]
    with _one_at_a_time():
        clean = {rung: _errors(rung, COLOCATED) + _errors(rung, gpus) for rung in Schedule}
        found = {
            fault: {rung: _errors(rung, COLOCATED, method) for rung in Schedule}
            for fault, method in FAULTS.items()
        }
    json.dump({"clean": clean, "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
