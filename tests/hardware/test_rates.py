"""Rates: who asks for the rate of one link or device gets one figure, however it is disturbed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

import pytest
import torch

from dpbench.analysis import transfers
from dpbench.doctor import transfers as copies
from dpbench.doctor.examination import DIRECT, PINNED
from dpbench.doctor.probe import gpu
from dpbench.hardware import devices as opened
from dpbench.hardware import rates
from dpbench.hardware.device import Device
from dpbench.hardware.devices import float32, open_devices
from dpbench.measure.worker import facts
from dpbench.records import HOST, Case, Trial, Verified
from dpbench.records.work import fastest

SECONDS = (0.02, 0.01, 0.03)
CASE = Case(model="mlp", strategy="dp", devices=3, device_kind="cuda", batch_size=6)


@dataclass
class Event:
    """An event of a device on which everything takes time as planned."""

    at_s: float

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at_s - self.at_s)


class Planned(Device):
    """A CPU device with events, between which `SECONDS` pass."""

    def __init__(self, index: int = 0) -> None:
        self.index, self.torch_device = index, torch.device("cpu")
        self._now, self._calls = 0.0, count()

    def event(self, reuse: object = None) -> Event:
        at = next(self._calls) % (1 + len(SECONDS))
        self._now += SECONDS[at - 1] if at else 100.0  # a pause between two series
        return Event(self._now)


def test_the_calls_are_timed_by_events_after_one_that_is_not_timed() -> None:
    calls = []
    found = rates.times(Planned(), lambda: calls.append("work"), 3, lambda: calls.append("cover"))
    assert found == pytest.approx(SECONDS)
    assert calls == ["work", "cover", "work", "work", "work"]


def test_a_device_without_events_is_timed_by_the_clock_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = count(start=10.0, step=0.5)
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(ticks))
    (device,) = open_devices("cpu", 1)
    assert rates.times(device, lambda: None, 3) == (0.5, 0.5, 0.5)


def test_a_rate_is_that_of_the_fastest_repetition() -> None:
    assert fastest(30.0, SECONDS) == pytest.approx(3000.0)
    assert fastest(30.0, (0.0, 1.0)) == 0.0


def test_worker_doctor_report_and_floors_have_one_rate_for_a_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fastest of three copies takes 10 ms."""
    monkeypatch.setattr(rates, "LINK_BYTES", rates.LINK_LEAST_BYTES)
    expected = pytest.approx(rates.LINK_BYTES / min(SECONDS))
    timed = list(rates.links([Planned(n) for n in range(3)], passes=2))
    trial = Trial(
        case=CASE,
        verified=Verified.BITWISE,
        provenance={"links": [vars(one) for one in timed]},
    )
    every = transfers._copies([trial])
    assert {ends: transfers._rate(one) for ends, one in every.items()} == dict.fromkeys(
        every, expected
    )
    monkeypatch.setattr(opened, "open_devices", lambda *_, **__: [Planned()])
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda one, **_: real(one))
    pattern = torch.zeros(rates.LINK_BYTES, dtype=torch.uint8)
    for wanted in (copies.Copy(HOST, 0, PINNED), copies.Copy(0, 1, DIRECT)):
        found = copies._result(wanted, pattern, pattern)
        assert found == {"bytes_per_s": expected, "wrong": 0}


def test_worker_and_probe_have_one_rate_for_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SIDES", {"cpu": (8, 16)})
    monkeypatch.setattr(float32, "impediment", lambda place: "planted")
    expected = pytest.approx(rates.PRODUCTS * 2 * 16**3 / min(SECONDS))
    case = replace(CASE, device_kind="cpu", devices=1, precision="bf16")
    assert facts._peak(case, Planned()) == expected
    assert dict(gpu._arithmetic(Planned()))["bf16_flop_per_s"] == expected


@pytest.mark.parametrize(("longest_s", "sides"), [(1.0, [8, 16, 64]), (0.1, [8, 16]), (0.001, [8])])
def test_products_that_would_take_too_long_are_left_out(
    longest_s: float, sides: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each repetition takes 10 ms at least: by its rate, 16 rows take 80 ms, and 64 take 640 ms."""
    monkeypatch.setattr(rates, "SIDES", {"cpu": (8, 16, 64)})
    monkeypatch.setattr(rates, "LONGEST_S", longest_s)
    timed = []
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda one: timed.append(len(one)) or real(one))
    found = rates.product_per_s(Planned(), torch.float32)
    assert timed == sides
    assert found == pytest.approx(rates.PRODUCTS * 2 * sides[-1] ** 3 / min(SECONDS))


def test_a_slow_link_has_the_rate_of_its_fastest_copy() -> None:
    """Its copies take four times as long as those of the others; two of three are disturbed."""
    ends = [(0, 1), (1, 0), (0, 2), (2, 0)]
    trials = [
        Trial(
            case=CASE,
            round=number,
            verified=Verified.BITWISE,
            provenance={
                "links": [
                    {
                        "source": s,
                        "target": t,
                        "bytes": 8,
                        "seconds": [each, 1.5 * each, 1.5 * each],
                    }
                    for s, t in ends
                    for each in [4.0 if (s, t) == (0, 1) else 1.0]
                ]
            },
        )
        for number in range(3)
    ]
    (found,) = transfers.slow_links(trials, to_host=False)
    assert (found.ends, found.rate, found.others) == ((0, 1), 2.0, 8.0)
