"""The command `dpbench doctor`: its text, its JSON and its exit codes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from dpbench.cli import cli
from dpbench.doctor.examination import DIRECT
from dpbench.doctor.examine import examine, without_kernels
from dpbench.doctor.faults import Examined
from dpbench.doctor.result import result
from dpbench.doctor.transfers import Copy
from dpbench.report import NoDrawings
from dpbench.report.machine import picture
from tests.doctor import machines


@pytest.fixture
def ill(tmp_path: Path) -> Examined:
    machine = machines.examined(tmp_path, "4x behind a switch")
    return machines.with_transfer(machine, Copy(0, 2, DIRECT), wrong=7)


def told(monkeypatch: pytest.MonkeyPatch, machine: Examined, *options: str) -> tuple[int, str]:
    monkeypatch.setattr("dpbench.doctor.examine.examine", lambda say: machine)
    done = CliRunner().invoke(cli, ["doctor", *options], catch_exceptions=False)
    return done.exit_code, done.stdout


def test_a_fault_is_told_with_its_evidence_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, ill: Examined
) -> None:
    code, out = told(monkeypatch, ill)
    assert code == 1
    (finding,) = result(ill, 0.0).findings
    assert (finding.name, finding.gpus) == ("corrupt transfer", (0, 2))
    assert f"1. {finding.says}" in " ".join(out.split())
    assert all(f"   {part}: " in out for part in ("evidence", "cost", "change", "undo"))
    table = out.partition("direct copies in GB/s")[2].splitlines()[1:7]
    assert [line.split() for line in table if line.startswith("GPU 0")] == [
        ["GPU", "0", "22.0", "wrong", "22.0"]
    ]
    assert "Nothing wrong found" not in out
    assert max(map(len, out.splitlines())) <= 120


def test_json_has_the_findings_and_every_copy(
    monkeypatch: pytest.MonkeyPatch, ill: Examined
) -> None:
    code, out = told(monkeypatch, ill, "--json")
    assert code == 1
    found = json.loads(out)
    assert {*found} == {
        "started_s",
        "labels",
        "software",
        "boxes",
        "links",
        "findings",
        "checked",
        "unchecked",
        "gpus",
        "copies",
        "all_reduce_bytes_per_s",
        "schema",
    }
    assert [one["name"] for one in found["findings"]] == ["corrupt transfer"]
    assert {*found["findings"][0]} == {
        "name",
        "says",
        "evidence",
        "cost",
        "change",
        "undo",
        "wrong",
        "gpus",
    }
    assert found["findings"][0]["gpus"] == [0, 2]
    assert len(found["copies"]) == 4 * 4 + 2 * 12
    (wrong,) = [one for one in found["copies"] if one["wrong"]]
    assert (wrong["source"], wrong["target"], wrong["way"]) == (0, 2, "direct")
    assert found["all_reduce_bytes_per_s"] == 18e9


def test_a_healthy_machine_ends_with_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = told(monkeypatch, machines.healthy())
    assert code == 0
    assert "Nothing wrong found." in out
    assert "Checked: " in out
    assert "Not checked: " in out


@pytest.mark.parametrize("name", machines.TREES)
def test_the_page_has_a_box_for_each_gpu_and_the_findings(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = machines.examined(tmp_path / "tree", name)
    path = tmp_path / "page.html"
    code, _ = told(monkeypatch, machine, "--report", str(path))
    text = path.read_text()
    assert code == (name == "container")
    drawn = ElementTree.fromstring(re.search(r"<svg.*?</svg>", text, re.DOTALL)[0])
    texts = [one.text for one in drawn.iter("text")]
    for gpu in range(len(machine.gpus)):
        assert texts.count(f"GPU {gpu}") == 1
    boxes = [one for one in drawn.iter("path") if one.get("fill") == "var(--card)"]
    assert len(boxes) >= len(machine.gpus) + 1
    assert ("Nothing wrong found" in text) is (code == 0)
    assert not re.search(r"https?://|<script", text)


def test_a_page_without_matplotlib_is_refused_before_the_examination(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("dpbench.doctor.examine.examine", lambda say: pytest.fail("examined"))
    done = CliRunner().invoke(cli, ["doctor", "--report", str(tmp_path / "page.html")])
    assert isinstance(done.exception, NoDrawings)


def test_load_alone_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    busy = replace(machines.examined(tmp_path, "2x3090"), busy="90% of the cores")
    code, out = told(monkeypatch, busy)
    assert "Nothing wrong found" not in out
    assert code == 0
    (finding,) = result(busy, 0.0).findings
    assert (finding.name, finding.wrong) == ("busy cores", False)
    assert f"1. {finding.says} (a fact" in out
    assert "No fault found, but" in out
    assert "NOISY" in out


def test_labels_say_what_the_rates_are_worth(ill: Examined) -> None:
    assert result(ill, 0.0).labels == ("MEASURED",)
    assert result(replace(ill, busy="90%"), 0.0).labels == ("MEASURED", "NOISY")
    fakes = replace(ill, software={**ill.software, "driver": "580.00.fake"})
    assert result(fakes, 0.0).labels == ("MEASURED", "FAKE-GPU")


LINK, SLOW = 'fill="none" stroke=', 'fill="none" stroke="var(--loss)"'
"""What is in the SVG of each link, and of each slow one."""


def drawn(machine: Examined) -> str:
    found = result(machine, 0.0)
    return picture(found.boxes, found.links)


def test_a_slow_link_is_red_in_the_picture(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, "2x3090")
    assert SLOW not in drawn(machine)
    slow = machines.with_transfer(machine, machines.UP, bytes_per_s=3e9)
    assert drawn(slow).count(SLOW) == 1


def test_nvlinks_are_drawn_between_gpus_or_to_their_switch(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path / "pairs", "4x behind a switch")
    plain = drawn(machine).count(LINK)
    bridged = machines.with_bridges(machine)
    assert drawn(bridged).count(LINK) == plain + 2
    assert ">85%<" in drawn(bridged)
    slow = machines.with_transfer(bridged, Copy(2, 3, DIRECT), bytes_per_s=5e9)
    assert drawn(slow).count(SLOW) == 1
    dgx = machines.examined(tmp_path / "dgx", "DGX")
    switched = drawn(machines.with_nvswitch(dgx))
    assert switched.count(LINK) == drawn(dgx).count(LINK) + 8
    assert ">NVSwitch<" in switched


def test_a_pair_that_a_finding_names_is_drawn(ill: Examined) -> None:
    assert SLOW in drawn(ill)
    assert ">fails<" in drawn(ill)


@pytest.mark.parametrize(
    ("kernels", "missing"),
    [
        (["sm_80", "sm_86", "sm_90"], [2]),
        (["sm_75", "sm_80"], [1, 2]),
        (["sm_80", "compute_80"], []),
        (["sm_86", "sm_90", "sm_120"], [0]),
        (["sm_90a", "sm_100f", "sm_120"], [0]),
        (["gfx90a", "gfx942"], []),
        ([], []),
    ],
)
def test_gpus_without_kernels_are_found(kernels: list[str], missing: list[int]) -> None:
    assert without_kernels(kernels, [(8, 0), (9, 0), (12, 0)]) == missing


def test_this_machine_is_examined() -> None:
    machine = examine()
    assert machine.system.affinity
    assert all(not one.failure for one in machine.transfers)
