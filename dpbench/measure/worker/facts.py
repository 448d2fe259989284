"""Facts of one trial that only a worker can tell: what its model is made of, and which GPUs reach each other."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from dpbench.hardware.device import Device
from dpbench.models import Model, positional
from dpbench.records import Case


def of_model(model: Model, batch: tuple[Any, Any]) -> dict[str, float]:
    """Return counts and bytes of modules, weights and buffers, and bytes of inputs, target and output per sample.

    Tensors are counted once however many modules share them, as replication copies them once. The output's bytes are
    those of a forward of two samples, and left out where that fails.
    """
    parameters, buffers = list(model.module.parameters()), list(model.module.buffers())
    inputs, target = positional(batch[0]), batch[1]
    samples = len(target)
    found = {
        "modules": sum(1 for _ in model.module.modules()),
        "buffer_tensors": len(buffers),
        "parameter_tensors": len(parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "trainable_bytes": sum(p.nbytes for p in parameters if p.requires_grad),
        "buffer_bytes": sum(b.nbytes for b in buffers),
        "input_bytes": sum(a.nbytes for a in inputs if isinstance(a, torch.Tensor)) / samples,
        "target_bytes": target.nbytes / samples,
    }
    few = slice(0, 2)  # BatchNorm refuses a single sample
    arguments = tuple(a[few] if isinstance(a, torch.Tensor) else a for a in inputs)
    statistics = {name: buffer.clone() for name, buffer in model.module.named_buffers()}  # a forward moves them
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = functional_call(model.module, statistics, arguments)
        found["output_bytes"] = output.nbytes / len(target[few])
    except Exception:  # whatever a model may raise: what is not known is left out
        return found
    return found


def torch_facts(case: Case, device: Device) -> dict[str, Any]:
    """Return what of torch makes the numbers repeatable."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if case.device_kind == "cuda":
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        facts |= {"gpu": torch.cuda.get_device_name(device.torch_device), "no_peer_access": blocked_pairs(case)}
    return facts


def blocked_pairs(case: Case) -> list[list[int]] | None:
    """Return the pairs of GPUs, by CUDA's numbers, that cannot read each other's memory; None where it says nothing."""
    if case.device_kind != "cuda" or case.placement != "spread" or case.devices == 1:
        return None
    ids = case.device_ids[: case.devices] or tuple(range(case.devices))
    reaches = torch.cuda.can_device_access_peer
    return [[a, b] for i, a in enumerate(ids) for b in ids[i + 1 :] if not (reaches(a, b) and reaches(b, a))]
