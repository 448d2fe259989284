"""The command that checks dpbench on fake GPUs: its stages, their outcomes and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakegpu import check
from tests.fakegpu.check import Stage
from tests.marked import marked, patience


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check, "LOGS", tmp_path / "logs")
    return tmp_path / "logs"


def python(code: str, limit_s: float = 60, **more: object) -> Stage:
    return Stage((sys.executable, "-c", code), limit_s, **more)  # type: ignore[arg-type]


def test_one_failed_stage_fails_all_and_its_log_ends_on_the_screen(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.check({"good": python("print('fine')")})
    stages = {
        "bad": python("print('first'); print('last words'); raise SystemExit(3)"),
        "good": python("print('fine')"),
        "slow": python("import time; time.sleep(60)", 0.2),
    }
    assert not check.check(stages)
    said = capsys.readouterr().out
    assert "FAILED with exit code 3" in said
    assert "not done within" in said
    assert "last words" in said
    assert (logs / "bad.log").read_text() == "first\nlast words\n"


def test_each_stage_has_gpus_of_its_own_and_its_variables(logs: Path) -> None:
    code = "import os; print(os.environ['FAKECUDA_MACHINE'], os.environ['FAKECUDA_SEED'])"
    stages = {name: python(code, environment={"FAKECUDA_SEED": name}) for name in ("1", "2")}
    assert check.check(stages)
    machines, seeds = zip(
        *((logs / f"{name}.log").read_text().split() for name in stages), strict=True
    )
    assert len(set(machines)) == 2
    assert seeds == ("1", "2")


def test_gpus_that_are_not_fake_are_checked_only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(check.nvml, "describe", lambda: {"driver": "580.65.06"})
    monkeypatch.setattr(check, "check", lambda stages: ran.append([*stages]) or True)
    assert check.main(["gpu"]) == 2
    assert not ran
    assert check.main(["gpu", "--anyway"]) == 0
    monkeypatch.setattr(check.nvml, "describe", lambda: {"driver": "580.00.fake"})
    assert check.main(["deferred-drawn", "--seed", "7"]) == 0
    assert ran == [["gpu"], ["deferred-drawn"]]
    assert check.stages(7)["deferred-drawn"].environment["FAKECUDA_SEED"] == "7"


INTERRUPTED = """
import subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tests.fakegpu import check

folder, when = sys.argv[1:]
waits = check.Stage((sys.executable, "-c", "import time; time.sleep(300)"), 60)


class Late(subprocess.Popen):
    def __init__(self, *given, stdout, **named):
        name = Path(stdout.name).stem
        time.sleep(0.5 if name == "second" else 0)
        super().__init__(*given, stdout=stdout, **named)
        print(name, flush=True)


class Submitting(ThreadPoolExecutor):
    def submit(self, *given):
        future = super().submit(*given)
        time.sleep(1 if when == "submitting" else 0)
        return future


subprocess.Popen = Late
check.ThreadPoolExecutor = Submitting
check.LOGS = Path(folder)
check.stages = lambda seed: {
    "first": replace(waits, alone=when == "alone"), "second": replace(waits, alone=when == "alone")
}
sys.exit(check.main(["--anyway"]))
"""


@pytest.mark.parametrize("when", ["alone", "submitting", "starting", "running"])
def test_an_interrupted_check_leaves_no_process(when: str, logs: Path) -> None:
    """Stages run one at a time, or together; the second starts half a second late."""
    command = [sys.executable, "-c", INTERRUPTED, str(logs), when]
    with (
        marked() as mark,
        subprocess.Popen(
            command, cwd=check.ROOT, env=os.environ | mark.env, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout
        for awaited in ("first", "second") if when == "running" else ("first",):
            assert awaited in iter(lambda: process.stdout.readline().strip(), "")
        process.terminate()
        assert process.wait(patience(10)) != 0
        assert mark.settles() == ""


def test_each_file_of_gpu_tests_is_in_one_stage() -> None:
    """A stage without a file would run all tests."""
    tests = [
        {part.partition("::")[0] for part in stage.command if part.startswith("tests/")}
        for name, stage in check.stages(3).items()
        if "pytest" in stage.command
        and name not in ("deferred-2", "deferred-drawn", "clock")
        and not name.endswith("-2.11")
    ]
    assert all(tests)
    assert sum(map(len, tests)) == len(set().union(*tests))
    assert {
        "tests/gpu/test_one_gpu.py",
        "tests/doctor/test_probe.py",
        "tests/engine/torch_suite/test_comm.py",
    } <= (set().union(*tests))


def test_the_stages_of_an_earlier_torch_run_on_it_without_numbers() -> None:
    earlier = {
        name: stage for name, stage in check.stages(3).items() if stage.command[0] != sys.executable
    }
    assert {*earlier} == {"profile-2.11", "clock-2.11"}
    for stage in earlier.values():
        assert stage.command[0] == str(check.BEFORE)
        assert stage.environment["FAKECUDA_NUMERICS"] == "0"
        files = [one.partition("::")[0] for one in stage.command if one.startswith("tests/")]
        assert files
        assert all((check.ROOT / file).exists() for file in files)


def test_a_stage_whose_torch_is_not_installed_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "BEFORE", tmp_path / "bin" / "python")
    with pytest.raises(SystemExit):
        check.main(["clock-2.11", "--anyway"])
    assert "make test-gpu" in capsys.readouterr().err
