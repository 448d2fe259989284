"""GPU sampler: read NVML's counters of the GPUs that a run uses.

A run without GPUs gets no samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from dpbench.hardware.nvml import METRICS, Library, NvmlGpu, open_nvml
from dpbench.hardware.samplers import every
from dpbench.hardware.samplers.host import ProcessTree, root_pid
from dpbench.records import Sample
from dpbench.records.series import BUFFERED

SLOW_INTERVAL_S = 0.2
"""The minimum seconds between readings of what is needed less often."""


@contextmanager
def start(
    devices: Sequence[int], interval_s: float, library: Library = None
) -> Iterator[list[Sample]]:
    """Sample the GPUs with the CUDA ordinals `devices`.

    Yield the list of samples, which grows until the `with` ends. `library` replaces pynvml in
    tests.
    """
    samples: list[Sample] = []
    if not devices:  # do not start NVML, which can take a second
        yield samples
        return
    with open_nvml(library) as nvml:
        gpus = [gpu for gpu in nvml.gpus if gpu.index in devices] if nvml else []
        if not gpus:
            yield samples
            return
        fast, slow = readings(gpus, samples)
        with every(interval_s, fast), every(max(interval_s, SLOW_INTERVAL_S), slow):
            yield samples


def readings(
    gpus: Sequence[NvmlGpu], samples: list[Sample]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions that read counters of all GPUs once and append to `samples`.

    The first reads the counters, the second the memory of other processes and the driver's buffer,
    which are needed less often.
    """
    tree = ProcessTree(root_pid())
    seen_s = dict.fromkeys((gpu.index for gpu in gpus), 0.0)

    def fast() -> None:
        for gpu in gpus:
            for metric in METRICS:
                _sample(samples, gpu.index, metric, partial(gpu.read, metric))

    def slow() -> None:
        for gpu in gpus:
            others = partial(gpu.foreign_memory_bytes, tree.pids())
            _sample(samples, gpu.index, "foreign_memory_bytes", others)
            for at_s, value in gpu.utilization_samples(seen_s[gpu.index]):
                seen_s[gpu.index] = at_s
                # the driver's times are those since the epoch
                since_s = time.time() - at_s
                samples.append(Sample(time.perf_counter() - since_s, gpu.index, BUFFERED, value))

    return fast, slow


def _sample(
    samples: list[Sample], device: int, metric: str, read: Callable[[], float | None]
) -> None:
    """The time is the middle of the call; None is not appended."""
    before_s = time.perf_counter()
    value = read()
    after_s = time.perf_counter()
    if value is not None:
        samples.append(Sample((before_s + after_s) / 2, device, metric, value))
