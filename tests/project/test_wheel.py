"""The wheel of the tree, installed beside torch alone, measures and writes a page."""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.commands import ROOT


def done(*command: object, folder: Path) -> str:
    """Run a command in `folder`, and return what it prints to stdout."""
    ended = subprocess.run(
        [*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs' folder of an environment with the wheel.

    The environment borrows the other packages that dpbench requires, as pip would install them from
    an index.
    """
    folder = tmp_path_factory.mktemp("wheel")
    wheels = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", folder)
    done(sys.executable, "-m", "pip", *wheels, ROOT, folder=folder)
    (wheel,) = folder.glob("torch_dpbench-*.whl")
    venv.create(folder / "venv", with_pip=False)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    target = ("--no-deps", "--no-index", "-q", "--target", packages)
    done(sys.executable, "-m", "pip", "install", *target, wheel, folder=folder)
    lent = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "lent.pth").write_text("\n".join(lent) + "\n")
    return folder / "venv" / "bin"


@pytest.mark.slow
def test_a_wheel_measures_and_writes_a_page(installed: Path, tmp_path: Path) -> None:
    python = installed / "python"
    where = done(python, "-c", "import dpbench; print(dpbench.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    cases = ("--models", "mlp", "--strategies", "single,dp", "--devices", "1,2", "--rounds", "1")
    out = done(python, "-m", "dpbench", "run", "-q", *cases, folder=tmp_path)
    assert "mlp: " in out
    page = tmp_path / "reports" / "latest" / "index.html"
    assert "<svg" in page.read_text()
    assert "rtx-3090-x8" in done(python, "-m", "dpbench", "list", "machines", folder=tmp_path)
