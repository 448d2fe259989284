"""On simulated GPUs, dpbench's timing loop, clock, samplers and report return the true values.

Every scenario runs the engine on the simulated machine, and compares with the simulation's own
times within 1 % of the step. The simulation shares no code with the clock and the ledger.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dpbench.analysis import transfers
from dpbench.analysis.report import Report
from dpbench.hardware import rates
from dpbench.measure.worker import bench
from dpbench.records import HOST, Phase, Trial
from dpbench.records.words import number
from tests.amounts import amounts
from tests.simulated.backend import LINK_BYTES, running
from tests.simulated.machine import Machine, Rates
from tests.simulated.scenario import EFFORT, Truth, as_rounds, case_of, report_of, run
from tests.simulated.timeline import Gpu

SLOW_GPU = {2: [(0.0, 0.5)]}
THROTTLED = {2: [(0.0, 1.0), (1000.05, 0.5)]}
SCENARIOS: dict[str, dict[str, Any]] = {
    "one": {"count": 1},
    "two": {"count": 2},
    "three": {"count": 3},
    "four": {"count": 4},
    "eight": {"count": 8},
    "drifting clocks": {"count": 4, "drift": 1e-3, "resolution_s": 1e-6},
    "slow host": {"count": 4, "call_s": 1.7e-4},
    "slow GPU": {"count": 4, "speeds": SLOW_GPU},
    "throttled GPU": {"count": 4, "speeds": THROTTLED, "lag_s": 0.005},
    "slow link": {"count": 4, "slow_links": {(0, 2): 0.25}},
    "slow link aside": {"count": 4, "slow_links": {(3, 2): 0.1}},
    "slow link one way": {"count": 3, "slow_links": {(2, 0): 0.5, (0, 2): 1.0}},
    "slow host link": {"count": 3, "slow_links": {(HOST, 0): 0.002}},
    "rather slow link": {"count": 4, "slow_links": {(0, 2): 0.7}},
}
Ran = tuple[Machine, Trial, Truth, Report]


def machine(
    count: int,
    speeds: dict[int, list[tuple[float, float]]] | None = None,
    drift: float = 0.0,
    resolution_s: float = 0.5e-6,
    **changed: Any,
) -> Machine:
    """Return a machine whose event clocks all differ, and whose PCI order reverses CUDA's."""
    gpus = [
        Gpu(
            i,
            offset_s=10.0 * i,
            drift=drift * (i + 1),
            resolution_s=resolution_s,
            speeds=(speeds or {}).get(i, [(0.0, 1.0)]),
        )
        for i in range(count)
    ]
    return Machine(gpus, **changed)


@pytest.fixture(scope="module", params=SCENARIOS)
def ran(request: pytest.FixtureRequest) -> Ran:
    return ran_of(request.param)


@functools.cache
def ran_of(name: str) -> Ran:
    simulated = machine(**SCENARIOS[name])
    trial, truth = run(simulated, case_of(SCENARIOS[name]["count"]))
    return simulated, trial, truth, report_of(as_rounds(trial))


def test_steps_and_phases_and_occupied_times_are_the_true_ones(ran: Ran) -> None:
    _, trial, truth, report = ran
    step_s = truth.step_s()
    for k in truth.timed:
        start_s, end_s = truth.steps[k]
        assert trial.steps[k].seconds == pytest.approx(end_s - start_s, rel=0.01)
    (row,) = report.rows
    assert row.step is not None
    assert row.step.value == pytest.approx(step_s, rel=0.01)
    found, true = defaultdict(list), defaultdict(list)
    for one, place in ((trial.spans, found), (truth.spans, true)):
        for span in one:
            place[span.step, span.phase, span.device].append((span.start_s, span.end_s))
    assert {key for key in true if key[0] in truth.timed} <= set(found)
    for key, spans in found.items():
        if key[0] in truth.timed:
            assert np.array(sorted(spans)) == pytest.approx(
                np.array(sorted(true[key])), abs=0.01 * step_s, rel=0
            ), key
    for device in range(trial.case.devices):
        occupied_s = np.median(trial.ledger.occupied[device])
        assert occupied_s == pytest.approx(truth.occupied_s(device), rel=0.01)


def test_waiting_for_other_devices_is_no_part_of_gather_and_reduce(ran: Ran) -> None:
    _, trial, truth, report = ran
    (row,) = report.rows
    for phase in (Phase.GATHER, Phase.REDUCE) if trial.case.devices > 1 else ():
        _, works_s = truth.waits_and_works_s(phase)
        assert row.phases[phase.value] == pytest.approx(works_s, abs=0.01 * truth.step_s())


@pytest.mark.parametrize(
    ("count", "changed"),
    [
        (1, {"strategy": "single"}),
        (4, {"schedule": "local"}),
        (8, {"schedule": "allreduce"}),
    ],
    ids=str,
)
def test_other_strategies_and_schedules_have_their_true_times(
    count: int, changed: dict[str, Any]
) -> None:
    simulated = machine(count, drift=1e-3, speeds={0: [(0.0, 0.5)]})
    trial, truth = run(simulated, case_of(count, **changed), replace(EFFORT, budget_s=1.0))
    ran = simulated, trial, truth, report_of(as_rounds(trial))
    test_steps_and_phases_and_occupied_times_are_the_true_ones(ran)
    test_busy_times_and_their_imbalance_are_the_true_ones(ran)
    collectives = {
        work.name.split("_")[1] for work in simulated.timeline.work if work.kind == "collective"
    }
    assert collectives >= {"each": {"AllReduce"}, "sharded": {"Reduce"}}.get(
        trial.case.schedule.rpartition("=")[2], set()
    )


def test_waiting_for_a_slow_gpu_counts_as_the_phase_in_which_it_computes() -> None:
    _, _, truth, report = ran_of("slow GPU")
    (row,) = report.rows
    for phase, needed in ((Phase.GATHER, Phase.FORWARD), (Phase.REDUCE, Phase.BACKWARD)):
        waits_s, _ = truth.waits_and_works_s(phase)
        assert waits_s > 1e-3
        (slow_s,) = [
            s.end_s - s.start_s
            for s in truth.spans
            if (s.step, s.phase, s.device) == (truth.timed[-1], needed, 2)
        ]
        assert row.phases[needed.value] == pytest.approx(slow_s, abs=0.01 * truth.step_s())


def test_waiting_for_a_slow_scatter_counts_as_scatter() -> None:
    _, _, truth, report = ran_of("slow host link")
    (row,) = report.rows
    scatters_s = dict.fromkeys(truth.timed, 0.0)
    for span in truth.spans:
        if span.step in scatters_s and (span.phase, span.device) == (Phase.SCATTER, 0):
            scatters_s[span.step] += span.end_s - span.start_s
    # within a block, the copies overlap the step before, except in its first step
    overlapped_s, alone_s = min(scatters_s.values()), max(scatters_s.values())
    assert alone_s > 1.5 * overlapped_s > 0.5 * truth.step_s()
    within = 0.01 * truth.step_s()
    assert overlapped_s - within <= row.phases["scatter"] < (overlapped_s + alone_s) / 2


def test_busy_times_and_their_imbalance_are_the_true_ones(ran: Ran) -> None:
    simulated, trial, _, report = ran
    (row,) = report.rows
    assert len(simulated.profiled) == bench.PROFILED_STEPS == 5

    def busy_s(*kinds: str) -> dict[int, list[float]]:
        devices = range(trial.case.devices)
        return {
            d: [simulated.busy_s(d, *window, kinds=kinds) for window in simulated.profiled]
            for d in devices
        }

    for device, seconds in busy_s("compute", "copy").items():
        assert trial.readings("kernel_busy_s")[device] == pytest.approx(seconds, rel=0.01)
    true = {d: np.median(seconds) for d, seconds in busy_s("compute", "copy").items()}
    moved = busy_s("collective", "peer")
    assert row.busy == pytest.approx(true, rel=0.01)
    if trial.case.devices > 1:
        readings = trial.readings("collective_busy_s")
        assert set(readings) == set(moved)
        assert all(readings[device] == pytest.approx(moved[device], rel=0.01) for device in moved)
        first = true[0] / np.mean([seconds for device, seconds in true.items() if device])
        assert row.imbalance is not None
        assert row.imbalance.value == pytest.approx(first, rel=0.01)


def test_counters_of_every_gpu_are_its_own(ran: Ran) -> None:
    _, trial, _, _ = ran
    for device, values in trial.readings("temperature_c").items():
        assert set(values) == {60.0 + device}


def test_the_host_runs_ahead_of_its_devices_unless_it_is_slow() -> None:
    for name, ahead in (("four", True), ("slow host", False)):
        _, _, truth, _ = ran_of(name)
        lead_s = [
            truth.steps[s.step][0] - s.end_s
            for s in truth.spans
            if s.device == HOST and s.step == truth.timed[-1]
        ]
        assert (min(lead_s) > 0) is ahead


@pytest.mark.parametrize("name", ["slow GPU", "throttled GPU"])
def test_a_slow_gpu_is_found_and_named(name: str) -> None:
    *_, report = ran_of(name)
    (diagnosis,) = report.diagnoses
    (says,) = [one.evidence.says for one in diagnosis.findings if one.rule.key == "slow device"]
    assert amounts(says)[:2] == ["2", "1.99×"]
    throttled = [
        detail for one in report.warnings if one.key == "throttling" for _, detail in one.cases
    ]
    assert [detail.partition(" on ")[2] for detail in throttled] == ["GPU 2, heat (driver)"] * (
        name != "slow GPU"
    )


@pytest.mark.parametrize(
    ("name", "rule", "healthy"),
    [
        ("slow GPU", "slow device", "four"),
        ("slow link", "slow link", "four"),
        ("slow link aside", "slow link", "four"),
        ("slow link one way", "slow link", "three"),
        ("slow host link", "slow host link", "three"),
    ],
)
def test_a_slow_device_or_link_costs_at_most_what_it_costs(
    name: str, rule: str, healthy: str
) -> None:
    *_, truth, report = ran_of(name)
    lost_s = truth.step_s() - ran_of(healthy)[2].step_s()
    (diagnosis,) = report.diagnoses
    (found,) = [one.evidence.size_s for one in diagnosis.findings if one.rule.key == rule]
    assert found is not None
    assert found.value >= lost_s - 0.001 * truth.step_s()


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("slow link", (0, 2)),
        ("slow link aside", (2, 3)),
        ("slow link one way", (2, 0)),
        ("slow host link", (-1, 0)),
    ],
)
def test_a_slow_link_is_found_and_named_with_its_true_rate(
    name: str, ends: tuple[int, int]
) -> None:
    simulated, trial, _, report = ran_of(name)
    (diagnosis,) = report.diagnoses
    (says,) = [one.evidence.says for one in diagnosis.findings if "link" in one.rule.key]
    first = "the host" if ends[0] == HOST else f"device {ends[0]}"
    between = f"from {first} to" if "one way" in name else f"between {first} and"
    assert says.startswith(f"the link {between} device {ends[1]} is slow: ")
    (found,) = transfers.slow_links(as_rounds(trial), to_host=ends[0] == HOST)
    size = LINK_BYTES
    times_s = {
        pair: simulated.host_s(pair[1], size) if pair[0] == HOST else simulated.link_s(*pair, size)
        for pair in (ends, (ends[0], 1))
    }
    assert [found.rate, found.others] == [
        pytest.approx(size / seconds, rel=0.01) for seconds in times_s.values()
    ]
    assert f"{number(found.rate / 1e9)} GB/s, the others {number(found.others / 1e9)} GB/s" in says


def test_links_that_are_faster_than_the_host_queues_copies_have_their_true_rate() -> None:
    simulated = Machine([Gpu(0), Gpu(1, offset_s=10.0)], rates=Rates(link=2e10), call_s=5e-5)
    with running(simulated) as devices:
        found = [link for link in rates.links(devices) if link.source != HOST]
    for link in found:
        true_s = simulated.link_s(link.source, link.target, link.bytes)
        assert true_s < simulated.timeline.call_s
        # the clock's resolution
        assert link.seconds == pytest.approx([true_s] * rates.COPIES, rel=0.03)


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_link_is_called_slow_without_reason(name: str) -> None:
    *_, report = ran_of(name)
    found = [
        one.rule.key
        for found in report.diagnoses
        for one in found.findings
        if "link" in one.rule.key
    ]
    assert found == ["slow host link" if "host" in name else "slow link"] * (
        name.startswith(("slow link", "slow host l"))
    )


@pytest.mark.parametrize("name", ["two", "eight", "drifting clocks", "slow host", "slow link"])
def test_no_gpu_is_called_slow_or_throttled_without_reason(name: str) -> None:
    *_, report = ran_of(name)
    assert not [one for one in report.warnings if one.key in ("throttling", "outlasting")]
    assert "slow device" not in {
        one.rule.key for found in report.diagnoses for one in found.findings
    }
