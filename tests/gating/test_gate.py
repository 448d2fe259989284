"""The gate from end to end: the command, the fixture and the action find a slower step.

The change makes the layers work five times as long, so that few pairs decide while other tests run
beside them; reports/gate-alarms has the changes of a few per cent. Those marked
`rest` run with --all.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks.scripts import action_steps
from dpbench.analysis import comparison
from dpbench.gating import judge, pairs, sides
from tests.gating.projects import BUDGET_S, LOADING, SCRIPT, commit, git, project, slow_down

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
WAITS = """\
import os
import sys

with open(os.environ["STARTED"], "a") as started:
    started.write(f"{os.getpid()} ")
"""
LIMIT = "60%"
"""A step beside other tests is known to be unchanged only to this share."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = project(tmp_path / "project")
    (folder / "data").mkdir()
    (folder / "data" / "kept").write_text("kept")
    yield folder
    assert (folder / "data" / "kept").read_text() == "kept"
    assert len(git(folder, "worktree", "list").splitlines()) == 1


def do(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def gate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    budget = f"--budget={BUDGET_S}"
    return do(folder, "-m", "dpbench", "gate", "--base", "base", budget, *words)


@pytest.mark.alone
@pytest.mark.rest
@pytest.mark.parametrize(("times", "code", "answer"), [(1, 0, "not slower"), (5, 1, "slower")])
def test_a_model(repository: Path, times: int, code: int, answer: str) -> None:
    slow_down(repository, times)
    done = gate(repository, "--models", "model.py:net", "--limit", LIMIT, "--json")
    assert done.returncode == code, done.stderr
    told = json.loads(done.stdout)
    assert told["answer"] == answer
    (found,) = told["findings"]
    assert found["answer"] == answer
    assert (found["wall"]["value"] > 1.5) is (times > 1)
    assert found["memory"]["value"] == pytest.approx(1, abs=0.1)
    if times > 1:
        assert found["phase"] in ("forward", "backward")
        assert found["phase_s"] > 0


@pytest.mark.alone
def test_a_script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # each process loads torch: three pairs, and an interval that holds with half
    monkeypatch.setattr(judge, "LOOKS", (3,))
    monkeypatch.setattr(comparison, "SURE", 0.5)
    slow_down(repository, 5)
    work = sides.watched("train.py", ["100000"])
    told = pairs.decided("base", [work], budget_s=BUDGET_S, folder=repository)
    (found,) = told.findings
    assert (told.answer, found.pairs) == (judge.Answer.SLOWER, 3)
    assert told.worse
    assert found.phase in ("forward", "backward")
    assert found.phase_s > 0


@pytest.mark.alone
@pytest.mark.rest
@pytest.mark.parametrize(
    ("seconds", "limit", "answer"),
    [("0.30", 0.15, "slower"), ("0.26", 0.15, "not slower")],
)
def test_a_loader_with_workers(
    repository: Path, monkeypatch: pytest.MonkeyPatch, seconds: str, limit: float, answer: str
) -> None:
    monkeypatch.setattr(judge, "LOOKS", (3,))
    monkeypatch.setattr(comparison, "SURE", 0.5)
    commit(repository, {"load.py": LOADING.replace("SECONDS", "0.25")}, tag="loading")
    (repository / "load.py").write_text(LOADING.replace("SECONDS", seconds))
    work = sides.watched("load.py", [])
    told = pairs.decided("loading", [work], limit=limit, budget_s=BUDGET_S, folder=repository)
    (found,) = told.findings
    assert found.answer == answer
    assert found.wall.value == pytest.approx(float(seconds) / 0.25, abs=0.05)


def test_a_script_that_is_too_short_says_so(repository: Path) -> None:
    done = gate(repository, "--script", "train.py", "--", "3")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_a_base_that_fails_says_why(repository: Path) -> None:
    commit(repository, {"model.py": "raise RuntimeError('no such luck')"}, tag="broken")
    git(repository, "checkout", "base", "--", "model.py")
    done = do(repository, "-m", "dpbench", "gate", "--base", "broken", "--models", "model.py:net")
    assert done.returncode == 2
    assert "no such luck" in done.stderr
    assert "broken" in done.stderr


def test_both_sides_may_not_run_the_same_code(repository: Path, tmp_path: Path) -> None:
    loads = "import importlib.util as u, sys\nspec = u.spec_from_file_location('model', {!r})\n"
    rest = "m = u.module_from_spec(spec)\nsys.modules['model'] = m\nspec.loader.exec_module(m)\n"
    script = (repository / "train.py").read_text()
    fixed = loads.format(str(repository / "model.py")) + rest + script
    commit(repository, {"fixed.py": fixed}, tag="fixed")
    done = do(
        repository, "-m", "dpbench", "gate", "--base", "fixed", "--script", "fixed.py", "--", "9999"
    )
    assert done.returncode == 64
    assert str(repository / "model.py") in done.stderr


def test_wrong_usage_is_told(repository: Path) -> None:
    for words in ([], ["--models", "model.py:net", "--script", "train.py"], ["--limit", "no"]):
        assert gate(repository, *words).returncode == 64
    assert gate(repository, "--models", "model.py:net", "--strategies", "ddp").returncode == 64


@pytest.mark.alone
@pytest.mark.rest
def test_the_fixture_finds_a_slower_step(repository: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "dpbench.gating.plugin", "test_step.py"]
    assert do(repository, *words).returncode == 0
    slow_down(repository, 5)
    done = do(repository, *words, "--dpbench-base", "base")
    assert done.returncode == 1, done.stdout
    assert "slower" in done.stdout


@pytest.mark.rest
def test_the_fixture_skips_a_new_test(repository: Path) -> None:
    (repository / "test_step.py").rename(repository / "test_new.py")
    words = ["-m", "pytest", "-q", "-p", "dpbench.gating.plugin", "test_new.py"]
    done = do(repository, *words, "--dpbench-base", "base")
    assert done.returncode == 0
    assert "1 skipped" in done.stdout


@pytest.mark.alone
@pytest.mark.parametrize("times", [1, 5])
def test_the_action(repository: Path, tmp_path: Path, times: int) -> None:
    slow_down(repository, times)
    outside = tmp_path / "outside"
    outside.mkdir()
    given = {"base": "base", "model": "model.py:net", "limit": LIMIT, "budget": str(BUDGET_S)}
    codes = action_steps.run(repository, outside, **given)
    assert codes == ([0, 0, 0] if times == 1 else [0, 0, 1])
    summary = (outside / "GITHUB_STEP_SUMMARY").read_text()
    answer = "slower" if times > 1 else "not slower"
    assert f"answer={answer}\n" in (outside / "GITHUB_OUTPUT").read_text()
    assert answer in summary
    _, made = (outside / "calls").read_text().splitlines()
    assert "POST" in made
    assert "2 changed files" not in summary


@pytest.mark.alone
@pytest.mark.rest
def test_the_action_updates_its_comment_and_takes_a_script(
    repository: Path, tmp_path: Path
) -> None:
    slow_down(repository, 5)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "ids").write_text("42\n")
    script = {"base": "base", "script": "train.py 100000", "budget": str(BUDGET_S)}
    assert action_steps.run(repository, outside, **script) == [0, 0, 1]
    _, made = (outside / "calls").read_text().splitlines()
    assert "PATCH" in made
    assert "/42" in made


def test_the_action_fails_if_the_gate_does(repository: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    codes = action_steps.run(repository, outside, base="nowhere", model="model.py:net")
    assert codes == [0, 0, 64]
    # an earlier comment must not go on to speak for this commit
    assert "failed with 64" in (outside / "GITHUB_STEP_SUMMARY").read_text()
    assert "POST" in (outside / "calls").read_text()


@pytest.mark.alone
@pytest.mark.rest
def test_the_action_leaves_out_what_the_base_has_gained(repository: Path, tmp_path: Path) -> None:
    git(repository, "checkout", "-b", "change")
    slow_down(repository, 5)
    commit(repository, {})
    git(repository, "checkout", "main")
    commit(repository, {"model.py": "raise RuntimeError"})
    git(repository, "checkout", "change")
    outside = tmp_path / "outside"
    outside.mkdir()
    given = {"base": "main", "model": "model.py:net", "limit": LIMIT, "budget": str(BUDGET_S)}
    assert action_steps.run(repository, outside, **given) == [0, 0, 1]


def test_each_job_and_each_work_has_its_comment(repository: Path, tmp_path: Path) -> None:
    markers = []
    for job, model in (("a", "model.py:net"), ("b", "model.py:net"), ("a", "model.py:other")):
        outside = tmp_path / f"{job}-{model}"
        outside.mkdir()
        action_steps.run(repository, outside, job, base="nowhere", model=model)
        markers.append((outside / "dpbench-gate.md").read_text().splitlines()[0])
    assert len({*markers}) == len(markers)
    assert all(marker.startswith("<!-- dpbench gate ") for marker in markers)


def test_the_action_takes_one_line(repository: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    assert action_steps.run(repository, outside, base="base", script="train.py 1\n2") == [64]


def test_a_comment_that_is_refused_fails_nothing(repository: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "ids").unlink(missing_ok=True)
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    (comment,) = (one for one in steps if one["name"] == "Comment")
    (outside / "dpbench-gate.md").write_text("<!-- dpbench gate 1 -->\n")
    (outside / "gh").write_text("#!/bin/sh\nexit 1\n")
    (outside / "gh").chmod(0o755)
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", comment["run"]],
        env={**os.environ, "PATH": f"{outside}{os.pathsep}{os.environ['PATH']}"}
        | {"RUNNER_TEMP": str(outside), "COMMENTS": "a", "COMMENT": "b"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("::warning::")


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_gate_that_is_interrupted_leaves_nothing(repository: Path, number: int) -> None:
    (repository / "train.py").write_text(SCRIPT.replace("import sys\n", WAITS, 1))
    commit(repository, {}, tag="waits")
    mine = {**os.environ, "PYTHONPATH": str(ROOT), "STARTED": str(repository / "data" / "pids")}
    words = ["-m", "dpbench", "gate", "--base", "waits", "--script", "train.py", "--", "9999"]
    with subprocess.Popen([sys.executable, *words], cwd=repository, env=mine) as process:
        deadline = time.monotonic() + 120
        pids: list[str] = []
        while len(pids) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
            path = repository / "data" / "pids"
            pids = path.read_text().split() if path.exists() else []
        process.send_signal(number)
        process.wait(60)
    assert len(pids) == 2
    assert process.returncode not in (0, 1, 3)
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)
    (repository / "data" / "pids").unlink()


def test_git_is_needed(repository: Path) -> None:
    shutil.copytree(repository, repository.parent / "plain", ignore=shutil.ignore_patterns(".git"))
    done = gate(repository.parent / "plain", "--models", "model.py:net")
    assert done.returncode == 64
