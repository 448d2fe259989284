"""Exports for pyperf and Parquet: equal after reading, and the tools report dpbench's numbers."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyperf
import pytest

# scipy.stats is imported at its first use: each process of the suite collects this file
import scipy
from pyperf._utils import is_significant  # the test of compare_to

from dpbench.analysis import stats
from dpbench.analysis.summary import labels, measured
from dpbench.records import CASE_FIELDS, Case, Phase, Source, Status, Step, Trial, Verified
from dpbench.store import export
from tests import exported
from tests.exported import DP, PROVENANCE, compared, made, stored

UNITS = {"sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@pytest.fixture
def dpbench(tmp_path, monkeypatch, capfd):
    return exported.command(tmp_path, monkeypatch, capfd)


def noisy(
    median_s: float, *, number: int = 0, case: Case = DP, steps: int = 31, seed: int = 0, **changes
) -> Trial:
    """Return a trial whose steps vary, the way step times do, after five warm-up steps."""
    draw = random.Random(f"{median_s} {number} {seed}")
    seconds = [median_s * draw.lognormvariate(0, 0.05) for _ in range(steps + 5)]
    ends = np.cumsum(seconds) + 100.0
    series = tuple(
        Step(s, i < 5, float(end)) for i, (s, end) in enumerate(zip(seconds, ends, strict=True))
    )
    return replace(made(case, number=number), steps=series, spans=(), **changes)


def suite_of(*trials: Trial) -> pyperf.BenchmarkSuite:
    return pyperf.BenchmarkSuite.loads(export.pyperf("f" * 32, PROVENANCE, trials, labels))


def run_pyperf(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "pyperf", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- pyperf


def test_pyperf_reads_back_the_median_step_of_every_round():
    trials = [noisy(0.01, number=i) for i in range(3)]
    (benchmark,) = suite_of(*trials)
    assert benchmark.get_name() == "mlp dp[reference] x2 batch 64"
    assert benchmark.get_unit() == "second"
    assert len(benchmark.get_runs()) == 3
    for run, trial in zip(benchmark.get_runs(), trials, strict=True):
        assert list(run.values) == [statistics.median(trial.timed)]
        assert run.get_metadata()["steps"] == 31
        assert list(run.warmups) == [(1, s.seconds) for s in trial.steps if s.warmup]
        assert run.get_metadata()["round"] == trial.round


def test_median_mean_and_deviation_are_those_of_pyperf_and_scipy():
    trials = [noisy(0.01, number=i) for i in range(3)]
    (benchmark,) = suite_of(*trials)
    ours = measured(trials)
    medians = [scipy.stats.quantile(series, 0.5).item() for series in ours.values()]
    described = scipy.stats.describe(medians)
    assert benchmark.mean() == pytest.approx(described.mean, rel=1e-12)
    assert benchmark.stdev() == pytest.approx(described.variance**0.5, rel=1e-9)
    assert benchmark.median() == pytest.approx(stats.median(ours).value, rel=1e-12)


def test_pyperf_finds_hardly_more_differences_between_equal_cases_than_its_level_says():
    """Rounds differ by 3 %, and the steps in them by 5 %: they are not independent."""
    draw = random.Random(0)

    def values(number: int) -> tuple[float, ...]:
        rounds = (
            noisy(0.01 * draw.lognormvariate(0, 0.03), number=i, seed=number) for i in range(5)
        )
        (benchmark,) = suite_of(*rounds)
        return benchmark.get_values()

    found = [is_significant(values(2 * i), values(2 * i + 1))[0] for i in range(200)]
    assert sum(found) <= 0.1 * len(found)


def test_the_command_writes_what_pyperf_stats_agrees_on(dpbench, tmp_path):
    trials = [noisy(0.0123 * factor, number=i) for i, factor in enumerate((1.0, 1.1, 1.3))]
    stored(tmp_path / "dpbench.db", *trials)
    assert dpbench("export", "pyperf", "--output", "suite.json") == (0, "", "")
    said = run_pyperf("stats", tmp_path / "suite.json")
    lines = map(json.loads, dpbench("export", "jsonl")[1].splitlines())
    series = {
        line["round"]: [step["seconds"] for step in line["steps"] if not step["warmup"]]
        for line in lines
    }
    medians = [statistics.median(seconds) for seconds in series.values()]

    def figure(pattern: str) -> list[float]:
        return [
            float(value) * UNITS[unit]
            for value, unit in re.findall(r"([\d.]+) (sec|ms|us|ns)", _line(said, pattern))
        ]

    digits = {"abs": 0.5 * 0.1e-3 * (1 + 1e-9)}  # pyperf prints 12.3 ms +- 0.4 ms
    assert figure(r"Median \+- MAD") == [
        pytest.approx(stats.median(series).value, **digits),
        pytest.approx(scipy.stats.median_abs_deviation(medians), **digits),
    ]
    assert figure(r"Mean \+- std dev") == [
        pytest.approx(scipy.stats.describe(medians).mean, **digits),
        pytest.approx(scipy.stats.describe(medians).variance ** 0.5, **digits),
    ]
    assert _line(said, "Number of warmup per run").endswith(" 5")
    assert _line(said, "Number of value per run").endswith(" 1")
    assert "4.5" in _line(said, "Total duration"), "the setup's seconds"


def _line(text: str, pattern: str) -> str:
    (found,) = [line for line in text.splitlines() if re.match(rf"\s*{pattern}", line)]
    return found


@pytest.mark.parametrize(("factor", "word", "code"), [(1.5, "slower", 1), (1 / 1.5, "faster", 0)])
def test_pyperf_and_dpbench_compare_agree_on_a_clear_difference(
    dpbench, tmp_path, factor, word, code
):
    for file, scale in (("a", 1.0), ("b", factor)):
        stored(
            tmp_path / f"{file}.db",
            *(noisy(0.01 * scale, number=i, seed=ord(file)) for i in range(3)),
        )
        assert (
            dpbench("export", "pyperf", "--store", f"{file}.db", "--output", f"{file}.json")[0] == 0
        )
    ours = dpbench("compare", "a.db", "b.db")
    assert (ours[0], compared(ours[1])[0].split()[0]) == (code, word)
    theirs = run_pyperf("compare_to", tmp_path / "a.json", tmp_path / "b.json")
    assert re.search(rf"([\d.]+)x {word}", theirs), theirs
    # above 1: faster; pyperf turns it round
    ratio = float(re.search(r"([\d.]+)×", ours[1]).group(1))
    assert float(re.search(rf"([\d.]+)x {word}", theirs).group(1)) == pytest.approx(
        max(ratio, 1 / ratio), rel=0.05
    )


def test_a_suite_names_each_case_and_leaves_out_what_may_not_be_shown():
    other, limit = replace(DP, model="lstm"), replace(DP, options=(("role", "limit"),))
    suite = suite_of(
        noisy(0.01),
        noisy(0.02, case=other),
        noisy(0.03, case=limit),
        noisy(9.0, number=1, verified=Verified.NO),
        Trial(case=replace(DP, model="vgg16"), status=Status.OOM),
        noisy(0.04, case=other, source=Source.PREDICTED),
        noisy(0.05, case=other),
    )
    assert {
        bench.get_name(): (len(bench.get_runs()), round(bench.median(), 2)) for bench in suite
    } == {
        "mlp dp[reference] x2 batch 64": (1, 0.01),
        "lstm dp[reference] x2 batch 64": (
            1,
            0.05,
        ),  # a round that was measured again counts by its last trial
        "mlp dp[reference] x2 batch 64 options=role:limit": (1, 0.03),
        "lstm dp[reference] x2 batch 64 predicted": (1, 0.04),
    }
    said = {bench.get_name(): bench.get_metadata()["labels"] for bench in suite}
    (labels,) = (labels for name, labels in said.items() if name.endswith(" predicted"))
    assert labels == "PREDICTED EXPERIMENTAL CPU-ONLY"
    assert said["mlp dp[reference] x2 batch 64"] == "MEASURED CPU-ONLY"


def test_a_suites_metadata_has_the_facts_of_the_host_without_its_name():
    facts = {
        **PROVENANCE,
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "scipy": "1.17"},
        "gpus": {"driver": "550\n.54", "gpus": [{"name": "NVIDIA A100"}, {"name": "NVIDIA A100"}]},
        "dpbench": {"version": "0.1.0", "commit": "abc", "dirty": True},
        "command": "dpbench run",
    }
    text = export.pyperf("f" * 32, facts, [noisy(0.01)], labels)
    assert "secret-host" not in text
    found = pyperf.BenchmarkSuite.loads(text).get_metadata()
    assert {
        "dpbench_run": "f" * 32,
        "platform": "Linux x86_64",
        "cpu_model_name": "EPYC",
        "cpu_count": 2,
        "python_version": "3.11.7",
        "torch_version": "2.13.0",
        "gpus": "2x NVIDIA A100",
        "gpu_driver": "550 .54",
        "dpbench_version": "0.1.0",
        "dpbench_commit": "abc (dirty)",
    }.items() <= found.items()
    start, _ = pyperf.BenchmarkSuite.loads(text).get_dates()
    assert start.isoformat() == "2023-11-14T22:13:20"


def test_a_run_that_measured_nothing_is_no_suite(dpbench, tmp_path):
    stored(tmp_path / "dpbench.db", Trial(case=DP, status=Status.FAILED), provenance={})
    code, out, err = dpbench("export", "pyperf")
    assert (code, out) == (64, "")
    assert "no measured trial" in err


# -- Parquet


def test_without_pyarrow_the_error_names_the_extra(dpbench, tmp_path, monkeypatch):
    stored(tmp_path / "dpbench.db", made())

    def missing(*_: object, **__: object) -> None:
        raise ImportError("no pyarrow")

    # a blocked import would stay in pandas, and later tests of this process would lack pyarrow
    monkeypatch.setattr(pd.DataFrame, "to_parquet", missing)
    code, out, err = dpbench("export", "parquet", "--output", "steps.parquet")
    assert (code, out, err.count("\n")) == (64, "", 1)
    assert "torch-dpbench[parquet]" in err
    assert not (tmp_path / "steps.parquet").exists()


def test_parquet_has_a_row_a_step_whose_phases_sum_to_it(dpbench, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
    from pyarrow import parquet

    limit = replace(DP, model="lstm", options=(("role", "limit"),), device_ids=(1, 0))
    first = stored(
        tmp_path / "dpbench.db", made(), made(limit, number=1), Trial(case=DP, status=Status.OOM)
    )
    second = stored(tmp_path / "dpbench.db", made(number=2, spans=()))
    assert dpbench("export", "parquet", "--all", "--output", "steps.parquet") == (0, "", "")
    found = parquet.read_table(tmp_path / "steps.parquet").to_pandas()
    assert found["run_id"].tolist() == [first] * 12 + [second] * 6
    assert found["step"].tolist() == [*range(6)] * 3
    assert found["warmup"].tolist() == [True, True, False, False, False, False] * 3
    assert found["seconds"].tolist() == [step.seconds for step in made().steps] * 3
    assert found["round"].tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert set(found["labels"]) == {"MEASURED CPU-ONLY"}
    phases = found[[f"phase_{phase}_s" for phase in (*Phase, "unattributed")]]
    assert phases.sum(axis=1).tolist() == pytest.approx(found["seconds"].tolist())
    assert (phases >= 0).all().all()
    assert found["phase_optimizer_s"].iloc[3] == pytest.approx(0.08 * 0.002)
    assert found["phase_unattributed_s"].tolist()[12:] == found["seconds"].tolist()[12:]
    assert set(found["model"]) == {"mlp", "lstm"}
    row = found[found["model"] == "lstm"].iloc[0]
    assert [pair.tolist() for pair in row["options"]] == [["role", "limit"]]
    assert row["device_ids"].tolist() == [1, 0]
    assert set(found["verified"]) == {made().verified}
    assert {field.name for field in CASE_FIELDS} <= set(found)
