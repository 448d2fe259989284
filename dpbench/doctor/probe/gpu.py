"""GPU: figures of one GPU's matrix products, copies within its memory, and launches.

CUDA events around many kernels in a row measure times on the device. The host's clock measures the
launch of a kernel, without waiting for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch

from dpbench.doctor.probe.figures import Figure, line
from dpbench.hardware.devices import float32

KIB = 2**10
MIB = 2**20
SIDES = (256, 512, 1024, 2048, 4096, 8192)
COPIES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)
DTYPES = {
    "fp32": torch.float32,
    float32.TF32: torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""The dtypes of matrix products by their format; TF32 is that of convolutions by default."""
REPEATS = 20
EMPTY = 10_000
HALF = "reaches half of the maximum rate, according to a line fitted to the seconds of"


def figures() -> Iterator[Figure]:
    """Yield all figures of GPU 0."""
    yield _context()
    yield from _arithmetic()
    yield from _memory()
    yield from _launches()


def _context() -> Figure:
    """Return the bytes of the CUDA context and of other processes on the GPU."""
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info(0)
    return Figure(
        "context_bytes",
        float(total - free - torch.cuda.memory_reserved(0)),
        "the memory in use on the GPU after CUDA has started, including that of other processes,"
        " but without that of torch's allocator",
    )


def _seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the mean seconds of `work` on the device, by events around `repeats` calls."""
    for _ in range(3):
        work()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def _arithmetic() -> Iterator[Figure]:
    for name, dtype in DTYPES.items():
        rounded = name == float32.TF32
        if rounded and float32.impediment(torch.device("cuda", 0)):
            continue
        points: list[tuple[float, float]] = []
        with float32.tf32_allowed() if rounded else nullcontext():
            for side in SIDES:
                a = torch.randn(side, side, device="cuda").to(dtype)
                points.append((2.0 * side**3, _seconds(lambda a=a: a @ a)))  # type: ignore[misc]
        start_s, per_flop = line(points)
        best = max(work / seconds for work, seconds in points)
        how = f"{name} products of square matrices with {SIDES[0]} to {SIDES[-1]} rows"
        yield Figure(f"{name}_flop_per_s", best, f"the best rate of {how}")
        half = f"the size, in FLOP, at which a matrix product {HALF} {how}"
        yield Figure(f"{name}_half_flop", start_s / per_flop, half)


def _memory() -> Iterator[Figure]:
    points: list[tuple[float, float]] = []
    for size in COPIES:
        source = torch.zeros(size // 4, device="cuda")
        target = torch.empty_like(source)
        points.append((2.0 * size, _seconds(lambda s=source, t=target: t.copy_(s))))  # type: ignore[misc]
    start_s, per_byte = line(points)
    best = max(work / seconds for work, seconds in points)
    how = (
        "copies of 64 KiB to 256 MiB on the GPU, counting both the bytes read and the bytes written"
    )
    yield Figure("gpu_memory_bytes_per_s", best, f"the best rate of {how}")
    half = f"the size, in bytes, at which a copy {HALF} {how}"
    yield Figure("gpu_half_bytes", start_s / per_byte, half)


def _launches() -> Iterator[Figure]:
    x = torch.zeros(1, device="cuda")
    how = (
        f"a kernel that adds a number to one element: the mean of {EMPTY} such kernels between two"
        " CUDA events"
    )
    yield Figure("kernel_s", _seconds(lambda: x.add_(1), EMPTY), how)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(500):  # fewer launches than the queue holds, so that the host never waits
        x.add_(1)
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    yield Figure(
        "launch_s",
        spent / 500,
        "the host's time to launch one operation, without waiting for the device",
    )
