"""The key of the code that ran: what has the same key may be measured in one run."""

from __future__ import annotations

import subprocess

import pytest

from dpbench.hardware import provenance

FACTS = {"dpbench": {"version": "1"}, "packages": {"torch": "2.13.0"}}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("net.py", "deep/other.py", "results.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.chdir(tmp_path / "deep")
    return tmp_path


def key() -> str:
    return provenance.code_key({**FACTS, "project": provenance.collect()["project"]})


@pytest.mark.parametrize("name", ["net.py", "deep/other.py"])
def test_each_change_of_a_python_file_that_is_not_committed_has_its_own_key(checkout, name):
    keys = [key()]
    for value in (2, 3):
        (checkout / name).write_text(f"a = {value}\n")
        keys.append(key())
    assert len(set(keys)) == 3
    (checkout / name).write_text("a = 1\n")
    assert key() == keys[0]


def test_results_in_the_checkout_do_not_change_the_key(checkout):
    """Otherwise no run whose store or page is committed could be resumed."""
    before = key()
    (checkout / "results.csv").write_text("a = 2\n")
    (checkout / "new.py").write_text("a = 2\n")
    assert key() == before
    assert provenance.collect()["project"]["dirty"]
