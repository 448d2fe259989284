"""Predictions: the simulation against the formula, steps whose order is known, and intervals."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.prediction import formula, loops, named_models
from benchmarks.prediction.loops import LoopDifferences
from dpbench.analysis import summary
from dpbench.predict import cases, counts, machine, network, profiles, simulation, what_if
from dpbench.predict.cases import Predictor
from dpbench.predict.constants import (
    DEFAULT,
    PRIORS,
    RESIDUAL,
    HostCosts,
    column,
    drawn,
    interval,
)
from dpbench.predict.deviations import NONE
from dpbench.predict.machine import Link, UnknownMachine
from dpbench.predict.work import Cost, Profile
from dpbench.records import Case, Phase, Source, Step, ledger, registry
from dpbench.records.estimate import Estimate
from dpbench.records.registry import Parallelism
from dpbench.records.schedule import Schedule

# ---------------------------------------------------------------- the simulation


def counted(model: str) -> Profile:
    return counts.of(Case(model=model, strategy="single", batch_size=1))


NOTHING = dict.fromkeys(Parallelism, NONE)
"""Nothing is lost beyond the model: steps are those of the simulation alone."""
COUNTED = counted("resnet50")
MEASURED_HOST = machine.Host(
    launch_s=40e-6, module_s=60e-6, tensor_s=9e-6, thread_s=3e-4, hand_off=0.1
)


def known(
    name: str, step_s: float = 0.05, samples: int = 32, host: float = 1.0
) -> tuple[Profile, machine.Machine]:
    found = machine.load(name)
    found = replace(found, host=replace(found.host, factor=host))
    return profiles.given(COUNTED, step_s, samples, found), found


def case_of(strategy: str, devices: int, batch: int = 32, **changed: Any) -> Case:
    return Case(
        model="resnet50",
        strategy=strategy,
        devices=devices,
        batch_size=batch * devices,
        device_kind="cuda",
        **changed,
    )


def seconds(case: Case, profile: Profile, on: machine.Machine, **changed: Any) -> float:
    return simulation.step(case, profile, on, replace(DEFAULT, **changed)).seconds


@pytest.mark.parametrize("strategy", ["single", "torch_dp", "dp", "ddp"])
@pytest.mark.parametrize("step_s", [0.004, 0.05, 0.5])
def test_one_device_takes_what_was_given(strategy: str, step_s: float) -> None:
    profile, on = known("rtx-3090-x8", step_s)
    assert seconds(case_of(strategy, 1), profile, on) == pytest.approx(step_s, rel=1e-6)


@pytest.mark.parametrize("name", machine.names())
@pytest.mark.parametrize("strategy", ["torch_dp", "dp", "ddp"])
@pytest.mark.parametrize("host", [1.0, 4.0])
def test_the_formula_and_the_simulation_agree(name: str, strategy: str, host: float) -> None:
    for step_s in (0.01, 0.05, 0.4):
        profile, on = known(name, step_s, host=host)
        if step_s == 0.05:  # as a measured or traced profile has them
            profile = replace(profile, loss=Cost(1e-4, 1e-5), optimizer=Cost(4e-3))
        for devices in (2, on.gpu.count):
            case = case_of(strategy, devices)
            assert seconds(case, profile, on) == pytest.approx(
                formula.seconds(case, profile, on), rel=0.005
            )


def test_the_formula_and_intervals_take_the_measured_costs_of_a_host() -> None:
    """A probe measures them; they replace the constants and their factor."""
    profile, on = known("rtx-3090-x8", 0.01)
    on, case = replace(on, host=MEASURED_HOST), case_of("torch_dp", 4)
    assert seconds(case, profile, on) == pytest.approx(
        formula.seconds(case, profile, on), rel=0.005
    )
    assert formula.seconds(case, profile, on) > 1.2 * formula.seconds(
        case, profile, replace(on, host=machine.Host())
    )
    found = cases.Predictor(
        on, measured={counts.key(case): replace(profile, source="measured")}
    ).predict(case)
    assert found.high_s / found.low_s > 1.2, "the costs of the host are uncertain by 0.15"
    assert abs(statistics.median(found.draws)) < 0.05, (
        "both ends come from the same costs as the step"
    )


@pytest.mark.parametrize(
    "strategy", [name for name in registry.names("strategies") if name != "single_all_cores"]
)
@pytest.mark.parametrize("schedule", Schedule)
def test_every_strategy_and_rung_gives_a_step_with_its_phases(strategy: str, schedule: str) -> None:
    if strategy != "dp" and schedule != "reference":
        return
    profile, on = known("rtx-3090-x8")
    case = case_of(
        strategy, 1 if strategy == "single" else 4, schedule=schedule if strategy == "dp" else ""
    )
    line = simulation.step(case, profile, on)
    assert line.seconds >= 0.05 * (1 - 1e-9)
    charged = ledger.phases(Step(line.seconds, False, line.seconds), line.spans())
    assert sum(charged.values()) == pytest.approx(line.seconds)
    assert charged["forward"] > 0
    assert charged["unattributed"] < 0.05 * line.seconds


def test_the_ladder_climbs() -> None:
    profile, on = known("rtx-2080-ti-x4", host=3.0)
    steps = {name: seconds(case_of("dp", 4, schedule=name), profile, on) for name in Schedule}
    assert steps["cached"] < 0.95 * steps["reference"]  # no trees rebuilt in Python
    assert steps["local"] < 1.01 * steps["cached"]  # no outputs gathered, but one sum of losses
    assert steps["sharded"] < steps["local"]  # no tensors joined, and a part of the update


def test_threads_that_launch_at_once_hand_the_interpreter_over() -> None:
    profile, on = known("rtx-3090-x8", step_s=0.01, host=4.0)
    costly, free = (seconds(case_of("dp", 8), profile, on, hand_off=cost) for cost in (0.5, 0.0))
    assert free < 0.9 * costly


def without_lock(on: machine.Machine, **host: Any) -> machine.Machine:
    return replace(on, host=replace(on.host, gil=False, **host))


def test_without_an_interpreter_lock_threads_launch_at_once() -> None:
    profile, on = known("rtx-3090-x8", step_s=0.01, host=4.0)
    dp = case_of("dp", 8)
    locked, unlocked = (simulation.step(dp, profile, one) for one in (on, without_lock(on)))
    assert unlocked.seconds < locked.seconds

    def launches(timeline: simulation.Timeline) -> list[tuple[float, float]]:
        return [
            times
            for task, times in zip(timeline.tasks, timeline.times, strict=True)
            if task.resource == simulation.GIL and task.phase is Phase.FORWARD
        ]

    together = launches(unlocked)
    assert len(together) == 8
    assert len({*together}) == 1, "all threads at the same time"
    (begin, end), (locked_begin, locked_end) = together[0], launches(locked)[0]
    # without the lock, they end when the last of the eight threads has started
    assert locked_end - locked_begin > 7 * (end - begin)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_process_with_one_device_loses_nothing_to_the_interpreter_lock(strategy: str) -> None:
    profile, on = known("rtx-3090-x8", step_s=0.01, host=4.0)
    case = case_of(strategy, 1 if strategy == "single" else 8)
    assert seconds(case, profile, without_lock(on)) == seconds(case, profile, on)


def test_without_the_lock_nothing_is_handed_over_unless_threads_were_measured() -> None:
    profile, on = known("rtx-3090-x8", step_s=0.01, host=4.0)
    dp, free = case_of("dp", 8), without_lock(on)
    costs = [HostCosts.of(one.host, DEFAULT).hand_off for one in (on, free)]
    assert costs == [DEFAULT.hand_off, 0.0]
    slowed = without_lock(on, hand_off=0.1, measured_gil=False)
    assert seconds(dp, profile, slowed) > seconds(dp, profile, free)
    assert seconds(dp, profile, slowed) < seconds(dp, profile, on)
    of_the_lock = without_lock(on, hand_off=0.1)
    assert seconds(dp, profile, of_the_lock) == seconds(dp, profile, free)
    relocked = replace(on, host=replace(on.host, hand_off=0.0, measured_gil=False))
    assert seconds(dp, profile, relocked) == seconds(dp, profile, on)


def test_a_host_that_nobody_measured_under_its_lock_is_said_to_be_assumed() -> None:
    _, on = known("rtx-3090-x8")

    def assumed(**host: Any) -> set[str]:
        changed = replace(on, host=replace(on.host, **host))
        assert changed.assumed == on.assumed, "the links are as known as before"
        return {*changed.assumptions} - {*on.assumptions}

    unlocked, measured = {"gil": False, "cores": 8}, {"launch_s": 1e-5}
    assert assumed(**unlocked) == {machine.UNMEASURED_WITHOUT_GIL}
    assert assumed(**unlocked, **measured) == {machine.UNMEASURED_WITHOUT_GIL}
    assert assumed(**unlocked, measured_gil=False) == {machine.UNMEASURED_WITHOUT_GIL}
    assert not assumed(**unlocked, **measured, measured_gil=False)
    assert assumed(**measured, measured_gil=False) == {machine.UNMEASURED_WITH_GIL}
    assert not assumed(**measured)


def test_a_core_for_each_thread_without_the_lock_is_said_to_be_assumed() -> None:
    _, on = known("rtx-3090-x8")

    def said(cores: int) -> list[str]:
        found = without_lock(on, cores=cores).assumptions
        return [one for one in found if one.startswith(machine.OWN_CORES)]

    assert said(0) == [machine.OWN_CORES]
    assert said(7) == [f"{machine.OWN_CORES}, and the host has 7 cores"]
    assert said(8) == []
    assert not any(machine.OWN_CORES in one for one in on.assumptions)


def test_a_prediction_without_the_lock_has_the_label_of_a_measurement_without_it() -> None:
    _, on = known("rtx-3090-x8")
    for case in (case_of("dp", 8), case_of("ddp", 8)):
        locked, unlocked = (
            summary.labels(Predictor(one, given=(0.05, 32)).predict(case).trial())
            for one in (on, without_lock(on))
        )
        assert {*unlocked} - {*locked} == {"NO-GIL"}


def test_uneven_rows_and_devices_without_any() -> None:
    profile, on = known("dgx-a100")
    case = Case(model="resnet50", strategy="dp", devices=8, batch_size=9, device_kind="cuda")
    assert seconds(case, profile, on) > 0
    assert seconds(replace(case, strategy="ddp"), profile, on) > 0


def test_more_devices_than_there_are_is_refused_with_the_way_out() -> None:
    profile, on = known("rtx-3090-x2")
    with pytest.raises(UnknownMachine, match=r"has 2 GPUs.*needs 4; give devices= up to 2"):
        simulation.step(case_of("ddp", 4), profile, on)
    many = machine.load("dgx-a100-x512")
    with pytest.raises(
        UnknownMachine, match=r"drives all devices from one process.*strategies= ddp"
    ):
        simulation.step(case_of("dp", 16), profile, many)


def test_a_step_falls_with_the_bus_and_never_below_one_device() -> None:
    profile, on = known("rtx-3090-x8")
    for strategy in ("torch_dp", "ddp"):
        steps = [
            seconds(case_of(strategy, 8), profile, on, bus_scale=scale)
            for scale in (0.25, 1.0, 4.0, 1e6)
        ]
        assert steps == sorted(steps, reverse=True)
        assert steps[-1] >= 0.05


def test_ranks_beyond_eight_are_one() -> None:
    profile, on = known("dgx-a100-x512", step_s=0.1)
    eight, sixteen, all_ = (simulation.step(case_of("ddp", n), profile, on) for n in (8, 16, 4096))
    assert {task.device for task in all_.tasks} == {0}
    assert eight.seconds < sixteen.seconds < all_.seconds < 1.2 * eight.seconds


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_without_flop_computes_once_and_not_once_per_bucket(strategy: str) -> None:
    """A model of embeddings has many buckets and no FLOP."""
    profile, on = known("dgx-a100")
    lookups = replace(profile, forward_flop=0.0, backward_flop=0.0)
    case = case_of(strategy, 8)
    assert seconds(case, lookups, on) == pytest.approx(seconds(case, profile, on))


def test_late_reduction_costs_what_overlap_hides() -> None:
    profile, on = known("rtx-3090-x8", step_s=0.3)
    beside, late = (
        loops.step(
            case_of("ddp", 8), profile, on, loop=LoopDifferences(late_reduction=late)
        ).seconds
        for late in (False, True)
    )
    wire = network.DeviceGroup(on, 8, DEFAULT).one_s("all_reduce", COUNTED.parameter_bytes)
    assert late - 0.3 == pytest.approx(wire, rel=0.2)
    assert beside < late - 0.2 * wire


def test_only_some_phases() -> None:
    profile, on = known("dgx-a100")
    tasks = simulation.step(case_of("dp", 4), profile, on).tasks
    kept = loops.of_phases(tasks, {Phase.FORWARD, Phase.BACKWARD})
    assert {task.phase for task in kept} == {Phase.FORWARD, Phase.BACKWARD}
    ends = [
        i for i, task in enumerate(kept) if task.phase is Phase.FORWARD and task.unit == "share"
    ]
    backward = next(task for task in kept if task.phase is Phase.BACKWARD)
    assert set(ends) <= set(backward.after)


# ---------------------------------------------------------------- right in kind


def test_data_parallel_is_slower_than_one_gpu_for_launch_bound_nets() -> None:
    small = counted("mnasnet0_5")
    on = replace(machine.load("rtx-2080-ti-x4"), host=machine.Host(factor=3.1))
    profile = profiles.given(small, 0.030, 48, on)
    one, four = (
        seconds(
            Case(model="m", strategy=s, devices=n, batch_size=48, device_kind="cuda"), profile, on
        )
        for s, n in (("single", 1), ("torch_dp", 4))
    )
    assert four > 1.5 * one


def test_vgg_scales_backwards_on_eight_consumer_gpus_without_peer_access() -> None:
    vgg = named_models.find("vgg16").profile  # the plug of this name is a small one
    on = machine.load("rtx-3090-x8")
    profile = profiles.given(vgg, 0.100, 32, on)
    rate = {
        n: (
            n
            / seconds(
                Case(
                    model="vgg16", strategy="ddp", devices=n, batch_size=4 * n, device_kind="cuda"
                ),
                profile,
                on,
            )
        )
        for n in (1, 2, 8)
    }
    assert rate[2] < rate[1]
    assert rate[8] < 2 * rate[1]
    fast = machine.load("h100-sxm-x8")
    assert 8 / seconds(
        Case(model="vgg16", strategy="ddp", devices=8, batch_size=32, device_kind="cuda"),
        profile,
        fast,
    ) > (5 * rate[1])


@pytest.mark.parametrize("step_s", [0.05, 0.1])
def test_overhead_follows_tensors_when_host_bound_and_bytes_when_large(step_s: float) -> None:
    on = replace(machine.load("titan-rtx-x4"), host=machine.Host(factor=3.1))

    def overhead(**changed: Any) -> float:
        profile = profiles.given(replace(COUNTED, **changed), step_s, 12, on)
        return seconds(case_of("torch_dp", 4, 12), profile, on) - step_s

    many, few = {"parameter_tensors": 600, "modules": 700}, {"parameter_tensors": 30, "modules": 40}
    light, heavy = {"parameter_bytes": 8_000_000}, {"parameter_bytes": 550_000_000}
    assert overhead(**many, **light) > 3 * overhead(**few, **light)
    assert overhead(**few, **heavy) > 3 * overhead(**few, **light)
    assert overhead(**many, **heavy) < overhead(**many, **light) + overhead(**few, **heavy)


def test_hugging_faces_gpt2_comes_out_in_order() -> None:
    # transformers docs, perf_train_gpu_many: 2x TITAN RTX, seconds for 200 steps: DDP with NVLink
    # 101.9, DP 110.6, DDP without peer access 131.4; no step of one GPU was published
    gpt2 = counted("gpt2")
    without = machine.load("titan-rtx-x4")
    bridge = Link("gpu0", "gpu1", "nvlink", 40e9)
    joined = replace(without, name="bridged", links=(bridge, *without.links))
    step = {}
    for name, strategy, on in (
        ("ddp, nvlink", "ddp", joined),
        ("dp, nvlink", "torch_dp", joined),
        ("ddp, no peer access", "ddp", without),
    ):
        profile = profiles.given(gpt2, 0.46, 4, on, optimizer="adam")
        case = Case(
            model="gpt2",
            strategy=strategy,
            devices=2,
            batch_size=8,
            optimizer="adam",
            device_kind="cuda",
        )
        step[name] = seconds(case, profile, on)
    assert step["ddp, nvlink"] < step["dp, nvlink"] < step["ddp, no peer access"]


# ---------------------------------------------------------------- predictions


def test_a_prediction_is_a_trial_that_says_so() -> None:
    predictor = cases.Predictor(machine.load("dgx-a100"), given=(0.05, 32))
    one = predictor.predict(case_of("dp", 4))
    trial = one.trial()
    assert trial.source is Source.PREDICTED
    assert one.low_s < one.seconds < one.high_s
    assert sum(trial.ledger.phases[0].values()) == pytest.approx(one.seconds)
    assert trial.provenance["machine"] == "dgx-a100"
    assert type(trial).from_dict(trial.to_dict()) == trial


def test_intervals_are_the_same_every_time_and_grow_with_doubt() -> None:
    predictor = cases.Predictor(machine.load("rtx-3090-x8"), given=(0.05, 32))
    first, again = (predictor.predict(case_of("torch_dp", 8)) for _ in range(2))
    assert (first.low_s, first.high_s) == (again.low_s, again.high_s)

    def width(priors: dict[str, float]) -> float:
        low, high = interval(1.0, drawn(1.0, lambda name, factor: factor**0.5, priors, 0.02))
        return math.log(high / low)

    assert width({"host_scale": 0.6}) > 1.5 * width({"host_scale": 0.2}) > 0


def test_one_machine_in_ten_delivers_a_part_of_its_links_and_a_slowdown_may_be_zero() -> None:
    slow = [z for z in column("delivered") if z < 0]
    assert len(slow) == len(column("delivered")) / 10
    assert max(column("delivered")) == 0
    assert 0.045 < math.exp(PRIORS["delivered"].deviation * min(slow)) < 0.06
    factors = [1 + PRIORS["slowdown"].deviation * z for z in column("slowdown")]
    assert min(factors) == 0
    assert 0.1 < sum(factor == 0 for factor in factors) / len(factors) < 0.2
    on, case = machine.load("h100-pcie-x8"), case_of("ddp", 8)
    usual = cases.Predictor(on, given=(0.02, 32)).predict(case)
    tenth = [
        draw
        for draw, z in zip(usual.draws, column("delivered"), strict=True)
        if z < -math.log(5) / PRIORS["delivered"].deviation
    ]
    assert min(tenth) > math.log(1.5), "a fifth of the links' rates makes this step much longer"


def test_a_response_continues_as_a_line_between_and_beyond_its_nodes() -> None:
    """A step in proportion to a factor responds by its logarithm, wherever the nodes are."""
    for name in ("host_scale", "bus_scale", "delivered", "compute"):
        draws = drawn(1.0, lambda name, factor: factor**0.5, {name: 0.4}, 0.0)
        causes = column("residual" if name == "compute" else name)
        assert draws == pytest.approx([0.2 * cause for cause in causes], abs=1e-9)


def test_an_interval_holds_80_percent() -> None:
    """A residual alone makes the step lognormal.

    A deviation of 1.28 to either side holds 80 %, and 1.64 holds 90 %.
    """
    low, high = interval(1.0, drawn(1.0, lambda name, factor: 1.0, {}, 0.1))
    assert (-math.log(low) / 0.1, math.log(high) / 0.1) == pytest.approx((1.28, 1.28), abs=0.18)


def speedup_of(single: cases.Prediction, many: cases.Prediction) -> Estimate:
    """Return the speed-up that every table shows for predictions: that of their trials."""
    _, row = summary.rows([single.trial(), many.trial()])
    assert row.case == many.case
    assert row.speedup is not None
    return row.speedup


def test_errors_that_two_steps_share_cancel_in_their_speed_up() -> None:
    """A counted step may err by a factor of two, but the step on one device errs as much."""
    predictor = cases.Predictor(machine.load("dgx-a100"))
    single, many = (
        predictor.predict(replace(case, model="resnet50"))
        for case in (case_of("single", 1), case_of("ddp", 8))
    )
    assert many.high_s / many.low_s > 2
    stated = speedup_of(single, many)
    assert stated.low < stated.value < stated.high < 1.3 * stated.low


@pytest.mark.parametrize("strategy", ["torch_dp", "dp", "ddp"])
@pytest.mark.parametrize("name", ["h100-pcie-x8", "rtx-3090-x8", "dgx-1-v100"])
@pytest.mark.parametrize("model", ["resnet50", "vgg16"])
def test_an_interval_of_a_speed_up_holds_those_at_the_ends_of_the_computation(
    model: str, name: str, strategy: str
) -> None:
    """A faster device computes the step on one sooner, and copies take as long as before."""
    predictor = cases.Predictor(machine.load(name), lost=NOTHING)
    single, many = (
        replace(case, model=model) for case in (case_of("single", 1), case_of(strategy, 8))
    )
    stated = speedup_of(predictor.predict(single), predictor.predict(many))

    def speedup(factor: float) -> float:
        one, all_eight = (
            simulation.step(
                case,
                profiles.slower(predictor.profile(case), factor),
                predictor.machine,
                predictor.constants,
            ).seconds
            for case in (single, many)
        )
        return 8 * one / all_eight

    deviations = sorted(column("residual"))
    for z in (deviations[len(deviations) // 10], deviations[-len(deviations) // 10 - 1]):
        found = speedup(math.exp(z * RESIDUAL[predictor.profile(single).source]))
        assert 0.99 * stated.low <= found <= 1.01 * stated.high


def test_data_parallel_on_eight_of_a_described_machine_may_gain_little_or_much() -> None:
    """When the doubt cancelled in the ratio, the interval was 2.19 to 2.87."""
    predictor = cases.Predictor(machine.load("h100-pcie-x8"), lost=NOTHING)
    single, many = case_of("single", 1, 64), case_of("torch_dp", 8, 64)
    stated = speedup_of(predictor.predict(single), predictor.predict(many))
    assert stated.low < 1.65
    assert stated.high > 3.85


def test_named_convolutional_nets_compute_in_tf32_as_torch_does_by_default() -> None:
    """NVIDIA's examples train ResNet-50 on one A100 at 938 images/s in TF32.

    The figure is that of DeepLearningExamples at batch 256.
    """
    predictor = cases.Predictor(machine.load("dgx-a100"))
    case = replace(case_of("single", 1), model="resnet50", batch_size=256)
    found = predictor.predict(case)
    assert 256 / found.high_s < 938 < 256 / found.low_s
    assert 256 / found.seconds == pytest.approx(938, rel=0.3)
    on = predictor.machine
    without = cases.Predictor(
        replace(on, gpu=replace(on.gpu, flop_per_s={"fp32": on.gpu.flop_per_s["fp32"]}))
    )
    assert without.predict(case).seconds > 2 * found.seconds
    attention = replace(case, model="bert-base")
    assert without.predict(attention).seconds == predictor.predict(attention).seconds


def test_a_model_nobody_knows_lists_the_known() -> None:
    with pytest.raises(
        LookupError, match=r"unknown model 'resnet5'; known: .*did you mean 'resnet50'.*models="
    ):
        counted("resnet5")


def test_known_losses_and_optimizers_follow_the_work_that_is_done() -> None:
    profile, on = known("dgx-a100")
    profile = replace(profile, loss=Cost(0.0, 1e-4), optimizer=Cost(8e-3))

    def phase_s(case: Case, phase: Phase) -> float:
        line = simulation.step(case, profile, on)
        found = [
            end - begin
            for task, (begin, end) in zip(line.tasks, line.times, strict=True)
            if task.phase is phase and task.unit == "bytes" and task.device == 0
        ]
        return sum(found)

    single, gathered = case_of("single", 1), case_of("dp", 4, schedule="reference")
    assert phase_s(gathered, Phase.LOSS) == pytest.approx(4 * phase_s(single, Phase.LOSS)), (
        "GPU 0 has it all"
    )
    local = case_of("dp", 4, schedule="local")
    assert phase_s(local, Phase.LOSS) == pytest.approx(phase_s(single, Phase.LOSS))
    whole, shared = (
        seconds(case_of("dp", 4, schedule=name), profile, on) for name in ("allreduce", "sharded")
    )
    assert whole - shared > 0.5 * 8e-3, "each has a quarter of the optimizer"


@pytest.mark.parametrize("host", [machine.Host(factor=4.0), MEASURED_HOST])
def test_a_faster_host_helps_a_launch_bound_net_that_was_traced(host: machine.Host) -> None:
    predictor = cases.Predictor(replace(machine.load("h100-sxm-x8"), host=host))
    case = Case(
        model="resnet18",
        size="small",
        strategy="dp",
        schedule="reference",
        batch_size=8,
        devices=2,
        device_kind="cuda",
    )
    found = what_if.what_ifs(predictor, [case])
    assert found[0].change == "DistributedDataParallel", "the first thing to try"
    assert all(one.gain_low <= one.gain <= one.gain_high for one in found)
    assert found[0].gain_low < found[0].gain < found[0].gain_high
    assert (found[-1].gain_low, found[-1].gain_high) == (1, 1), "the errors of equal steps cancel"
    gains = {one.change: one.gain for one in found}
    assert gains["a host twice as fast"] > 1.6


def test_a_machine_without_peaks_asks_for_the_step() -> None:
    bare = machine.read(
        {
            "peer_access": True,
            "gpu": {"name": "x", "count": 1},
            "link": [{"between": ["gpu0", "cpu0"], "kind": "pcie", "bytes_per_s": 1e9}],
        },
        "bare",
    )
    with pytest.raises(UnknownMachine, match=r"bare.*peak for fp32.*step_s='SECONDS'"):
        cases.Predictor(bare).predict(case_of("single", 1))


@pytest.mark.parametrize("name", ["dgx-1-v100", "t4-x4", "rtx-2080-ti-x4"])
def test_no_other_peak_stands_for_that_of_bf16_on_gpus_without_it(name: str) -> None:
    case = case_of("single", 1, precision="bf16")
    with pytest.raises(UnknownMachine, match=r"peak for bf16 .*\(stated for: fp32, fp16\)"):
        cases.Predictor(machine.load(name)).predict(case)


@pytest.mark.parametrize("gpu", ["RTX A4000", "RTX A5000", "RTX 6000 Ada", "RTX 3090 Ti"])
def test_a_transformer_is_faster_in_bf16_on_gpus_with_tensor_cores_for_it(gpu: str) -> None:
    predictor = cases.Predictor(machine.load(f"1x {gpu}"))
    case = replace(case_of("single", 1), model="bert-base")
    in_bf16 = predictor.predict(replace(case, precision="bf16"))
    assert in_bf16.seconds < 0.6 * predictor.predict(case).seconds


def test_predictions_are_quick() -> None:
    for name, strategy, devices in (("dgx-a100", "torch_dp", 8), ("dgx-a100-x512", "ddp", 4096)):
        predictor = cases.Predictor(machine.load(name), given=(0.05, 32))
        predictor.predict(case_of(strategy, devices))
        began = time.process_time()
        predictor.predict(case_of(strategy, devices))
        assert time.process_time() - began < 0.05


def test_costs_know_every_collective_that_tasks_name() -> None:
    profile, on = known("dgx-a100")
    for text in Schedule:
        for task in simulation.step(case_of("dp", 4, schedule=text), profile, on).tasks:
            kind = task.resource.partition(":")[0]
            assert kind in (*simulation.COLLECTIVES, "device", "host", "gil", "copy")
