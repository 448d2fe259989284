"""GPU: figures of one GPU's matrix products, copies within its memory, and launches.

CUDA events around many kernels in a row measure times on the device. The host's clock measures the
launch of a kernel, without waiting for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch

from dpbench.doctor.probe.figures import Figure
from dpbench.hardware.devices import float32

SIDES = (256, 512, 1024, 2048, 4096, 8192)
DTYPES = {
    "fp32": torch.float32,
    float32.TF32: torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""The dtypes of matrix products by their format; TF32 is that of convolutions by default."""
REPEATS = 20


def figures() -> Iterator[Figure]:
    """Yield all figures of GPU 0."""
    yield from _arithmetic()
    yield _memory()
    yield _launch()


def _seconds(work: Callable[[], object]) -> float:
    """Return the mean seconds of `work` on the device, by events around `REPEATS` calls."""
    for _ in range(3):
        work()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / REPEATS


def _arithmetic() -> Iterator[Figure]:
    """Yield the best rate of products of square matrices with `SIDES` rows, by format."""
    for name, dtype in DTYPES.items():
        rounded = name == float32.TF32
        if rounded and float32.impediment(torch.device("cuda", 0)):
            continue
        best = 0.0
        with float32.tf32_allowed() if rounded else nullcontext():
            for side in SIDES:
                a = torch.randn(side, side, device="cuda").to(dtype)
                best = max(best, 2.0 * side**3 / _seconds(lambda a=a: a @ a))  # type: ignore[misc]
        yield f"{name}_flop_per_s", best


def _memory() -> Figure:
    size = 2**28  # smaller copies may stay in the cache
    source = torch.zeros(size // 4, device="cuda")
    target = torch.empty_like(source)
    copied = 2.0 * size  # both read and written
    return "gpu_memory_bytes_per_s", copied / _seconds(lambda: target.copy_(source))


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
