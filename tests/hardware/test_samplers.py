"""Laws of the samplers: every plug-in's contract, the intervals of ticks, and NVML's calls."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

from dpbench.hardware import samplers
from dpbench.hardware.nvml import open_nvml
from dpbench.hardware.samplers import nvml as nvml_sampler
from dpbench.records import HOST, Sample, registry
from tests.marked import poll
from tests.recorded_nvml import DRIVER_NOT_LOADED, recorded

pytestmark = pytest.mark.usefixtures("all_gpus_visible")

PLUGS = registry.names("samplers")
UNITS = re.compile(r".+_(ratio|bytes|bytes_per_s|w|j|hz|c|reasons|1m)$")


def times(samples):
    """Group the times of samples by device and metric."""
    series = defaultdict(list)
    for sample in samples:
        series[sample.device, sample.metric].append(sample.time_s)
    return series


# The contract of every plug


@pytest.mark.parametrize("name", PLUGS)
def test_plug_starts_by_contract(name):
    parameters = list(inspect.signature(registry.load("samplers", name).start).parameters.values())
    assert [p.name for p in parameters[:2]] == ["devices", "interval_s"]
    assert all(p.default is not p.empty for p in parameters[2:])


@pytest.mark.parametrize("name", PLUGS)
def test_plug_without_its_hardware_is_silent(name, caplog):
    with registry.load("samplers", name).start((), 0.05) as samples:
        time.sleep(0.1)
    assert isinstance(samples, list)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", PLUGS)
def test_plug_samples_in_order_with_units_until_it_ends(name):
    library = {"library": recorded("h100_x4")} if name == "nvml" else {}
    start_s = time.perf_counter()
    with registry.load("samplers", name).start((0, 1), 0.05, **library) as samples:
        time.sleep(0.6)
    end_s = time.perf_counter()
    count = len(samples)
    for series in times(samples).values():
        assert series == sorted(series)
        assert len(set(series)) == len(series)
    assert all(start_s <= s.time_s <= end_s and s.device in (HOST, 0, 1) for s in samples)
    assert [s.metric for s in samples if not UNITS.match(s.metric)] == []
    time.sleep(0.25)
    assert len(samples) == count


@pytest.mark.parametrize("name", PLUGS)
def test_plug_survives_that_its_list_is_emptied(name):
    library = {"library": recorded("gtx1080")} if name == "nvml" else {}
    with registry.load("samplers", name).start((0,), 0.05, **library) as samples:
        for _ in range(2):
            assert poll(lambda: samples) or sys.platform != "linux"
            del samples[:]


# Cadence


@pytest.mark.parametrize(
    ("durations_s", "expected"),
    [
        ([0.0, 0.0, 0.0], [0, 1, 2]),
        ([0.3, 0.9, 0.3], [0, 1, 2]),
        ([1.5, 0.0, 0.0], [0, 2, 3]),
        ([3.2, 0.5, 1.1], [0, 4, 5]),
    ],
)
def test_late_ticks_are_skipped_and_the_rest_keep_their_place(durations_s, expected):
    clock_s = [100.0]

    def wait(seconds):
        clock_s[0] += seconds
        return False

    seen = []
    for tick, duration_s in zip(
        samplers.ticks(1.0, wait, lambda: clock_s[0]), durations_s, strict=False
    ):
        seen.append((tick, clock_s[0]))
        clock_s[0] += duration_s
    assert seen == [(tick, 100.0 + tick) for tick in expected]


def test_fault_in_a_sampler_ends_its_series_only(caplog):
    with samplers.every(0.01, lambda: 1 // 0):
        assert poll(lambda: "ended early" in caplog.text)


def test_interval_must_be_positive():
    with (
        pytest.raises(ValueError, match="interval_s must be positive, not 0"),
        samplers.every(0, print),
    ):
        pass


# NVML


class Jumping:
    """A clock that only the replayed latencies and the waits of a cadence move."""

    def __init__(self):
        self.now_s = 0.0

    def wait(self, seconds):
        self.now_s += seconds
        return False

    def until(self, end_s):
        return lambda seconds: self.wait(seconds) or self.now_s >= end_s


def replayed(which, count, interval_s, seconds, slower=1.0):
    """Run one cadence over some GPUs of a recording.

    Return its library, and the delay of each tick.
    """
    clock = Jumping()
    library = recorded("h100_x4")
    library.recording["uuids"] = [f"GPU-{i:08d}-0000-0000-0000-000000000000" for i in range(count)]
    library.sleep = lambda latency_s: clock.wait(latency_s * slower)
    late_s = []
    with open_nvml(library) as nvml:
        tick = nvml_sampler.readings(nvml.gpus, [])[which]
        library.calls.clear()
        clock.now_s = 0.0
        for number in samplers.ticks(interval_s, clock.until(seconds), lambda: clock.now_s):
            late_s.append(clock.now_s - number * interval_s)
            tick()
    return library, late_s


FAST, SLOW = 0, 1
SELDOM = {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetSamples(1)"}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4, 8])
def test_fast_cadence_holds_100_hz_at_the_recorded_latencies(count):
    library, late_s = replayed(FAST, count, 0.01, 60.0)
    assert len(late_s) >= 0.99 * 6000
    assert sum(late > 0.001 for late in late_s) < 0.01 * 6000
    assert not SELDOM & {call for call, _ in library.calls}


def test_calls_that_are_too_slow_for_100_hz_would_be_seen():
    _, late_s = replayed(FAST, 4, 0.01, 10.0, slower=3.0)
    assert len(late_s) < 0.6 * 1000


def test_what_is_needed_less_often_keeps_a_slow_cadence_of_its_own():
    library, late_s = replayed(SLOW, 4, nvml_sampler.SLOW_INTERVAL_S, 60.0)
    assert len(late_s) == 300
    assert {call for call, _ in library.calls} == SELDOM


@pytest.mark.slow
def test_fast_counters_go_on_while_slower_calls_hang(monkeypatch):
    monkeypatch.setattr(nvml_sampler.ProcessTree, "pids", lambda self: frozenset((4242,)))
    library = recorded("h100_x4")
    library.recording["gpu"]["nvmlDeviceGetComputeRunningProcesses_v3"]["latency_s"] = 0.4
    with nvml_sampler.start((0,), 0.01, library) as samples:
        assert poll(lambda: Counter(s.metric for s in samples)["foreign_memory_bytes"] >= 2)
        counts = Counter(s.metric for s in samples)
    assert counts["power_w"] > 3 * counts["foreign_memory_bytes"]  # in one thread: as many


def test_missing_counters_give_no_samples():
    with nvml_sampler.start((0,), 0.02, recorded("gtx1080")) as samples:
        poll(lambda: "throttle_reasons" in {s.metric for s in samples})
    metrics = {s.metric for s in samples}
    assert "power_w" in metrics
    assert not metrics & {"energy_j", "foreign_memory_bytes"}


def test_time_is_the_middle_of_the_reading(monkeypatch):
    now_s = [10.0]
    monkeypatch.setattr(nvml_sampler, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def read():
        now_s[0] += 2.0
        return 1.0

    samples = []
    nvml_sampler._sample(samples, 0, "power_w", read)
    assert samples == [Sample(11.0, 0, "power_w", 1.0)]


def test_devices_are_cuda_ordinals(monkeypatch):
    library = recorded("h100_x4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with nvml_sampler.start((1, 2), 0.02, library) as samples:
        assert poll(lambda: samples)
    asked = {uuid for call, uuid in library.calls if call == "nvmlDeviceGetPowerUsage"}
    assert asked == {library.recording["uuids"][1]}
    assert {s.device for s in samples} == {1}


@pytest.mark.parametrize("change", [{"init_error": DRIVER_NOT_LOADED}, {"uuids": []}])
def test_no_driver_or_no_gpu_gives_no_samples(change):
    library = recorded("h100_x4")
    library.recording.update(change)
    with nvml_sampler.start((0,), 0.01, library) as samples:
        time.sleep(0.05)
    assert samples == []


def test_memory_of_others_is_what_our_tree_does_not_hold(monkeypatch):
    for ours, expected in (((4242, 9), [536870912]), ((4242, 4243, 9), [0]), ((1,), [])):
        monkeypatch.setattr(
            nvml_sampler.ProcessTree, "pids", lambda self, ours=ours: frozenset(ours)
        )
        samples = []
        with open_nvml(recorded("h100_x4")) as nvml:
            nvml_sampler.readings(nvml.gpus[:1], samples)[SLOW]()
        assert [s.value for s in samples if s.metric == "foreign_memory_bytes"] == expected
