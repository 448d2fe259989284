"""The clocks' laws, on time that the test makes: every second is accounted for by hand."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dpbench.engine import resolve
from dpbench.hardware.device import Device
from dpbench.hardware.devices import cuda, holding
from dpbench.hardware.devices.cuda import CudaDevice
from dpbench.measure import clocks
from dpbench.measure.clocks import BUSY, CudaClock, HostClock
from dpbench.records import HOST, Phase, Span, Step

F, B, S, L = Phase.FORWARD, Phase.BACKWARD, Phase.SCATTER, Phase.LOSS


class Time:
    """A wall clock and one CPU clock per thread, moved by hand."""

    def __init__(self, at: float = 1000.0) -> None:
        self.at, self.cpu = at, {}

    def now(self) -> float:
        return self.at

    def thread(self) -> float:
        return self.cpu.get(threading.get_ident(), 0.0)

    def work(self, wall: float, cpu: float | None = None) -> None:
        """Let time pass in this thread."""
        self.at += wall
        self.cpu[threading.get_ident()] = self.thread() + (wall if cpu is None else cpu)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def host(time: Time) -> HostClock:
    return HostClock(time.now, time.thread)


def busy(clock: HostClock) -> dict[tuple[float, int], float]:
    return {(s.time_s, s.device): s.value for s in clock.samples()}


def test_steps_and_spans_are_from_call_to_return(time: Time, host: HostClock) -> None:
    with host.block():
        for warmup in (True, False):
            with host.step(warmup=warmup):
                time.work(1)
                with host.mark(F, 0):
                    time.work(2)
                time.work(4)
            time.work(100)
    assert host.steps() == (Step(7, True, 1007), Step(7, False, 1114))
    assert host.spans() == (Span(0, F, 0, "host", 1001, 1003), Span(1, F, 0, "host", 1108, 1110))


def test_busy_time_is_cpu_time_inside_spans_alone(time: Time, host: HostClock) -> None:
    with host.step(warmup=False):
        time.work(5)
        with host.mark(F, 0):
            time.work(wall=10, cpu=3)
        time.work(5)
        with host.mark(B, 0):
            time.work(wall=10, cpu=4)
        with host.mark(S, 1):
            time.work(wall=1, cpu=0.5)
        with host.mark(L, HOST):
            time.work(wall=1, cpu=1)
    assert busy(host) == {(1032, 0): 7, (1032, 1): 0.5}
    assert {s.metric for s in host.samples()} == {BUSY}


def test_joint_spans_share_cpu_time_equally_while_both_are_open(
    time: Time, host: HostClock
) -> None:
    with host.step(warmup=False), host.mark(B, 0):
        time.work(1)
        with host.mark(B, 1):
            time.work(6)
            with host.mark(B, 2):
                time.work(9)
        time.work(2)
    assert busy(host) == {(1018, 0): 1 + 3 + 3 + 2, (1018, 1): 3 + 3, (1018, 2): 3}


def marked_jointly(clock: HostClock | CudaClock, time: Time) -> dict[tuple[Phase, int], bool]:
    """Take a step with a joint backward on devices 0 and 1.

    Return whether each span is joint, by phase and device.
    """
    with clock.block(), clock.step(warmup=False):
        for device in (0, 1):  # one after the other, in one thread
            with clock.mark(F, device):
                time.work(1)
        with clock.mark(L, 0), clock.mark(F, HOST), clock.mark(S, 0), clock.mark(S, HOST):
            time.work(1)
        with clock.mark(B, 0), clock.mark(B, 1):
            time.work(4)
    return {(span.phase, span.device): span.joint for span in clock.spans()}


NOT_JOINT = dict.fromkeys([(F, 0), (F, 1), (F, HOST), (L, 0), (S, 0), (S, HOST)], False)


def test_a_phase_that_a_thread_opens_on_several_devices_at_once_is_joint(
    time: Time, host: HostClock
) -> None:
    assert marked_jointly(host, time) == {**NOT_JOINT, (B, 0): True, (B, 1): True}
    assert {span.clock for span in host.spans()} == {"host", "host_joint"}
    assert all(span.on_host for span in host.spans())


def test_a_joint_phase_of_gpus_is_known_by_the_thread_that_opened_it(time: Time) -> None:
    """Spans of GPUs overlap even if one thread opens them in sequence: the GPUs work later."""
    clock = CudaClock(gpus(time, 1.0, 1.0), time.now)
    found = marked_jointly(clock, time)
    assert found == {**NOT_JOINT, (B, 0): True, (B, 1): True}
    assert {span.clock for span in clock.spans() if span.joint} == {"cuda_event_joint"}


def test_phases_of_two_threads_are_not_joint() -> None:
    host, both = HostClock(), threading.Barrier(2, timeout=60)

    def replica(device: int) -> None:
        with host.mark(B, device):
            both.wait()

    with host.step(warmup=False):
        threads = [threading.Thread(target=replica, args=(device,)) for device in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [span.joint for span in host.spans()] == [False, False]


def test_nested_spans_of_one_device_count_once(time: Time, host: HostClock) -> None:
    with host.step(warmup=False), host.mark(F, 0):
        time.work(1)
        with host.mark(L, 0):
            time.work(2)
        time.work(4)
    assert busy(host) == {(1007, 0): 7}


def test_spans_may_close_in_any_order(time: Time, host: HostClock) -> None:
    with host.step(warmup=False):
        first, second = host.mark(B, 0), host.mark(B, 1)
        first.__enter__()
        second.__enter__()
        time.work(4)
        first.__exit__(None, None, None)
        time.work(3)
        second.__exit__(None, None, None)
    assert busy(host) == {(1007, 0): 2, (1007, 1): 5}
    assert [(s.device, s.start_s, s.end_s) for s in host.spans()] == [
        (0, 1000, 1004),
        (1, 1000, 1007),
    ]


def test_threads_have_their_own_cpu_time(time: Time, host: HostClock) -> None:
    def replica(device: int) -> None:
        time.work(wall=0, cpu=50)  # before its mark: nobody's
        with host.mark(F, device):
            time.work(wall=1, cpu=device)

    with host.step(warmup=False), host.mark(S, 0):
        time.work(2)
        for device in (1, 2, 3):
            thread = threading.Thread(target=replica, args=(device,))
            thread.start()
            thread.join()
        time.work(3)
    assert busy(host) == {(1008, 0): 5, (1008, 1): 1, (1008, 2): 2, (1008, 3): 3}


def test_cpu_time_is_read_in_one_step_of_so_many_seconds(time: Time) -> None:
    host = HostClock(time.now, time.thread, read_each_s=1.0)
    for seconds in [1.5] * 3 + [0.4] * 6 + [0.001] * 60:
        with host.step(warmup=False), host.mark(F, 0):
            time.work(seconds)
    steps, spans = host.steps(), host.spans()
    at = [round(sample.time_s, 6) for sample in host.samples()]
    read = [number for number, step in enumerate(steps) if round(step.end_s, 6) in at]
    # long steps each; from a shorter one that is read each second, a power of two within a second;
    # then each 32nd
    assert read == [0, 1, 2, 3, 4, 6, 8, 10, 32, 64]
    assert len(spans) == len(steps)


def test_what_is_added_belongs_to_the_step_just_ended(time: Time, host: HostClock) -> None:
    for _ in range(2):
        with host.step(warmup=False):
            time.work(1)
        host.add(Phase.REDUCE, 1, 5.0, 6.0)
    assert [(s.step, s.start_s) for s in host.spans()] == [(0, 5.0), (1, 5.0)]


def test_marks_outside_of_every_step_are_no_busy_time_of_one(time: Time, host: HostClock) -> None:
    with host.step(warmup=False):
        time.work(1)
    with host.mark(F, 0):
        time.work(1)
    assert host.samples() == ()


def test_a_span_is_closed_when_its_work_raises(time: Time, host: HostClock) -> None:
    def fail() -> None:
        time.work(2)
        raise KeyError

    with pytest.raises(KeyError), host.step(warmup=False), host.mark(F, 0):
        fail()
    assert [(s.start_s, s.end_s) for s in host.spans()] == [(1000, 1002)]
    assert host.steps() == ()


# ---------------------------------------------------------------- events


class Event:
    """A moment on a device's clock.

    As in CUDA, the time between two moments is in milliseconds as float32.
    """

    def __init__(self, device: Any, at_ms: float) -> None:
        self.device, self.at_ms = device, at_ms

    def elapsed_time(self, other: Event) -> float:
        assert other.device is self.device, "events of two devices cannot be compared"
        return float(np.float32(other.at_ms - self.at_ms))


class FakeGpu:
    """A device whose clock has an offset and a rate, and whose queue ends when the test says so."""

    def __init__(self, index: int, time: Time, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self.index, self._time, self._offset, self._rate = index, time, offset_s, rate
        self.queue_s = 0.0  # when the work queued so far ends, on the host's clock
        self.synchronised = 0

    def launch(self, seconds: float) -> None:
        """Queue work."""
        self.queue_s = max(self.queue_s, self._time.at) + seconds

    def event(self, reuse: Event | None = None) -> Event:
        event = Event(self, 0.0) if reuse is None else reuse
        event.at_ms = ((max(self.queue_s, self._time.at) - 1000) * self._rate + self._offset) * 1e3
        return event

    def synchronize(self) -> None:
        self.synchronised += 1
        self._time.at = max(self._time.at, self.queue_s)


def gpus(time: Time, *rates: float) -> list[FakeGpu]:
    return [FakeGpu(i, time, offset_s=77.0 * (i + 1), rate=rate) for i, rate in enumerate(rates)]


def test_a_cuda_step_lasts_from_the_end_before_to_its_own(time: Time) -> None:
    devices = gpus(time, 1.0, 1.0)
    clock = CudaClock(devices, time.now)
    with clock.block():
        for number in range(3):
            with clock.step(warmup=number == 0):
                with clock.mark(F, 0):
                    devices[0].launch(2.0)
                with clock.mark(F, 1):
                    devices[1].launch(3.0)
                time.at += 0.1  # the host runs ahead
    assert [s.seconds for s in clock.steps()] == pytest.approx([3, 3, 3])
    assert [s.end_s for s in clock.steps()] == pytest.approx([1003, 1006, 1009])
    assert [s.warmup for s in clock.steps()] == [True, False, False]
    expected = [(0, 0, 1000, 1002), (0, 1, 1000, 1003), (1, 0, 1002, 1004), (1, 1, 1003, 1006)]
    got = [(s.step, s.device, s.start_s, s.end_s) for s in clock.spans()]
    for ours, theirs in zip(got, expected, strict=False):
        assert ours == pytest.approx(theirs)
    assert len(got) == 6
    assert {s.clock for s in clock.spans()} == {"cuda_event"}


def test_nothing_synchronises_inside_a_block(time: Time) -> None:
    devices = gpus(time, 1.0, 1.0)
    clock = CudaClock(devices, time.now)
    with clock.block():
        before = [d.synchronised for d in devices]
        for _ in range(3):
            with clock.step(warmup=False), clock.mark(F, 1):
                devices[1].launch(1)
        assert [d.synchronised for d in devices] == before


def test_no_event_of_earlier_blocks_is_compared_again(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = gpus(time, 1.0, 1.0)
    clock, asked = CudaClock(devices, time.now), list[Event]()
    elapsed_time = Event.elapsed_time

    def counted(one: Event, other: Event) -> float:
        asked.append(other)
        return elapsed_time(one, other)

    monkeypatch.setattr(Event, "elapsed_time", counted)
    for _ in range(5):
        with clock.block():
            for _ in range(3):
                with clock.step(warmup=False):
                    devices[0].launch(1.0)
        asked.clear()
        assert [step.seconds for step in clock.steps()[-3:]] == pytest.approx([1.0] * 3)
        assert len(asked) == 2 * (1 + 3 + 1), "begin, ends and last anchor of the new block"


def test_clocks_that_run_at_other_rates_meet_on_the_hosts(time: Time) -> None:
    devices = gpus(time, 1.0, 1.0001, 0.9999)
    clock = CudaClock(devices, time.now)
    for _ in range(2):
        with clock.block():
            for _ in range(50):
                with clock.step(warmup=False):
                    for device in devices:
                        with clock.mark(F, device.index):
                            device.launch(0.5)
        time.at += 40  # between blocks the host does other things: no step's time
    steps = clock.steps()
    assert [s.seconds for s in steps] == pytest.approx([0.5] * 100, abs=1e-5)
    assert steps[49].end_s == pytest.approx(1025, abs=1e-4)
    assert steps[50].start_s == pytest.approx(1065, abs=1e-4)
    assert clock.drift == pytest.approx((0, -1e-4, 1e-4), abs=1e-6)
    for s in clock.spans():
        assert s.start_s == pytest.approx(steps[s.step].start_s, abs=2e-4)
        assert s.end_s == pytest.approx(steps[s.step].end_s, abs=2e-4)


def test_spans_last_as_long_as_on_the_hosts_clock(time: Time) -> None:
    devices = gpus(time, 1.0, 0.9, 1.2)
    clock, asked = CudaClock(devices, time.now), list[Any]()
    with clock.block():
        for _ in range(3):
            with clock.step(warmup=False):
                for device in devices:
                    device.launch(2.0)
                    with clock.mark(F, device.index):
                        device.launch(4.0)
                    asked.append(device.event())
                    device.launch(1.0)
    places = clock.placing()
    for number, (s, event) in enumerate(zip(clock.spans(), asked, strict=True)):
        assert (s.step, s.device) == divmod(number, 3)
        assert (s.start_s, s.end_s) == pytest.approx(
            (1002 + 7 * s.step, 1006 + 7 * s.step), abs=1e-6
        )
        assert places(s.step, s.device, event) == pytest.approx(s.end_s, abs=1e-6)


class SlowGpu(FakeGpu):
    """A device on which recording an event takes the host a second.

    The event is of the middle of that second.
    """

    def event(self, reuse: Event | None = None) -> Event:
        self._time.at += 2.5 if reuse is None else 0.5  # a new event is created first
        recorded = super().event(reuse)
        self._time.at += 0.5
        return recorded

    def synchronize(self) -> None:
        super().synchronize()
        self._time.at += 3.0  # the host returns late


def test_an_anchor_is_the_middle_of_the_time_that_reading_it_takes(time: Time) -> None:
    device = SlowGpu(0, time, offset_s=77.0)
    clock, ends = CudaClock([device], time.now), []
    with clock.block():
        for _ in range(3):
            with clock.step(warmup=False):
                device.launch(10.0)
                ends.append(device.queue_s)
    assert [step.end_s for step in clock.steps()] == pytest.approx(ends, abs=1e-4)


def test_float32_milliseconds_do_not_add_up_to_an_error(time: Time) -> None:
    """One difference over the whole run would be off by up to a millisecond.

    The chain stays exact.
    """
    (device,) = devices = gpus(time, 1.0)
    clock = CudaClock(devices, time.now)
    with clock.block():
        for _ in range(2000):
            with clock.step(warmup=False):
                device.launch(8.000321)
    assert [s.seconds for s in clock.steps()] == pytest.approx([8.000321] * 2000, abs=2e-6)
    assert clock.steps()[-1].end_s == pytest.approx(1000 + 2000 * 8.000321, abs=1e-4)


def test_marks_after_the_last_step_are_dropped(time: Time) -> None:
    (device,) = devices = gpus(time, 1.0)
    clock = CudaClock(devices, time.now)
    with clock.block(), clock.step(warmup=False), clock.mark(F, 0):
        device.launch(1)
    with clock.mark(B, 0):  # a profiled step, after timing
        device.launch(1)
    assert [s.phase for s in clock.spans()] == [F]
    assert len(clock.steps()) == 1


def test_what_is_added_keeps_the_hosts_times(time: Time) -> None:
    (device,) = devices = gpus(time, 1.0)
    clock = CudaClock(devices, time.now)
    with clock.block():
        for _ in range(2):
            with clock.step(warmup=False):
                device.launch(1)
        clock.add(Phase.REDUCE, 0, 1000.5, 1001.5)
    assert clock.spans() == (Span(1, Phase.REDUCE, 0, "host", 1000.5, 1001.5),)


def test_the_hosts_part_of_a_phase_is_timed_by_the_hosts_clock(time: Time) -> None:
    clock = CudaClock(gpus(time, 1.0), time.now)

    def fail() -> None:
        time.at += 0.5
        raise KeyError

    with clock.block(), clock.step(warmup=False):
        with clock.mark(F, HOST):
            time.at += 0.25
        with pytest.raises(KeyError), clock.mark(B, HOST):
            fail()
    assert set(clock.spans()) == {
        Span(0, F, HOST, "host", 1000, 1000.25),
        Span(0, B, HOST, "host", 1000.25, 1000.75),
    }


def test_devices_are_known_by_index_and_not_by_position(time: Time) -> None:
    device = FakeGpu(3, time)
    clock = CudaClock([device], time.now)
    with clock.block(), clock.step(warmup=False), clock.mark(F, 3):
        device.launch(2)
    assert [(s.device, s.end_s - s.start_s) for s in clock.spans()] == [(3, 2.0)]


def test_an_unused_clock_has_nothing_to_tell(time: Time, host: HostClock) -> None:
    for clock in (host, CudaClock(gpus(time, 1.0), time.now)):
        assert (clock.steps(), clock.spans(), clock.samples()) == ((), (), ())


def test_devices_with_events_are_timed_by_them(time: Time) -> None:
    assert isinstance(clocks.choose(resolve(["cpu", "cpu"])), HostClock)
    assert isinstance(clocks.choose(gpus(time, 1.0)), CudaClock)
    assert all(isinstance(device, Device) for device in resolve(["cpu", "cpu"]))


class Driver:
    """The calls that CUDA events and streams make, counted by name.

    The times of events are the numbers of records.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def new_event(self, enable_timing: bool) -> DriverEvent:
        self.calls["create"] += 1
        return DriverEvent(self)

    def current_stream(self, ordinal: int) -> str:
        self.calls["look up"] += 1
        return f"stream of GPU {ordinal}"


class DriverEvent:
    def __init__(self, driver: Driver) -> None:
        self._calls, self.at_ms = driver.calls, 0.0

    def record(self, stream: str) -> None:
        self._calls["record"] += 1
        self.at_ms = float(self._calls["record"])

    def elapsed_time(self, end: DriverEvent) -> float:
        self._calls["read"] += 1
        return end.at_ms - self.at_ms


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for name, part in {
        "Event": driver.new_event,
        "current_stream": driver.current_stream,
        "synchronize": lambda ordinal: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, part)
    monkeypatch.setattr(cuda, "_key_of_stream", None)  # of a CUDA build of torch
    return driver


def test_a_mark_costs_the_driver_two_records(driver: Driver) -> None:
    devices = [CudaDevice(i, i) for i in range(8)]
    clock, steps, marks = (
        CudaClock(devices, lambda: 1000.0 + driver.calls["record"] / 1e3),
        3,
        2 * 8,
    )
    with holding(devices):
        for number in range(3):
            with clock.block():
                for _ in range(steps):
                    with clock.step(warmup=False):
                        before = driver.calls.copy()
                        for phase in (F, B):
                            for i in range(8):
                                with clock.mark(phase, i):
                                    pass
                        calls = driver.calls - before
                        assert calls == {"record": 2 * marks} | (
                            {"create": 2 * marks} if number == 0 else {}
                        )
    spans = clock.spans()
    assert len(spans) == 3 * steps * marks
    # each event was read before another mark reused it: a span has one record between its two, or
    # is 1 ms long
    assert {round((s.end_s - s.start_s) * 1e3) for s in spans} == {1}
    assert len({round(s.start_s * 1e3) for s in spans}) == len(spans)


def test_events_of_a_mark_that_is_still_open_are_not_reused(time: Time) -> None:
    devices = gpus(time, 1.0)
    clock = CudaClock(devices, time.now)
    for _ in range(3):
        with clock.block(), clock.step(warmup=False), clock.mark(F, 0):
            devices[0].launch(1)
            with clock.mark(B, 0):
                devices[0].launch(2)
    assert [(s.phase, s.end_s - s.start_s) for s in clock.spans()] == [(B, 2.0), (F, 3.0)] * 3
