"""Facts of one trial that only a worker can tell: what its model is made of, and which GPUs reach each other."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from dpbench import models
from dpbench.records import Case

SAMPLES = 2
"""Rows of the one forward that tells how large an output is; the smallest batch that BatchNorm trains on."""


def of_model(case: Case) -> dict[str, Any]:
    """Return counts and bytes of the case's model; input and output bytes are those of one sample.

    Tensors are counted once however many modules share them, as replication copies them once.
    """
    model = models.load(case.model, case.size, case.seed)
    module = model.module
    inputs, _ = model.batch(SAMPLES, case.seed)
    parameters, buffers = list(module.parameters()), list(module.buffers())
    facts = {
        "modules": sum(1 for _ in module.modules()),
        "parameter_tensors": len(parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "buffer_tensors": len(buffers),
        "buffer_bytes": sum(b.nbytes for b in buffers),
        "input_bytes": _bytes(models.positional(inputs)) / SAMPLES,
    }
    with suppress(Exception), torch.no_grad():  # a model that runs on GPUs alone is measured all the same
        facts["output_bytes"] = _bytes(module(*models.positional(inputs))) / SAMPLES
    return facts


def _bytes(value: Any) -> int:
    """Sum the tensors of a nest of tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, tuple | list) else 0


def blocked_pairs(case: Case) -> list[list[int]] | None:
    """Return the pairs of GPUs, by CUDA's numbers, that cannot read each other's memory; None where it says nothing."""
    if case.device_kind != "cuda" or case.placement != "spread" or case.devices == 1:
        return None
    ids = case.device_ids[: case.devices] or tuple(range(case.devices))
    reaches = torch.cuda.can_device_access_peer
    return [[a, b] for i, a in enumerate(ids) for b in ids[i + 1 :] if not (reaches(a, b) and reaches(b, a))]
