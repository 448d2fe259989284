"""Other processes on the GPUs and on the cores of a machine with GPUs, and the label NOISY."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.analysis import statements, summary, validity
from dpbench.api import reports
from dpbench.hardware import foreign_load, nvml
from dpbench.measure.noise import Noise
from dpbench.measure.run import Note
from dpbench.records import Case, Effort, Status, Step, Trial, Verified, disturbance
from dpbench.records.facts import RunFacts, stated
from dpbench.records.load import GpuLoad, GpuProcess, Load, Measured, UnknownLoad
from tests.amounts import amounts
from tests.marked import poll
from tests.recorded_nvml import NOT_FOUND, NOT_SUPPORTED, Recorded, recorded
from tests.runs import run
from tests.standing_in import QUIET, Server

GIB = 2**30
ALONE = Case(model="mlp", strategy="single", batch_size=8, device_kind="cuda")
PAIR = replace(ALONE, strategy="dp", devices=2, schedule="reference")
OTHER = GpuProcess(pid=4242, share=0.62, memory_bytes=int(10.3 * GIB))
BUSY = GpuLoad(gpu=1, share=0.62, memory_bytes=int(10.3 * GIB), processes=(OTHER,))
IDLE = GpuLoad(gpu=0, share=0.0, memory_bytes=0, processes=())


def library(processes: list[Any], **answers: Any) -> Recorded:
    """Return a machine with four GPUs, on each of which `processes` run."""
    found = recorded("h100_x4")
    calls = found.recording["gpu"]
    calls["nvmlDeviceGetComputeRunningProcesses_v3"] = _answer(processes)
    for name, value in answers.items():
        calls[name] = value if "error" in value else _answer(value["is"])
    return found


def _answer(value: Any) -> dict[str, Any]:
    return {"latency_s": 0.0, "answers": [value]}


def _process(pid: int, size: int | None) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=size)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the time of the measurement pass at once, from 1000 s after the epoch."""
    now_s = [1000.0]
    monkeypatch.setattr(foreign_load.time, "time", lambda: now_s[0])
    monkeypatch.setattr(
        foreign_load.time, "sleep", lambda seconds: now_s.append(now_s.pop() + seconds)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    assert now_s == [1001.0], "a second, over which drivers average"


# -- what NVML tells


@pytest.mark.usefixtures("clock")
def test_a_process_is_named_with_its_share_and_its_memory() -> None:
    """The driver's samples from before the second, in which dpbench's own trial ran, are left."""
    uses = [
        SimpleNamespace(pid=4242, timeStamp=1_000_400_000, smUtil=60),
        SimpleNamespace(pid=4242, timeStamp=1_000_800_000, smUtil=64),
        SimpleNamespace(pid=os.getpid(), timeStamp=1_000_800_000, smUtil=30),
        SimpleNamespace(pid=9, timeStamp=999_000_000, smUtil=99),
    ]
    found = foreign_load.of_gpus(
        [1],
        library(
            [_process(4242, int(10.3 * GIB)), _process(os.getpid(), GIB)],
            **{"nvmlDeviceGetProcessUtilization(1000000000)": {"is": uses}},
        ),
    )
    assert found == (BUSY,)
    assert amounts(str(found[0])) == ["1", "4242", "62%", "10.3 GiB"]


def _samples(*pairs: tuple[int, int]) -> Any:
    return [
        1,
        [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=v)) for at, v in pairs],
    ]


@pytest.mark.usefixtures("clock")
def test_without_process_ids_the_use_of_the_whole_gpu_counts() -> None:
    """As in a container."""
    buffered = _samples((999_900_000, 100), (1_000_200_000, 40), (1_000_600_000, 60))
    (found,) = foreign_load.of_gpus(
        [0], library([], **{"nvmlDeviceGetSamples(1)": {"is": buffered}})
    )
    assert (found.share, found.processes) == (0.5, ())
    assert found.memory_bytes is not None
    assert found.memory_bytes > 0
    assert disturbance.busy(Measured(UnknownLoad("a quota"), (found,)))
    assert amounts(str(found))[:2] == ["0", "50%"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("error", [NOT_SUPPORTED, NOT_FOUND])
def test_without_buffered_samples_the_drivers_average_counts(error: int) -> None:
    """It is read at the end of the second over which the driver averages."""
    missing = {"error": error, "latency_s": 0.0}
    (found,) = foreign_load.of_gpus(
        [0],
        library(
            [_process(4242, None)],
            **{
                "nvmlDeviceGetSamples(1)": missing,
                "nvmlDeviceGetUtilizationRates": {"is": {"gpu": 43, "memory": 12}},
            },
        ),
    )
    assert found.share == 0.43
    assert found.processes == (GpuProcess(pid=4242, share=0.43, memory_bytes=None),)
    assert amounts(str(found)) == ["0", "4242", "43%"]


@pytest.mark.usefixtures("clock")
def test_several_processes_of_unknown_shares_share_the_gpus_use() -> None:
    calls = {"nvmlDeviceGetUtilizationRates": {"is": {"gpu": 43, "memory": 12}}}
    found = foreign_load.of_gpus(
        [2], library([_process(4242, GIB), _process(4243, 2 * GIB)], **calls)
    )
    assert amounts(str(found[0])) == ["2", "4242", "1.00 GiB", "4243", "2.00 GiB", "43%"]


@pytest.mark.usefixtures("clock")
def test_what_nvml_does_not_tell_is_no_load() -> None:
    missing = {"error": NOT_SUPPORTED, "latency_s": 0.0}
    (found,) = foreign_load.of_gpus([0], library([], nvmlDeviceGetUtilizationRates=missing))
    assert found.share is None
    assert not disturbance.busy(Measured(QUIET, (found,)))
    broken = recorded("h100_x4")
    broken.recording["init_error"] = 9
    assert foreign_load.of_gpus([0], broken) == ()
    assert foreign_load.of_gpus([], recorded("h100_x4")) == ()


@pytest.mark.usefixtures("clock")
def test_own_processes_are_nobody_else() -> None:
    calls = {"nvmlDeviceGetUtilizationRates": {"is": {"gpu": 90, "memory": 12}}}
    (found,) = foreign_load.of_gpus([0], library([_process(os.getpid(), GIB)], **calls))
    assert (found.share, found.memory_bytes) == (0.0, 0)


def test_an_idle_process_that_holds_memory_is_no_load() -> None:
    """Memory takes no time of a step; the check `foreign_gpu` tells it."""
    holder = GpuProcess(pid=7, share=0.0, memory_bytes=GIB)
    assert not disturbance.busy(
        Measured(QUIET, (GpuLoad(gpu=0, share=0.0, memory_bytes=GIB, processes=(holder,)),))
    )


# -- a run


def _timed(case: Case, effort: Effort) -> dict[str, Any]:
    steps = tuple(Step(0.1, False, time.perf_counter() - 2 + 0.1 * i) for i in range(20))
    return {"verified": Verified.BITWISE, "steps": steps}


@pytest.fixture
def used(quick: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[GpuLoad, ...]]:
    """Return the list of what others use at each look; the last item stays."""
    loads: list[tuple[GpuLoad, ...]] = [()]

    def look(gpus: Sequence[int]) -> tuple[GpuLoad, ...]:
        found = loads.pop(0) if len(loads) > 1 else loads[0]
        return tuple(load for load in found if load.gpu in gpus)

    monkeypatch.setattr(Server, "act", staticmethod(_timed))
    monkeypatch.setattr(foreign_load, "snapshot", lambda roots=(): UnknownLoad("no counts"))
    monkeypatch.setattr(foreign_load, "of_gpus", look)
    return loads


def _noisy(store: Any, outcome: Any) -> list[tuple[str, int]]:
    trials = store.trials(outcome.run_id)
    return sorted((t.case.strategy, t.round) for t in trials if "NOISY" in summary.labels(t))


def test_a_gpu_in_use_is_waited_for_and_named(store: Any, used: list[Any]) -> None:
    used[:] = [(BUSY,), (BUSY,), (replace(BUSY, share=0.0),)]
    heard: list[Any] = []
    outcome = run([PAIR], store, rounds=1, patience_s=1e6, listen=heard.append)
    notes = [event.text for event in heard if isinstance(event, Note)]
    assert str(BUSY) in notes[0]
    assert not any("GPU 1" in note for note in notes[1:])
    assert _noisy(store, outcome) == []
    assert store.runs()[0].provenance["noisy"] == {}


def test_only_cases_on_the_gpu_in_use_are_noisy(store: Any, used: list[Any]) -> None:
    used[:] = [(IDLE, BUSY)]
    outcome = run([ALONE, PAIR], store, rounds=2, patience_s=0)
    assert _noisy(store, outcome) == [("dp", 0), ("dp", 1)]
    found = reports.report_of(store.runs()[0], store.trials(outcome.run_id))
    (noisy,) = [str(one) for one in found.remarks if one.key == "noisy"]
    assert str(BUSY) in noisy
    told = [str(one) for one in found.remarks if one.key == "gpu_in_use"]
    assert len(told) == 1
    assert str(BUSY) in told[0]
    assert "mlp dp" in told[0]


def test_a_gpu_that_others_begin_to_use_between_rounds_is_found(
    store: Any, used: list[Any]
) -> None:
    used[:] = [(IDLE, replace(BUSY, share=0.0)), (IDLE, BUSY)]
    outcome = run([PAIR], store, rounds=3, patience_s=0)
    assert _noisy(store, outcome) == [("dp", 1), ("dp", 2)]


def test_who_used_a_gpu_in_an_earlier_session_is_still_named(
    store: Any, used: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = (IDLE, replace(BUSY, share=0.0))
    used[:] = [idle, (IDLE, BUSY), idle]
    done: list[Case] = []

    def act(case: Case, effort: Effort) -> dict[str, Any]:
        done.append(case)
        if len(done) == 3:
            raise KeyboardInterrupt
        return _timed(case, effort)

    monkeypatch.setattr(Server, "act", staticmethod(act))
    with pytest.raises(KeyboardInterrupt):
        run([PAIR], store, rounds=3, patience_s=0)
    assert run([PAIR], store, rounds=3, patience_s=0).resumed
    during = store.runs()[0].provenance["noisy"]["during"]
    assert during.startswith("1 trial ran")
    assert str(BUSY) in during


def test_nobody_on_the_gpus_is_no_noise(store: Any, used: list[Any]) -> None:
    used[:] = [(IDLE, replace(BUSY, share=0.0))]
    outcome = run([ALONE, PAIR], store, rounds=2, patience_s=0)
    assert _noisy(store, outcome) == []
    assert store.runs()[0].provenance["noisy"] == {}


def test_a_gpu_that_stays_in_use_is_waited_for_once(
    store: Any, used: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used[:] = [(BUSY,)]
    patience: list[float] = []
    wait = foreign_load.wait

    def waiting(patience_s: float, *arguments: Any, **named: Any) -> Any:
        patience.append(patience_s)
        return wait(0, *arguments, **named)

    monkeypatch.setattr(foreign_load, "wait", waiting)
    monkeypatch.setattr(Noise, "repeatable", lambda self: [])
    run([PAIR], store, rounds=3, patience_s=5)
    assert patience == [5, 0, 0]


def test_cases_on_cpus_ask_no_gpu(
    store: Any, used: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_load, "of_gpus", lambda gpus: pytest.fail("asked") if gpus else ())
    run([replace(ALONE, device_kind="cpu")], store, rounds=2, patience_s=0)


# -- the cores of a machine with GPUs


def beside(case: Case, taken: float, cores: int, **facts: Any) -> Trial:
    """Return a trial of 100 ms steps beside processes that take the share `taken` of the cores."""
    load = Load(foreign=taken, steal=0.0, cores=cores, seconds=3.0)
    steps = tuple(Step(0.1, False, 100 + 0.1 * i) for i in range(20))
    return Trial(
        case=case,
        steps=steps,
        verified=Verified.BITWISE,
        provenance=stated(foreign_load=load, **facts),
    )


@pytest.mark.parametrize(
    ("taken", "cores", "busy_s", "noisy"),
    [
        (0.5, 64, None, False),  # 32 of 64 cores are free, and two GPUs need two
        (0.99, 64, None, True),  # the case finds less than two free cores
        (0.99, 64, 0.095, False),  # the GPU computes for 95 ms of the step of 100 ms
        (0.99, 64, 0.05, True),  # the host decides half of the step
        (0.5, 2, None, True),
        (0.5, 2, 0.099, False),
    ],
)
def test_the_cores_matter_to_a_case_on_gpus_as_far_as_it_depends_on_them(
    taken: float, cores: int, busy_s: float | None, noisy: bool
) -> None:
    facts = {} if busy_s is None else {"gpu_busy_s": busy_s}
    one = beside(PAIR, taken, cores, **facts)
    assert disturbance.noisy(one) is noisy
    (check,) = [found for found in validity.check(one, cores) if found.key == "foreign_cpu"]
    assert check.ok is not noisy
    assert ("step" in check.about["by"]) is (busy_s is not None)


@pytest.mark.parametrize(
    ("cases", "busy"),
    [([PAIR], False), ([PAIR, replace(PAIR, device_kind="cpu")], True), ([], True)],
)
def test_a_shared_server_is_not_waited_for_by_cases_on_gpus(cases: list[Case], busy: bool) -> None:
    load = Load(foreign=0.4, steal=0.0, cores=64, seconds=0.5)
    assert disturbance.busy(Measured(load), cases) is busy


def test_the_first_round_tells_the_later_ones_how_long_the_gpu_computes(
    store: Any, used: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first round is profiled."""
    from dpbench.records import Sample

    def act(case: Case, effort: Effort) -> dict[str, Any]:
        samples = [Sample(0.0, 0, "kernel_busy_s", 0.09), Sample(0.0, 1, "kernel_busy_s", 0.05)]
        return _timed(case, effort) | ({"samples": tuple(samples)} if effort.profile else {})

    monkeypatch.setattr(Server, "act", staticmethod(act))
    outcome = run([PAIR], store, rounds=2, patience_s=0)
    trials = store.trials(outcome.run_id)
    assert [one.provenance["gpu_busy_s"] for one in trials] == [0.09, 0.09]


def test_a_stored_load_of_gpus_is_read_again(store: Any, used: list[Any]) -> None:
    used[:] = [(BUSY,)]
    outcome = run([PAIR], store, rounds=1, patience_s=0)
    (one,) = store.trials(outcome.run_id)
    assert one.facts.foreign_gpus == (BUSY,)
    assert one.provenance["foreign_gpus"][0]["processes"][0]["pid"] == 4242
    assert Trial(case=PAIR).facts.foreign_gpus == ()
    assert "gpu_in_use" not in {
        one.key for one in statements.made([], [Trial(case=PAIR)], RunFacts())
    }


# -- a second process on a GPU


KERNELS = """
import sys, time, torch
tensor = torch.ones(4096, 4096, device="cuda:1")
open(sys.argv[1], "w").close()
until = time.time() + 60
while time.time() < until:
    for _ in range(10):
        tensor @ tensor
    torch.cuda.synchronize(1)
"""


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[int]:
    """Run kernels on GPU 1 in a process outside this process tree, and return its id."""
    began = tmp_path / "began"
    clock_only = {**os.environ, "FAKECUDA_NUMERICS": "0", "FAKECUDA_DATA": "0"}
    shell = 'exec "$0" -c "$1" "$2" </dev/null >/dev/null 2>&1 & echo $!'
    command = ["sh", "-c", shell, sys.executable, KERNELS, str(began)]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=clock_only, check=True)
    pid = int(told.stdout)
    try:
        assert poll(began.exists, 60)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.multi_gpu
def test_a_process_that_runs_kernels_on_a_gpu_makes_its_cases_noisy(
    store: Any, stranger: int
) -> None:
    outcome = run(
        [replace(ALONE, device_ids=(1,))],
        store,
        rounds=1,
        patience_s=0,
        effort=Effort(budget_s=0.05, memory_by_phase=False, profile=False),
    )
    (trial,) = store.trials(outcome.run_id)
    assert trial.status is Status.OK
    assert "NOISY" in summary.labels(trial)
    assert f"GPU 1: pid {stranger} uses" in store.runs()[0].provenance["noisy"]["before"]
    assert [load.gpu for load in foreign_load.of_gpus([0, 1]) if load.busy] == [1]


@pytest.mark.multi_gpu
def test_nobody_on_the_real_gpus_is_no_load() -> None:
    # the driver's averages still show processes of the tests before
    assert poll(lambda: not any(load.busy for load in foreign_load.of_gpus([0, 1])))


def test_numbers_are_those_of_the_real_library() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert pynvml.NVML_GPU_UTILIZATION_SAMPLES == nvml._UTILIZATION_SAMPLES
