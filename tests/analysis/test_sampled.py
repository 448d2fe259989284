"""What NVML's readings say about the timed steps, and where they are too few to say it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.analysis import answer, imbalance, sampled, statements, summary, validity
from dpbench.hardware import nvml, samplers
from dpbench.hardware.samplers import nvml as nvml_sampler
from dpbench.measure import run as module
from dpbench.records import HOST, Case, Sample, Status, Step, Trial, Verified, disturbance
from dpbench.records.facts import RunFacts, TrialHost, stated
from dpbench.records.load import GpuLoad
from dpbench.records.resources import Resources
from dpbench.report import timeline
from tests.amounts import amounts
from tests.recorded_nvml import recorded
from tests.trials import report_on

ALONE = Case(model="mlp", strategy="single", batch_size=8, device_kind="cuda")
PAIR = replace(ALONE, strategy="dp", devices=2, schedule="reference")
STEPS = 20
Readings = list[tuple[float, float]]


def trial(
    *readings: tuple[str, int, Readings], case: Case = ALONE, seconds: float = 2.0, **facts: Any
) -> Trial:
    """Return a trial whose steps are timed from 100 s to 100 + `seconds`, after one of warm-up."""
    each_s = seconds / STEPS
    steps = (Step(each_s, False, 100 + each_s * (i + 1)) for i in range(STEPS))
    return Trial(
        case=case,
        verified=Verified.BITWISE,
        steps=(Step(50.0, True, 100.0), *steps),
        samples=tuple(Sample(t, d, name, v) for name, d, each in readings for t, v in each),
        **facts,
    )


def every(interval_s: float, values: list[float]) -> Readings:
    return [(100.0 + interval_s * (i + 1), value) for i, value in enumerate(values)]


def test_what_was_read_before_and_after_the_timed_steps_says_nothing_about_them() -> None:
    """As the throttling of the verification, or the memory of the copies over links."""
    around = [(99.0, 0x40), (99.5, 0x40), (100.5, 0), (101.0, 0), (101.5, 0), (102.5, 0x40)]
    one = trial(("throttle_reasons", 0, around))
    (check,) = [c for c in validity.check(one, 8) if c.key == "throttling"]
    assert (check.value, check.about["readings"]) == (0.0, 3)


@pytest.mark.parametrize("metric", ["throttle_reasons", "sm_clock_hz", "energy_j"])
@pytest.mark.parametrize(("count", "said"), [(0, False), (2, False), (3, True)])
def test_fewer_than_three_readings_say_nothing(metric: str, count: int, said: bool) -> None:
    inside = every(0.3, [4.0 + i for i in range(count)])
    one = trial((metric, 0, [(99.9, 3.0), *inside, (102.1, 9.0)]))
    found = {check.key for check in validity.check(one, 8)} & {"throttling", "gpu_clock"}
    assert bool(found or sampled.energy_j(one)) is said


def caveat(trials: list[Trial], kind: str) -> statements.Statement | None:
    found = statements.made(summary.rows(trials), trials, RunFacts.of({"host": {"cores": 8}}))
    return next((one for one in found if one.key == kind), None)


def test_a_short_window_is_not_checked_and_a_long_one_is() -> None:
    """Also where NVML is missing altogether; on CPUs there is nothing to check."""
    both = [(name, 0, every(0.3, [1e9] * 5)) for name in ("throttle_reasons", "sm_clock_hz")]
    long, short = trial(*both), trial(*both, seconds=0.05, round=1)
    told = caveat([long, short], "not_checked")
    assert told is not None
    ((case, detail),) = told.cases
    assert case == ALONE
    assert {"throttling", "gpu_clock"} < {*detail.replace(",", "").split()}
    assert amounts(detail) == ["1", "2"], "rounds"
    assert caveat([long], "not_checked") is None
    assert caveat([trial()], "not_checked") is not None
    assert caveat([trial(case=replace(ALONE, device_kind="cpu"))], "not_checked") is None
    assert caveat([trial(status=Status.OOM)], "not_checked") is None


def test_energy_is_that_of_the_timed_steps_alone() -> None:
    """100 W before and after them, 300 W in between, read every 0.4 s, apart from their ends."""
    at_s = [99.1 + 0.4 * i for i in range(10)]

    def counter(t: float) -> float:
        return 5000 + 100 * (t - 99) + 200 * max(0.0, min(t, 102.0) - 100.0)

    one = trial(("energy_j", 0, [(t, counter(t)) for t in at_s]))
    assert sampled.energy_j(one)[0] == pytest.approx(600, rel=0.1)


def watts(power_w: float, **changed: Any) -> Readings:
    """Return a counter's readings every 0.1 s around the timed steps, some of them changed.

    `since` and `until` limit their times. `states` maps a reading to what the counter shows.
    """
    states = changed.get("states", lambda at_s, joules: joules)
    times = [99.5 + 0.1 * i for i in range(31)]
    return [
        (at_s, states(at_s, 1e6 + power_w * (at_s - 99.5)))
        for at_s in times
        if changed.get("since", 0.0) <= at_s <= changed.get("until", 200.0)
    ]


@pytest.mark.parametrize(
    ("changed", "limit_w"),
    [
        ({"since": 101.0}, 700.0),
        ({"until": 101.0}, 700.0),
        ({"states": lambda at_s, joules: joules - 1e6 * (at_s > 101)}, 700.0),
        ({"states": lambda at_s, joules: 0.0 if 101 < at_s < 101.15 else joules}, 700.0),
        ({"states": lambda at_s, joules: float("nan") if at_s > 101.9 else joules}, 700.0),
        ({"states": lambda at_s, joules: joules + 1e6 * (at_s > 101)}, None),
        ({"states": lambda at_s, joules: joules + 150 * (at_s > 101)}, 700.0),
        ({"states": lambda at_s, joules: 1e6}, 700.0),
    ],
    ids=["late", "early", "reset", "one zero", "NaN", "jump", "above the limit", "stuck"],
)
def test_energy_of_which_readings_miss_or_are_impossible_is_not_checked(
    changed: dict[str, Any], limit_w: float | None
) -> None:
    limits = [("power_limit_w", d, every(0.3, [limit_w] * 3)) for d in range(2) if limit_w]
    one = trial(
        ("energy_j", 0, watts(300.0)), ("energy_j", 1, watts(300.0, **changed)), *limits, case=PAIR
    )
    assert sampled.energy_j(one) == {0: pytest.approx(600)}
    assert "energy of a step" not in {index.quantity for index in imbalance.indexes([one])}
    told = caveat([one], "not_checked")
    assert told is not None
    assert "energy_j" in told.cases[0][1]


def test_a_counter_that_the_driver_updates_seldom_is_read_at_its_updates() -> None:
    def updated(at_s: float, joules: float) -> float:
        return 1e6 + 150.0 * ((at_s - 99.5 + 1e-9) // 0.5)

    one = trial(("energy_j", 0, watts(300.0, states=updated)), seconds=1.8)
    assert sampled.energy_j(one) == {0: pytest.approx(1.8 * 300)}


def test_an_average_counts_only_if_all_of_its_time_is_in_the_timed_steps() -> None:
    """It may be that of the second before the reading."""
    series = [(100.9, 0.1), (101.0, 0.1), (105.0, 0.6), (109.0, 0.7), (110.0, 0.8), (110.1, 0.0)]
    expected = (4 * 0.6 + 4 * 0.7 + 0.8) / 9
    named = ("utilization_ratio", 0, series)
    assert sampled.utilisation(trial(named, seconds=10.0)) == {0: pytest.approx(expected)}
    assert sampled.utilisation(trial(named, seconds=9.0)) == {}, "the first second counts too much"
    assert sampled.utilisation(trial(("utilization_ratio", 0, series[:4]), seconds=10.0)) == {}


def test_samples_of_the_drivers_buffer_have_their_own_times() -> None:
    """The one of 100.1 s covers time before the steps; the one of 102.1 s time after them."""
    series = [(99.9, 0.0), (100.1, 0.2), (100.4, 0.6), (100.5, 1.0), (101.9, 0.9), (102.1, 0.0)]
    averages = ("utilization_ratio", 0, every(0.1, [0.1] * 19))
    one = trial(averages, ("buffered_utilization_ratio", 0, series))
    expected = (0.1 * 0.2 + 0.3 * 0.6 + 0.1 * 1.0 + 1.4 * 0.9 + 0.1 * 0.0) / 2
    assert sampled.utilisation(one) == {0: pytest.approx(expected)}
    late = trial(averages, ("buffered_utilization_ratio", 0, series[2:]))
    assert sampled.utilisation(late) == {}


def test_the_chart_of_utilisation_gives_no_mean_of_too_few_readings() -> None:
    few = trial(("utilization_ratio", 0, every(0.01, [0.5, 0.6])), seconds=0.05)
    many = trial(("utilization_ratio", 0, every(0.2, [0.5] * 50)), seconds=10.0)
    for one, said in ((few, sampled.NOT_CHECKED), (many, "50%")):
        report = report_on([one])
        drawing = timeline.utilisation(report, report.rows).panels[0].svg
        assert said in drawing
        assert (sampled.NOT_CHECKED in drawing) is (one is few)


# -- the sampler


def test_buffered_samples_are_taken_once_at_the_drivers_times() -> None:
    now_s = time.time()
    took = [[(-5, 90), (1, 20)], [(-5, 90), (1, 20), (2, 40)]]
    library = recorded("h100_x4")
    library.recording["gpu"]["nvmlDeviceGetSamples(1)"] = {
        "latency_s": 0.0,
        "answers": [[1, [_sample(now_s + after, value) for after, value in each]] for each in took],
    }
    samples: list[Sample] = []
    with nvml.open_nvml(library, {}) as opened:
        assert opened
        _, slow = nvml_sampler.readings(opened.gpus[:1], samples)
        slow()
        slow()
    found = [one for one in samples if one.metric == "buffered_utilization_ratio"]
    assert [one.value for one in found] == [0.9, 0.2, 0.4]
    ahead_s = time.time() - time.perf_counter()
    assert [one.time_s + ahead_s - now_s for one in found] == pytest.approx([-5, 1, 2], abs=0.05)


def _sample(at_s: float, value: int) -> Any:
    return SimpleNamespace(timeStamp=int(at_s * 1e6), sampleValue=SimpleNamespace(uiVal=value))


def test_gpus_are_sampled_over_the_whole_trial_and_the_host_while_steps_are_timed(
    tmp_path: Path,
) -> None:
    """GPUs that the case does not use have no samples; the others have the index of the device."""
    path = tmp_path / "samples.jsonl"
    devices = ((3, "power_w"), (1, "power_w"), (HOST, "rss_bytes"))
    times = [98.0, 99.0, 101.0, 102.5, 103.0, 105.0]
    path.write_text("".join(f'[{t}, {d}, "{m}", 1.0]\n' for t in times for d, m in devices))
    series = samplers.SampleFile(path, 0, None)
    one = trial(case=replace(ALONE, device_ids=(3,)))
    found = [(s.time_s, s.device) for s in module._watched(series, 98.5, 104.0, one, [])]
    assert found == [(99.0, 0), (101.0, 0), (101.0, HOST), (102.5, 0), (103.0, 0)]


# -- clocks


def clocked(case: Case, number: int, *clocks_hz: float) -> Trial:
    series = [("sm_clock_hz", d, every(0.3, [hz] * 5)) for d, hz in enumerate(clocks_hz)]
    one = trial(*series, case=case, round=number)
    return replace(one, samples=(), provenance={"validity": validity.facts(one, 8)})


@pytest.mark.parametrize(
    ("pair_hz", "flagged"), [((1.7e9, 1.9e9), True), ((1.93e9, 1.97e9), False)]
)
def test_a_speed_up_between_clocks_that_differ_names_both(
    pair_hz: tuple[float, float], flagged: bool
) -> None:
    """The mean clock of the trial is stored with it, and needs no samples."""
    trials = [clocked(ALONE, n, 1.98e9) for n in range(3)]
    trials += [clocked(PAIR, n, *pair_hz) for n in range(3)]
    means = trials[-1].provenance["validity"]["gpu_clock"]["mean_hz"]
    assert [tuple(pair) for pair in means] == [(0, pair_hz[0]), (1, pair_hz[1])]
    found = caveat(trials, "clocks")
    assert bool(found) is flagged
    if found:
        ((case, detail),) = found.cases
        assert case == PAIR
        assert "1800 MHz" in detail
        assert "1980 MHz" in detail


def test_clocks_that_nvml_does_not_tell_are_no_difference() -> None:
    trials = [clocked(ALONE, n, 1.98e9) for n in range(3)]
    trials += [trial(case=PAIR, round=n) for n in range(3)]
    assert caveat(trials, "clocks") is None


# ---------------------------------------------------------------- energy of a sample


def powered(case: Case, *watts: float, number: int = 0, **changed: Any) -> Trial:
    """Return a trial of two seconds whose GPUs, from 0 on, have counters of these powers."""
    counters = [
        ("energy_j", device, [(99.5 + 0.2 * i, 1000 + power * 0.2 * i) for i in range(16)])
        for device, power in enumerate(watts)
    ]
    return trial(*counters, case=case, round=number, **changed)


def answered(*trials: Trial) -> str:
    rows = summary.rows(trials)
    (found,) = answer.answers(rows, Resources())
    assert found.energy == "" or f"{found.energy[0].upper()}{found.energy[1:]}." in found.sentences
    return found.energy


def test_the_energy_of_a_sample_is_that_of_all_gpus_over_the_samples() -> None:
    """160 samples in two seconds: of 300 W, 3.75 J each; of 250 and 200 W, 5.625 J."""
    alone = [powered(ALONE, 300.0, number=n) for n in range(3)]
    pair = [powered(PAIR, 250.0, 200.0, number=n) for n in range(3)]
    assert sampled.joules_per_sample(alone[0]) == pytest.approx(3.75)
    assert sampled.joules_per_sample(pair[0]) == pytest.approx(5.625)
    told = answered(*alone, *pair)
    assert amounts(told) == ["3.75 J", "3.75", "3.75", "5.62 J", "5.62", "5.62", "2"]
    assert told.index("3.75 J") < told.index("one GPU") < told.index("5.62 J") < told.index(" dp ")


def test_the_interval_of_an_energy_is_that_of_its_rounds() -> None:
    """Student's t of 2 degrees is 4.303: 3.75 ± 4.303 * 0.125 / sqrt(3)."""
    rows = summary.rows([powered(ALONE, 300.0 + 10 * (n - 1), number=n) for n in range(3)])
    assert rows[0].energy is not None
    assert rows[0].energy.value == pytest.approx(3.75)
    half = 4.303 * 0.125 / 3**0.5
    assert rows[0].energy.low == pytest.approx(3.75 - half, rel=1e-4)
    assert rows[0].energy.high == pytest.approx(3.75 + half, rel=1e-4)


def test_without_the_counter_of_each_gpu_the_energy_is_unknown() -> None:
    assert sampled.joules_per_sample(powered(PAIR, 250.0)) is None
    assert sampled.joules_per_sample(powered(ALONE, 300.0, 300.0)) == pytest.approx(3.75)
    colocated = replace(PAIR, placement="colocated")
    assert sampled.joules_per_sample(powered(colocated, 300.0)) == pytest.approx(3.75)
    alone = [powered(ALONE, 300.0, number=n) for n in range(3)]
    pair = [powered(PAIR, 250.0, number=n) for n in range(3)]
    assert "2 GPUs" not in answered(*alone, *pair)
    assert answered(*(trial(case=ALONE, round=n) for n in range(3))) == ""


def test_an_energy_in_doubt_is_not_said() -> None:
    few = [powered(ALONE, 300.0, number=n) for n in range(2)]
    assert answered(*few) == ""
    load = GpuLoad(gpu=0, share=0.9, memory_bytes=None, processes=())
    busy = stated(foreign_gpus=(load,))
    noisy = [powered(ALONE, 300.0, number=n, provenance=busy) for n in range(3)]
    quiet = [powered(ALONE, 200.0, number=n) for n in range(3, 6)]
    assert disturbance.noisy(noisy[0])
    assert answered(*noisy) == ""
    assert "2.50 J" in answered(*noisy, *quiet)


def test_steps_between_which_gpus_do_other_work_have_no_energy() -> None:
    """As the blocks of another case in the same process (--paired)."""
    one = powered(ALONE, 300.0)
    for share, known in ((0.5, False), (0.95, False), (0.99, True)):
        steps = [replace(step, seconds=share * step.seconds) for step in one.steps]
        found = sampled.joules_per_sample(replace(one, steps=tuple(steps)))
        assert (found is not None) is known


def test_hosts_that_are_one_machine_may_share_gpus_and_have_no_energy() -> None:
    machines = tuple(TrialHost(name, "1", ranks) for name, ranks in (("a", (0,)), ("b", (1,))))
    shared = powered(PAIR, 250.0, 200.0, provenance=stated(hosts=machines))
    assert sampled.joules_per_sample(shared) is None
