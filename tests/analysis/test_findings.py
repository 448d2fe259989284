"""Findings on trials made by hand: each rule fires just above its threshold and not below it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from dpbench.analysis import findings, summary
from dpbench.analysis.findings import text
from dpbench.analysis.findings.rule import Finding, contexts
from dpbench.records import (
    UNATTRIBUTED,
    Case,
    Memory,
    Phase,
    Sample,
    Span,
    Step,
    Trial,
    Verified,
    plan,
)
from dpbench.records.resources import Resources
from dpbench.report import markdown, page
from tests.amounts import amounts
from tests.trials import report_on

ROUNDS, STEPS = 3, 12
MODEL = {
    "modules": 40,
    "parameter_tensors": 160,
    "parameter_bytes": 2**20,
    "buffer_tensors": 0,
    "buffer_bytes": 0,
    "input_bytes": 2**14,
    "output_bytes": 64.0,
}
LEVEL = {"forward": 0.010, "backward": 0.015}
"""One device's share, in seconds: 25 ms of a step of two devices, 50 ms of one device's."""


def case(
    strategy: str = "dp", devices: int = 2, batch: int = 64, schedule: str = "", **changed: Any
) -> Case:
    schedule = schedule or ("reference" if strategy == "dp" else "")
    return Case(
        model="mlp",
        strategy=strategy,
        devices=devices,
        batch_size=batch,
        schedule=schedule,
        **changed,
    )


SINGLE = case("single", devices=1)


def measured(
    of: Case,
    phases: Mapping[str, float],
    *,
    busy: Mapping[int, float] | None = None,
    memory: tuple[int, ...] = (),
    wobble: float = 0.001,
    serial: bool = False,
) -> list[Trial]:
    """Return rounds of a case whose steps are these phases one after the other.

    "unattributed" is in none.

    Replicas compute side by side, or in turn. Rounds differ by `wobble`, steps by a tenth of that.
    """
    found = []
    for number in range(ROUNDS):
        steps, spans, samples, at = [], [], [], 100.0 * number
        for k in range(STEPS):
            factor = 1 + wobble * (number - 1) + wobble / 10 * (k % 3 - 1)
            start = at
            for name, seconds in phases.items():
                if name != UNATTRIBUTED:
                    spans += _spans(of, k, Phase(name), at, at + seconds * factor, serial)
                at += seconds * factor
            steps.append(Step(at - start, k < 2, at))
            samples += [
                Sample(at, device, "busy_s", value * factor)
                for device, value in (busy or {}).items()
            ]
        peaks = tuple(Memory(device, peak, "allocator") for device, peak in enumerate(memory))
        found.append(
            Trial(
                case=of,
                verified=Verified.BITWISE,
                steps=tuple(steps),
                spans=tuple(spans),
                samples=tuple(samples),
                memory=peaks,
                round=number,
                provenance={"model": MODEL},
            )
        )
    return found


def _spans(of: Case, k: int, phase: Phase, start: float, end: float, serial: bool) -> list[Span]:
    count = len(of.rows) if phase in (Phase.FORWARD, Phase.BACKWARD) else 1
    if not serial:
        return [Span(k, phase, device, "host", start, end) for device in range(count)]
    part = (end - start) / count
    return [
        Span(k, phase, d, "host", start + d * part, start + (d + 1) * part) for d in range(count)
    ]


def one(of: Case = SINGLE, factor: float = 1.0) -> list[Trial]:
    """Return one device's trials, with the whole work that two devices share."""
    return measured(of, {name: 2 * seconds * factor for name, seconds in LEVEL.items()})


def explained(*groups: list[Trial], cores: int = 8) -> list[findings.Diagnosis]:
    trials = [trial for group in groups for trial in group]
    return findings.diagnose(summary.rows(trials), trials, Resources(cores=cores))


def found(*groups: list[Trial], cores: int = 8) -> dict[str, Finding]:
    (diagnosis,) = explained(*groups, cores=cores)
    return {finding.rule.key: finding for finding in diagnosis.findings}


def judged(name: str, *groups: list[Trial], cores: int = 8) -> bool:
    """Return whether a rule had all measurements that it needs.

    If not, the diagnosis lists it as unjudged.
    """
    (diagnosis,) = explained(*groups, cores=cores)
    return not any(name in said for said in diagnosis.unjudged)


def dp(devices: int = 2, batch: int = 64, **phases: float) -> list[Trial]:
    return measured(case(devices=devices, batch=batch), {**LEVEL, **phases})


# ---------------------------------------------------------------- phases

NAMES = {
    "data": "data",
    "replicate": "replicate",
    "reduce": "reduce",
    "scatter": "scatter",
    "gather": "gather",
}


@pytest.mark.parametrize("name", [*NAMES, UNATTRIBUTED])
def test_a_phase_is_a_finding_from_two_percent_of_the_step(name: str) -> None:
    # 25 ms of computing: 0.5 ms is just below 2 % of the step, 0.52 ms just above
    assert name not in found(one(), dp(**{name: 0.00050}))
    seen = found(one(), dp(**{name: 0.00052}))[name]
    assert seen.share == pytest.approx(0.0204, abs=2e-4)
    assert seen.evidence.size_s.value == pytest.approx(0.00052, rel=0.01)


def test_replicate_says_its_cost_a_tensor() -> None:
    seen = found(one(), dp(replicate=0.016))["replicate"]
    assert amounts(seen.evidence.says) == ["39%"]
    whole, each = ["16.0 ms", "160", "100 µs"], ["400 µs", "40"]
    assert amounts(seen.evidence.numbers) == [*whole, *each, "1", "1.00 MiB", "160"]


def test_a_finding_whose_interval_reaches_zero_is_noise() -> None:
    def bigger(wobble: float) -> list[Trial]:
        each = {name: 1.8 * seconds for name, seconds in LEVEL.items()}
        return measured(case(batch=128), each, wobble=wobble)

    noisy = {d.row.case.batch_size: d for d in explained(one(), dp(), bigger(0.1))}[64]
    assert "bigger batch" not in [finding.rule.key for finding in noisy.findings]
    assert "bigger batch" in [finding.rule.key for finding in noisy.open]
    steady = {d.row.case.batch_size: d for d in explained(one(), dp(), bigger(0.001))}[64]
    assert "bigger batch" in [finding.rule.key for finding in steady.findings]


def test_the_optimizer_is_one_where_device_0_updates_alone() -> None:
    seen = found(one(), dp(optimizer=0.002))["optimizer"]
    assert seen.evidence.size_s.value == pytest.approx(0.001, rel=0.01)
    sharded = measured(case(schedule="sharded"), {**LEVEL, "optimizer": 0.002})
    assert "optimizer" not in found(one(), sharded)


def test_torchs_own_has_its_reduction_in_backward_and_no_finding_on_that() -> None:
    torch_dp = measured(case("torch_dp"), {"forward": 0.010, "backward": 0.03, "replicate": 0.01})
    assert {"replicate", "serial backward"} & found(one(), torch_dp).keys() == {"replicate"}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_phase_that_does_not_divide_is_serial(phase: str) -> None:
    name, level = f"serial {phase}", LEVEL[phase]
    local = case(schedule="local")
    assert name not in found(one(), measured(local, LEVEL))
    assert name not in found(one(), measured(local, LEVEL | {phase: level + 0.0004}))
    seen = found(one(), measured(local, LEVEL | {phase: level + 0.0008}))[name]
    assert seen.evidence.size_s.value == pytest.approx(0.0008, rel=0.05)
    assert amounts(seen.evidence.numbers)[1:3] == ["2.0", "2"]
    assert ("GIL" in seen.evidence.numbers) is (phase == "forward")  # autograd does not hold it
    slow = measured(local, LEVEL | {phase: level + 0.0008})
    unlocked = [replace(one, provenance={**one.provenance, "gil": "off"}) for one in slow]
    without = found(one(), unlocked)[name].evidence.numbers
    assert "GIL" not in without
    assert ("reference counts" in without) is (phase == "forward")
    assert "cores" not in without  # they are the devices


# stores of earlier versions do not know joint spans
@pytest.mark.parametrize("clock", ["host", "host_joint"])
@pytest.mark.parametrize(
    ("kind", "at_once"), [("cpu", ["1.0", "2"]), ("cuda", ["2"])], ids=["one", "unknown"]
)
def test_a_joint_backward_is_not_concurrent(kind: str, at_once: list[str], clock: str) -> None:
    clock = clock if kind == "cpu" else clock.replace("host", "cuda_event")
    joint = [
        replace(
            trial,
            spans=tuple(
                replace(one, clock=clock) if one.phase is Phase.BACKWARD else one
                for one in trial.spans
            ),
        )
        for trial in measured(case(device_kind=kind), LEVEL | {"backward": 0.030})
    ]
    alone = one(replace(SINGLE, device_kind=kind))
    numbers = found(alone, joint)["serial backward"].evidence.numbers
    assert amounts(numbers)[1:] == at_once
    fastest = [replace(trial, case=replace(trial.case, schedule="fastest")) for trial in joint]
    if clock.endswith("joint"):
        numbers = found(alone, fastest)["serial backward"].evidence.numbers
        assert amounts(numbers)[1:] == at_once


def test_the_cause_of_serial_work_is_told_by_overlap_and_cores() -> None:
    twice = {name: 2 * seconds for name, seconds in LEVEL.items()}
    in_turn = measured(case(), twice, serial=True)
    causes = [
        found(one(), in_turn, cores=cores)["serial forward"].evidence.numbers for cores in (8, 1)
    ]
    assert [amounts(cause)[1:] for cause in causes] == [["1.0", "2"], ["2", "1"]]
    assert not judged("compute concurrently", dp())


# ---------------------------------------------------------------- between devices


def test_device_0_is_a_finding_when_it_is_decidedly_busier() -> None:
    def row(first: float) -> list[Trial]:
        return measured(case(), LEVEL, busy={0: first, 1: 0.010})

    assert "imbalance" not in found(one(), row(0.0108))
    seen = found(one(), row(0.0112))["imbalance"]
    assert seen.evidence.size_s.value == pytest.approx(0.0006, rel=0.02)
    assert amounts(seen.evidence.says) == ["0", "1.12×", "1.12", "1.12"]


def test_a_slow_device_is_named() -> None:
    def row(busy: dict[int, float], strategy: str = "dp") -> list[Trial]:
        return measured(case(strategy, devices=len(busy)), LEVEL, busy=busy)

    even = {0: 0.015, 1: 0.010, 2: 0.010, 3: 0.010}
    assert "slow device" not in found(one(), row(even))
    assert "slow device" not in found(one(), row({**even, 2: 0.0109}))
    seen = found(one(), row({**even, 2: 0.0112}))["slow device"].evidence
    assert amounts(seen.says) == ["2", "1.12×", "1.12", "1.12"]
    assert seen.size_s.value == pytest.approx(0.0012, rel=0.02)
    # the ranks all do the same work
    assert "device 0" in found(one(), row(even, "ddp"))["slow device"].evidence.says
    assert (
        "as long as device 0"
        in found(one(), row({0: 0.010, 1: 0.012}))["slow device"].evidence.says
    )


@pytest.mark.parametrize("schedule", ["sharded", "fastest"])
def test_a_device_that_updates_more_weights_is_not_slow(schedule: str) -> None:
    busy = {0: 0.010, 1: 0.030, 2: 0.010}
    assert "slow device" in found(
        one(), measured(case(devices=3, schedule="allreduce"), LEVEL, busy=busy)
    )
    assert "slow device" not in found(
        one(), measured(case(devices=3, schedule=schedule), LEVEL, busy=busy)
    )


def test_devices_that_are_not_known_to_be_replicas_are_not_compared() -> None:
    """A stored strategy of another version may have other layers on each device."""
    rules = found(
        one(), measured(case("model_parallel", batch=3), LEVEL, busy={0: 0.010, 1: 0.030})
    )
    assert not {"slow device", "uneven"} & {*rules}


def test_a_device_without_rows_is_not_one_of_the_others() -> None:
    """Persistent replicas without rows still get gradients, which takes the last device 1 ms."""
    trials = measured(
        case(devices=4, batch=3), LEVEL, busy={0: 0.020, 1: 0.010, 2: 0.010, 3: 0.001}
    )
    evidence = found(one(), trials)["imbalance"].evidence
    assert amounts(evidence.says) == ["0", "2.00×", "2.00", "2.00"]
    assert amounts(evidence.numbers) == ["0", "20.0 ms", "10.0 ms"]
    assert evidence.size_s.value == pytest.approx(0.010 * 2 / 3, rel=0.01)


def test_ranks_are_not_told_to_move_work_from_device_0() -> None:
    busy = {0: 0.012, 1: 0.010, 2: 0.010, 3: 0.010}
    names = {*found(one(), measured(case("ddp", devices=4), LEVEL, busy=busy))}
    assert "slow device" in names
    assert "imbalance" not in names
    assert "imbalance" in found(one(), measured(case("dp", devices=4), LEVEL, busy=busy))


def test_a_device_with_fewer_rows_does_not_make_the_others_slow() -> None:
    # 22, 22 and 21 rows
    last = measured(case(devices=3, batch=65), LEVEL, busy={0: 0.022, 1: 0.022, 2: 0.017})
    assert "slow device" not in found(one(), last)


@pytest.mark.parametrize(
    ("source", "name", "phase"), [(0, "slow link", "reduce"), (-1, "slow host link", "scatter")]
)
def test_a_slow_link_is_named_with_its_rate(source: int, name: str, phase: str) -> None:
    def row(slower: float, spread: float = 0.0) -> list[Trial]:
        return [
            replace(
                trial,
                provenance={
                    **trial.provenance,
                    "links": [
                        {
                            "source": source,
                            "target": to,
                            "bytes": 2**20,
                            "seconds": (
                                [
                                    1e-4
                                    * (
                                        slower * (1 + spread * (trial.round - 1))
                                        if to == 2
                                        else 1.0
                                    )
                                ]
                                * 3
                            ),
                        }
                        for to in range(source + 1, 4)
                    ],
                },
            )
            for trial in dp(devices=4, **{phase: 0.010})
        ]

    assert name not in found(one(), row(1.49))
    seen = found(one(), row(1.51))[name].evidence
    assert ("the host" in seen.says) is (source < 0)
    ends = ["2"] if source < 0 else ["0", "2"]
    assert amounts(seen.says) == [*ends, "6.94 GB/s", "10.5 GB/s"]
    assert seen.size_s.value == pytest.approx(0.010 * (1 - 1 / 1.51), rel=0.02)
    assert judged("one link is slower", row(3.0))
    assert not judged("one link is slower", row(3.0, spread=0.9))  # the rounds differ too much
    assert name not in found(one(), row(3.0, spread=0.9))


def test_of_many_slow_links_the_slowest_are_named() -> None:
    slower = {(0, 1): 2.0, (0, 2): 6.0, (1, 2): 4.0, (2, 5): 3.0, (3, 4): 5.0}
    trials = [
        replace(
            trial,
            provenance={
                **trial.provenance,
                "links": [
                    {
                        "source": a,
                        "target": b,
                        "bytes": 2**20,
                        "seconds": [1e-4 * slower.get((a, b), 1.0)] * 3,
                    }
                    for a in range(6)
                    for b in range(a + 1, 6)
                ],
            },
        )
        for trial in dp(devices=6, reduce=0.010)
    ]
    seen = found(one(), trials)["slow link"].evidence
    first, second, third, more = seen.says.split("; ")
    assert "device 0 and device 2 " in first
    assert "device 3 and device 4 " in second
    assert "device 1 and device 2 " in third
    assert amounts(more) == ["2"]
    assert seen.size_s.value == pytest.approx(0.010 * (1 - 1 / 6), rel=0.02)


def test_memory_of_device_0_costs_no_time_and_stands_last() -> None:
    def row(first: int, strategy: str = "dp") -> list[Trial]:
        return measured(
            case(strategy, device_kind="cuda"),
            {**LEVEL, "replicate": 0.001},
            memory=(first * 2**20, 100 * 2**20),
        )

    assert "memory" not in found(row(110))
    (diagnosis,) = explained(row(111), row(101, "ddp"))
    seen = diagnosis.findings[-1]
    assert seen.rule.key == "memory"
    assert seen.evidence.size_s is None
    assert amounts(seen.evidence.numbers) == ["111 MiB", "0", "100 MiB", "1.01×"]
    assert "ddp" in seen.evidence.numbers


@pytest.mark.parametrize(
    ("batch", "fires"), [(64, False), (66, False), (63, False), (9, True), (5, True)]
)
def test_a_batch_that_leaves_a_device_short_is_uneven(batch: int, fires: bool) -> None:
    # 63 over 2 is 32 and 31: less than 2 % of the step; 9 is 5 and 4; 66 divides
    seen = found(dp(batch=batch)).get("uneven")
    assert (seen is not None) is fires
    if seen:
        assert seen.evidence.size_s.value == pytest.approx(
            0.025 * (1 - batch / (-(-batch // 2) * 2)), rel=0.01
        )


def test_devices_that_get_nothing_are_told() -> None:
    seen = found(dp(devices=4, batch=6))["uneven"]
    assert amounts(seen.evidence.says) == ["6", "4", "1", "4"]
    assert amounts(seen.evidence.numbers) == [*"222", "4", "4", "8"]


@pytest.mark.parametrize(("cores", "fires"), [(0, False), (1, True), (2, False), (8, False)])
def test_more_devices_than_cores_are_oversubscribed(cores: int, fires: bool) -> None:
    seen = found(one(), dp(), cores=cores).get("oversubscribed")
    assert (seen is not None) is fires
    if seen:
        assert seen.evidence.size_s.value == pytest.approx(0.0125, rel=0.01)


def test_gpus_are_not_oversubscribed_by_cores() -> None:
    assert "oversubscribed" not in found(measured(case(device_kind="cuda"), LEVEL), cores=1)


# ---------------------------------------------------------------- between cases


def test_what_was_not_measured_is_said_and_not_guessed() -> None:
    (diagnosis,) = explained(one(), dp(replicate=0.015))
    said = " ".join(diagnosis.unjudged)
    for words in ("--batch-sizes 32", "bigger batch"):
        assert words in said
    shown = " ".join(text.render([diagnosis]).split())
    said = "not measured in this run; measure it with: dpbench run --models mlp --strategies"
    assert f"{said} single,dp,ddp" in shown
    assert "--schedules reference,cached,local,allreduce" in shown


@pytest.mark.parametrize("options", [(), plan.LIMIT], ids=["single", "limit"])
def test_a_share_is_small_when_alone_it_takes_more_than_its_part(options: Any) -> None:
    share = replace(case("single", devices=1, batch=32), options=options)
    even, small = one(share, 0.5 * 1.01), one(share, 0.5 * 1.04)
    assert "small share" not in found(one(), dp(), even)
    seen = found(one(), dp(), small)["small share"]
    assert seen.evidence.size_s.value == pytest.approx(0.001, rel=0.02)
    assert amounts(seen.evidence.numbers)[-1] == "1.92"


def test_a_bigger_batch_that_costs_less_a_sample_is_a_finding() -> None:
    def bigger(factor: float) -> list[Trial]:
        return measured(
            case(batch=128), {name: 2 * factor * seconds for name, seconds in LEVEL.items()}
        )

    both = {d.row.case.batch_size: d for d in explained(one(), dp(), bigger(0.99))}
    assert "bigger batch" not in [f.rule.key for f in both[64].findings]
    both = {d.row.case.batch_size: d for d in explained(one(), dp(), bigger(0.97))}
    assert "bigger batch" in [f.rule.key for f in both[64].findings]
    assert "bigger batch" not in [f.rule.key for f in both[128].findings]


def test_the_last_devices_are_diminishing_when_they_give_less_than_their_part() -> None:
    def four(factor: float) -> list[Trial]:
        return measured(
            case(devices=4), {name: factor * seconds / 2 for name, seconds in LEVEL.items()}
        )

    assert "diminishing" not in found(one(), dp(), four(1.015))
    seen = found(one(), dp(), four(1.9))["diminishing"]
    assert amounts(seen.evidence.says)[:3] == ["2", "4", "1.05×"]
    assert not judged("the gain over fewer devices", one(), four(1.9))


def test_in_weak_scaling_the_last_devices_are_held_against_equal_work_a_device() -> None:
    wide = measured(
        case(devices=4, batch=128), {name: 1.9 * seconds for name, seconds in LEVEL.items()}
    )
    narrow = dp(devices=2, batch=64)
    seen = found(one(case("single", devices=1, batch=32), 0.5), narrow, wide)["diminishing"]
    assert amounts(seen.evidence.says)[:3] == ["2", "4", "1.05×"]
    assert seen.evidence.size_s.value == pytest.approx(0.025 * 0.9, rel=0.01)


# ---------------------------------------------------------------- ranking, cures, the answer


@pytest.mark.parametrize(("wobble", "told"), [(-0.03, []), (0.03, ["500 µs", "25.5 ms"])])
def test_a_loss_against_perfect_scaling_is_stated_if_the_rounds_tell_it(
    wobble: float, told: list[str]
) -> None:
    """A step takes 2 % longer than with perfect scaling; rounds differ by more, alike or not."""
    alone = measured(SINGLE, {name: 2 * seconds for name, seconds in LEVEL.items()}, wobble=0.03)
    two = {name: 1.02 * seconds for name, seconds in LEVEL.items()}
    trials = [*alone, *measured(case(), two, wobble=wobble)]
    (answer,) = report_on(trials, {"host": {"cores": 8}}).answers
    assert amounts(answer.reason)[:2] == told


def test_findings_are_ranked_by_the_seconds_at_stake() -> None:
    (diagnosis,) = explained(
        one(), dp(replicate=0.004, reduce=0.009, gather=0.002, optimizer=0.012)
    )
    names = [finding.rule.key for finding in diagnosis.findings]
    assert names == ["reduce", "optimizer", "replicate", "gather"]
    sizes = [finding.evidence.size_s.value for finding in diagnosis.findings]
    assert sizes == sorted(sizes, reverse=True)


def test_a_remedys_gain_is_read_off_the_cases_that_hold_it() -> None:
    cached = measured(case(schedule="cached"), {**LEVEL, "replicate": 0.002})
    pool = measured(case(schedule="pool"), {**LEVEL, "replicate": 0.001})
    ddp = measured(case("ddp"), {**LEVEL, "reduce": 0.05})
    (diagnosis,) = explained(one(), dp(replicate=0.015), cached, pool, ddp)
    seen = {finding.rule.key: finding for finding in diagnosis.findings}["replicate"]
    assert [
        (cure.row.case.strategy, cure.row.case.schedule, cure.verdict) for cure in seen.cures
    ] == [
        ("dp", "cached", "faster"),
        ("ddp", "", "slower"),
    ]
    assert seen.cures[0].ratio.value == pytest.approx(40 / 27, rel=0.01)
    assert seen.cures[0].gain_s.value == pytest.approx(0.013, rel=0.01)
    said = amounts(dict(text.parts(seen))["measured in this run"])
    assert said[:3] == ["1.48×", "1.48", "1.48"]
    assert "13.0 ms" in said


def test_findings_hold_together_at_each_look_of_a_run_that_stops_by_itself() -> None:
    trials = [*one(), *dp(replicate=0.015), *measured(case("ddp"), LEVEL)]
    looked = [replace(trial, provenance={**trial.provenance, "looks": 6}) for trial in trials]
    for given, looks in ((trials, 1), (looked, 6)):
        (context,) = contexts(summary.rows(given), given, Resources())
        assert context.level == pytest.approx(1 - 0.05 / looks)


def test_a_remedy_that_was_measured_as_slower_is_no_change_that_helps() -> None:
    ddp = measured(case("ddp"), {**LEVEL, "reduce": 0.100})
    pool = measured(case(schedule="cached"), {**LEVEL, "replicate": 0.080})
    trials = [*one(), *dp(replicate=0.060), *ddp, *pool]
    report = report_on(trials, {"host": {"cores": 8}})
    (answer,) = report.answers
    (diagnosis,) = report.diagnoses
    finding = next(one for one in diagnosis.findings if one.rule.key == "replicate")
    assert finding.in_vain
    said = text.explain([answer], [replace(diagnosis, findings=(finding,))])
    assert "  - change: none " in said
    assert finding.rule.remedy not in said
    assert "slower" not in said


def test_replicas_that_share_a_gpu_are_held_against_the_whole_step_of_one() -> None:
    shared = case(device_kind="cuda", placement="colocated")
    whole = {name: 2 * seconds for name, seconds in LEVEL.items()}
    (diagnosis,) = explained(
        one(case("single", devices=1, device_kind="cuda")),
        measured(shared, {**whole, "replicate": 0.010}),
        cores=1,
    )
    assert [finding.rule.key for finding in diagnosis.findings] == ["replicate"]


def test_emulated_devices_get_no_speed_up() -> None:
    emulated = case(device_kind="emulated")
    (diagnosis,) = explained(measured(emulated, {**LEVEL, "replicate": 0.015}))
    assert all("EMULATED" in finding.labels for finding in diagnosis.findings)
    assert [finding.rule.key for finding in diagnosis.findings] == ["replicate"]


def test_the_subject_is_torchs_own_then_the_reference_on_the_most_devices() -> None:
    rows = [
        dp(),
        measured(case(schedule="sharded", devices=4), LEVEL),
        measured(case("ddp", devices=4), LEVEL),
    ]
    assert [d.row.case.schedule for d in explained(*rows)] == ["sharded"]
    rows.append(measured(case("torch_dp", devices=4), LEVEL))
    assert [d.row.case.strategy for d in explained(*rows)] == ["torch_dp"]


def test_one_device_alone_is_nothing_to_explain() -> None:
    assert explained(one()) == []
    assert "Nothing to explain" in text.render([])


def test_page_and_comment_show_every_finding() -> None:
    trials = [*one(), *dp(replicate=0.015, gather=0.005)]
    content = report_on(trials, {"host": {"cores": 8}})
    (answer,), (diagnosis,) = content.answers, content.diagnoses
    assert [one.rule.key for one in diagnosis.findings] == ["replicate", "gather"]
    told = [answer.reason[1:], *(text.headline(one) for one in diagnosis.findings)]
    numbers = [one.evidence.numbers for one in diagnosis.findings]
    for rendered in (page.render(content), markdown.render(content)):
        assert [one for one in (*told, *numbers) if one not in unescape(rendered)] == []
