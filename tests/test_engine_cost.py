"""The engine against torch.nn.DataParallel: which cases are compared, how they are measured, what is said of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.analysis import diagnosis
from dpbench.analysis.diagnosis import GOAL, Dispatched, EngineCost, engine_cost, engine_costs
from dpbench.analysis.report import Report
from dpbench.analysis.summary import rows
from dpbench.hardware.devices import open_devices
from dpbench.hardware.devices.host import counting
from dpbench.measure.selection import cases_of
from dpbench.measure.worker.trial import run_together
from dpbench.models import load as load_model
from dpbench.records import Case, Effort, Step, Trial, Verified, no_mark, plan
from dpbench.records.options import Options
from dpbench.records.trial import DISPATCHED, Estimate
from dpbench.strategies import load

OURS = Case(model="mlp", strategy="dp", schedule="reference", devices=2, batch_size=8, device_kind="emulated")
TORCHS = replace(OURS, strategy="torch_dp", schedule="")
SMALL = Effort(budget_s=0.05, min_steps=3, max_steps=5, warmup_steps=1, block_steps=1)


def trial(case: Case, seconds: float, number: int, **facts: object) -> Trial:
    steps = tuple(Step(seconds, False, k * seconds) for k in range(1, 5))
    return Trial(case=case, verified=Verified.BITWISE, steps=steps, round=number, provenance=facts)


def measured(ours: float, torchs: float, rounds: int = 5, kind: str = "emulated") -> list[Trial]:
    both = {replace(OURS, device_kind=kind): ours, replace(TORCHS, device_kind=kind): torchs}
    return [trial(case, s * (1 + n / 1e3), n) for n in range(rounds) for case, s in both.items()]


def costs(trials: list[Trial]) -> list[EngineCost]:
    return engine_costs(rows(trials), trials)


# ---------------------------------------------------------------- the strategy


@pytest.mark.usefixtures("short_sequences")
@pytest.mark.parametrize(
    ("model", "devices"),
    [("mlp", 1), ("mlp", 2), ("mlp", 3), ("resnet18", 2), ("transformer", 2), ("embedding", 2), ("lstm", 2)],
)
def test_torchs_own_data_parallel_is_verified_and_timed_on_emulated_devices(
    model: str, devices: int, tmp_path: Path
) -> None:
    case = replace(TORCHS, model=model, devices=devices, batch_size=6)
    (done,) = run_together([case], SMALL, tmp_path)
    assert (done.status, done.reason if done.status != "ok" else "") == ("ok", "")
    assert done.verified in {Verified.BITWISE, Verified.WITHIN_TOLERANCE}
    assert {span.phase for span in done.spans} >= {"forward", "backward", "optimizer", "loss"}
    assert {memory.device for memory in done.memory} >= set(range(devices))


def test_after_a_trial_torch_is_as_it_was(tmp_path: Path) -> None:
    from torch.nn.parallel import comm, parallel_apply

    before = comm.torch, parallel_apply.__globals__["torch"]
    run_together([TORCHS], SMALL, tmp_path)
    assert (comm.torch, parallel_apply.__globals__["torch"]) == before


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_both_sides_copy_the_same_bytes(model: str) -> None:
    found = {}
    for case in (replace(OURS, model=model), replace(TORCHS, model=model)):
        loaded = load_model(model, "small", 0)
        batch = loaded.batch(8, 0)
        with load(case.strategy).start(case, loaded, open_devices("emulated", 2), no_mark) as step:
            step(*batch)
            with counting() as copied:
                step(*batch)
        assert len(copied) > 50
        found[case.strategy] = sum(copied)
    parameters = sum(p.nbytes for p in load_model(model, "small", 0).module.parameters())
    assert found["dp"] == found["torch_dp"] > 2 * parameters, "weights go out, gradients come back"


def test_outside_the_context_nothing_is_counted() -> None:
    import torch

    device = open_devices("emulated", 1)[0].torch_device
    with counting() as outer:
        with counting() as inner:
            torch.ones(4, device=device) + 1
        many = len(inner)
        host = torch.ones(3).to(device)
    assert many == len(inner) < len(outer)
    assert outer[-1] == 12
    host.cpu()
    assert sum(outer) == 12


def test_a_sparse_copy_counts_its_indices_and_values() -> None:
    import torch

    open_devices("emulated", 2)
    sparse = torch.sparse_coo_tensor([[0, 2]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=False).to("lazy:0")
    with counting() as copied:
        sparse.to("lazy:1")
    assert max(copied) == 2 * 8 + 4 * 4


# ---------------------------------------------------------------- the plan


def test_a_run_without_options_on_a_cpu_compares_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpbench.hardware.nvml.cuda_device_count", lambda: 0)
    monkeypatch.setattr("dpbench.hardware.provenance.usable_cores", lambda: 2)
    for ladder in (False, True):
        cases, _ = cases_of(Options(ladder=ladder))
        pairs = [case for case in cases if case.device_kind == "emulated"]
        assert [(case.model, case.strategy, case.devices) for case in pairs] == [
            ("mlp", "dp", 2), ("mlp", "torch_dp", 2), ("resnet18", "dp", 2), ("resnet18", "torch_dp", 2),
        ]  # fmt: skip
    cases, _ = cases_of(Options(models=("mlp",)))
    assert not [case for case in cases if case.device_kind == "emulated"], "axes say what is measured"


@pytest.mark.parametrize("changed", [{"devices": [1]}, {"batch_sizes": ()}, {"precision": "bf16"}])
def test_what_cannot_be_compared_is_not_planned(changed: dict[str, object]) -> None:
    axes = {"models": ["mlp"], "devices": [1, 2], "batch_sizes": [8]} | changed
    assert plan.engine_cost(**axes) == []  # type: ignore[arg-type]


def test_on_emulated_devices_both_engines_are_measured_in_one_process_and_take_turns_at_the_start() -> None:
    single, other = plan.alone(OURS, 8), replace(OURS, schedule="cached")
    cpu = [replace(case, device_kind="cpu") for case in (OURS, TORCHS)]
    cases = [single, OURS, other, TORCHS, *cpu]
    first, second = (plan.groups(cases, number, paired=False) for number in (0, 1))
    assert first == [(TORCHS, OURS), (single,), (other,), *((case,) for case in cpu)]
    assert second == [(OURS, TORCHS), (single,), (other,), *((case,) for case in cpu)]
    assert plan.groups([OURS], 0, paired=False) == [(OURS,)]
    assert plan.groups(cases, 0, paired=True) == plan.side_by_side(cases)


# ---------------------------------------------------------------- the analysis


@pytest.mark.parametrize(("ours", "expected"), [(0.9, "met"), (1.029, "met"), (1.031, "missed"), (1.2, "missed")])
def test_the_verdict_depends_on_the_goal(ours: float, expected: str) -> None:
    (found,) = costs(measured(ours, 1.0))
    assert found.ratio.value == pytest.approx(ours, rel=1e-6)
    assert found.verdict == expected
    assert expected in engine_cost([found])


def test_an_interval_around_the_goal_cannot_tell() -> None:
    cost = EngineCost(case=OURS, ratio=Estimate(1.0, 0.98, GOAL + 1e-9, 5))
    assert cost.verdict == "cannot tell"
    assert replace(cost, ratio=Estimate(1.0, 0.98, GOAL, 5)).verdict == "met"
    assert replace(cost, ratio=Estimate(1.5, GOAL + 1e-9, 1.6, 5)).verdict == "missed"
    assert costs(measured(0.5, 1.0, rounds=1))[0].verdict == "cannot tell", "one round shows no spread"


def test_rounds_are_compared_within_their_process() -> None:
    """Both sides of a round are slow at the same time: their ratio is not."""
    slow = [1.0, 2.0, 1.0, 3.0, 1.0]
    trials = [trial(case, s * f, n) for n, f in enumerate(slow) for case, s in ((OURS, 0.9), (TORCHS, 1.0))]
    (found,) = costs(trials)
    assert (found.ratio.low, found.ratio.high) == pytest.approx((0.9, 0.9))


@pytest.mark.parametrize(
    "lost", [{"devices": 1}, {"batch_size": 9}, {"device_kind": "cpu"}, {"model": "lstm"}, {"schedule": "cached"}]
)
def test_other_work_is_not_compared(lost: dict[str, object]) -> None:
    changed = replace(OURS, **lost)  # type: ignore[arg-type]
    assert costs([trial(case, 1.0, n) for n in range(3) for case in (changed, TORCHS)]) == []


def test_a_trial_that_is_not_verified_is_not_compared() -> None:
    trials = measured(0.9, 1.0)
    assert costs([replace(one, verified=Verified.NO) if one.case == TORCHS else one for one in trials]) == []


def test_the_counts_of_both_sides_are_said() -> None:
    ours, torchs = Dispatched(1234, 17, 2048), Dispatched(1500, 1, 4096)
    cost = EngineCost(case=OURS, ratio=Estimate(0.9, 0.89, 0.91, 5), engine=ours, torch=torchs)
    assert "goal of at most 1.03: 0.900× (0.890–0.910) on mlp (met)." in engine_cost([cost])
    assert diagnosis.call_counts([cost, replace(cost, torch=None)]) == [
        "one step on mlp: 1,234 operators, 17 copies (2.00 KiB in all) by the engine, "
        "1,500 operators, 1 copy (4.00 KiB in all) by torch.nn.DataParallel"
    ]
    assert engine_cost([]) == ""


def test_replicas_on_one_gpu_are_not_called_gpus() -> None:
    cost = EngineCost(case=replace(OURS, device_kind="cuda"), ratio=Estimate(0.9, 0.89, 0.91, 5))
    assert "DataParallel on GPUs, with a goal of" in engine_cost([cost])
    shared = replace(cost, case=replace(cost.case, placement="colocated"))
    assert "DataParallel on replicas sharing one GPU (COLOCATED: " in engine_cost([shared])


def test_the_worker_stores_the_counts(tmp_path: Path) -> None:
    done = run_together([OURS, TORCHS], SMALL, tmp_path)
    counts = [one.provenance[DISPATCHED] for one in done]
    assert counts[0]["copied_bytes"] == counts[1]["copied_bytes"]
    assert all(one["operators"] > one["copies"] > 5 for one in counts)
    (cpu,) = run_together([replace(OURS, device_kind="cpu")], SMALL, tmp_path)
    assert DISPATCHED not in cpu.provenance


@pytest.fixture
def report() -> Iterator[Report]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Estimate, "WIDEST", math.inf)
        cpu = [replace(OURS, device_kind="cpu"), plan.alone(replace(OURS, device_kind="cpu"), 8)]
        trials = [*measured(0.9, 1.0), *(trial(case, 1.0, n) for n in range(5) for case in cpu)]
        yield Report.of(trials, run_id="r", started_s=0.0, provenance={})


def test_the_verdict_has_the_comparison_and_the_diagnosis_stays_with_the_measured_devices(report: Report) -> None:
    assert (
        "to that of torch.nn.DataParallel on emulated devices (host time alone), with a goal of at most 1.03: 0.900×"
        in " ".join(report.notes)
    )
    assert report.engine_costs == diagnosis.engine_costs(report.rows, report.trials)
    assert {diagnosis.row.case.device_kind for diagnosis in report.diagnoses} == {"cpu"}
