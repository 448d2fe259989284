"""torch.nn.DataParallel with marks, on GPUs and on emulated devices.

On emulated devices, the Python code of torch.nn.parallel runs unchanged, including its threads.
This module replaces the functions that CUDA builds of torch implement in C++ (following
`torch/csrc/cuda/comm.cpp`), and some that query devices and precisions. In three modules of torch,
the name `torch` refers to an object that provides the replacements and takes every other attribute
from torch.

`comm.cpp` copies weights in flat buffers, in which a copy may start at any address. This module
allocates each copy separately, because on a CPU `linear` rounds differently at other alignments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.amp.common
from torch import Tensor, nn

from dpbench.hardware.device import Device
from dpbench.hardware.devices.host import install
from dpbench.records import Mark, Phase, marked

PACKAGE = "torch.nn.parallel"


class Marked(nn.DataParallel):  # type: ignore[type-arg]
    """torch.nn.DataParallel with marks around scatter, replicate, parallel_apply and gather."""

    def __init__(self, module: nn.Module, devices: Sequence[Device], mark: Mark) -> None:
        super().__init__(module, [device.torch_device.index for device in devices])
        self._devices = devices
        self._mark = mark
        if len(devices) == 1:  # torch then calls the module without parallel_apply
            inner = module.forward

            def forward(*inputs: Any, **kwargs: Any) -> Any:
                with mark(Phase.FORWARD, 0):
                    return inner(*inputs, **kwargs)

            module.forward = forward

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        with marked(self._mark, Phase.SCATTER, range(len(device_ids))):
            return super().scatter(inputs, kwargs, device_ids)

    def replicate(self, module: Any, device_ids: Any) -> Any:
        with marked(self._mark, Phase.REPLICATE, range(len(device_ids))):
            return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        with marked(self._mark, Phase.FORWARD, range(len(replicas))):
            return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        used = self._devices[: len(outputs)]
        with marked(self._mark, Phase.GATHER, used[0].at_work(used)):
            return super().gather(outputs, output_device)


@contextmanager
def on_emulated_devices(count: int) -> Iterator[None]:
    """Let torch.nn.DataParallel accept emulated devices as device ids 0 to `count - 1`.

    The context affects the whole process.
    """
    install()
    primitives = _Overlay(
        torch._C,
        _broadcast=_broadcast,
        _broadcast_coalesced=_broadcast_coalesced,
        _scatter=_scatter,
        _gather=_gather,
    )
    # the package's attribute is the function of that name
    data_parallel = sys.modules[f"{PACKAGE}.data_parallel"]
    patches: list[tuple[Any, str, Any]] = [
        (data_parallel, "_get_available_device_type", lambda: "lazy"),
        (data_parallel, "_get_all_device_indices", lambda: list(range(count))),
        (sys.modules[f"{PACKAGE}.comm"], "torch", _Overlay(torch, _C=primitives)),
        (
            sys.modules[f"{PACKAGE}.comm"],
            "nccl",
            SimpleNamespace(is_available=lambda tensors: False),
        ),
        (
            sys.modules[f"{PACKAGE}.parallel_apply"],
            "torch",
            _Overlay(torch, accelerator=_accelerator(available=True)),
        ),
        # without streams, as for an input that is on a GPU
        (
            sys.modules[f"{PACKAGE}._functions"],
            "torch",
            _Overlay(torch, accelerator=_accelerator(available=False)),
        ),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda: True),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in patches:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, stand_in)
        yield


def emulated(index: int) -> torch.device:
    """Return the torch.device of the emulated device `index`; the CPU for -1, as torch does."""
    return torch.device("cpu") if index == -1 else torch.device("lazy", index)


def _broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    return [tensor if tensor.device == emulated(i) else tensor.to(emulated(i)) for i in devices]


def _broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[Tensor]]:
    if any(tensor.get_device() != devices[0] for tensor in tensors):
        raise RuntimeError(
            f"All tensors must be on the first device, devices[0], whose index is {devices[0]}"
        )
    return [
        list(tensors),
        *([tensor.detach().to(emulated(i), copy=True) for tensor in tensors] for i in devices[1:]),
    ]


def _scatter(
    tensor: Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Any,
) -> list[Tensor]:
    chunks = (
        tensor.chunk(len(devices), dim)
        if chunk_sizes is None
        else tensor.split(list(chunk_sizes), dim)
    )
    return [chunk.to(emulated(i)) for chunk, i in zip(chunks, devices, strict=False)]


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    expected = list(tensors[0].shape)
    for i, tensor in enumerate(tensors):
        if tensor.dim() != len(expected):
            raise RuntimeError(
                "Expected all input tensors to have the same number of dimensions, but tensor at"
                f" index {i} has {tensor.dim()} dimensions (expected {len(expected)})"
            )
        expected[dim] = tensor.size(dim)
        if list(tensor.shape) != expected:
            raise RuntimeError(
                f"Input tensor at index {i} has invalid shape {list(tensor.shape)}, but expected"
                f" {expected}"
            )
    return torch.cat([tensor.to(emulated(destination or 0)) for tensor in tensors], dim)


class _Overlay:
    """An object with the attributes `own`, and all other attributes of the object `below`."""

    def __init__(self, below: Any, **own: Any) -> None:
        self.__dict__.update(own, _below=below)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def _accelerator(*, available: bool) -> Any:
    """Return a replacement of `torch.accelerator` without streams.

    Its current accelerator is "cuda", for which torch looks up the settings of autocast.
    """
    return SimpleNamespace(
        is_available=lambda: available,
        current_accelerator=lambda: torch.device("cuda"),
        current_stream=lambda index: nullcontext(),
        device_index=lambda index: nullcontext(),
    )
