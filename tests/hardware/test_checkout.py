"""The facts about a checkout: what git says of it, without the programs that the checkout names."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpbench.hardware import provenance

WHO = ("-c", "user.name=a", "-c", "user.email=a@example.com")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *WHO, *arguments], check=True)


def begun(folder: Path) -> Path:
    """Return a checkout with one commit, whose file `net.py` has an uncommitted change."""
    folder.mkdir(exist_ok=True)
    git(folder, "init", "-q")
    (folder / "net.py").write_text("a = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a")
    (folder / "net.py").write_text("a = 2\n")
    return folder


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = begun(tmp_path / "checkout")
    monkeypatch.chdir(folder)
    return folder


def marker(checkout: Path, name: str) -> str:
    """Return a command that leaves a file when it is run, and passes its input on."""
    script = checkout.parent / name
    script.write_text(f"#!/bin/sh\ntouch {checkout.parent}/ran-{name}\nexec cat\n")
    script.chmod(0o755)
    return str(script)


def ran(checkout: Path) -> list[str]:
    return sorted(path.name for path in checkout.parent.glob("ran-*"))


SETTINGS = {
    "fsmonitor": ("core.fsmonitor", "", ""),
    "external": ("diff.external", "", ""),
    "driver": ("diff.evil.command", "*.py diff=evil", ""),
    "textconv": ("diff.evil.textconv", "*.py diff=evil", ""),
    "clean": ("filter.evil.clean", "*.py filter=evil", ""),
    "process": ("filter.evil.process", "*.py filter=evil", ""),
    "required": ("filter.evil.clean", "*.py filter=evil", "filter.evil.required"),
    "equals": ("filter.e=vil.clean", "*.py filter=e=vil", ""),
    "pager": ("core.pager", "", ""),
    "alias": ("alias.status", "", ""),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_program_that_the_configuration_names_is_run(checkout, name):
    key, attribute, also = SETTINGS[name]
    (checkout / ".git/info").mkdir(exist_ok=True)
    for attributes in (".gitattributes", ".git/info/attributes"):
        (checkout / attributes).write_text(f"{attribute}\n")
    bang = "!" if name == "alias" else ""
    git(checkout, "config", key, f"{bang}{marker(checkout, name)}")
    if also:
        git(checkout, "config", also, "true")
    found = provenance.collect()["project"]
    assert ran(checkout) == []
    assert name == "equals" or found["changes"]


def test_no_hook_is_run_and_the_index_is_not_written(checkout):
    hook = checkout / ".git/hooks/post-index-change"
    hook.parent.mkdir(exist_ok=True)
    Path(marker(checkout, "hook")).rename(hook)
    os.utime(checkout / "net.py", (1e9, 1e9))
    assert provenance.collect()["project"]["dirty"]
    assert ran(checkout) == []


def test_no_program_of_a_submodule_is_run(checkout):
    inner = begun(checkout / "inner")
    git(checkout, "-c", "protocol.file.allow=always", "submodule", "add", "-q", "./inner", "inner")
    git(checkout, "commit", "-q", "-m", "b")
    git(inner, "config", "core.fsmonitor", marker(checkout, "fsmonitor"))
    git(checkout, "config", "diff.submodule", "diff")
    assert provenance.collect()["project"]["dirty"]
    assert ran(checkout) == []


def test_missing_objects_are_not_fetched(checkout):
    """In a partial clone, git would run the transport that the configuration names."""
    for key, value in {
        "core.repositoryformatversion": "1",
        "extensions.partialclone": "origin",
        "remote.origin.url": f"ext::{marker(checkout, 'transport')}",
        "remote.origin.promisor": "true",
        "protocol.ext.allow": "always",
    }.items():
        git(checkout, "config", key, value)
    for path in (checkout / ".git/objects").glob("??/*"):
        blob = f"{path.parent.name}{path.name}"
        kind = subprocess.check_output(["git", "-C", str(checkout), "cat-file", "-t", blob])
        if kind == b"blob\n":
            path.unlink()
    provenance.collect()
    assert ran(checkout) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("GIT_EXTERNAL_DIFF", "marker"), ("GIT_DIR", "/nowhere"), ("GIT_TRACE", "f")],
)
def test_variables_of_git_do_not_change_the_facts(checkout, monkeypatch, name, value):
    """A hook of git, for instance, is run with GIT_DIR, which is not that of dpbench's checkout."""
    before = provenance.collect()["project"]
    value = {"marker": marker(checkout, "external"), "f": f"{checkout.parent}/ran-trace"}.get(
        value, value
    )
    monkeypatch.setenv(name, value)
    assert provenance.collect()["project"] == before
    assert ran(checkout) == []


def test_the_changes_are_those_that_git_shows(checkout):
    """Runs of earlier versions are resumed by this hash, as long as no filter is involved."""
    shown = subprocess.check_output(["git", "-C", str(checkout), "diff", "HEAD", "--", ":/*.py"])
    expected = hashlib.sha256(shown.strip()).hexdigest()[:16]
    assert provenance.collect()["project"]["changes"] == expected


def test_a_clean_checkout_has_a_commit_and_no_changes(checkout):
    (checkout / "net.py").write_text("a = 1\n")
    found = provenance.collect()["project"]
    assert found["dirty"] is False
    assert len(found["commit"]) == 40
    assert "changes" not in found


def test_a_file_that_was_only_touched_is_not_changed(checkout):
    (checkout / "net.py").write_text("a = 1\n")
    os.utime(checkout / "net.py", (time.time() - 100,) * 2)
    assert provenance.collect()["project"]["dirty"] is False


def test_an_archive_of_git_knows_its_commit_without_git(tmp_path):
    root = Path(__file__).parents[2]
    head = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not head:
        pytest.skip("this is no checkout")
    file = "dpbench/hardware/checkout.py"
    packed = ["git", "-C", str(root), "archive", "HEAD", file]
    with subprocess.Popen(packed, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(tmp_path)], stdin=archive.stdout, check=True)
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['own'](None))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / file)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": ""},
    )
    assert done.stdout.strip() == str({"commit": head})
