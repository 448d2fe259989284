"""The benchmarks: each runs where it applies, and returns samples."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import statistics
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dpbench.measure.server import Server
from dpbench.store import Store

asv = pytest.importorskip("asv", reason="a GPU machine lends its own packages, and may have no asv")

ROOT = Path(__file__).parents[2]
MODULES = ("cuda", "engine_cost", "imports", "replicas", "samplers", "selfcheck", "steps", "verbs")
BENCHMARKS = {
    "cuda.track_cuda_imbalance",
    "cuda.track_cuda_peak_bytes",
    "cuda.track_cuda_step_seconds",
    "engine_cost.track_emulated_step_seconds",
    "imports.track_import_seconds",
    "replicas.track_replica_seconds",
    "samplers.track_fast_tick_seconds",
    "selfcheck.track_cuda_mark_seconds",
    "selfcheck.track_marked_step_seconds",
    "steps.track_phase_seconds",
    "steps.track_step_seconds",
    "verbs.track_verb_seconds",
}


# --------------------------------------------------------------------------------------------------
# the suite


@pytest.fixture
def one_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks use the server of all tests."""
    monkeypatch.setattr("dpbench.measure.server.Server", lambda scratch: nullcontext(server))


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Import the suite's modules in quick mode, as on a machine without GPUs."""
    return imported(monkeypatch, gpus=0)


def imported(monkeypatch: pytest.MonkeyPatch, gpus: int) -> dict[str, ModuleType]:
    """Import the suite's modules in quick mode, as on a machine with some GPUs."""
    monkeypatch.setenv("DPBENCH_QUICK", "1")
    monkeypatch.setenv("DPBENCH_GPUS", str(gpus))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the interpreters that benchmarks start
    monkeypatch.syspath_prepend(ROOT)
    for name in ("benchmarks", *(f"benchmarks.{module}" for module in MODULES)):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {module: importlib.import_module(f"benchmarks.{module}") for module in MODULES}


def tracks(suite: dict[str, ModuleType]) -> dict[str, Any]:
    """Return the benchmarks by the names that asv gives them."""
    return {
        f"{module}.{name}": function
        for module, content in suite.items()
        for name, function in vars(content).items()
        if name.startswith("track_")
    }


def setup_of(function: Any) -> Any:
    return getattr(function, "setup", None) or sys.modules[function.__module__].setup


def check_shape(result: dict[str, Any]) -> None:
    assert set(result) == {"samples", "number"}
    assert result["number"] == 1
    assert len(result["samples"]) >= 5
    assert all(isinstance(sample, float) and sample >= 0 for sample in result["samples"])


def measures_gpus(function: Any) -> bool:
    """Return whether a benchmark measures GPUs.

    Without them it has one cell, which starts nothing.
    """
    return function.__module__ == "benchmarks.cuda"


def test_the_suite_has_these_benchmarks(suite: dict[str, ModuleType]) -> None:
    found = tracks(suite)
    assert set(found) == BENCHMARKS
    cells = 0
    for function in found.values():
        assert function.unit == "seconds" or function.__name__ in (
            "track_cuda_imbalance",
            "track_cuda_peak_bytes",
        )
        assert function.version == "1"
        assert len(function.params) == len(function.param_names)
        if not measures_gpus(function):
            cells += len(list(itertools.product(*function.params)))
    assert 25 <= cells <= 48, "each costs seconds, for every commit"


def test_only_single_on_two_devices_is_not_applicable(suite: dict[str, ModuleType]) -> None:
    skipped = []
    for name, function in tracks(suite).items():
        if name.startswith("cuda."):
            continue
        caches = {
            "engine_cost.track_emulated_step_seconds": "PAIRS",
            "selfcheck.track_marked_step_seconds": "ARMS",
            "steps.track_phase_seconds": "PHASES",
        }
        cached = (
            [dict.fromkeys(getattr(suite[name.partition(".")[0]], caches[name]))]
            if name in caches
            else []
        )
        for values in itertools.product(*function.params):
            try:
                setup_of(function)(*cached, *values)
            except NotImplementedError:
                skipped.append((name, values))
    assert skipped == [
        ("steps.track_step_seconds", ("single", model, 2)) for model in ("mlp", "resnet18")
    ]


def test_without_gpus_each_benchmark_on_gpus_has_one_cell_that_is_not_applicable(
    suite: dict[str, ModuleType],
) -> None:
    assert suite["cuda"].cells() == {}
    for name, function in tracks(suite).items():
        if name.startswith("cuda."):
            assert function.params == (("single",), ("mlp",), (1,))
            with pytest.raises(NotImplementedError, match="this machine has no GPU"):
                function.setup({}, "single", "mlp", 1)


def test_with_gpus_the_suite_measures_them_in_the_place_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dpbench.records import Case, Memory, Sample, Step, Trial, Verified

    suite, asked = imported(monkeypatch, gpus=4), list[Case]()
    cuda = suite["cuda"]
    assert cuda.track_cuda_step_seconds.params == (
        ("single", "torch_dp", "dp", "ddp"),
        ("mlp", "resnet18"),
        (1, 2, 4),
    )
    with pytest.raises(NotImplementedError, match="this machine has GPUs"):
        suite["steps"].setup_step("dp", "mlp", 2)

    def trials_of(case: Case) -> list[Trial]:
        if case.strategy == "ddp":
            raise LookupError("no ddp")  # as in a commit that lacks it
        asked.append(case)
        samples = [
            Sample(0.5 + i, device, "kernel_busy_s", 3.0 - device)
            for i in (0, 1)
            for device in range(2)
        ]
        trial = Trial(
            case=case,
            verified=Verified.BITWISE,
            steps=tuple(Step(0.5, False, 0.5 * i) for i in range(1, 5)),
            memory=(Memory(0, 7, "allocator"), Memory(1, 5, "allocator")),
            samples=tuple(samples),
        )
        return [replace(trial, round=number) for number in range(4)]

    monkeypatch.setattr(cuda, "trials_of", trials_of)
    monkeypatch.setenv("DPBENCH_HISTORY", str(tmp_path / ("c0ffee1" * 3)))
    cache = cuda.cells()
    assert {case.device_kind for case in asked} == {"cuda"}
    assert sorted({(case.strategy, case.devices) for case in asked}) == [
        ("dp", 1),
        ("dp", 2),
        ("dp", 4),
        ("single", 1),
        ("torch_dp", 1),
        ("torch_dp", 2),
        ("torch_dp", 4),
    ]
    check_shape(
        {"samples": cuda.track_cuda_step_seconds(cache, "dp", "mlp", 2)["samples"], "number": 1}
    )
    assert cuda.track_cuda_peak_bytes(cache, "dp", "mlp", 2) == 7
    assert cuda.track_cuda_imbalance(cache, "dp", "mlp", 2) == pytest.approx(1.5)
    for cell in (("ddp", "mlp", 2), ("single", "mlp", 2)):
        with pytest.raises(NotImplementedError, match="in this commit"):
            cuda.track_cuda_step_seconds.setup(cache, *cell)
    entries = [
        json.loads(line) for line in (tmp_path / f"{'c0ffee1' * 3}.jsonl").read_text().splitlines()
    ]
    assert entries[0]["params"] == ["'single'", "'mlp'", "1"]
    with Store.read(tmp_path / f"{'c0ffee1' * 3}.db") as store:
        assert {run.id for run in store.runs()} == {one["run"] for one in entries}
        (found,) = [run for run in store.runs() if run.id == entries[0]["run"]]
        assert found.provenance["dpbench"]["commit"] == "c0ffee1" * 3
        assert {t.case.fingerprint for t in store.summaries(found.id)} == set(
            entries[0]["fingerprints"]
        )


def test_an_interrupted_benchmark_goes_on_in_the_same_environment_only(
    suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DPBENCH_HISTORY", str(tmp_path / "c0ffee1"))
    runs = []
    for variable in ("", "", "1"):
        monkeypatch.setenv("NCCL_P2P_DISABLE", variable)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "end_run", lambda store, run_id: None)
            suite["steps"].keep("steps.any", (), ())
        with Store.read(tmp_path / "c0ffee1.db") as store:
            runs.append(len(store.runs()))
    assert runs == [1, 1, 2]


@pytest.mark.parametrize(
    "lacking",
    [ModuleNotFoundError("no", name="dpbench.measure.server"), LookupError(), TypeError()],
)
def test_what_an_old_commit_lacks_is_not_applicable(
    suite: dict[str, ModuleType], lacking: Exception
) -> None:
    with pytest.raises(NotImplementedError), suite["steps"].names_of_the_commit():
        raise lacking


def test_a_broken_environment_is_a_failure(suite: dict[str, ModuleType]) -> None:
    with pytest.raises(ModuleNotFoundError), suite["steps"].names_of_the_commit():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("verb", ["scatter", "replicate", "parallel_apply", "gather", "reduce"])
def test_verbs_return_samples(suite: dict[str, ModuleType], verb: str, devices: int) -> None:
    import torch

    threads = torch.get_num_threads()
    try:
        result = suite["verbs"].track_verb_seconds(verb, devices)
    finally:
        torch.set_num_threads(threads)
    check_shape(result)
    assert statistics.median(result["samples"]) < 0.2


def test_imports_return_samples(suite: dict[str, ModuleType]) -> None:
    (programs,) = suite["imports"].track_import_seconds.params
    median = {}
    for program in programs:
        result = suite["imports"].track_import_seconds(program)
        check_shape(result)
        median[program] = statistics.median(result["samples"])
    assert median["nothing"] < median["import dpbench.cli"]


@pytest.mark.usefixtures("one_server")
def test_steps_return_samples(suite: dict[str, ModuleType]) -> None:
    check_shape(suite["steps"].track_step_seconds("dp", "mlp", 2))


@pytest.mark.usefixtures("one_server")
def test_marked_steps_return_samples_of_both_arms(suite: dict[str, ModuleType]) -> None:
    selfcheck = suite["selfcheck"]
    cache = selfcheck.track_marked_step_seconds.setup_cache()
    assert set(cache) == set(selfcheck.ARMS)
    for arm in selfcheck.ARMS:
        check_shape(selfcheck.track_marked_step_seconds(cache, arm))


@pytest.mark.slow
def test_samplers_return_the_seconds_between_two_readings(suite: dict[str, ModuleType]) -> None:
    found = suite["samplers"].track_fast_tick_seconds(1)
    check_shape(found)
    assert 0.0095 < statistics.median(found["samples"]) < 0.05


@pytest.mark.usefixtures("one_server")
def test_a_failed_trial_is_a_failed_benchmark(
    suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite["steps"], "LIMIT_S", 0.0)
    with pytest.raises(
        RuntimeError, match="resnet18 single x1 batch 16: timeout: the worker exceeded the limit"
    ):
        suite["steps"].track_step_seconds("single", "resnet18", 1)


@pytest.mark.usefixtures("one_server")
def test_phases_return_samples_of_the_same_steps(suite: dict[str, ModuleType]) -> None:
    from dpbench.records import Phase
    from dpbench.records.ledger import UNATTRIBUTED

    steps = suite["steps"]
    # which only observed loops have
    engine = [phase for phase in Phase if phase not in (Phase.CLIP, Phase.READ)]
    assert (
        *engine,
        UNATTRIBUTED,
    ) == steps.PHASES, "spelled out there, for commits that lack the names"
    cache = steps.track_phase_seconds.setup_cache()
    assert set(cache) == set(steps.PHASES)
    for phase in steps.PHASES:
        steps.setup_phase(cache, phase)
        check_shape(steps.track_phase_seconds(cache, phase))
    for phase in ("replicate", "forward", "backward", "reduce"):
        assert statistics.median(cache[phase]) > 0
