"""The self-check: a planted cost is found, drift cancels, and a part that cannot run states the reason."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.hardware import processes, samplers
from dpbench.measure import checks, clocks
from dpbench.measure.request import Arm, SelfCheck
from dpbench.measure.server import Server
from dpbench.measure.worker import selfcheck as worker
from dpbench.records import Case, Effort, Phase, Status
from dpbench.report import naming
from dpbench.store import Store

linux = pytest.mark.skipif(sys.platform != "linux", reason="stops and reads processes as Linux does")


CASE = Case(model="mlp", strategy="dp", schedule="reference", batch_size=8, devices=1)
"""The step that is checked, on one device: no two threads that wait for each other."""
MARKS = SelfCheck(arm=Arm.MARKS, block_s=0.005, step_s=0.01)


def made(cost_s: float, *, pairs: int = 40, drift: float = 0.0, **more: Any) -> dict[str, Any]:
    """Return the facts of a step of 2 ms to which measuring adds a given cost."""
    level = [0.002 * (1 + drift * i) for i in range(pairs)]
    noise = [1e-6 * (i % 5 - 2) for i in range(pairs)]
    on = [step + cost_s + wobble for step, wobble in zip(level, noise, strict=True)]
    return {"on_s": on, "off_s": level, "case": "mlp", "marks_per_step": 17.0} | more


def test_the_cost_of_marks_is_held_against_ten_milliseconds() -> None:
    (cost,) = checks.costs({"marks": made(40e-6)})
    assert cost.cost_s is not None
    assert cost.share is not None
    assert cost.cost_s.value == pytest.approx(40e-6, abs=1e-6)
    assert cost.share.value == pytest.approx(0.004, abs=1e-4)
    assert cost.cost_s.n == 40
    (said,) = checks.words({"self_check": {"marks": made(40e-6)}})
    assert "+40 µs per step" in said
    assert "0.40% of a 10 ms step" in said
    assert "below the goal of 0.5%" in said
    assert "17 marks per step" in said


@pytest.mark.parametrize(
    ("cost_s", "verdict"), [(45e-6, ", below"), (50e-6, "not clearly below or above"), (55e-6, ", above")]
)
def test_the_goal_is_met_missed_or_undecided_by_the_interval(cost_s: float, verdict: str) -> None:
    (said,) = checks.words({"self_check": {"marks": made(cost_s)}})
    assert f"{verdict} the goal" in said


def test_a_drift_over_pairs_cancels() -> None:
    (cost,) = checks.costs({"marks": made(40e-6, drift=0.1)})
    assert cost.cost_s is not None
    assert cost.cost_s.high - cost.cost_s.low < 3e-6


def test_samplers_cost_throughput() -> None:
    facts = made(20e-6, sampler_cpu_ratio=0.003, steps_touched=7)
    (cost,) = checks.costs({"samplers": facts})
    assert cost.share is not None
    assert cost.share.value == pytest.approx(1 - 2000 / 2020, abs=1e-4)
    (said,) = checks.words({"self_check": {"samplers": facts}})
    assert "of the throughput" in said
    assert "the sampler uses 0.30% of one core and ran during 7 steps" in said
    del facts["steps_touched"]  # a run of an earlier dpbench
    assert "%; the sampler uses 0.30% of one core" in checks.words({"self_check": {"samplers": facts}})[0]


def test_what_does_not_run_here_says_why_and_a_run_without_says_nothing() -> None:
    (said,) = checks.words({"self_check": {"engine": {"reason": "failed: out of patience"}}})
    assert "not measured: failed: out of patience" in said
    assert checks.words({}) == []


# ---------------------------------------------------------------- the worker's part


class _SlowClock(clocks.HostClock):
    def mark(self, phase: Phase, device: int) -> Any:
        time.sleep(0.0005)
        return super().mark(phase, device)


@pytest.mark.alone
def test_a_planted_cost_of_marks_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "choose", lambda devices: _SlowClock())
    facts = worker.measure(CASE, Effort(budget_s=0.2), MARKS).provenance["self_check"]
    assert len(facts["on_s"]) == len(facts["off_s"]) >= 10
    slept = [on - off for on, off in zip(facts["on_s"], facts["off_s"], strict=True)]
    assert statistics.median(slept) > facts["marks_per_step"] * 0.0005


class _BusyClock(clocks.HostClock):
    def mark(self, phase: Phase, device: int) -> Any:
        until = time.thread_time() + 0.0002
        while time.thread_time() < until:
            pass
        return super().mark(phase, device)


@pytest.mark.slow
def test_a_cost_in_cpu_time_comes_out_whoever_else_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "choose", lambda devices: _BusyClock())
    facts = worker.measure(CASE, Effort(budget_s=0.4), MARKS).provenance["self_check"]
    (cost,) = checks.costs({"marks": facts})
    assert cost.cost_s is not None
    planted_s = facts["marks_per_step"] * 0.0002
    assert 0.9 * planted_s < cost.cost_s.value < 3 * planted_s  # the step itself finds its caches cold, too


SPIN = """
import time
while True:
    until = time.process_time() + {spin_s}
    while time.process_time() < until:
        pass
    time.sleep({sleep_s})
"""


@contextmanager
def busy(spin_s: float = 1.0, sleep_s: float = 0.0) -> Iterator[int]:
    """Run a process that computes for so long, sleeps for so long, and so on."""
    with subprocess.Popen([sys.executable, "-c", SPIN.format(spin_s=spin_s, sleep_s=sleep_s)]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this process, and those it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        processes.roam()  # first what the check itself has bound
        os.sched_setaffinity(0, before)


def beside(pid: int | None, *, block_s: float, budget_s: float) -> dict[str, Any]:
    """Return the facts that the worker measured while this process ran."""
    settings = SelfCheck(arm=Arm.SAMPLER, block_s=block_s, step_s=0.01, sampler_pid=pid or 0)
    trial = worker.measure(CASE, Effort(budget_s=budget_s), settings)
    return dict(trial.provenance["self_check"])


def shared_time(pid: int) -> SimpleNamespace:
    """Return the clocks of a core on which only this process and another one run, whoever else is at work."""
    clock = worker._Sampler(pid)._clock
    both = lambda: time.process_time() + time.clock_gettime(clock)  # noqa: E731  # a function of a module has no self
    return SimpleNamespace(perf_counter=both, process_time=time.process_time, clock_gettime=time.clock_gettime)


@linux
def test_what_a_process_takes_from_the_steps_core_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_core(), busy(spin_s=0.005, sleep_s=0.05) as pid:
        monkeypatch.setattr(worker, "time", shared_time(pid))
        facts = beside(pid, block_s=0.5, budget_s=3.0)
    (cost,) = checks.costs({"samplers": facts})
    assert cost.share is not None
    # the CPU time of that process, within the error of a short measurement
    assert facts["sampler_cpu_ratio"] > 0.02
    assert 0.6 < cost.share.value / facts["sampler_cpu_ratio"] < 1.8
    assert facts["steps_touched"] >= 20


@linux
def test_a_process_at_work_in_every_step_leaves_none_to_compare_with() -> None:
    with pytest.raises(
        RuntimeError, match=r"in or just before every step of one part of the measurement \(steps: \d+\)"
    ):
        beside(os.getpid(), block_s=0.05, budget_s=0.1)  # this process itself runs in every step


@linux
def test_the_sampler_is_idle_by_comparison() -> None:
    with samplers.sampling((), Path("/dev/null")) as series:
        facts = beside(series.pid, block_s=0.5, budget_s=1.0)
    assert 0 < facts["sampler_cpu_ratio"] < 0.1
    assert 2 <= facts["steps_touched"] < 100


@linux
def test_a_sampler_that_is_gone_is_a_reason_and_no_crash(server: Server) -> None:
    with busy() as pid:
        pass
    found = checks._of_worker(server, CASE, Arm.SAMPLER, 0.01, sampler_pid=pid)
    assert "ProcessLookupError" in found["reason"]


# ---------------------------------------------------------------- the whole


@linux
@pytest.mark.usefixtures("one_server")
def test_all_three_are_measured_stored_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ROUNDS", 2)
    facts = checks.measure("cpu", 2, scale=0.02)
    assert set(facts) == set(checks.NAMES)
    assert 10 < facts["marks"]["marks_per_step"] < 40
    assert len(facts["engine"]["on_s"]) == len(facts["engine"]["off_s"]) == checks.ROUNDS
    assert "emulated" in facts["engine"]["case"]
    with Store.create(tmp_path / "x.db") as store:
        run, _ = store.begin_run(plan="p", host="h", code="c", rounds=1, provenance={"host": {"cores": 2}})
        store.annotate(run, "self_check", facts)
        (kept,) = store.runs()
    assert kept.provenance["host"] == {"cores": 2}
    said = checks.words(kept.provenance)
    assert [line.startswith(f"{name}: ") for line, name in zip(said, checks.NAMES.values(), strict=True)] == [True] * 3
    assert all("MEASURED" in line for line in said)
    assert not [name for name, _ in naming.environment(kept.provenance, []) if "self_check" in name]


@pytest.mark.gpu
def test_the_engine_is_held_against_torchs_own_on_one_gpu() -> None:
    found = checks.measure("cuda", 1, (0,), scale=0.1)["engine"]
    assert len(found["on_s"]) == len(found["off_s"]) == checks.ROUNDS, found


def test_a_failed_worker_is_a_reason(server: Server) -> None:
    found = checks._of_worker(server, replace(CASE, model="no such"), Arm.MARKS, 0.01)
    assert "no such" in found["reason"]
    assert found["reason"].startswith(Status.FAILED.value)
