"""The first mistakes of a new user end before anything is measured or stored, with the way out."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.cli.showing import check_page
from dpbench.hardware import gpus
from dpbench.measure import selection
from dpbench.records import objects, registry
from dpbench.records.errors import UsageError
from dpbench.records.options import Options
from tests.measure.test_gpu_budget import machine

MODEL = """
from types import SimpleNamespace

class Net:
    pass

net = SimpleNamespace(build=None)
"""


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (MODEL, "m.py:nett", ["nett", "did you mean 'net'"]),
        (MODEL, "m.py:Net", ["is a class", "m.py:model"]),
        (MODEL, "m.py", ["such as m.py:net"]),
        ("def build(:\n", "m.py:net", ["line 1", "SyntaxError"]),
    ],
)
def test_a_wrong_name_of_a_model_ends_before_anything_is_stored(
    dpbench, tmp_path: Path, command: str, text: str, name: str, words: list[str]
) -> None:
    (tmp_path / "m.py").write_text(text)
    code, out, err = dpbench(command, "--model", name)
    assert (code, out) == (64, "")
    assert all(word in err for word in words), err
    assert "--retry" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["m.py"]


def test_a_name_from_a_star_import_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text("from models import *\n")
    objects.check("m.py:net", "models")


def test_a_file_imports_its_neighbour_as_a_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour_of_train.py").write_text("ROWS = [1, 2, 3]\n")
    (tmp_path / "scripts" / "train.py").write_text(
        "from neighbour_of_train import ROWS\ndataset = ROWS\n"
    )
    assert registry.outside("dataset", "scripts/train.py:dataset") == [1, 2, 3]


def test_a_page_that_cannot_be_written_is_noticed_before_measuring(dpbench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = dpbench("run", "--models", "mlp", "--report", "file/page.html")
    assert (code, out) == (2, "")
    assert "file" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("quick")
def test_without_matplotlib_a_run_has_no_page_and_refuses_to_measure_for_one(
    dpbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    measure = ("run", "--models", "mlp", "--strategies", "single", "--rounds", 1)
    code, out, err = dpbench(*measure, "--report", "page.html")
    assert (code, out) == (64, "")
    assert "pip install matplotlib" in err
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    code, out, err = dpbench(*measure)
    assert (code, "mlp" in out) == (0, True), err
    first, last = err.splitlines()[-2:]
    assert first.startswith("report: not written")
    assert last.startswith("note: ")
    assert "matplotlib" in last
    assert not (tmp_path / "reports").exists()


def test_the_check_of_a_page_leaves_no_file_and_changes_none(tmp_path: Path) -> None:
    check_page(tmp_path / "deep" / "page.html")
    assert [*(tmp_path / "deep").iterdir()] == []
    (tmp_path / "page.html").write_text("kept")
    check_page(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "kept"


def test_more_devices_than_cores_are_a_warning_before_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dpbench.hardware.provenance.usable_cores", lambda: 2)
    options = Options(models=("mlp",), devices=(2,), device_kind="cpu")
    with caplog.at_level(logging.WARNING):
        selection.cases_of(options)
        assert caplog.text == ""
        selection.cases_of(Options(models=("mlp",), devices=(3,), device_kind="cpu"))
    assert "3 devices on 2 cores" in caplog.text


def test_more_gpus_than_torch_sees_are_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "of_torch", lambda: machine(1))
    spread = Options(models=("mlp",), devices=(1, 2), placement="spread", device_kind="cuda")
    with pytest.raises(UsageError, match="needs 2 GPUs, but torch sees 1"):
        selection.cases_of(spread)
    cases, _ = selection.cases_of(replace(spread, placement="colocated"))
    assert {case.devices for case in cases} == {1, 2}
    cases, _ = selection.cases_of(replace(spread, devices=(1,)))
    assert {case.devices for case in cases} == {1}


def test_only_the_gpus_that_cases_need_must_be_there_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "of_torch", lambda: machine(2))
    four = Options(models=("mlp",), devices=(4,), device_kind="cuda")
    named = replace(four, device_ids=(0, 1))
    with pytest.raises(UsageError, match=r"devices=\[4\] needs 4 GPUs, but torch sees 2"):
        selection.cases_of(four)
    with pytest.raises(UsageError, match=r"4 devices .* device_ids= names only \[0, 1\]"):
        selection.cases_of(named)
    for ids in ((5,), (0, 5)):
        with pytest.raises(UsageError, match=r"names \[5\], but torch sees the GPUs \[0, 1\]"):
            selection.cases_of(Options(device_ids=ids))
    for asked in (four, named):
        (case,), _ = selection.cases_of(replace(asked, strategies=("single",)))
        assert (case.devices, case.device_ids) == (1, asked.device_ids)


@pytest.mark.sibling("predict")
def test_a_prediction_says_which_peer_access_it_assumes(dpbench) -> None:
    asked = ("--models", "resnet50", "--devices", "1,2")
    for name, has in (("8x RTX 3090", False), ("8x A100 SXM4 40GB", True)):
        code, out, err = dpbench("predict", "--machine", name, *asked)
        assert code == 0, err
        (line,) = (one for one in out.splitlines() if one.startswith("peer access"))
        assert line.endswith(": yes") is has
        shown = json.loads(dpbench("predict", "--machine", name, *asked, "--json")[1])
        assert shown["peer_access"] is has


def test_a_run_may_have_a_name_in_any_script(dpbench, tmp_path: Path) -> None:
    options = ("--models", "mlp", "--strategies", "single", "--dry-run")
    for name in ("größer", "训练-1"):
        code, _, err = dpbench("run", *options, "--name", name)
        assert code == 0, err
