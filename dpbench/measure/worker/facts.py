"""Facts: the provenance that a worker adds to its trial, about the model, torch and the GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations, pairwise, permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from dpbench.engine.containers import tensors_in
from dpbench.hardware import nvml
from dpbench.hardware.device import Device
from dpbench.hardware.devices import float32
from dpbench.models import Model, bytes_in, positional, rows_in
from dpbench.records import HOST, Case, Trial, fake
from dpbench.records.trial import FLOAT32
from dpbench.records.work import LINKS, OPERATIONS, CopyTimes, Operations, times_links

LINK_BYTES, LINK_COPIES, LINK_PASSES = 128 * 2**20, 3, 3
"""The bytes of each copy that times a link, the copies of a link in a pass, and a trial's passes.

Smaller copies do not reach the rate of NVLink.
"""
LINK_LEAST_BYTES = 8 * 2**20
"""The least size of such a copy; without memory for it, no link is timed."""
PEAK_PASSES = 4
"""The passes of matrix products that show a device's peak; the first one also loads libraries."""


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
        if dist.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts |= {
            "gpu": torch.cuda.get_device_name(device.torch_device),
            "no_peer_access": blocked_pairs(case),
        }
        facts |= {"gpu_uuids": gpu_uuids(case.gpus)}
    return facts


def gpu_uuids(ordinals: Sequence[int]) -> list[str]:
    """Return the UUIDs of the GPUs with these CUDA ordinals; none if a UUID is unknown.

    A UUID is unknown if this process does not see the GPU, or if torch is older than 2.5.
    """
    if any(one >= torch.cuda.device_count() for one in ordinals):
        return []
    uuids = [str(getattr(torch.cuda.get_device_properties(one), "uuid", "")) for one in ordinals]
    return uuids if all(uuids) else []


def blocked_pairs(case: Case) -> list[list[int]] | None:
    """Return the pairs of the case's GPUs without peer access, as CUDA ordinals.

    None for fewer than two GPUs, and if this process does not see all of them.
    """
    if case.device_kind != "cuda" or case.placement != "spread" or case.devices == 1:
        return None
    # the ranks of a launch may each see only their own GPUs
    if max(case.gpus) >= torch.cuda.device_count():
        return None
    reaches = torch.cuda.can_device_access_peer
    return [[a, b] for a, b in combinations(case.gpus, 2) if not (reaches(a, b) and reaches(b, a))]


def with_links(trial: Trial, devices: Sequence[Device]) -> Trial:
    """Time copies over the links of the devices, and return the trial with these times.

    The setup of the returned trial has `links_s`, the seconds that the timing took. The trial is
    returned unchanged if `times_links` is False for its case, or if a GPU has too little free
    memory for the copies, because the trial is valid without them.
    """
    if not times_links(trial.case):
        return trial
    began_s = time.perf_counter()
    try:
        measured = [asdict(link) for link in links(devices, LINK_PASSES)]
    except torch.OutOfMemoryError:
        return trial
    return trial.adding({LINKS: measured}, links_s=time.perf_counter() - began_s)


def with_operations(
    trial: Trial, model: Model, batch: tuple[Any, Any], devices: Sequence[Device]
) -> Trial:
    """Return the trial with its `Operations`, unchanged if they are unknown.

    The setup of the returned trial has `peak_s`, the seconds that this took. Fake and emulated
    devices have no peak. The peak is also unknown if torch cannot measure it, for example because
    the device has too little free memory: the trial is valid without it.
    """
    kind = trial.case.device_kind
    # the driver tells fake GPUs, whatever their names are
    fakes = kind == "cuda" and fake.fake_gpus({**trial.provenance, "gpus": nvml.describe()})
    if fakes or kind not in ("cpu", "cuda"):
        return trial
    began_s = time.perf_counter()
    counted = operations(model, batch)
    if counted is None:
        return trial
    forward, backward = counted
    try:
        peak_per_s = _peak(trial.case, devices[0])
    except RuntimeError:  # such as too little memory, of the device or of the host
        return trial
    found = Operations(forward=forward, backward=backward, peak_per_s=peak_per_s)
    return trial.adding({OPERATIONS: asdict(found)}, peak_s=time.perf_counter() - began_s)


def operations(model: Model, batch: tuple[Any, Any]) -> tuple[float, float] | None:
    """Return the floating-point operations of a sample in forward and in backward.

    torch counts those of products, convolutions and attention, of tensors without values. None if
    it counts none, if the model needs values, as one with packed sequences does, or if an input
    has no rows.
    """

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)

    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    try:
        inputs, samples = positional(batch[0]), min(2, rows_in(batch))
        arguments = tree_map_only(torch.Tensor, lambda one: bare(one[:samples]), inputs)
        weights = {name: bare(one) for name, one in model.module.named_parameters()}
        buffers = {name: bare(one) for name, one in model.module.named_buffers()}
        trained = [one for one in weights.values() if one.requires_grad]
        with forward:
            output = functional_call(model.module, {**weights, **buffers}, arguments)
        outputs = [one for one in tensors_in(output) if one.requires_grad]
        with backward:
            torch.autograd.grad([one.sum() for one in outputs], trained, allow_unused=True)
    except Exception:  # a model may raise any error, and its tensors may be of any kind
        return None
    counts = forward.get_total_flops() / samples, backward.get_total_flops() / samples
    return counts if all(counts) else None


def _peak(case: Case, device: Device) -> float:
    """Return the best rate of products of large square matrices on a device, in FLOP/s.

    If convolutions round float32 values to TF32, as torch's do by default, these products do, too.
    """
    on_gpu = case.device_kind == "cuda"
    side, repeats = (8192, 5) if on_gpu else (1024, 1)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision, torch.float32)
    if float32.products(case.device_kind, device.torch_device).convolution == float32.TF32:
        float32.allow_tf32()
    one = torch.ones(side, side, dtype=dtype, device=device.torch_device)
    product = torch.empty_like(one)
    fastest_s = math.inf
    with device.guard(), torch.no_grad():
        for _ in range(PEAK_PASSES):
            device.synchronize()
            began_s = time.perf_counter()
            for _ in range(repeats):
                torch.mm(one, one, out=product)
            device.synchronize()
            fastest_s = min(fastest_s, (time.perf_counter() - began_s) / repeats)
    return 2.0 * side**3 / fastest_s


def links(devices: Sequence[Device], passes: int = 1) -> Iterator[CopyTimes]:
    """Time copies from the host's pinned memory to each device, and from each device to the others.

    Each of the `passes` yields every link once, as soon as its copies are done, so that a caller
    can read counters between two links. Copies have `LINK_BYTES`, or the largest half, quarter and
    so on for which all devices have memory. Raises torch.OutOfMemoryError if that is less than
    `LINK_LEAST_BYTES`.
    """
    buffer, places = _buffers(devices)
    ends = list(zip(devices, places, strict=True))
    for _ in range(passes):
        for device, place in ends:
            yield CopyTimes(
                source=HOST,
                target=device.index,
                bytes=buffer.nbytes,
                seconds=_copy_times(device, place, buffer, buffer),
            )
        for (source, there), (target, here) in permutations(ends, 2):
            target.synchronize()
            yield CopyTimes(
                source=source.index,
                target=target.index,
                bytes=buffer.nbytes,
                seconds=_copy_times(source, here, there, buffer),
            )


def _buffers(devices: Sequence[Device]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a buffer in the host's pinned memory and its copy on each device, all of one size."""
    size = LINK_BYTES
    while True:
        buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        try:
            return buffer, [buffer.to(device.torch_device) for device in devices]
        except torch.OutOfMemoryError:
            if size // 2 < LINK_LEAST_BYTES:
                raise
        size //= 2


def _copy_times(
    queue: Device, place: torch.Tensor, tensor: torch.Tensor, buffer: torch.Tensor
) -> tuple[float, ...]:
    """Return the seconds of each copy of `tensor` to `place`, which runs on the stream of `queue`.

    Torch queues a copy between two GPUs on the stream of its source: events of the target would
    also time how the streams wait for each other. The copies run one after the other, and allocate
    no memory. Two untimed copies precede them. The first sets up the access to the other device.
    The second is a copy of a part of `buffer` from the host; while it runs, the host queues all
    timed copies. Without it, small copies over a fast link would wait for the host to queue them.
    """
    cover = slice(LINK_LEAST_BYTES)
    own = place if place.device == queue.torch_device else tensor
    queue.synchronize()
    with queue.guard():
        place.copy_(tensor, non_blocking=True)
        own[cover].copy_(buffer[cover], non_blocking=True)
        events = [queue.event()]
        for _ in range(LINK_COPIES):
            place.copy_(tensor, non_blocking=True)
            events.append(queue.event())
    queue.synchronize()
    return tuple(start.elapsed_time(end) / 1e3 for start, end in pairwise(events))
