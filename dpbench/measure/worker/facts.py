"""Facts: the provenance that a worker adds to its trial, about the model, torch and the GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise, permutations
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from dpbench.engine.containers import tensors_in
from dpbench.hardware.device import Device
from dpbench.hardware.devices import float32
from dpbench.models import Model, bytes_in, positional, rows_in
from dpbench.records import HOST, Case, Trial
from dpbench.records.trial import FLOAT32
from dpbench.records.work import LINKS, CopyTimes

LINK_BYTES, LINK_COPIES = 8 * 2**20, 3
"""The size in bytes of each copy that times a link, and the number of timed copies."""


def sizes(module: nn.Module) -> dict[str, float]:
    """Return the numbers of modules, parameters and buffers, and the bytes of the latter two."""
    parameters, buffers = list(module.parameters()), list(module.buffers())
    return {
        "modules": sum(1 for _ in module.modules()),
        "buffer_tensors": len(buffers),
        "parameter_tensors": len(parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "trainable_bytes": sum(p.nbytes for p in parameters if p.requires_grad),
        "buffer_bytes": sum(b.nbytes for b in buffers),
    }


def of_model(model: Model, batch: tuple[Any, Any]) -> dict[str, float]:
    """Return the `sizes` of a module, and the bytes of inputs, target and output per sample.

    A tensor that several modules share is counted once, because replication copies it once. The
    output's bytes come from a forward pass of at most two samples, and are left out if it fails.
    """
    inputs, target = positional(batch[0]), batch[1]
    samples = rows_in(batch)
    facts = {
        **sizes(model.module),
        "input_bytes": bytes_in(inputs) / samples,
        "target_bytes": bytes_in(target) / samples,
    }
    few = slice(0, 2)  # BatchNorm refuses a single sample
    arguments = tree_map_only(torch.Tensor, lambda tensor: tensor[few], inputs)
    statistics = {
        name: buffer.clone() for name, buffer in model.module.named_buffers()
    }  # forward changes buffers
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = functional_call(model.module, statistics, arguments)
        facts["output_bytes"] = sum(tensor.nbytes for tensor in tensors_in(output)) / min(
            2, samples
        )
    except Exception:  # a model may raise any error: leave the unknown fact out
        return facts
    return facts


def torch_facts(case: Case, device: Device) -> dict[str, Any]:
    """Return the version and settings of torch and, for GPUs, of CUDA, cuDNN and the GPUs."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        FLOAT32: float32.products(case.device_kind, device.torch_device)._asdict(),
    }
    if case.device_kind == "cuda":
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        facts |= {
            "gpu": torch.cuda.get_device_name(device.torch_device),
            "no_peer_access": blocked_pairs(case),
        }
        facts |= {"gpu_uuids": gpu_uuids(_ordinals(case))}
    return facts


def gpu_uuids(ordinals: Sequence[int]) -> list[str]:
    """Return the UUIDs of the GPUs with these CUDA ordinals; none if a UUID is unknown.

    A UUID is unknown if this process does not see the GPU, or if torch is older than 2.5.
    """
    if any(one >= torch.cuda.device_count() for one in ordinals):
        return []
    uuids = [str(getattr(torch.cuda.get_device_properties(one), "uuid", "")) for one in ordinals]
    return uuids if all(uuids) else []


def _ordinals(case: Case) -> tuple[int, ...]:
    count = case.devices if case.placement == "spread" else 1
    return case.device_ids[:count] or tuple(range(count))


def blocked_pairs(case: Case) -> list[list[int]] | None:
    """Return the pairs of the case's GPUs without peer access, as CUDA ordinals.

    None for fewer than two GPUs, and if this process does not see all of them.
    """
    if case.device_kind != "cuda" or case.placement != "spread" or case.devices == 1:
        return None
    ids = _ordinals(case)
    # the ranks of a launch may each see only their own GPUs
    if max(ids) >= torch.cuda.device_count():
        return None
    reaches = torch.cuda.can_device_access_peer
    return [
        [a, b]
        for i, a in enumerate(ids)
        for b in ids[i + 1 :]
        if not (reaches(a, b) and reaches(b, a))
    ]


def with_links(trial: Trial, devices: Sequence[Device]) -> Trial:
    """Time copies over the links of the devices, and return the trial with these times.

    The setup of the returned trial has `links_s`, the seconds that the timing took. The trial is
    returned unchanged if this process does not drive two or more distinct GPUs, or if a GPU has too
    little free memory for the copies, because the trial is valid without them.
    """
    case = trial.case
    if (
        case.device_kind != "cuda"
        or case.placement != "spread"
        or case.traits.ranks
        or len(devices) == 1
    ):
        return trial
    began_s = time.perf_counter()
    try:
        measured = [asdict(link) for link in links(devices)]
    except torch.OutOfMemoryError:
        return trial
    return replace(
        trial,
        setup={**trial.setup, "links_s": time.perf_counter() - began_s},
        provenance={**trial.provenance, LINKS: measured},
    )


def links(devices: Sequence[Device]) -> Iterator[CopyTimes]:
    """Time copies from the host's pinned memory to each device, and from each device to the others.

    Yield each link as soon as its copies are done, so that a caller can read counters between two
    links.
    """
    buffer = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    places = [buffer.to(device.torch_device) for device in devices]
    for device, place in zip(devices, places, strict=True):
        yield CopyTimes(
            source=HOST,
            target=device.index,
            bytes=LINK_BYTES,
            seconds=_copy_times(device, place, buffer, buffer),
        )
    for (source, there), (target, here) in permutations(zip(devices, places, strict=True), 2):
        source.synchronize()
        seconds = _copy_times(target, here, there, buffer)
        yield CopyTimes(source=source.index, target=target.index, bytes=LINK_BYTES, seconds=seconds)


def _copy_times(
    target: Device, place: torch.Tensor, tensor: torch.Tensor, buffer: torch.Tensor
) -> tuple[float, ...]:
    """Return the seconds of each copy of `tensor` to `place`, which is on the device `target`.

    The copies run one after the other, and allocate no memory. Two untimed copies precede them. The
    first sets up the access to the other device. The second is a slow copy of `buffer` from the
    host; while it runs, the host queues all timed copies. Without it, timed copies over a fast link
    would wait for the host to queue them.
    """
    target.synchronize()
    with target.guard():
        for one in (tensor, buffer):
            place.copy_(one, non_blocking=True)
        events = [target.event()]
        for _ in range(LINK_COPIES):
            place.copy_(tensor, non_blocking=True)
            events.append(target.event())
    target.synchronize()
    return tuple(start.elapsed_time(end) / 1e3 for start, end in pairwise(events))
