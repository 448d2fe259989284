"""What is asked of a device, or said of it, concerns its own GPU, whichever GPU is current.

The fake GPUs' log of operations says where and when work ran.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from dpbench.hardware import rates
from dpbench.hardware.device import Device
from dpbench.hardware.devices import cuda, holding, open_devices
from dpbench.hardware.devices.cuda import CudaDevice
from dpbench.measure.worker import profiling
from dpbench.measure.worker.memory import Peaks
from dpbench.records import Phase
from dpbench.records.activity import KERNELS, busy
from tests.fakegpu import oplog
from tests.fakegpu.oplog import NOTE, RECORD, WAIT, Line
from tests.gpu.accounts import FLOPS_PER_S

pytestmark = pytest.mark.multi_gpu

GPUS = 3
MIB = 2**20
HELD = [2 * MIB, 4 * MIB, 8 * MIB]
"""Bytes that stay allocated on each GPU; a block of torch's allocator has at least 2 MiB."""
FREED = [8 * MIB, 32 * MIB, 16 * MIB]
"""Bytes that are allocated on each GPU and freed again."""

LEAST_S = 3e-6
"""The seconds of the shortest kernel of a fake GPU, which each kernel takes beside its work."""

needs_log = pytest.mark.skipif(
    not torch.cuda.is_available() or "Fake" not in torch.cuda.get_device_name(),
    reason="only fake GPUs log their operations",
)


@pytest.fixture(params=range(GPUS))
def current(request: pytest.FixtureRequest) -> Iterator[int]:
    """Make each of the GPUs the current one in turn."""
    with torch.cuda.device(request.param):
        yield request.param


@pytest.fixture
def devices() -> list[Device]:
    return open_devices("cuda", GPUS)


def bytes_on(device: Device, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device.torch_device)


def logged(work: Callable[[], object], folder: Path) -> list[Line]:
    """Return the operations of some work, without events and waits."""
    torch.cuda.synchronize()
    with oplog.logging(folder / "log") as path:
        work()
    return [line for line in oplog.read(path) if line.kind not in (NOTE, RECORD, WAIT)]


def keep_busy(device: Device, seconds: float, name: str = "busy") -> None:
    """Queue a kernel of this length on the device's stream."""
    with device.guard():
        stream = torch.cuda.current_stream().cuda_stream
        oplog.submit(stream, name, flops=seconds * FLOPS_PER_S)


# -- memory


def allocate_on_each(devices: Sequence[Device]) -> list[torch.Tensor]:
    """Allocate and free `FREED`, then keep `HELD`."""
    kept = []
    for device, freed, held in zip(devices, FREED, HELD, strict=True):
        bytes_on(device, freed)
        kept.append(bytes_on(device, held))
    return kept


def test_a_peak_is_that_of_its_gpu_since_the_last_one(current: int, devices: list[Device]) -> None:
    gc.collect()
    before = [torch.cuda.memory_allocated(i) for i in range(GPUS)]
    for device in devices:
        device.reset_memory()
    kept = allocate_on_each(devices)
    first = [device.take_peaks()["allocated"] for device in devices]
    second = [device.take_peaks()["allocated"] for device in devices]
    assert [peak - was for peak, was in zip(first, before, strict=True)] == FREED
    assert [peak - was for peak, was in zip(second, before, strict=True)] == HELD
    del kept


def test_a_reset_empties_the_cache_and_forgets_the_peaks_of_its_gpu(
    current: int, devices: list[Device]
) -> None:
    gc.collect()
    for device in devices:
        device.reset_memory()
    before = [torch.cuda.memory_allocated(i) for i in range(GPUS)]
    reserved = [torch.cuda.memory_reserved(i) for i in range(GPUS)]
    for device, size in zip(devices, FREED, strict=True):
        bytes_on(device, size)
    for device in devices:
        device.reset_memory()
    peaks = [device.take_peaks() for device in devices]
    assert [peak["allocated"] for peak in peaks] == before
    assert [peak["reserved"] for peak in peaks] == reserved


def test_a_peak_of_reserved_bytes_is_not_one_of_allocated_bytes(devices: list[Device]) -> None:
    for device in devices:
        device.reset_memory()
    for device, size in zip(devices, FREED, strict=True):
        bytes_on(device, size)
        found = device.take_peaks()
        ordinal = device.torch_device.index
        assert found["reserved"] == torch.cuda.memory_reserved(ordinal)
        assert found["allocated"] == torch.cuda.memory_allocated(ordinal) + size


def test_replicas_that_share_a_gpu_report_its_memory_once() -> None:
    shared = open_devices("cuda", 3, placement="colocated")
    assert [sorted(device.take_peaks()) for device in shared] == [["allocated", "reserved"], [], []]


def test_peaks_by_phase_are_those_of_each_gpu(current: int, devices: list[Device]) -> None:
    gc.collect()
    for device in devices:
        device.reset_memory()
    before = [torch.cuda.memory_allocated(i) for i in range(GPUS)]
    peaks = Peaks(devices)
    kept = []
    bytes_on(devices[0], 64 * MIB)  # before the step
    with peaks.step():
        with peaks.mark(Phase.FORWARD, 0):
            kept.append(bytes_on(devices[1], FREED[1]))
        with peaks.mark(Phase.BACKWARD, 0):
            kept.clear()
            kept.append(bytes_on(devices[2], HELD[2]))
        kept.clear()
        with peaks.mark(Phase.OPTIMIZER, 0):
            bytes_on(devices[0], FREED[0])
    found = {
        (m.device, m.phase): m.peak_bytes - before[m.device]
        for m in peaks.memory("allocator")
        if m.kind == "allocated"
    }
    expected = {
        "": [FREED[0], FREED[1], HELD[2]],
        "forward": [0, FREED[1], 0],
        "backward": [0, FREED[1], HELD[2]],
        "optimizer": [FREED[0], 0, 0],
    }
    for phase, sizes in expected.items():
        assert [found[i, phase] for i in range(GPUS)] == sizes, phase


# -- where work runs


@needs_log
def test_a_guard_makes_the_gpu_and_stream_of_its_device_current(
    current: int, devices: list[Device], tmp_path: Path
) -> None:
    def work() -> None:
        for device in devices:
            with device.guard():
                torch.empty(2**20, device="cuda").fill_(1.0)

    assert [line.gpu for line in logged(work, tmp_path)] == [0, 1, 2]
    assert torch.cuda.current_device() == current


@needs_log
def test_a_copy_arrives_on_the_gpu_of_its_device(
    current: int, devices: list[Device], tmp_path: Path
) -> None:
    given = torch.empty(2**20, pin_memory=True)
    on_gpu_1 = given.cuda(1)
    from_host = logged(lambda: [device.put(given) for device in devices], tmp_path)
    assert [(line.gpu, line.name) for line in from_host] == [
        (i, "Memcpy HtoD") for i in range(GPUS)
    ]
    (tmp_path / "between").mkdir()
    between = logged(lambda: [device.put(on_gpu_1) for device in devices], tmp_path / "between")
    assert [(line.source, line.target) for line in between if line.source >= 0] == [(1, 0), (1, 2)]
    assert {line.gpu for line in between} == {1}


@needs_log
def test_a_device_waits_until_its_gpu_is_idle(current: int, devices: list[Device]) -> None:
    for device in devices:
        assert isinstance(device, CudaDevice)
        keep_busy(device, 0.05)
        device.synchronize()
        assert device.stream.query(), device.name


@needs_log
def test_every_gpu_is_heated(current: int, devices: list[Device], tmp_path: Path) -> None:
    lines = logged(lambda: cuda.heat(devices, 0.05), tmp_path)
    assert lines
    assert [line.gpu for line in lines] == [0, 1, 2] * (len(lines) // 3)


@needs_log
@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_collectives_run_on_streams_of_their_gpus_after_the_work_before_them(
    verb: str, current: int, devices: list[Device], tmp_path: Path
) -> None:
    collectives = devices[0].collectives(devices)
    assert collectives is not None
    tensors = [torch.empty(3 * 2**20, device=device.torch_device) for device in devices]

    def work() -> None:
        for i, device in enumerate(devices):
            keep_busy(device, 0.01, "before")
            collectives.follow(i)
        getattr(collectives, verb)(tensors, *([0] if verb == "broadcast" else []))
        for i, device in enumerate(devices):
            collectives.lead(i)
            keep_busy(device, 0.0, "after")

    lines = logged(work, tmp_path)
    before, after = (
        {line.gpu: line for line in lines if line.name == name} for name in ("before", "after")
    )
    run = [line for line in lines if line.kind == "collective"]
    assert sorted(line.gpu for line in run) == [0, 1, 2]
    for line in run:
        assert line.gpu == line.source
        assert before[line.gpu].end_ns <= line.start_ns
        assert line.end_ns <= after[line.gpu].start_ns


@needs_log
def test_a_held_stream_is_that_of_its_gpu(current: int, devices: list[Device]) -> None:
    streams = [torch.cuda.Stream(i) for i in range(GPUS)]
    for device, stream in zip(devices, streams, strict=True):
        with torch.cuda.stream(stream), device.hold():
            held = device.stream  # type: ignore[attr-defined]
            with torch.cuda.stream(torch.cuda.Stream(stream.device)):
                assert device.stream == held == stream  # type: ignore[attr-defined]
    with holding(devices):
        assert [device.stream.device.index for device in devices] == [0, 1, 2]  # type: ignore[attr-defined]


@needs_log
def test_a_timing_event_is_on_the_stream_of_its_device(
    current: int, devices: list[Device], tmp_path: Path
) -> None:
    with oplog.logging(tmp_path / "log") as path:
        for device in devices:
            device.event(device.event())
    records = [line for line in oplog.read(path) if line.kind == RECORD]
    assert [(line.gpu, line.source) for line in records] == [
        (i, i) for i in range(GPUS) for _ in range(2)
    ]


@needs_log
def test_work_is_timed_on_the_gpu_of_its_device(current: int, devices: list[Device]) -> None:
    for i, device in enumerate(devices):
        lasting_s = 0.002 * (i + 1)
        work = partial(keep_busy, device, lasting_s)
        found = rates.times(device, work, 3, partial(keep_busy, device, 0.1))
        assert found == pytest.approx([lasting_s + LEAST_S] * 3, rel=0, abs=1e-6)


# -- profiles


@needs_log
def test_a_profile_credits_every_kernel_to_the_gpu_that_ran_it(
    current: int, devices: list[Device], tmp_path: Path
) -> None:
    values = [
        torch.empty(2 ** (20 + i), device=device.torch_device) for i, device in enumerate(devices)
    ]

    def step() -> None:
        for i, value in enumerate(values):
            for _ in range(i + 1):
                value.add_(1.0)

    profiles = list[profiling.Profile]()
    for attempt in range(3):  # the profiler itself may lose a record, and then says so
        folder = tmp_path / str(attempt)
        folder.mkdir()
        lines = logged(lambda: profiles.append(profiling.profiled(step, devices, 2)), folder)
        if not profiles[-1].withheld:
            break
    assert not profiles[-1].withheld
    kernels = [line for line in lines if line.kind == "kernel"]
    each = sum(range(1, GPUS + 1))
    assert len(kernels) == 3 * each  # a step to warm up, and two that are profiled
    for number, activities in enumerate(profiles[-1].steps, start=1):
        expected = kernels[number * each : (number + 1) * each]
        assert Counter(one.device for one in activities) == Counter(k.gpu for k in expected)
        for gpu, found in busy(activities).items():
            lasted_s = sum(k.end_ns - k.start_ns for k in expected if k.gpu == gpu) / 1e9
            assert found.metrics[KERNELS] == pytest.approx(lasted_s, rel=0, abs=1e-6)
