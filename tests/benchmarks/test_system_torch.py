"""A machine with a GPU lends the torch of its Python; what is missing is named before the start."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from dpbench.hardware.provenance import version
from tests.marked import patience

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "scripts" / "system_torch.py"


def _lend(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, SCRIPT, folder], capture_output=True, text=True, timeout=patience(60), check=False
    )


@pytest.mark.slow
def test_a_python_with_torch_alone_gets_one_command_that_leaves_torch_alone(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    (packages,) = tmp_path.glob("bare/lib/python*/site-packages")
    for name, number in (("torch", "2.14.1+cu130"), ("pandas", "1.5")):
        facts = packages / f"{name}-{number}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    python = tmp_path / "bare" / "bin" / "python"
    ended = _lend(python, tmp_path / "lent")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    (command,) = (line for line in ended.stderr.splitlines() if "pip install" in line)
    assert f"{python} -m pip install" in command
    assert "'click>=" in command
    assert "'pandas>=" in command, "the installed one is too old"
    assert "'torch" not in command
    assert not (tmp_path / "lent").exists()


@pytest.mark.slow
def test_a_complete_python_lends_its_packages_and_this_checkout(tmp_path: Path) -> None:
    ended = _lend(Path(sys.executable), tmp_path / "lent")
    assert ended.returncode == 0, ended.stderr
    code = "import dpbench, importlib.metadata as m; print(dpbench.__file__, m.version('torch'))"
    python = tmp_path / "lent" / "bin" / "python"
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [str(ROOT / "dpbench" / "__init__.py"), version("torch")]
    command = [tmp_path / "lent" / "bin" / "dpbench", "run", "--help"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def _recipe(folder: Path, *settings: str, search: str = os.defpath) -> str:
    """Return what `make bench` would do with settings, and programs on the path `search`."""
    return subprocess.run(
        ["make", "--dry-run", "bench", f"VENV={folder / 'venv'}", *settings],
        cwd=ROOT,
        env={"PATH": search},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(("gpu", "lends"), [("/dev/nvidia0", True), ("", False)])
def test_make_on_a_machine_with_a_gpu_installs_no_torch_for_cpus(
    tmp_path: Path, gpu: str, lends: bool
) -> None:
    recipe = _recipe(tmp_path, f"GPU={gpu}")
    assert ("system_torch.py" in recipe) is lends
    assert ("pip install" in recipe) is not lends


@pytest.mark.parametrize(
    ("tool", "line"),
    [("nvidia-smi", "GPU 0: Tesla T4"), ("rocm-smi", "GPU[0] : Device Name: MI300X")],
)
def test_make_finds_a_gpu_that_has_no_device_file(tmp_path: Path, tool: str, line: str) -> None:
    """As in WSL; no test can make a device file."""
    program = tmp_path / tool
    program.write_text(f"#!/bin/sh\necho '{line}'\n")
    program.chmod(0o755)
    recipe = _recipe(tmp_path, search=f"{tmp_path}:{os.defpath}")
    assert "system_torch.py" in recipe
    assert "pip install" not in recipe
