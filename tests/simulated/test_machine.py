"""The simulated machine itself: it orders work, and refuses calls, as CUDA does."""

from __future__ import annotations

import os

import pytest

from tests.simulated.machine import Machine, Nvml
from tests.simulated.timeline import CudaError, Event, Gpu, Stream, Timeline


@pytest.fixture
def line() -> Timeline:
    return Timeline([Gpu(0), Gpu(1, offset_s=50, drift=1e-3)], call_s=1e-5, start_s=1000.0)


def recorded(line: Timeline, stream: Stream) -> Event:
    event = Event(line, stream.device)
    event.record(stream)
    return event


def test_kernels_of_a_stream_run_one_after_another_while_the_host_runs_ahead(
    line: Timeline,
) -> None:
    stream = Stream(0)
    begin = recorded(line, stream)
    for _ in range(3):
        line.kernel(stream, 0.5, "k")
    end = recorded(line, stream)
    assert line.now() == pytest.approx(1000.00003)
    with pytest.raises(CudaError, match="not ready"):
        begin.elapsed_time(end)
    line.synchronize([stream])
    assert line.now() == pytest.approx(1001.50001)
    assert begin.elapsed_time(end) == pytest.approx(1500.01)


def test_an_event_clock_drifts_and_has_a_resolution(line: Timeline) -> None:
    stream = Stream(1)
    begin = recorded(line, stream)
    line.kernel(stream, 1.0, "k")
    end = recorded(line, stream)
    line.synchronize([stream])
    assert begin.elapsed_time(end) == pytest.approx(1.001 * 1000.01, abs=1e-3)
    assert begin.elapsed_time(recorded(line, stream)) * 1e3 % 0.5 == pytest.approx(0, abs=0.1)


def test_cuda_refuses_what_the_simulation_refuses(line: Timeline) -> None:
    first, second = recorded(line, Stream(0)), recorded(line, Stream(1))
    with pytest.raises(CudaError, match="events of GPU 0 and GPU 1"):
        first.elapsed_time(second)
    with pytest.raises(CudaError, match="GPU 0 was recorded on a stream of GPU 1"):
        first.record(Stream(1))
    with pytest.raises(CudaError, match="never recorded"):
        first.elapsed_time(Event(line, 0))
    line._pid = os.getpid() + 1
    with pytest.raises(CudaError, match="forked"):
        line.kernel(Stream(0), 1, "k")


def test_a_copy_runs_on_its_source_and_holds_both_streams(line: Timeline) -> None:
    source, target = Stream(0), Stream(1)
    line.kernel(target, 2.0, "k")
    line.copy(source, target, 1.0, "Memcpy PtoP")
    assert line.work[-1].device == 0
    assert line.work[-1].start_s == line.work[0].end_s
    assert source.end_s == target.end_s == pytest.approx(1003.00001)


def test_a_collective_starts_everywhere_and_moves_data_when_all_have_arrived(
    line: Timeline,
) -> None:
    streams = [Stream(0), Stream(1)]
    line.kernel(streams[1], 2.0, "k")
    line.collective(streams, 0.5, "nccl")
    early, late = line.work[-2:]
    assert (early.end_s, early.all_here_s) == (late.end_s, late.all_here_s)
    assert late.start_s - early.start_s == pytest.approx(2 - 1e-5)


def test_a_throttled_kernel_runs_at_each_speed_in_turn() -> None:
    gpu = Gpu(0, speeds=[(0.0, 1.0), (10.0, 0.5)])
    assert gpu.finish(9.0, 3.0) == 14.0
    assert gpu.finish(1.0, 3.0) == 4.0
    assert gpu.finish(20.0, 3.0) == 26.0


def test_streams_of_one_device_share_its_compute_engine(line: Timeline) -> None:
    streams = [Stream(0), Stream(0)]
    for stream in streams:
        line.kernel(stream, 1.0, "k")
    assert streams[1].end_s == pytest.approx(streams[0].end_s + 1.0)


def test_nvml_lists_gpus_in_pci_order_and_lags_by_a_period() -> None:
    machine = Machine([Gpu(0), Gpu(1, speeds=[(0.0, 1.0), (1000.05, 0.5)])], lag_s=0.1)
    machine.timeline.kernel(machine.streams[1], 0.0625, "k")
    nvml = Nvml(machine, at_s=1000.09)
    assert [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(2)] == [1, 0]
    assert nvml.nvmlDeviceGetUtilizationRates(1).gpu == 0
    assert nvml.nvmlDeviceGetClockInfo(1, 1) == 2000
    nvml.at_s = 1000.15
    assert nvml.nvmlDeviceGetUtilizationRates(1).gpu == 75
    assert nvml.nvmlDeviceGetUtilizationRates(0).gpu == 0
    assert nvml.nvmlDeviceGetClockInfo(1, 1) == 1000
