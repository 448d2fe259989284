"""Runs as commands: ended in every way and started again, hanging, or started twice."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from dpbench.records import Status
from dpbench.store import Store
from tests import commands
from tests.marked import patience
from tests.measure.test_run import slots

PARENT = [
    "measure.run",
    "records.plan",
    "store",
    "measure.server",
    "hardware.provenance",
    "api.progress",
    "cli",
    "hardware.foreign_load",
    "measure.checks",
]


def test_the_parent_of_the_workers_never_loads_torch():
    code = f"""
import importlib, sys
for name in {PARENT}:
    importlib.import_module(f"dpbench.{{name}}")
    if "torch" in sys.modules:
        sys.exit(f"dpbench.{{name}} loads torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=commands.ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


ENDS = {"interrupt": 130, "interrupt group": 130, "terminate": 143, "kill": -9, "kill group": -9}
"""The ways in which a command is ended, and its exit status."""


def refuses_a_second(folder, first, command):
    """Check that the command of a run that `first` is at is refused.

    `first` can go on afterwards.
    """
    first.send_signal(signal.SIGSTOP)  # or it might finish before the second one has begun
    second = subprocess.run(
        [*commands.COMMAND, *command],
        cwd=folder.path,
        env=folder.env,
        capture_output=True,
        text=True,
        check=False,
    )
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert second.stdout == ""
    assert second.stderr.startswith("error: ")
    assert str(first.pid) in second.stderr
    assert second.stderr.count("\n") == 1


@pytest.mark.slow
def test_however_it_is_ended_the_same_command_completes_the_run_once_without_repeating_a_trial(
    folder,
):
    """The command is ended in five ways, each time while a rank hangs that only SIGKILL ends.

    There are five cases. Each command but the first completes a trial before. The last one goes on
    while the same command is refused.
    """
    axes = ("--strategies", "ddp", "--devices", "2", "--batch-sizes", "16,20,24,28,32")
    command = (
        "run",
        "--model",
        "tests.hungry:STUBBORN_WHEN_TOLD",
        *axes,
        "--rounds",
        "1",
        "--store",
        "acceptance.db",
    )
    folder.store, passing = folder.path / "acceptance.db", folder.path / "passing"
    kept: list[tuple] = []
    for number, (how, code) in enumerate(ENDS.items()):
        passing.write_text(str(min(number, 1)))  # trials that pass before one hangs
        process = folder.start(*command)
        commands.poll(lambda: passing.read_text() == "-1", 60)
        assert folder.wait_for(process, number), folder.err
        assert len(folder.mark.alive()) >= 6, (
            "the command, its sampler, the server, the worker, two ranks"
        )
        ended = commands.end(process, how)
        assert folder.mark.settles(0) == "", f"{how}: these have outlived the command"
        rows = folder.final()
        assert rows[: len(kept)] == kept, "the final trials have changed"
        kept = rows
        assert ended == code
        if "kill" not in how:
            assert list(folder.temporary.iterdir()) == [], "a temporary folder is left behind"
            # a run that is interrupted says how to go on
            assert "same command" in folder.err
            assert "Traceback" not in folder.err
    passing.write_text("1")
    last = folder.start(*command)
    assert folder.wait_for(last, len(kept)), folder.err
    refuses_a_second(folder, last, command)
    assert last.wait(patience(60)) == 0, folder.err
    assert f"which has {len(kept)} of 5 trials" in folder.err
    assert folder.final()[: len(kept)] == kept
    assert list(folder.temporary.iterdir()) == [], (
        "the next run removes what killed runs left, and leaves nothing"
    )
    assert folder.mark.settles(0) == ""
    with Store.read(folder.store) as store:
        (found,) = store.runs()
        trials = store.trials(found.id)
    assert found.status == "finished"
    assert len({trial.case for trial in trials}) == 5
    assert {trial.round for trial in trials} == {0}
    assert set(slots(trials).values()) == {1}
    assert len(trials) == 5
    assert {trial.status for trial in trials} == {Status.OK}
    assert {trial.verified for trial in trials} <= {"bitwise", "within_tolerance"}
    assert folder.query("SELECT count(*) FROM trial WHERE status='killed'")[0][0] <= 5
    assert folder.query("PRAGMA integrity_check") == [("ok",)]
