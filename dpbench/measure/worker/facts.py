"""Facts: the provenance that a worker adds to its trial, about the model, torch and the GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from dpbench.analysis.moves import of_step
from dpbench.engine.containers import tensors_in
from dpbench.hardware import interpreter, nvml, rates
from dpbench.hardware.device import Device
from dpbench.hardware.devices import float32
from dpbench.hardware.readings import reading
from dpbench.models import Model, bytes_in, rows_in
from dpbench.records import Case, Trial, data_sheets, fake, vendors
from dpbench.records.arguments import arguments_of
from dpbench.records.facts import TrialFacts, stated
from dpbench.records.work import Operations, Shapes, Sizes, times_links

log = logging.getLogger(__name__)

LINK_PASSES = 3
"""The passes over all links in a trial; each is a round of their intervals."""


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
    inputs, target = batch
    samples = rows_in(batch)
    facts = {
        **sizes(model.module),
        "input_bytes": bytes_in(inputs) / samples,
        "target_bytes": bytes_in(target) / samples,
    }
    few = slice(0, 2)  # BatchNorm refuses a single sample
    given = tree_map_only(torch.Tensor, lambda tensor: tensor[few], inputs)
    statistics = {
        name: buffer.clone() for name, buffer in model.module.named_buffers()
    }  # forward changes buffers
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = functional_call(model.module, statistics, *arguments_of(given))
        facts["output_bytes"] = sum(tensor.nbytes for tensor in tensors_in(output)) / min(
            2, samples
        )
    except Exception:  # a model may raise any error: leave the unknown fact out
        return facts
    return facts


def described_moves(case: Case, model: dict[str, float]) -> dict[str, Any]:
    """Return the bytes that a step of an external strategy moves, if it describes its step.

    `model` has the model's sizes. Readers of the trial do not import the code of the strategy. An
    error of this code costs no measurement.
    """
    shapes = Shapes.of(Sizes(**model)) if case.declared else None
    try:
        moves = of_step(case, shapes) if shapes else []
    except Exception as error:
        log.warning("the bytes that a step of %s moves are unknown: %r", case.strategy, error)
        return {}
    return stated(moves=tuple(moves)) if moves else {}


def process_facts() -> dict[str, Any]:
    """Return the facts about this process that every trial states, also one of a DataLoader.

    They are whether the process has the global interpreter lock, and which module has switched it
    on. Call this function after the timed work, because any import until then may switch the lock
    on: that of torch, of the user's file, or one inside a forward pass.
    """
    facts = stated(gil=interpreter.gil())
    if module := interpreter.switched_on_by():
        facts |= stated(gil_switched_on_by=module)
    return facts


def torch_facts(case: Case, device: Device) -> dict[str, Any]:
    """Return the version and settings of torch and, for GPUs, of its libraries and the GPUs."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **stated(float32=float32.products(case.device_kind, device.torch_device)),
    }
    if case.device_kind == "cuda":
        gpu = device.torch_device
        vendor = vendors.of(torch.version.hip)
        built = {"cuda": torch.version.cuda, "hip": torch.version.hip}
        facts |= {name: version for name, version in built.items() if version}
        facts["cudnn"] = reading(
            f"the version of {vendor.convolutions}", torch.backends.cudnn.version
        )
        if dist.is_nccl_available():
            facts["nccl"] = reading(f"the version of {vendor.collectives}", _nccl_version)
        facts |= {
            "gpu": reading("the name of the GPU in torch", torch.cuda.get_device_name, gpu),
            "no_peer_access": reading("peer access", blocked_pairs, case),
            "gpu_uuids": reading("the UUIDs of GPUs in torch", gpu_uuids, case.gpus) or [],
        }
    return facts


def data_sheet(case: Case, devices: Sequence[Device]) -> dict[str, Any]:
    """Return the data sheet of this process's GPUs as a fact; {} if unknown or not that of all."""
    if case.device_kind != "cuda":
        return {}
    every = reading("the names and the memory of GPUs in torch", _sheets, devices) or [None]
    known = every[0] is not None and all(one == every[0] for one in every)
    return stated(data_sheet=every[0]) if known else {}


def _sheets(devices: Sequence[Device]) -> list[data_sheets.DataSheet | None]:
    every = [torch.cuda.get_device_properties(device.torch_device) for device in devices]
    return [data_sheets.of_gpu(gpu.name, gpu.total_memory) for gpu in every]


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


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
        measured = tuple(rates.links(devices, LINK_PASSES))
    except torch.OutOfMemoryError:
        return trial
    return trial.adding(stated(links=measured), links_s=time.perf_counter() - began_s)


def with_operations(
    trial: Trial, model: Model, batch: tuple[Any, Any], devices: Sequence[Device]
) -> Trial:
    """Return the trial with its `Operations`, or with the reason if they cannot be counted.

    The setup of the returned trial has `peak_s`, the seconds that this took. Fake and emulated
    devices have no peak. The peak is also unknown if torch cannot measure it, for example because
    the device has too little free memory: the trial is valid without it. The steps must have been
    timed before, because a user's model may change its state when its operations are counted.
    """
    kind = trial.case.device_kind
    # the driver tells fake GPUs, whatever their names are
    fakes = kind == "cuda" and fake.fake_gpus(
        TrialFacts.of({**trial.provenance, "gpus": nvml.describe()})
    )
    if fakes or kind not in ("cpu", "cuda"):
        return trial
    began_s = time.perf_counter()
    eager = torch.compiler.set_stance("force_eager") if trial.case.compile else nullcontext()
    with eager:  # the kernels of a graph are not torch's operators
        counted = operations(model, batch)
    if isinstance(counted, str):
        return trial.adding({"no_operations": counted})
    try:
        peak_per_s = _peak(trial.case, devices[0])
    except RuntimeError:  # such as too little memory, of the device or of the host
        return trial
    found = replace(counted, peak_per_s=peak_per_s)
    return trial.adding(stated(operations=found), peak_s=time.perf_counter() - began_s)


class _Factors(TorchDispatchMode):
    """Notes the types of each operator's floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: dict[Any, set[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = self.types.setdefault(func.overloadpacket, set())
        for leaf in tree_leaves(args):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                found.add(str(leaf.dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


class _OwnAutocast(TorchFunctionMode):
    """Notes whether a function is called under autocast; it has no effect on meta tensors."""

    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.found |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return func(*args, **(kwargs or {}))


def operations(model: Model, batch: tuple[Any, Any]) -> Operations | str:
    """Return the floating-point operations of a sample, without a peak, or why they are unknown.

    torch counts those of products, convolutions and attention, of tensors without values: two for
    a multiplication and an addition. They are unknown if it counts none, if the model needs values,
    as one with packed sequences does, or if an input has no rows.
    """

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)

    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    factors, autocast = _Factors(), _OwnAutocast()
    try:
        samples = min(2, rows_in(batch))
        given = tree_map_only(torch.Tensor, lambda one: bare(one[:samples]), batch[0])
        weights = {name: bare(one) for name, one in model.module.named_parameters()}
        buffers = {name: bare(one) for name, one in model.module.named_buffers()}
        trained = [one for one in weights.values() if one.requires_grad]
        with autocast, factors, forward:
            output = functional_call(model.module, {**weights, **buffers}, *arguments_of(given))
        outputs = [one for one in tensors_in(output) if one.requires_grad]
        with factors, backward:
            torch.autograd.grad([one.sum() for one in outputs], trained, allow_unused=True)
    except Exception as error:  # a model may raise any error, and its tensors may be of any kind
        return f"torch could not count them: {type(error).__name__}: {error}"
    by_operator = [one.get_flop_counts().get("Global", {}) for one in (forward, backward)]
    every = [sum(counts.values()) / samples for counts in by_operator]
    if not all(every):
        return "torch counted none in forward or in backward"
    convolutions = [
        sum(count for operator, count in counts.items() if "convolution" in str(operator)) / samples
        for counts in by_operator
    ]
    counted = {*by_operator[0], *by_operator[1]}
    types = {kind for operator in counted for kind in factors.types.get(operator, ())}
    return Operations(
        forward=every[0],
        backward=every[1],
        peak_per_s=0.0,
        forward_convolutions=convolutions[0],
        backward_convolutions=convolutions[1],
        dtype=types.pop() if len(types) == 1 and not autocast.found else "",
    )


def _peak(case: Case, device: Device) -> float:
    """Return the best rate of matrix products in the case's precision, in FLOP/s.

    If convolutions round float32 values to TF32, as torch's do by default, these products do, too.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision, torch.float32)
    if float32.products(case.device_kind, device.torch_device).convolution == float32.TF32:
        float32.allow_tf32()
    return rates.product_per_s(device, dtype)
