"""Profiler: the busy time of GPUs, which is the union of kernel intervals in one step profiled after timing.

Event spans show how long a phase occupied a device, waiting included; kernels show when the device computed. Collective
kernels are counted separately, because a kernel that waits for its peers counts as busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig

from dpbench.hardware.device import Device
from dpbench.records import Sample

METRIC = "kernel_busy_s"
COLLECTIVE = "collective_busy_s"


def profiled(step: Callable[[], object], devices: Sequence[Device]) -> list[Sample]:
    """Run one step under torch.profiler; return each GPU's busy seconds as samples of the GPU's first replica."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for device in devices:
        device.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        for device in devices:
            device.synchronize()
    kernels: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in profiler.events() or ():
        # annotations also appear on the GPU's timeline but include idle time
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            metric = COLLECTIVE if "nccl" in event.name.lower() else METRIC
            interval = (event.time_range.start / 1e6, event.time_range.end / 1e6)
            kernels.setdefault((event.device_index, metric), []).append(interval)
    first = {device.torch_device.index: device.index for device in reversed(devices)}
    return [
        Sample(0.0, first[ordinal], metric, union(intervals))
        for (ordinal, metric), intervals in sorted(kernels.items())
        if ordinal in first
    ]


def trace(step: Callable[[], object], devices: Sequence[Device], path: Path) -> None:
    """Run one step under torch.profiler and write a Chrome trace with the operators of all threads to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # replicas run in other threads, which the profiler leaves out by default
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities, experimental_config=everywhere) as profiler:
        step()
        for device in devices:
            device.synchronize()
    profiler.export_chrome_trace(str(path))


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
