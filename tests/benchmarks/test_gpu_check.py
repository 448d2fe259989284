"""The page of `make gpu-check`: tests that ran, each failure, no host name, none without GPUs."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from dpbench.hardware import gpus, provenance

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "scripts"))

import gpu_check

JUNIT = """<testsuites><testsuite>
<testcase name="test_a"/>
<testcase name="test_b"><failure message="assert 3 == 4&#10;where 3 = f()">long</failure></testcase>
<testcase name="test_c"><error message="fixture died"/></testcase>
<testcase name="test_d"><skipped message="needs 2 GPUs"/></testcase>
<testcase name="test_e"><skipped message="needs 2 GPUs"/></testcase>
</testsuite></testsuites>"""


def test_the_page_names_machine_failures_and_run(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(JUNIT)
    gpus = {
        "gpus": [
            {"index": 0, "name": "NVIDIA A2", "memory_bytes": 16_000_000_000, "uuid": "GPU-1"}
        ],
        "driver": "570",
    }
    facts = provenance.collect(gpus)
    found = gpu_check.page(facts, gpu_check.Tests.of(junit), "mlp: use ddp on 2 devices\n")
    assert "0: NVIDIA A2, 16,000,000,000 bytes" in found
    assert "1 passed, 2 skipped, 2 failed" in found
    assert "skipped 2: needs 2 GPUs" in found
    assert "FAILED test_b: assert 3 == 4\nFAILED test_c: fixture died" in found
    assert "mlp: use ddp on 2 devices" in found
    assert f"torch {provenance.version('torch')}" in found
    assert "GPU-1" not in found
    assert facts["host"]["name"] not in found
    assert "did not end" in gpu_check.page(facts, None, "")
    assert "FAKE-GPU" not in found
    fakes = facts | {"gpus": gpus | {"driver": "580.00.fake"}}
    assert "FAKE-GPU" in gpu_check.page(fakes, None, "")


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
    "test_lacking.py": "import not_installed_here",
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
    found = gpu_check._tests(checkout)
    assert found is not None
    assert (found.passed, found.failed) == (2, {})
    assert found.skipped == {"No module named 'not_installed_here'": 1}
    assert found.sound


def test_a_file_that_cannot_import_this_repository_is_a_failure(checkout: Path) -> None:
    (checkout / "tests" / "test_gone.py").write_text("import dpbench.gone")
    found = gpu_check._tests(checkout)
    assert found is not None
    assert list(found.failed.values()) == ["collection failure"]
    assert not found.sound


@pytest.mark.parametrize("why", ["none is marked", "pytest refuses its settings"])
def test_no_test_is_a_failure_with_the_last_line_of_pytest(checkout: Path, why: str) -> None:
    if why == "none is marked":
        (checkout / "tests" / "test_one.py").write_text("def test_a(): pass")
    else:
        (checkout / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = 3 = 4")
    found = gpu_check._tests(checkout)
    assert found is not None
    assert not found.sound
    assert found.last_line
    page = gpu_check.page(provenance.collect({}), found, "")
    assert f"no test ran; pytest ended with: {found.last_line}" in page


def test_tests_that_do_not_end_are_stopped(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "TESTS_S", 0.01)
    assert gpu_check._tests(checkout) is None


@pytest.mark.parametrize(
    ("tests", "run", "expected"),
    [
        (gpu_check.Tests(passed=3, skipped={}, failed={}), 0, 0),
        (gpu_check.Tests(passed=3, skipped={}, failed={}), 2, 1),
        (gpu_check.Tests(passed=3, skipped={}, failed={"test_b": "no"}), 0, 1),
        (gpu_check.Tests(passed=0, skipped={"no": 1}, failed={}), 0, 1),
        (None, 0, 1),
    ],
)
def test_the_exit_code_says_whether_tests_ran_and_passed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tests: gpu_check.Tests | None,
    run: int,
    expected: int,
) -> None:
    listed = ({"index": 0, "name": "NVIDIA A2"},)
    monkeypatch.setattr(gpu_check.gpus, "of_torch", lambda: gpus.TorchGpus(gpus=listed))
    monkeypatch.setattr(gpu_check.gpus, "describe", lambda: {"gpus": [*listed]})
    monkeypatch.setattr(gpu_check, "_tests", lambda folder: tests)
    monkeypatch.setattr(gpu_check, "_run", lambda folder, options: (run, ""))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(tmp_path / "page.txt")])
    with pytest.raises(SystemExit) as raised:
        gpu_check.main()
    assert raised.value.code == expected
    assert (tmp_path / "page.txt").exists()


def test_missing_packages_are_one_line_with_one_command_that_leaves_torch_alone() -> None:
    assert gpu_check.lacking(["pytest"]) == ""
    line = gpu_check.lacking(["pytest", "not-installed-a", "not-installed-b"])
    assert line.startswith("not installed: not-installed-a, not-installed-b; ")
    assert line.endswith("-m pip install not-installed-a not-installed-b")
    assert "torch" not in line
    assert len(line.splitlines()) == 1


def test_without_gpus_there_is_no_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = gpus.TorchGpus(missing="torch 2.14 finds no GPU: no driver")
    monkeypatch.setattr(gpu_check.gpus, "of_torch", lambda: missing)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as raised:
        gpu_check.main()
    assert raised.value.code == 2
    assert missing.missing in capsys.readouterr().err


def test_the_document_installs_all_that_is_needed_but_torch() -> None:
    text = (gpu_check.ROOT / "docs" / "first-gpu-run.md").read_text(encoding="utf-8")
    project = tomllib.loads((gpu_check.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [re.split(r"[<>=]", one)[0] for one in project["project"]["dependencies"]]
    (command,) = re.findall(r"^python -m pip install (.+)$", text.replace("\\\n", ""), re.M)
    named = [re.split(r"[<>=]", one)[0] for one in shlex.split(command)]
    assert sorted([*named, "torch"]) == sorted([*needed, *gpu_check.USED])
