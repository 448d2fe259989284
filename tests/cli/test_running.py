"""`dpbench run` as a user starts it: tables on stdout, the rest on stderr, honest exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from dpbench.analysis.decision import Basis, Choice
from tests import commands
from tests.amounts import amounts
from tests.cli.test_reading import WEAK
from tests.marked import patience


@pytest.mark.usefixtures("one_server")
def test_a_case_that_fails_is_stored_shown_and_makes_the_exit_code_2(folder, dpbench):
    code, out, err = dpbench(
        "run",
        "--models",
        "mlp",
        "--model",
        "tests.hungry:RAISES",
        "--strategies",
        "single,torch_dp",
        "--batch-sizes",
        "8",
        "--devices",
        "1",
        "--rounds",
        "1",
    )
    assert code == 2
    assert "Traceback" not in err
    table = {tuple(line.split()[:2]): line for line in out.splitlines()}
    assert " failed" in table["tests.hungry:RAISES", "single"]
    assert " skipped" in table["mlp", "torch_dp"]
    assert " bitwise" in table["mlp", "single"]
    assert "planted in forward" in err
    assert sorted(status for (status,) in folder.query("SELECT status FROM trial")) == [
        "failed",
        "failed",
        "ok",
        "skipped",
    ]


TINY = """
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
"""


@pytest.fixture(scope="module")
def own_models(tmp_path_factory):
    """A run of a user's models, and its output: one can be measured, and four cannot."""
    with commands.folder(tmp_path_factory.mktemp("models")) as folder:
        package = folder.path / "mine" / "nets"
        package.mkdir(parents=True)
        for part in (package.parent, package):
            (part / "__init__.py").write_text("print('imported')\n")
        (package / "tiny.py").write_text(TINY)
        (folder.path / "broken.py").write_text("import no_such_module\nNET = None\n")
        (folder.path / "torch.py").write_text(
            "raise SystemExit('a file of the user hides the real torch')\n"
        )
        models = (
            "broken:NET",
            *(f"tests.hungry:{name}" for name in ("RAISES", "DIES", "TWICE_THE_ROWS")),
        )
        named = [word for model in (*models, "mine.nets.tiny:Net") for word in ("--model", model)]
        axes = (
            "--strategies",
            "single,dp",
            "--batch-sizes",
            "8",
            "--devices",
            "2",
            "--rounds",
            "1",
            "--limit",
            "60",
        )
        yield folder, folder.do("run", *named, *axes)


def test_models_that_cannot_be_imported_built_or_stepped_fail_once_before_the_run(own_models):
    folder, done = own_models
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if "will not be measured" in line]
    assert len(told) == 4
    for model, why in (
        ("broken:NET", "No module named 'no_such_module'"),
        ("tests.hungry:RAISES", "planted in forward"),
        ("tests.hungry:DIES", "killed by SIGABRT"),
        ("tests.hungry:TWICE_THE_ROWS", "must return 8 rows"),
    ):
        assert any(
            line.startswith(f"{model} (small) ") and amounts(line)[0] == "2" and why in line
            for line in told
        )
    rows = folder.query("SELECT case_json, status, round FROM trial")
    assert [row[1:] for row in rows if "mine.nets.tiny:Net" not in row[0]] == [("failed", 0)] * 8


def test_a_model_of_the_current_directory_is_found_by_package_module_and_name(own_models):
    folder, done = own_models
    rows = folder.query("SELECT case_json, status, verified FROM trial")
    assert [row[1:] for row in rows if "mine.nets.tiny:Net" in row[0]] == [("ok", "bitwise")] * 2, (
        done.stderr
    )
    assert "imported" not in done.stdout


@pytest.mark.slow
def test_a_full_disk_names_the_folder_and_the_variable_and_the_same_command_goes_on(folder):
    """The results of the first trial still fit on the disk."""
    passing = folder.path / "passing"
    command = (
        "run",
        "--model",
        "tests.hungry:FILLS_THE_DISK_WHEN_TOLD",
        "--strategies",
        "single",
        "--batch-sizes",
        "16,24",
        "--rounds",
        "1",
    )
    passing.write_text("1")
    done = folder.do(*command)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert str(folder.temporary) in error
    assert "TMPDIR" in error
    assert os.strerror(errno.ENOSPC) in error
    assert folder.query("SELECT status FROM run") == [("interrupted",)]
    kept = folder.final()
    assert [row[3] for row in kept] == ["ok"]
    assert list(folder.temporary.iterdir()) == []
    passing.write_text("99")
    assert folder.do(*command).returncode == 0, folder.err
    assert folder.query("SELECT status FROM run") == [("finished",)]
    assert folder.final()[:1] == kept
    assert [row[3] for row in folder.final()] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
def test_a_model_whose_processes_are_killed_fails_no_case_and_the_run_can_be_resumed(
    folder, dpbench
):
    axes = (
        "--model",
        "tests.hungry:KILLED",
        "--strategies",
        "single",
        "--batch-sizes",
        "8,16",
        "--rounds",
        "1",
    )
    code, _, err = dpbench("run", *axes)
    assert code == 2, err
    assert "will not be measured" not in err
    assert folder.query("SELECT status, round FROM trial") == [("killed", 0)] * 2
    assert all("SIGKILL" in reason for (reason,) in folder.query("SELECT reason FROM trial"))
    assert folder.query("SELECT status FROM run") == [("interrupted",)]
    dpbench("run", *axes)
    assert folder.query("SELECT status FROM run") == [("interrupted",)], (
        "the same command resumes the run"
    )
    assert folder.query("SELECT status, round FROM trial") == [("killed", 0)] * 4


@pytest.mark.usefixtures("one_server")
def test_a_run_in_which_nothing_was_measured_says_why_and_makes_the_exit_code_2(folder, dpbench):
    code, out, err = dpbench(
        "run",
        "--models",
        "mlp",
        "--strategies",
        "torch_dp",
        "--batch-sizes",
        "8",
        "--devices",
        "2",
        "--rounds",
        "1",
        "--device-kind",
        "cpu",
    )
    assert code == 2
    (answer,) = json.loads(dpbench("report", "--json")[1])["answers"]
    assert (answer["choice"], answer["basis"]) == (Choice.UNKNOWN, Basis.NO_RESULT)
    assert answer["headline"] in " ".join(out.split())
    assert "torch_dp on 2 " in answer["headline"]
    assert "torch.nn.DataParallel needs an accelerator" in err
    assert folder.query("SELECT DISTINCT status FROM trial") == [("skipped",)]


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
def test_more_devices_than_rows_are_measured_and_shown_by_every_reader(dpbench):
    case = (
        "--models",
        "mlp",
        "--devices",
        "2",
        "--batch-sizes",
        "1",
        "--strategies",
        "single,dp,ddp",
    )
    code, out, err = dpbench("run", *case, "--rounds", "1")
    assert code == 0, err
    assert len([line for line in out.splitlines() if line.startswith("mlp ")]) == 3
    for reader in (
        ("report",),
        ("explain",),
        ("export", "csv"),
        ("export", "pyperf"),
        ("list", "runs"),
    ):
        assert dpbench(*reader)[0] == 0, reader


@pytest.mark.usefixtures("one_server")
def test_the_same_command_goes_on_with_what_its_budget_left_out(folder, dpbench):
    # one case: of several, a slow machine may spend the budget before the first trial of the last
    case = ("--models", "mlp", "--strategies", "single", "--devices", "1")
    counts = []
    for _ in range(2):
        code, _, err = dpbench("run", *case, "--rounds", "100", "--budget", "4")
        assert code == 0, err
        assert "left out: " in err
        assert "the same command" in err
        counts += folder.query("SELECT count(*) FROM trial WHERE status='ok'")
    assert folder.query("SELECT DISTINCT status FROM trial") == [("ok",)]
    assert folder.query("SELECT status FROM run") == [("open",)]
    assert 0 < counts[0][0] < counts[1][0] < 100


def test_a_full_disk_ends_the_run_with_one_line_and_leaves_a_sound_store(folder):
    code = """
import resource, signal, sys
from dpbench import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *WEAK, "--rounds", "2"],
        cwd=folder.path,
        env=folder.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(100),
    )
    assert done.returncode == 2
    assert not re.search("^Traceback", done.stderr, re.MULTILINE), (
        "a worker's last words may have one, we have none"
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "dpbench.db" in last
    assert folder.query("PRAGMA integrity_check") == [("ok",)]
    assert folder.mark.settles(0) == ""


@pytest.mark.slow
def test_a_closed_pipe_ends_a_run_cleanly_or_its_table_alone_and_both_are_said(folder):
    """First stderr closes during the run, which is left to be resumed.

    The same command then has a closed stdout.
    """
    command = [
        *commands.COMMAND,
        "run",
        "--models",
        "mlp",
        "--strategies",
        "single,dp",
        "--devices",
        "2",
    ]
    command += ["--batch-sizes", "8", "--rounds", "1"]
    reader, writer = os.pipe()
    with (folder.path / "out").open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=folder.path,
            env=folder.env,
            stdout=out,
            stderr=writer,
            stdin=subprocess.DEVNULL,
        )
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        assert process.wait(patience(60)) == 128 + signal.SIGPIPE
    assert folder.query("SELECT status FROM run") == [("interrupted",)]
    assert folder.out == ""

    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command,
        cwd=folder.path,
        env=folder.env,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=patience(60),
    )
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "resuming run" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    ((run_id, status),) = folder.query("SELECT id, status FROM run")
    assert status == "finished"
    assert done.stderr.splitlines()[-1].endswith(f"`dpbench report --run {run_id[:8]}` shows it")
    assert (folder.path / "reports" / "latest" / "index.html").exists()
