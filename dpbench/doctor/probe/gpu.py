"""GPU: figures of one GPU's matrix products, copies, launches and transfers, and of links.

CUDA events around many kernels in a row measure times on the device. The host's clock measures the
launch of a kernel, without waiting for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import permutations

import torch

from dpbench.doctor.probe.figures import Figure, line, spread, timing
from dpbench.hardware.device import Device
from dpbench.hardware.devices import float32
from dpbench.hardware.nvml import NvmlGpu
from dpbench.measure.worker import facts
from dpbench.records import HOST

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
    yield from _transfers()


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


def _transfers() -> Iterator[Figure]:
    size = 64 * MIB
    there = torch.empty(size // 4, device="cuda")
    for name, pinned in (("pinned", True), ("pageable", False)):
        here = torch.zeros(size // 4, pin_memory=pinned)
        up = _seconds(lambda h=here: there.copy_(h, non_blocking=True))  # type: ignore[misc]
        down = _seconds(lambda h=here: h.copy_(there, non_blocking=True))  # type: ignore[misc]
        yield Figure(
            f"{name}_to_device_bytes_per_s", size / up, f"copies of 64 MiB from {name} host memory"
        )
        yield Figure(
            f"{name}_to_host_bytes_per_s", size / down, f"copies of 64 MiB to {name} host memory"
        )


def links(devices: Sequence[Device], counters: Mapping[int, NvmlGpu]) -> Iterator[Figure]:
    """Yield the figures of the links from the host to each GPU and between all pairs of GPUs.

    They are the share of the pairs with peer access, the rate of each link for one copy at a time
    and, if the GPU at its start has an NVLink counter, the share of the copied bytes that NVLink
    carried. `counters` maps CUDA ordinals to NVML's GPUs.
    """
    pairs = list(permutations([device.torch_device.index for device in devices], 2))
    reached = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    how = (
        "the share of the ordered pairs of GPUs in which the first can access the memory of the"
        " second"
    )
    yield Figure("peer_access_ratio", reached / len(pairs), how)
    before = _sent(counters)
    for link in facts.links(devices):
        after = _sent(counters)
        size = f"{link.bytes // KIB} KiB"
        source, target = (
            f"GPU {end}" if end != HOST else "the host's pinned memory"
            for end in (link.source, link.target)
        )
        name = f"link_{'host' if link.source == HOST else link.source}_{link.target}"
        spent = timing(link.seconds)
        rates = [link.bytes / seconds for seconds in (spent.seconds, spent.low_s, spent.high_s)]
        yield spread(
            f"{name}_bytes_per_s",
            rates,
            f"copies of {size} from {source} to {target}, one at a time",
        )
        if link.source in after and link.source in before:
            share = (after[link.source] - before[link.source]) / (
                link.bytes * (1 + facts.LINK_COPIES)
            )
            how = (
                f"the bytes that NVML's counter shows as sent by {source} over NVLink, per byte"
                f" copied to {target}"
            )
            yield Figure(f"{name}_nvlink_ratio", share, how)
        before = after


def _sent(counters: Mapping[int, NvmlGpu]) -> dict[int, float]:
    """Return the bytes sent over NVLink so far, by the CUDA ordinal of each GPU with a counter."""
    found = {ordinal: gpu.read("nvlink_sent_bytes") for ordinal, gpu in counters.items()}
    return {ordinal: sent for ordinal, sent in found.items() if sent is not None}
