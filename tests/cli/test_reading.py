"""The output of a finished run, and of compare, export, report and list on stored runs."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

from dpbench.records import Case, Phase, Span, Status, Step, Trial, Verified, registry, schedule
from dpbench.records.estimate import Doubt
from dpbench.store import Identity, Store
from tests import commands
from tests.amounts import amounts
from tests.exported import compared, is_error, strict

PHASES = {*(phase.value for phase in Phase), "unattributed"}
WEAK = (
    "run",
    "--models",
    "mlp",
    "--strategies",
    "single,dp",
    "--devices",
    "1,2",
    "--batch-per-device",
    "8",
)


@pytest.fixture(scope="module")
def weak(once):
    """A finished weak-scaling run, and the output of the command."""

    def run(path):
        with commands.folder(path) as folder:
            return path, folder.do(*WEAK, "--rounds", "2", "--budget", "120")

    path, done = once("weak", run)
    with commands.folder(path) as folder:
        yield folder, done


# -- run


def test_a_run_prints_answers_and_table_to_stdout_and_all_else_to_stderr(weak):
    folder, done = weak
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (answer,) = (line for line in lines if line.startswith("mlp: "))
    assert lines[lines.index(answer) + 1].strip().startswith("Cannot tell: ")
    assert amounts(lines[lines.index(answer) + 1])[:2] == ["2", "3"], "rounds, of the least number"
    assert lines[0].split()[:4] == ["model", "strategy", "devices", "batch"]
    assert len([line for line in lines if line.startswith("mlp ")]) == 3
    assert "warning" not in done.stdout + done.stderr
    assert "round 1" not in done.stdout
    (second,) = (line for line in done.stderr.splitlines() if line.startswith("round 2, "))
    assert amounts(second)[:2] == ["2", "4"], "the round, and the trials"
    (remarks,) = (line for line in lines if "dpbench explain --run" in line)
    assert int(amounts(remarks)[0]) > 0
    assert "\x1b" not in done.stdout + done.stderr, "no colours where no terminal is"
    assert "Traceback" not in done.stderr
    page = folder.path / "reports" / "latest" / "index.html"
    assert page.stat().st_size > 1000
    assert str(folder.store.name) in done.stderr


def test_weak_scaling_multiplies_the_batch_keeps_one_single_and_says_weak(dpbench, weak):
    folder, _ = weak
    cases = [json.loads(text) for (text,) in folder.query("SELECT DISTINCT case_json FROM trial")]
    found = sorted((c["strategy"], c.get("devices", 1), c["batch_size"]) for c in cases)
    assert found == [("dp", 1, 8), ("dp", 2, 16), ("single", 1, 8)]
    table = csv.DictReader(io.StringIO(dpbench("export", "csv", "--store", folder.store)[1]))
    two = next(row for row in table if (row["devices"], row["batch_size"]) == ("2", "16"))
    assert (two["scaling"], two["speedup_withheld"]) == ("weak", "too few rounds")
    with Store.read(folder.store) as store:
        trials = store.trials()
    medians = {}
    for strategy, devices in (("single", 1), ("dp", 2)):
        medians[strategy] = {
            t.round: pd.Series([s.seconds for s in t.steps if not s.warmup]).median()
            for t in trials
            if (t.case.strategy, t.case.devices) == (strategy, devices)
        }
    ratios = pd.Series({r: medians["single"][r] / medians["dp"][r] for r in medians["dp"]})
    assert len(ratios) == 2, "of two rounds the centre is their geometric mean"
    adjusted = 2 * ratios.prod() ** 0.5
    assert float(two["speedup_value"]) == pytest.approx(adjusted)


# -- a store made by hand

FAST, SLOW = 0.001, 0.003


def fill(
    path: Path,
    seconds: float,
    *,
    noise: float = 0.0,
    model: str = "mlp",
    status: Status = Status.OK,
    rounds=3,
) -> str:
    generator = random.Random(seconds)
    case = Case(model=model, strategy="dp", devices=2, batch_size=64, schedule="reference")
    with Store.create(path) as store:
        run_id, _ = store.begin_run(
            Identity(str(time.time_ns()), "h", "c"), rounds=rounds, provenance={}
        )
        for number in range(rounds):
            level = seconds * (1 + noise * generator.uniform(-1, 1))
            steps = tuple(Step(level * (50 if i < 3 else 1), i < 3, 1.0 + i) for i in range(23))
            spans = tuple(
                Span(i, Phase.FORWARD, 0, "host", 1.0 + i - level / 2, 1.0 + i) for i in range(23)
            )
            trial = Trial(
                case=case,
                round=number,
                status=status,
                verified=Verified.BITWISE,
                steps=steps,
                spans=spans,
            )
            store.end_trial(store.begin_trial(run_id, case, number), trial)
        store.end_run(run_id)
    return run_id


def test_comparing_a_run_with_itself_finds_no_difference(dpbench, weak):
    folder, _ = weak
    code, out, err = dpbench("compare", folder.store, folder.store)
    lines = compared(out)
    verdicts = {line.split()[0] for line in lines}
    assert len(lines) == 3
    assert verdicts <= {"same", "undecided"}
    assert code == (3 if "undecided" in verdicts else 0)
    assert re.fullmatch(r"note: .* same run, \w{8}\n", err)


@pytest.mark.parametrize(
    ("before", "after", "noise", "expected", "verdict"),
    [
        (FAST, SLOW, 0.001, 1, "slower"),
        (SLOW, FAST, 0.001, 0, "faster"),
        (FAST, FAST, 0.0, 0, "same"),
        (FAST, FAST * 1.02, 0.5, 3, "undecided"),
        (FAST, FAST * 1.002, 0.0001, 0, "same"),
    ],
)
def test_compare_tells_slower_faster_same_and_undecided_by_words_and_exit_code(
    dpbench, tmp_path, before, after, noise, expected, verdict
):
    stores = tmp_path / "a.db", tmp_path / "b.db"
    for store, seconds in zip(stores, (before, after), strict=True):
        fill(store, seconds, noise=noise)
    code, out, err = dpbench("compare", *stores)
    assert code == expected, out + err
    (line,) = compared(out)
    assert line.split()[0] == verdict
    if noise > 0.1:
        (one,) = json.loads(dpbench("compare", *stores, "--json")[1])["cases"]
        assert one["ratio"]["withheld"] == Doubt.WIDTH
        assert amounts(one["reason"]) == ["4"]
        assert one["reason"] in " ".join(out.split())
    else:
        assert float(re.search(r"([\d.]+)×", line).group(1)) == pytest.approx(
            before / after, rel=0.01 + 2 * noise
        )
    assert "mlp dp[reference] x2 batch 64" in line


def test_compare_takes_runs_of_one_store_by_the_beginning_of_their_ids(dpbench, tmp_path):
    first, second = (fill(tmp_path / "dpbench.db", seconds) for seconds in (FAST, SLOW))
    assert dpbench("compare", first[:10], second[:10])[0] == 1
    assert dpbench("compare", second[:10], first[:10])[0] == 0
    last = is_error(*dpbench("compare", first[:10], "zzz"))
    assert "zzz" in last
    assert first[:8] in last


def test_one_slower_case_among_faster_ones_is_worse(dpbench, tmp_path):
    for name, (mlp, lstm) in (("a.db", (FAST, SLOW)), ("b.db", (SLOW, FAST))):
        fill(tmp_path / name, mlp)
        fill(tmp_path / name, lstm, model="lstm")
        # the newest run is what a file stands for, so both models must be in it
    with Store.read(tmp_path / "a.db") as store:
        assert len(store.runs()) == 2
    assert dpbench("compare", tmp_path / "a.db", tmp_path / "b.db")[0] == 0, (
        "only lstm is in the newest run"
    )


@pytest.mark.parametrize("other", [{"model": "lstm"}, {"status": Status.FAILED}])
def test_runs_with_nothing_in_common_cannot_be_compared(dpbench, tmp_path, other):
    fill(tmp_path / "a.db", FAST)
    fill(tmp_path / "b.db", FAST, **other)
    last = is_error(*dpbench("compare", tmp_path / "a.db", tmp_path / "b.db"))
    assert "no measured case in common" in last


def test_a_run_that_is_not_there_or_not_alone_is_named_with_those_that_are(dpbench, tmp_path):
    first, second = (fill(tmp_path / "dpbench.db", seconds) for seconds in (FAST, SLOW))
    last = is_error(*dpbench("export", "jsonl", "--run", "no-such"))
    assert "no-such" in last
    assert first[:8] in last
    assert second[:8] in last
    newest = dpbench("export", "jsonl")[1].splitlines()
    chosen = dpbench("export", "jsonl", "--run", first)[1].splitlines()
    everything = dpbench("export", "jsonl", "--all")[1].splitlines()
    assert (len(newest), len(chosen), len(everything)) == (3, 3, 6)
    assert newest != chosen
    assert everything == chosen + newest


# -- export and list


def test_jsonl_has_the_documented_schema_and_phases_that_sum_to_each_step(dpbench, weak):
    folder, _ = weak
    code, out, err = dpbench("export", "jsonl", "--store", folder.store)
    assert (code, err) == (0, "")
    lines = [strict(line) for line in out.splitlines()]
    assert len(lines) == 6
    for line in lines:
        documented = {
            "run_id",
            "case",
            "source",
            "status",
            "reason",
            "verified",
            "steps",
            "memory",
            "provenance",
        }
        assert (
            documented
            <= set(line)
            <= documented
            | {
                "round",
                "schema",
                "setup",
                "failed_device",
                "labels",
            }
        )
        assert (line["source"], line["status"], line["verified"]) == ("measured", "ok", "bitwise")
        assert {"model", "strategy", "devices", "batch_size"} <= set(line["case"])
        assert line["steps"]
        assert any(step["warmup"] is True for step in line["steps"])
        for step in line["steps"]:
            assert set(step) == {"seconds", "warmup", "phases"}
            assert set(step["phases"]) <= PHASES
            assert "unattributed" in step["phases"]
            assert all(seconds >= 0 for seconds in step["phases"].values())
            assert sum(step["phases"].values()) == pytest.approx(step["seconds"], rel=1e-9)
        assert line["memory"]
        assert all(
            set(m) == {"device", "peak_bytes", "source", "phase", "kind"} for m in line["memory"]
        )
        assert line["provenance"]["torch"]


def test_a_failed_trial_is_exported_too(dpbench, tmp_path):
    case = Case(model="mlp", strategy="single", batch_size=8)
    with Store.create(tmp_path / "dpbench.db") as store:
        run_id, _ = store.begin_run(Identity("p", "h", "c"), rounds=1, provenance={})
        store.end_trial(
            store.begin_trial(run_id, case, 0),
            Trial(case=case, status=Status.OOM, reason="out\nof 'memory'"),
        )
    (line,) = dpbench("export", "jsonl")[1].splitlines()
    found = strict(line)
    assert (found["status"], found["reason"], found["steps"], found["memory"]) == (
        "oom",
        "out\nof 'memory'",
        [],
        [],
    )
    code, out, _ = dpbench("export", "csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (code, row["status"], row["reason"]) == (0, "oom", "out\nof 'memory'")


def test_csv_loads_in_pandas_with_a_row_a_case(dpbench, weak, tmp_path):
    folder, _ = weak
    code, _, err = dpbench(
        "export", "csv", "--store", folder.store, "--output", tmp_path / "out.csv"
    )
    assert (code, err) == (0, "")
    table = pd.read_csv(tmp_path / "out.csv")
    assert len(table) == 3
    assert set(table["strategy"]) == {"single", "dp"}
    assert (table["step_low"] <= table["step_value"]).all()
    assert (table["step_value"] <= table["step_high"]).all()
    phases = table[[column for column in table if column.startswith("phase_")]].sum(axis=1)
    assert phases.tolist() == pytest.approx(table["mean_value"].tolist())
    text = dpbench("export", "csv", "--store", folder.store)[1]
    assert text == (tmp_path / "out.csv").read_text()


def test_csv_has_the_same_columns_whatever_was_run(dpbench, weak, tmp_path):
    fill(tmp_path / "one.db", FAST, status=Status.FAILED)
    heads = [
        dpbench("export", "csv", "--store", s)[1].splitlines()[0]
        for s in (weak[0].store, tmp_path / "one.db")
    ]
    assert heads[0] == heads[1]
    columns = heads[0].split(",")
    assert {f"phase_{name}_s" for name in PHASES} <= set(columns)
    assert {"run_id", "busy_7_s", "memory_0_bytes"} <= set(columns)


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_exported_rows_say_their_run_and_runs_do_not_mix(dpbench, tmp_path, format):
    first, second = (fill(tmp_path / "dpbench.db", seconds) for seconds in (FAST, SLOW))
    out = dpbench("export", format, "--all")[1]
    if format == "jsonl":
        assert [strict(line)["run_id"] for line in out.splitlines()] == [first] * 3 + [second] * 3
    else:
        rows = list(csv.DictReader(io.StringIO(out)))
        assert [(row["run_id"], float(row["step_value"])) for row in rows] == [
            (first, FAST),
            (second, SLOW),
        ]


@pytest.mark.parametrize(
    "arguments",
    [("export", "csv", "--output"), ("export", "jsonl", "--output"), ("report", "--report")],
)
def test_an_output_that_cannot_be_written_is_an_error_of_one_line(dpbench, tmp_path, arguments):
    fill(tmp_path / "dpbench.db", FAST)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").touch()
    code, out, err = dpbench(*arguments, tmp_path / "folder")
    assert "folder" in is_error(code, out, err, expected=code)
    assert code in (2, 64)


def test_the_report_is_written_and_named_and_markdown_goes_to_stdout(dpbench, weak, tmp_path):
    folder, done = weak
    code, out, err = dpbench(
        "report", "--store", folder.store, "--report", tmp_path / "deep" / "page.html"
    )
    assert (code, err) == (0, "")
    page = Path(out.strip())
    assert page == tmp_path / "deep" / "page.html"
    headline = "cannot tell: 2 rounds, but at least 3 are needed"
    assert headline in done.stdout.lower()
    assert headline in page.read_text().lower()
    code, out, err = dpbench("report", "--md", "--store", folder.store)
    assert (code, err) == (0, "")
    assert headline in out.replace("\\", "").lower()
    assert "|" in out


@pytest.mark.parametrize("kind", ["models", "strategies", "schedules", "metrics"])
def test_list_prints_one_name_first_on_each_line_without_a_heading(kind):
    done = subprocess.run(
        [*commands.COMMAND, "list", kind],
        cwd=commands.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(names) == len(set(names)) > 0
    assert all(line == line.rstrip() and not line[0].isspace() for line in done.stdout.splitlines())
    assert all(re.fullmatch(r"[\w{}]+", name) for name in names), names
    assert all(len(line.split()) > 2 for line in done.stdout.splitlines()), (
        "each has a word on what it is"
    )
    if kind in ("models", "strategies"):
        assert names == registry.names(kind)


def test_list_schedules_says_what_each_of_them_changes(dpbench):
    lines = {line.split()[0]: line for line in dpbench("list", "schedules")[1].splitlines()}
    assert list(lines) == [*schedule.Schedule, *schedule.SELECTED]
    assert all(lines[name].endswith(effect) for name, effect in schedule.EFFECTS.items())


def test_list_runs_names_every_run_with_commit_cases_and_status(dpbench, tmp_path):
    first, second = (fill(tmp_path / "other.db", seconds) for seconds in (FAST, SLOW))
    with Store.create(tmp_path / "other.db") as store:
        facts = {"dpbench": {"commit": "0123456789abcdef", "dirty": True}}
        third, _ = store.begin_run(Identity("p", "h", "c"), rounds=1, provenance=facts)
        store.begin_trial(third, Case(model="mlp", strategy="single", batch_size=8), 0)
        store.end_run(third, "interrupted")
    code, out, err = dpbench("list", "runs", "--store", tmp_path / "other.db")
    assert (code, err) == (0, "")
    ids, rest = zip(*((line.split()[0], line) for line in out.splitlines()), strict=True)
    assert list(ids) == [third[:12], second[:12], first[:12]]
    columns = [re.split("  +", line) for line in rest]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", columns[0][1])
    assert columns[0][2:] == ["012345678+", "1 case", "interrupted", "-", "mlp", "-", "-"]
    assert columns[1][2:] == ["no commit", "1 case", "finished", "-", "mlp", "-", "-"]


def test_list_runs_without_a_store_says_how_to_get_one(dpbench):
    assert "dpbench run" in is_error(*dpbench("list", "runs"), expected=2)


def test_every_metric_that_is_stored_is_listed(dpbench, weak):
    folder, _ = weak
    listed = {line.split()[0] for line in dpbench("list", "metrics")[1].splitlines()}
    patterns = [re.escape(name).replace(r"\{i\}", r"\d+") for name in listed]
    stored = {metric for (metric,) in folder.query("SELECT DISTINCT metric FROM series")}
    assert stored
    assert {
        metric for metric in stored if not any(re.fullmatch(p, metric) for p in patterns)
    } == set()
