"""The command line's laws: data on stdout, the rest on stderr, honest exit codes, errors that say the way out."""

import csv
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from dpbench.records import Case, Phase, Span, Status, Step, Trial, Verified, plan, registry, schedule
from dpbench.store import Store
from tests import commands
from tests.exported import command

PHASES = {*(phase.value for phase in Phase), "unattributed"}
WEAK = ("run", "--models", "mlp", "--strategies", "single,dp", "--devices", "1,2", "--batch-per-device", "8")


@pytest.fixture
def folder(tmp_path):
    with commands.folder(tmp_path) as folder:
        yield folder


@pytest.fixture
def dpbench(tmp_path, monkeypatch, capfd):
    """Call the command line in this process, in a folder of its own; return exit code, stdout and stderr."""
    return command(tmp_path, monkeypatch, capfd)


@pytest.fixture(scope="module")
def weak(tmp_path_factory):
    """A finished weak-scaling run, and what the command printed."""
    with commands.folder(tmp_path_factory.mktemp("weak")) as folder:
        yield folder, folder.do(*WEAK, "--rounds", "2", "--budget", "60")


def is_error(code, out, err, expected=64):
    """Check that an error is one line, or click's usage and a message, with the right exit code; return it."""
    assert code == expected, err
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith(("Usage: ", "error: ")), err
    assert err.startswith("Usage: ") or err.count("\n") == 1, err
    return err[err.lower().index("error: ") :]


# -- run


def test_a_run_prints_table_and_verdict_to_stdout_and_all_else_to_stderr(weak):
    folder, done = weak
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["model", "strategy", "devices", "batch"]
    assert len([line for line in lines if line.startswith("mlp ")]) == 3
    assert lines[-1].startswith("Not enough rounds for the speed-up of dp on mlp: more rounds (--rounds N")
    assert "warning" not in done.stdout
    assert "round 1" not in done.stdout
    assert "[6/6]" in done.stderr
    assert "warning: " in done.stderr
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


def test_a_case_that_fails_is_stored_shown_and_makes_the_exit_code_2(folder):
    done = folder.do(
        "run", "--models", "mlp", "--model", "tests.hungry:RAISES", "--strategies", "single,torch_dp",
        "--batch-sizes", "8", "--devices", "1", "--rounds", "1",
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    table = {tuple(line.split()[:2]): line for line in done.stdout.splitlines()}
    assert " failed" in table["tests.hungry:RAISES", "single"]
    assert " skipped" in table["mlp", "torch_dp"]
    assert " bitwise" in table["mlp", "single"]
    assert "planted in forward" in done.stderr
    assert sorted(status for (status,) in folder.query("SELECT status FROM trial")) == [
        "failed",
        "failed",
        "ok",
        "skipped",
    ]


def test_models_that_cannot_be_imported_built_or_stepped_fail_once_before_the_run(folder):
    (folder.path / "broken.py").write_text("import no_such_module\n")
    done = folder.do(
        "run", "--model", "broken:NET", "--model", "tests.hungry:RAISES", "--model", "tests.hungry:KILLED",
        "--model", "tests.hungry:TWICE_THE_ROWS", "--strategies", "single,dp", "--batch-sizes", "8", "--devices", "2",
    )  # fmt: skip
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if "will not be measured" in line]
    assert len(told) == 4
    for model, why in (
        ("broken:NET", "No module named 'no_such_module'"),
        ("tests.hungry:RAISES", "planted in forward"),
        ("tests.hungry:KILLED", "killed by SIGKILL"),
        ("tests.hungry:TWICE_THE_ROWS", "must return 8 rows"),
    ):
        assert any(
            line.startswith(f"{model} (small) failed its check (failed), so its 2 case(s) will not be measured: ")
            and why in line
            for line in told
        )
    assert folder.query("SELECT status, round, count(*) FROM trial GROUP BY status, round") == [("failed", 0, 8)]


def test_a_run_in_which_nothing_was_measured_says_why_and_makes_the_exit_code_2(folder):
    done = folder.do(
        "run", "--models", "mlp", "--strategies", "torch_dp", "--batch-sizes", "8", "--devices", "2", "--rounds", "1",
        "--device-kind", "cpu",
    )  # fmt: skip
    assert done.returncode == 2
    assert "No result: 1 case without a verified step." in done.stdout
    assert "torch.nn.DataParallel needs an accelerator" in done.stderr
    assert folder.query("SELECT DISTINCT status FROM trial") == [("skipped",)]


@pytest.mark.slow
def test_more_devices_than_rows_are_measured_and_shown_by_every_reader(folder, dpbench):
    done = folder.do("run", "--models", "mlp", "--devices", "2", "--batch-sizes", "1", "--strategies", "single,dp,ddp")
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("mlp ")]) == 3
    for reader in (("report",), ("explain",), ("export", "csv"), ("export", "pyperf"), ("list", "runs")):
        assert dpbench(*reader)[0] == 0, reader


def test_a_model_of_the_current_directory_is_found_by_package_module_and_name(folder):
    package = folder.path / "mine" / "nets"
    package.mkdir(parents=True)
    for part in (package.parent, package):
        (part / "__init__.py").write_text("print('imported')\n")
    (package / "tiny.py").write_text("""
import torch
from torch import nn
class Net:
    @staticmethod
    def build(size):
        return nn.Linear(4, 2)
    @staticmethod
    def batch(n, seed, size):
        g = torch.Generator().manual_seed(seed)
        return torch.randn(n, 4, generator=g), torch.randn(n, 2, generator=g)
    loss = staticmethod(nn.functional.mse_loss)
""")
    (folder.path / "torch.py").write_text("raise SystemExit('a file of the user hides the real torch')\n")
    done = folder.do(
        "run", "--model", "mine.nets.tiny:Net", "--strategies", "single,dp", "--devices", "2", "--batch-sizes", "8",
        "--rounds", "1", "--limit", "60",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert folder.query("SELECT DISTINCT status, verified FROM trial") == [("ok", "bitwise")]
    assert "imported" not in done.stdout


def test_a_budget_leaves_the_rest_skipped_with_the_reason_and_exit_code_0(folder):
    done = folder.do(
        "run", "--models", "mlp", "--strategies", "single,dp", "--devices", "1,2,4", "--rounds", "40", "--budget", "3"
    )
    assert done.returncode == 0, done.stderr
    rows = folder.query("SELECT status, reason FROM trial")
    assert len(rows) == 4 * 40
    assert {status for status, _ in rows} == {"ok", "skipped"}
    assert all("--budget" in reason for status, reason in rows if status == "skipped")


def test_a_full_disk_ends_the_run_with_one_line_and_leaves_a_sound_store(folder):
    code = """
import resource, signal, sys
from dpbench import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *WEAK, "--rounds", "4"],
        cwd=folder.path, env=folder.env, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert not re.search("^Traceback", done.stderr, re.MULTILINE), "a worker's last words may have one, we have none"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "dpbench.db" in last
    assert folder.query("PRAGMA integrity_check") == [("ok",)]
    assert folder.mark.settles(0) == ""


@pytest.mark.slow
def test_a_closed_pipe_ends_a_run_cleanly_says_so_and_leaves_it_to_be_resumed(folder):
    arguments = ("run", "--models", "mlp", "--strategies", "single,dp", "--devices", "1,2", "--rounds", "1")
    reader, writer = os.pipe()
    with (folder.path / "out").open("w") as out:
        process = subprocess.Popen(
            [*commands.COMMAND, *arguments], cwd=folder.path, env=folder.env, stdout=out, stderr=writer,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        assert process.wait(60) == 128 + signal.SIGPIPE
    assert folder.query("SELECT status FROM run") == [("interrupted",)]
    assert (folder.path / "out").read_text() == ""
    done = folder.do(*arguments)
    assert done.returncode == 0, done.stderr
    assert "resuming run" in done.stderr
    assert folder.query("SELECT status FROM run") == [("finished",)]


def test_a_run_whose_stdout_is_closed_still_leaves_its_report_and_says_where_it_is(folder):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*commands.COMMAND, "run", *CHEAP], cwd=folder.path, env=folder.env, stdout=writer, stderr=subprocess.PIPE,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    ((run_id,),) = folder.query("SELECT id FROM run WHERE status='finished'")
    assert done.stderr.splitlines()[-1].endswith(f"`dpbench report --run {run_id[:8]}` shows it")
    assert (folder.path / "reports" / "latest" / "index.html").exists()


# -- usage

CHEAP = ("--models", "mlp", "--strategies", "single", "--batch-sizes", "8", "--rounds", "1")
COMMANDS = ("run", "rnu", "list", "export", "compare", "predict")
LISTS = {
    "run": ("--models", "--strategies", "--schedules", "--devices", "--device-ids", "--batch-sizes",
            "--batch-per-device", "--retry"),
    "predict": ("--models", "--strategies", "--schedules", "--devices", "--batch-sizes", "--batch-per-device"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            ([command, option, empty], [option, "empty list", "at least one"])
            for command, options in LISTS.items()
            for option in options
            for empty in ("", " , ")
        ),
        (["run", "--models", "resnet81"], ["resnet81", "did you mean 'resnet18'", "mlp"]),
        (["run", "--strategies", "dpp"], ["dpp", "did you mean 'dp'", "ddp"]),
        (["run", "--devices", "0"], ["devices", "0"]),
        (["run", "--devices=-1"], ["devices", "-1"]),
        (["run", "--devices", "x"], ["--devices", "x", "1,2,4"]),
        (["run", "--devices", "1.5"], ["--devices", "1.5"]),
        (["run", "--batch-sizes", "0"], ["batch size", "0"]),
        (["run", "--batch-sizes", "64", "--batch-per-device", "8"], ["strong", "weak"]),
        (["run", "--device-kind", "cpu", "--device-ids", "0,1"], ["--device-ids", "CPU"]),
        (["run", "--device-kind", "cpu", "--placement", "colocated"], ["colocated", "spread"]),
        (["run", "--device-kind", "tpu"], ["tpu", "cpu", "cuda"]),
        (["run", "--size", "huge"], ["huge", "small", "full"]),
        (["run", "--rounds", "0"], ["--rounds", "0"]),
        (["run", "--budget", "-5"], ["--budget"]),
        (["run", "--retry", "fialed", *CHEAP], ["fialed", "failed"]),
        (["run", "--strategies", "dp", "--schedules", "refrence"], ["refrence", "reference"]),
        (["run", "--ladder", "--schedules", "cached"], ["--ladder", "leave out --schedules"]),
        (["run", "--ladder", "--strategies", "dp"], ["--ladder", "leave out --strategies"]),
        (["run", "--ladder", "--devices", "1"], ["ladder", "--devices 2"]),
        (["run", "--schedules", "workers=pool,workers=serial"], ["workers twice", "';'", "option twice"]),
        (["run", "--schedules", "pool;graphs=on", "--device-kind", "cpu"], ["graphs=on", "needs cuda"]),
        (["run", "--device-kind", "emulated", "--device-ids", "0"], ["emulated", "leave out --device-ids"]),
        (["run", "--device-kind", "emulated", "--placement", "colocated"], ["colocated", "emulated", "spread"]),
        (["run", "--no-such-option"], ["--no-such-option"]),
        (["run", "surplus"], ["surplus"]),
        (["rnu"], ["rnu"]),
        (["list", "modles"], ["modles", "models"]),
        (["list"], ["models"]),
        (["export"], ["jsonl"]),
        (["export", "xml"], ["xml", "jsonl"]),
        (["compare", "only-one"], ["AFTER"]),
    ],
    ids=lambda value: "-".join(word.strip("-") for word in value[:3]) if value[0] in COMMANDS else "",
)
def test_a_usage_error_says_what_and_the_way_out_and_starts_nothing(dpbench, tmp_path, arguments, words):
    last = is_error(*dpbench(*arguments))
    assert all(word in last for word in words), last
    assert list(tmp_path.iterdir()) == [], "nothing is made before all arguments are checked"


@pytest.fixture
def planned(dpbench, monkeypatch):
    """Call `dpbench run`; return the cases that it would measure."""
    from dpbench.measure import run as runner

    def call(*arguments):
        seen = []
        monkeypatch.setattr(runner, "run", lambda cases, *rest, **options: seen.extend(cases) or sys.exit(0))
        assert dpbench("run", *arguments)[0] == 0
        return seen

    return call


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["reference,workers=pool,replicas=cached"], ["reference", "cached"]),
        (["workers=serial;replicas=cached"], ["workers=serial", "replicas=cached"]),
        (["workers=serial", "replicas=cached"], ["workers=serial", "replicas=cached"]),
        (["replicas=cached, workers=pool , pool"], ["cached", "pool"]),
        (["cached,workers=pool,replicas=cached"], ["cached"]),
    ],
)
def test_schedules_are_cut_at_commas_but_not_between_switches(planned, given, expected):
    options = [word for text in given for word in ("--schedules", text)]
    cases = planned("--models", "mlp", "--strategies", "dp", "--devices", "2", *options)
    assert [case.schedule for case in cases] == expected


def test_the_ladder_takes_other_axes_and_its_defaults_are_two_models_on_the_most_devices(planned):
    cases = planned("--ladder", "--device-kind", "cpu", "--batch-sizes", "32")
    assert {case.model for case in cases} == {"mlp", "resnet18"}
    assert len({case.devices for case in cases if case.strategy == "dp"}) == 1
    assert {case.batch_size for case in cases if case.strategy == "dp"} == {32}
    cases = planned("--ladder", "--models", "lstm", "--devices", "1,2,3", "--batch-sizes", "12", "--size", "full")
    assert cases == plan.ladder(models=["lstm"], devices=[2, 3], batch_sizes=[12], size="full")


def test_without_a_command_the_help_is_shown_as_a_usage_error(dpbench):
    code, out, err = dpbench()
    assert code == 64
    assert "run" in out + err


@pytest.mark.parametrize(
    "arguments", [("report",), ("report", "--md"), ("export", "jsonl"), ("export", "csv"), ("compare", "a", "b")]
)
def test_without_a_store_the_reading_commands_say_how_to_get_one(dpbench, tmp_path, arguments):
    last = is_error(*dpbench(*arguments), expected=2)
    assert "dpbench.db" in last
    assert "dpbench run" in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("run", "--models", "mlp"), ("report",), ("export", "csv")])
@pytest.mark.parametrize("kind", ["directory", "text"])
def test_a_store_that_is_none_is_an_error_of_one_line(dpbench, tmp_path, arguments, kind):
    wrong = tmp_path / "wrong"
    wrong.mkdir() if kind == "directory" else wrong.write_text("a,b\n" * 100)
    assert "wrong" in is_error(*dpbench(*arguments, "--store", wrong), expected=2)


# -- a store made by hand

FAST, SLOW = 0.001, 0.003


def fill(
    path: Path, seconds: float, *, noise: float = 0.0, model: str = "mlp", status: Status = Status.OK, rounds=3
) -> str:
    generator = random.Random(seconds)
    case = Case(model=model, strategy="dp", devices=2, batch_size=64, schedule="reference")
    with Store.create(path) as store:
        run_id, _ = store.begin_run(plan=str(time.time_ns()), host="h", code="c", rounds=rounds, provenance={})
        for number in range(rounds):
            level = seconds * (1 + noise * generator.uniform(-1, 1))
            steps = tuple(Step(level * (50 if i < 3 else 1), i < 3, 1.0 + i) for i in range(23))
            spans = tuple(Span(i, Phase.FORWARD, 0, "host", 1.0 + i - level / 2, 1.0 + i) for i in range(23))
            trial = Trial(case=case, round=number, status=status, verified=Verified.BITWISE, steps=steps, spans=spans)
            store.end_trial(store.begin_trial(run_id, case, number), trial)
        store.end_run(run_id)
    return run_id


def test_comparing_a_run_with_itself_finds_no_difference(dpbench, weak):
    folder, _ = weak
    code, out, err = dpbench("compare", folder.store, folder.store)
    verdicts = {line.split()[0] for line in out.splitlines()}
    assert len(out.splitlines()) == 3
    assert verdicts <= {"same", "undecided"}
    assert code == (3 if "undecided" in verdicts else 0)
    assert err == ""


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
    (line,) = out.splitlines()
    assert line.split()[0] == verdict
    if noise > 0.1:
        assert "not enough rounds (its interval spans more than a factor of 4; more rounds" in line
    else:
        assert float(re.search(r"([\d.]+)x", line).group(1)) == pytest.approx(before / after, rel=0.01 + 2 * noise)
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
    assert dpbench("compare", tmp_path / "a.db", tmp_path / "b.db")[0] == 0, "only lstm is in the newest run"


@pytest.mark.parametrize("other", [{"model": "lstm"}, {"status": Status.FAILED}])
def test_runs_with_nothing_in_common_cannot_be_compared(dpbench, tmp_path, other):
    fill(tmp_path / "a.db", FAST)
    fill(tmp_path / "b.db", FAST, **other)
    last = is_error(*dpbench("compare", tmp_path / "a.db", tmp_path / "b.db"))
    assert "a.db" in last
    assert "common" in last


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


def strict(text: str) -> object:
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_jsonl_has_the_documented_schema_and_phases_that_sum_to_each_step(dpbench, weak):
    folder, _ = weak
    code, out, err = dpbench("export", "jsonl", "--store", folder.store)
    assert (code, err) == (0, "")
    lines = [strict(line) for line in out.splitlines()]
    assert len(lines) == 6
    for line in lines:
        documented = {"run_id", "case", "source", "status", "reason", "verified", "steps", "memory", "provenance"}
        assert documented <= set(line) <= documented | {"round", "setup", "failed_device"}
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
        assert all(set(m) == {"device", "peak_bytes", "source", "phase", "kind"} for m in line["memory"])
        assert line["provenance"]["torch"]


def test_a_failed_trial_is_exported_too(dpbench, tmp_path):
    case = Case(model="mlp", strategy="single", batch_size=8)
    with Store.create(tmp_path / "dpbench.db") as store:
        run_id, _ = store.begin_run(plan="p", host="h", code="c", rounds=1, provenance={})
        store.end_trial(
            store.begin_trial(run_id, case, 0), Trial(case=case, status=Status.OOM, reason="out\nof 'memory'")
        )
    (line,) = dpbench("export", "jsonl")[1].splitlines()
    found = strict(line)
    assert (found["status"], found["reason"], found["steps"], found["memory"]) == ("oom", "out\nof 'memory'", [], [])
    code, out, _ = dpbench("export", "csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (code, row["status"], row["reason"]) == (0, "oom", "out\nof 'memory'")


def test_csv_loads_in_pandas_with_a_row_a_case(dpbench, weak, tmp_path):
    folder, _ = weak
    code, _, err = dpbench("export", "csv", "--store", folder.store, "--output", tmp_path / "out.csv")
    assert (code, err) == (0, "")
    table = pd.read_csv(tmp_path / "out.csv")
    assert len(table) == 3
    assert set(table["strategy"]) == {"single", "dp"}
    assert (table["step_low"] <= table["step_value"]).all()
    assert (table["step_value"] <= table["step_high"]).all()
    phases = table[[column for column in table if column.startswith("phase_")]].sum(axis=1)
    assert phases.tolist() == pytest.approx(table["step_value"].tolist())
    text = dpbench("export", "csv", "--store", folder.store)[1]
    assert text == (tmp_path / "out.csv").read_text()


def test_csv_has_the_same_columns_whatever_was_run(dpbench, weak, tmp_path):
    fill(tmp_path / "one.db", FAST, status=Status.FAILED)
    heads = [dpbench("export", "csv", "--store", s)[1].splitlines()[0] for s in (weak[0].store, tmp_path / "one.db")]
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
        assert [(row["run_id"], float(row["step_value"])) for row in rows] == [(first, FAST), (second, SLOW)]


@pytest.mark.parametrize(
    "arguments", [("export", "csv", "--output"), ("export", "jsonl", "--output"), ("report", "--html")]
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
    code, out, err = dpbench("report", "--store", folder.store, "--html", tmp_path / "deep" / "page.html")
    assert (code, err) == (0, "")
    page = Path(out.strip())
    assert page == tmp_path / "deep" / "page.html"
    verdict = done.stdout.splitlines()[-1]
    assert verdict.split(";")[0][:40] in page.read_text()
    code, out, err = dpbench("report", "--md", "--store", folder.store)
    assert (code, err) == (0, "")
    assert verdict.split(";")[0] in out.replace("\\", "")
    assert "|" in out


@pytest.mark.parametrize("kind", ["models", "strategies", "schedules", "metrics"])
def test_list_prints_one_name_first_on_each_line_without_a_heading(kind):
    done = subprocess.run(
        [*commands.COMMAND, "list", kind], cwd=commands.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(names) == len(set(names)) > 0
    assert all(line == line.rstrip() and not line[0].isspace() for line in done.stdout.splitlines())
    assert all(re.fullmatch(r"[\w{}]+", name) for name in names), names
    assert all(len(line.split()) > 2 for line in done.stdout.splitlines()), "each has a word on what it is"
    if kind in ("models", "strategies"):
        assert names == registry.names(kind)


def test_list_schedules_says_the_switch_what_it_removes_and_what_it_needs(dpbench):
    lines = {line.split()[0]: line for line in dpbench("list", "schedules")[1].splitlines()}
    assert list(lines) == [*schedule.RUNGS, schedule.FASTEST]
    for name, (switch, position) in schedule.LADDER.items():
        assert re.search(rf" {switch}={position}; removes \w+ \w+", lines[name])
    assert [name for name, line in lines.items() if "needs cuda" in line] == ["graphs"]
    assert [name for name, line in lines.items() if "tolerance" in line] == ["bf16_comm"]


def test_list_runs_names_every_run_with_commit_cases_and_status(dpbench, tmp_path):
    first, second = (fill(tmp_path / "other.db", seconds) for seconds in (FAST, SLOW))
    with Store.create(tmp_path / "other.db") as store:
        facts = {"dpbench": {"commit": "0123456789abcdef", "dirty": True}}
        third, _ = store.begin_run(plan="p", host="h", code="c", rounds=1, provenance=facts)
        store.begin_trial(third, Case(model="mlp", strategy="single", batch_size=8), 0)
        store.end_run(third, "interrupted")
    code, out, err = dpbench("list", "runs", "--store", tmp_path / "other.db")
    assert (code, err) == (0, "")
    ids, rest = zip(*((line.split()[0], line) for line in out.splitlines()), strict=True)
    assert list(ids) == [third[:12], second[:12], first[:12]]
    assert re.search(r"  \d{4}-\d\d-\d\d \d\d:\d\d UTC  012345678\+  1 case  interrupted$", rest[0])
    assert re.search("no commit +1 case  finished$", rest[1])


def test_list_runs_without_a_store_says_how_to_get_one(dpbench):
    assert "dpbench run" in is_error(*dpbench("list", "runs"), expected=2)


def test_every_metric_that_is_stored_is_listed(dpbench, weak):
    folder, _ = weak
    listed = {line.split()[0] for line in dpbench("list", "metrics")[1].splitlines()}
    patterns = [re.escape(name).replace(r"\{i\}", r"\d+") for name in listed]
    stored = {metric for (metric,) in folder.query("SELECT DISTINCT metric FROM series")}
    assert stored
    assert {metric for metric in stored if not any(re.fullmatch(p, metric) for p in patterns)} == set()


# -- the help


HEAVY = ("torch", "pandas", "numpy", "matplotlib", "rich", "scipy", "jinja2", "psutil", "pynvml", "sqlite3")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["--version"], ["list", "models"], ["list", "schedules"]]
)
def test_help_and_lists_import_nothing_heavy(arguments):
    code = f"""
import sys
from dpbench import cli
try:
    cli.main({arguments!r})
except SystemExit as end:
    assert not end.code
sys.stderr.write(" ".join(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=commands.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr == ""


def test_the_help_loads_few_modules():
    """Those of click and of the standard library make about a hundred; each costs about a millisecond."""
    code = """
import sys
before = len(sys.modules)
from dpbench import cli
try:
    cli.main(["--help"])
except SystemExit as end:
    assert not end.code
sys.stderr.write(str(len(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=commands.ROOT, capture_output=True, text=True, check=True)
    assert int(done.stderr) <= 150


def test_help_names_every_command_and_the_first_step(dpbench):
    code, out, err = dpbench("--help")
    assert (code, err) == (0, "")
    assert all(re.search(rf"^  {name} ", out, re.M) for name in ("run", "report", "list", "export", "compare"))
    assert "dpbench run" in out
