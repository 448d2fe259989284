"""GPU: figures of one GPU's matrix products, copies within its memory, and launches.

The host's clock measures the launch of a kernel, without waiting for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from dpbench.doctor.probe.figures import Figure
from dpbench.hardware import rates
from dpbench.hardware.device import Device
from dpbench.hardware.devices import float32, open_devices
from dpbench.records.work import fastest

DTYPES = {
    "fp32": torch.float32,
    float32.TF32: torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""The dtypes of matrix products by their format; TF32 is that of convolutions by default."""


def figures() -> Iterator[Figure]:
    """Yield all figures of GPU 0."""
    (device,) = open_devices("cuda", 1)
    yield from _arithmetic(device)
    yield _memory(device)
    yield _launch()


def _arithmetic(device: Device) -> Iterator[Figure]:
    """Yield the best rate of matrix products by format."""
    for name, dtype in DTYPES.items():
        rounded = name == float32.TF32
        if rounded and float32.impediment(device.torch_device):
            continue
        with float32.tf32_allowed() if rounded else nullcontext():
            yield f"{name}_flop_per_s", rates.product_per_s(device, dtype)


def _memory(device: Device) -> Figure:
    size = 2**28  # smaller copies may stay in the cache
    source = torch.zeros(size // 4, device=device.torch_device)
    target = torch.empty_like(source)
    seconds = rates.times(device, lambda: target.copy_(source), rates.COPIES)
    return "gpu_memory_bytes_per_s", fastest(2.0 * size, seconds)  # read and written


def _launch() -> Figure:
    """Return the host's time to launch one operation, without waiting for the device."""
    x = torch.zeros(1, device="cuda")
    for _ in range(2):  # the first time is warm-up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(500):  # fewer launches than the queue holds, so that the host never waits
            x.add_(1)
        spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return "launch_s", spent / 500
