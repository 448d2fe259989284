"""The command `dpbench doctor`: its text, its JSON and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpbench.cli import cli
from dpbench.doctor.examine import examine
from dpbench.doctor.faults import Examined
from dpbench.doctor.transfers import DIRECT, Copy
from tests.doctor import machines


@pytest.fixture
def ill(tmp_path: Path) -> Examined:
    machine = machines.examined(machines.read(tmp_path, "4x behind a switch"))
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
    assert "1. GPU 0 -> GPU 2 direct: bytes arrive changed" in out
    assert all(f"   {part}: " in out for part in ("evidence", "cost", "change", "undo"))
    assert "7 wrong bytes" in out
    assert "Nothing wrong found" not in out
    assert max(map(len, out.splitlines())) <= 120


def test_json_has_the_findings_and_every_copy(
    monkeypatch: pytest.MonkeyPatch, ill: Examined
) -> None:
    code, out = told(monkeypatch, ill, "--json")
    assert code == 1
    found = json.loads(out)
    assert {*found} == {
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
    }
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


def test_this_machine_is_examined() -> None:
    machine = examine()
    assert machine.system.affinity
    assert all(not one.failure for one in machine.transfers)
