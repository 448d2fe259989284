"""The page of the GPU check: claims, tests that ran, failures, no host name, none without GPUs."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scripts import gpu_check, gpu_claims
from dpbench.hardware import gpus, provenance
from tests.amounts import amounts

JUNIT = """<testsuites><testsuite>
<testcase name="test_a"/>
<testcase name="test_b"><failure message="assert 3 == 4&#10;where 3 = f()">long</failure></testcase>
<testcase name="test_c"><error message="fixture died"/></testcase>
<testcase name="test_d"><skipped message="needs 2 GPUs"/></testcase>
<testcase name="test_e"><skipped message="needs 2 GPUs"/></testcase>
</testsuite></testsuites>"""
SAID = "mlp: use ddp on 2 devices"
A2 = {"index": 0, "name": "NVIDIA A2", "memory_bytes": 16_000_000_000, "uuid": "GPU-1"}


def state_of(**stages: Any) -> dict[str, Any]:
    return {"left_out": [], **stages}


def test_the_page_names_machine_failures_and_run(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(JUNIT)
    nvidia = {"gpus": [A2], "driver": "570"}
    facts = provenance.collect(nvidia)
    state = state_of(
        facts=gpu_check.described(facts),
        tests={"tests/test_x.py": gpu_check.outcome(junit, "")},
        run={"options": "--rounds 3", "said": SAID},
    )
    found = gpu_check.page(state)
    assert "0: NVIDIA A2, 16,000,000,000 bytes" in found
    (counts,) = (line for line in found.splitlines() if " passed, " in line)
    assert re.findall(r"(\d) (\w+)", counts)[-3:] == [
        ("1", "passed"),
        ("2", "skipped"),
        ("2", "failed"),
    ]
    assert "skipped 2: needs 2 GPUs" in found
    assert re.findall(r"^FAILED (\w+): (.*)", found, re.M) == [
        ("test_b", "assert 3 == 4"),
        ("test_c", "fixture died"),
    ]
    assert f"dpbench run --rounds 3\n\n{SAID}" in found
    assert f"torch {provenance.version('torch')}" in found
    assert "not done yet: --stage truth" in found
    assert "GPU-1" not in found
    assert facts["host"]["name"] not in found
    assert "FAKE-GPU" not in found
    fakes = facts | {"gpus": nvidia | {"driver": "580.00.fake"}}
    assert "FAKE-GPU" in gpu_check.page(state_of(facts=gpu_check.described(fakes)))


CHECKED = {
    "test_one.py": """
import warnings
import pytest

@pytest.mark.gpu
def test_a_warning_of_this_build_fails_nothing():
    warnings.warn("only GPUs warn", FutureWarning)

@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
def test_on_two():
    pass

def test_without_a_mark():
    assert False
""",
    "test_lacking.py": "import not_installed_here  # pytest.mark.gpu",
    "test_none.py": "def test_without_a_mark():\n    assert False",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of tests in the place of the checkout, with its settings of pytest.

    The plug-in of the package pytest-timeout is missing.
    """
    settings = (gpu_check.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(settings, encoding="utf-8")
    (tmp_path / "tests").mkdir()
    for name, text in CHECKED.items():
        (tmp_path / "tests" / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:timeout -p no:cacheprovider")
    return tmp_path


def test_all_marked_tests_run_without_a_limit_and_what_needs_another_package_is_skipped(
    checkout: Path,
) -> None:
    state = state_of()
    assert gpu_check.tests(state, checkout, [])
    assert {*state["tests"]} == {"tests/test_one.py", "tests/test_lacking.py"}
    found = gpu_check.total(state)
    assert (found["passed"], found["failed"]) == (2, {})
    assert found["skipped"] == {"No module named 'not_installed_here'": 1}


def test_a_file_that_cannot_import_this_repository_is_a_failure(checkout: Path) -> None:
    (checkout / "tests" / "test_gone.py").write_text("import dpbench.gone  # mark.gpu")
    state = state_of()
    assert not gpu_check.tests(state, checkout, [])
    assert [*gpu_check.total(state)["failed"].values()] == ["collection failure"]


@pytest.mark.parametrize("why", ["none is marked", "pytest refuses its settings"])
def test_no_test_is_a_failure_with_the_last_line_of_pytest(checkout: Path, why: str) -> None:
    if why == "none is marked":
        (checkout / "tests" / "test_one.py").unlink()
        (checkout / "tests" / "test_lacking.py").unlink()
    else:
        (checkout / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = 3 = 4")
    state = state_of()
    assert not gpu_check.tests(state, checkout, [])
    said = "no test ran" if why == "none is marked" else "FAILED pytest: ERROR: "
    assert said in gpu_check.page(state)


def test_files_that_no_time_is_left_for_are_named_and_the_next_command_runs_them(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file of a command that does not end has failed: more time will not help it."""
    (checkout / "tests" / "test_hangs.py").write_text("import time; time.sleep(99)  # mark.gpu")
    found: dict[str, Any] = {
        "tests/test_one.py": {"passed": 1, "skipped": {}, "failed": {}},
        "tests/test_lacking.py": None,
    }
    limits = []

    def tested(file: str, limit_s: float, folder: Path) -> gpu_check.Outcome | None:
        limits.append(limit_s)
        return found.get(file, {"passed": 2, "skipped": {}, "failed": {}})

    monkeypatch.setattr(gpu_check, "tested", tested)
    monkeypatch.setattr(
        gpu_check, "marked", lambda: ["tests/test_one.py", "tests/test_lacking.py", "c"]
    )
    state = state_of()
    assert gpu_check.tests(state, checkout, ["tests/test_one.py"])
    assert state["left_out"] == ["tests/test_lacking.py", "c"]
    state = state_of()
    assert not gpu_check.tests(state, checkout, []), "two files have not run"
    assert state["left_out"] == ["tests/test_lacking.py", "c"]
    assert "another --stage tests: tests/test_lacking.py c" in gpu_check.page(state)
    assert not gpu_check.tests(state, checkout, [])
    assert state["left_out"] == []
    assert [*gpu_check.total(state)["failed"]] == ["tests/test_lacking.py"]
    assert gpu_check.total(state)["passed"] == 3
    assert gpu_check.tests(state, checkout, ["tests/test_one.py"]) is False
    assert max(limits) <= gpu_check.STAGE_S < 540


def test_what_does_not_end_is_stopped_with_all_that_it_has_started(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    late = f"import time; time.sleep(3); open({str(tmp_path / 'late')!r}, 'w')"
    command = [sys.executable, "-c", child, late]
    assert gpu_check.ended(command, 0.5, tmp_path / "log", tmp_path) is None
    assert gpu_check.ended([sys.executable, "-c", "1 / 0"], 30, tmp_path / "log", tmp_path) == 1
    assert gpu_check._last(tmp_path / "log") == "ZeroDivisionError: division by zero"
    time.sleep(4)
    assert not (tmp_path / "late").exists()


STOPPED = """
import signal, sys
from pathlib import Path
from benchmarks.scripts import gpu_check
from dpbench.hardware import gpus

def stage(state, folder):
    wait = "import sys, time; print('begun', flush=True); time.sleep(3); open(sys.argv[1], 'w')"
    gpu_check.ended([sys.executable, "-c", wait, sys.argv.pop()], 60, Path("log"), Path())

gpu_check.machine = stage
gpus.of_torch = lambda: gpus.TorchGpus(gpus=({"index": 0},))
gpu_check.main()
"""


def test_a_command_that_is_stopped_ends_the_process_of_its_stage(tmp_path: Path) -> None:
    late = tmp_path / "late"
    command = [sys.executable, "-c", STOPPED, "--stage", "facts", "page.txt", str(late)]
    environment = {**os.environ, "PYTHONPATH": str(gpu_check.ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        log = tmp_path / "log"
        while not (log.exists() and log.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 143
    time.sleep(4)
    assert not late.exists()


# -- claims

TRIAL = {
    "label": "single x1",
    "strategy": "single",
    "devices": 1,
    "round": 0,
    "status": "ok",
    "reason": "",
    "gpu": "NVIDIA H200",
    "labels": ["MEASURED"],
    "step_s": 0.010,
    "phases_s": {"forward": 0.0031, "backward": 0.006, "optimizer": 0.0002},
    "no_profile": "",
    "checks": ["gpu_clock", "throttling", "marks"],
    "marks": {"value": 0.002, "low": 0.001, "high": 0.003},
    "memory": [[0, "", "allocated", 1000], [0, "backward", "allocated", 1010]],
}
DP = {"label": "dp x2", "strategy": "dp", "devices": 2, "labels": ["COLOCATED"]}
EVIDENCE: dict[str, Any] = {
    "fake": False,
    "gpu": "NVIDIA H200",
    "tolerance_s": 1e-4,
    "trials": [TRIAL, {**TRIAL, **DP}],
    "paired": {"value": 0.02, "low": 0.01, "high": 0.03},
    "events_s": 0.4001,
    "host_s": 0.4,
    "spans_s": {"forward": 0.003, "backward": 0.006, "optimizer": 0.0002},
    "bare_s": 0.0099,
    "sampler": {"value": 0.001, "low": 0.0, "high": 0.002},
    "energy": {"counter_j": 3000.0, "integral_j": 3060.0, "seconds": 5.0},
    "profiled": {
        "single": {
            "forward": {"span_s": 0.003, "kernels_s": 0.0029},
            "backward": {"span_s": 0.006, "kernels_s": 0.005997},
            "optimizer": {"span_s": 0.0002, "kernels_s": 0.0001},
        }
    },
    "off_s": -4.1e-6,
    "withheld": "",
}
Place = tuple[str | int, ...]
WRONG: dict[str, list[tuple[Place, Any]]] = {
    "step_time": [(("events_s",), 0.4021), (("events_s",), 0.3979)],
    "plain_loop": [(("bare_s",), 0.0097)],
    "marks": [(("trials", 1, "marks"), {"value": 0.02, "low": 0.0101, "high": 0.03})],
    "sampler": [(("sampler",), {"value": 0.006, "low": 0.0051, "high": 0.007})],
    "phases_cover": [(("profiled", "single", "forward", "kernels_s"), 0.003021)],
    "phases_full": [
        (("profiled", "single", "backward", "kernels_s"), 0.005),
        (("spans_s", "backward"), 0.005),
    ],
    "ledger": [(("trials", 0, "phases_s", "forward"), 0.0032)],
    "profile": [
        (("off_s",), 6e-6),
        (("trials", 1, "no_profile"), "lost"),
        (("withheld",), "lost"),
        (("off_s",), None),
    ],
    "data_parallel": [
        (("paired",), {"value": 0.06, "low": 0.051, "high": 0.07}),
        (("paired",), {"value": -0.06, "low": -0.07, "high": -0.051}),
    ],
    "energy": [(("energy", "counter_j"), 2900.0)],
    "memory": [(("trials", 0, "memory", 1, 3), 1021)],
    "labels": [
        (("trials", 1, "labels"), ["MEASURED"]),
        (("trials", 0, "labels"), ["MEASURED", "FAKE-GPU"]),
        (("trials", 0, "gpu"), "NVIDIA A2"),
    ],
    "clocks": [(("trials", 1, "checks"), ["gpu_clock"])],
}
NUMBERS = {
    "step_time": "+0.02%",
    "marks": "single x1 +0.20% (+0.10% to +0.30%); dp x2 +0.20%",
    "phases_cover": "least margin +3.0 us in backward of single",
    "profile": "kernels are at most -4.1 us outside; dpbench tolerates 100 us",
    "energy": "-1.96% of 3060 J in 5.0 s",
    "memory": "at most +1.0%, in backward of single x1",
}


def changed(path: Place, value: Any) -> dict[str, Any]:
    evidence = copy.deepcopy(EVIDENCE)
    place: Any = evidence
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return evidence


@pytest.mark.parametrize("claim", gpu_claims.CLAIMS, ids=lambda one: one.key)
def test_each_claim_is_right_within_its_limit_wrong_beyond_and_unknown_without_evidence(
    claim: gpu_claims.Claim,
) -> None:
    right, line = claim.line(EVIDENCE)
    assert right, line
    assert line.startswith(f"{claim.claim}: yes, {NUMBERS.get(claim.key, '')}")
    for path, value in WRONG[claim.key]:
        right, line = claim.line(changed(path, value))
        assert right is False
        assert line.startswith(f"{claim.claim}: no, ")
    right, line = claim.line({"fake": False})
    assert right is None
    assert line.startswith(f"{claim.claim}: not checked, without ")


@pytest.mark.parametrize(
    ("key", "path", "value"),
    [
        ("marks", ("trials", 1, "marks", "high"), 0.011),
        ("sampler", ("sampler", "high"), 0.006),
        ("data_parallel", ("paired", "high"), 0.06),
        ("data_parallel", ("paired", "low"), -0.06),
    ],
)
def test_an_interval_with_a_limit_in_it_cannot_tell(key: str, path: Place, value: float) -> None:
    (claim,) = (one for one in gpu_claims.CLAIMS if one.key == key)
    right, line = claim.line(changed(path, value))
    assert right is None
    assert line.startswith(f"{claim.claim}: cannot tell, ")


@pytest.mark.parametrize("claim", gpu_claims.CLAIMS, ids=lambda one: one.key)
def test_fake_gpus_prove_nothing_about_times(claim: gpu_claims.Claim) -> None:
    evidence = copy.deepcopy(EVIDENCE) | {"fake": True}
    for one in evidence["trials"]:
        one["labels"].append("FAKE-GPU")
    right, line = claim.line(evidence)
    assert right is (None if claim.timed else True)
    assert ("not checked, FAKE-GPU (yes, " in line) is claim.timed


def test_a_failed_trial_leaves_what_needs_trials_unchecked_and_is_told() -> None:
    evidence = changed(("trials", 1, "status"), "oom") | {"stopped": "stopped after 510 s"}
    evidence["trials"][1]["reason"] = reason = "out of memory on replica 1"
    unknown = {one.key for one in gpu_claims.CLAIMS if one.line(evidence)[0] is None}
    assert {"marks", "memory", "labels", "clocks", "plain_loop"} <= unknown
    found = gpu_check.page(state_of(truth=evidence))
    assert f"dp x2: {reason}" in found
    assert evidence["stopped"] in found
    right, step = next(one for one in gpu_claims.CLAIMS if one.key == "step_time").line(evidence)
    assert right is True
    assert amounts(step)[-1] == "+0.02%"
    assert f"- {step}" in found


def test_a_profile_that_failed_leaves_kernels_unchecked_and_is_told() -> None:
    empty = {"single": {}, "dp": {}}
    evidence = copy.deepcopy(EVIDENCE) | {"profiled": empty, "off_s": None, "withheld": "no CUPTI"}
    found = {one.key: one.line(evidence) for one in gpu_claims.CLAIMS}
    assert found["phases_cover"][0] is found["phases_full"][0] is None
    right, line = found["profile"]
    assert right is False
    assert line.endswith(": no, no CUPTI")


def test_the_document_has_the_table_of_claims() -> None:
    table = gpu_claims.table()
    text = (gpu_check.ROOT / "docs" / "first-gpu-run.md").read_text(encoding="utf-8")
    assert table in text, f"docs/first-gpu-run.md needs:\n{table}"


# -- the command

Stage = Callable[..., bool]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bool]:
    """Let stand-ins run the stages, and return what each says; there is one GPU."""
    right = dict.fromkeys(gpu_check.STAGES, True)
    content = {
        "facts": ["0: NVIDIA A2"],
        "truth": {},
        "tests": {},
        "run": {"options": "", "said": ""},
    }

    def stage(name: str) -> Stage:
        def act(state: dict[str, Any], *_: Any) -> bool:
            state[name] = content[name]
            state.setdefault("left_out", [])
            return right[name]

        return act

    for name, function in zip(gpu_check.STAGES, ("machine", "truth", "tests", "run"), strict=True):
        monkeypatch.setattr(gpu_check, function, stage(name))
    monkeypatch.setattr(gpus, "of_torch", lambda: gpus.TorchGpus(gpus=(A2,)))
    monkeypatch.chdir(tmp_path)
    return right


def command(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu_check.py", *arguments])
        with pytest.raises(SystemExit) as raised:
            gpu_check.main()
    assert isinstance(raised.value.code, int)
    return raised.value.code


@pytest.mark.parametrize("wrong", ["", *gpu_check.STAGES])
def test_the_exit_code_says_whether_all_is_right(stages: dict[str, bool], wrong: str) -> None:
    stages |= {wrong: False} if wrong else {}
    assert command("page.txt") == (1 if wrong else 0)
    assert "not done yet" not in Path("page.txt").read_text()


def test_a_later_command_adds_to_the_page(stages: dict[str, bool]) -> None:
    assert command("--stage", "facts", "--stage", "run") == 0
    assert Path("gpu-check.txt").read_text().count("not done yet") == 2
    assert command("--stage", "tests", "--models", "mlp") == 0
    assert Path("gpu-check.txt").read_text().count("not done yet") == 1
    assert {*json.loads(Path("gpu-check.json").read_text())} >= {"facts", "run", "tests"}


def test_without_gpus_there_is_one_line_and_no_page(
    stages: dict[str, bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = gpus.TorchGpus(missing="torch 2.14 finds no GPU: no driver")
    monkeypatch.setattr(gpus, "of_torch", lambda: missing)
    assert command() == 2
    assert capsys.readouterr().err == f"gpu-check: {missing.missing}\n"
    assert not [*Path().iterdir()]


WITHOUT_MSGSPEC = """
import importlib.metadata, runpy, sys
found = importlib.metadata.version

def version(name):
    if name == "msgspec":
        raise importlib.metadata.PackageNotFoundError
    return found(name)

importlib.metadata.version = version
sys.modules["msgspec"] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_missing_package_is_one_line_with_the_wheel_to_bring(tmp_path: Path) -> None:
    """Without msgspec, no module of dpbench can be imported."""
    script = str(gpu_check.ROOT / "benchmarks" / "scripts" / "gpu_check.py")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MSGSPEC, script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu-check: not installed: msgspec>=")
    assert "pip download --only-binary=:all: --python-version 3." in line
    assert "torch" not in line
    assert "http" not in line


def test_packages_that_are_installed_are_no_line() -> None:
    assert gpu_check.lacking(["pytest"]) == ""
    assert "torch" in " ".join(gpu_check.needed())
    line = gpu_check.lacking(["pytest", "not-installed-a>=2", "not-installed-b"])
    assert line.startswith("not installed: not-installed-a>=2, not-installed-b; ")
    assert "-d wheels 'not-installed-a>=2' not-installed-b" in line


def test_the_document_installs_all_that_is_needed_but_torch() -> None:
    text = (gpu_check.ROOT / "docs" / "first-gpu-run.md").read_text(encoding="utf-8")
    project = tomllib.loads((gpu_check.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [re.split(r"[<>=]", one)[0] for one in project["project"]["dependencies"]]
    (command,) = re.findall(r"^python -m pip install (.+)$", text.replace("\\\n", ""), re.M)
    named = [re.split(r"[<>=]", one)[0] for one in shlex.split(command)]
    assert sorted([*named, "torch"]) == sorted([*needed, *gpu_check.USED])
