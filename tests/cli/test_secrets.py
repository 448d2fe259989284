"""What commands store and show of secrets, and of the machine's name."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing

import pytest

from dpbench.analysis import summary
from dpbench.records import Status
from dpbench.report import page
from dpbench.store import Naming, Store, export
from tests import exported
from tests.exported import made, stored
from tests.observed_loops import loop

SECRET = "Tr0ub4dor"
COMMAND = f"dpbench watch train.py --hf-token {SECRET} --lr 0.1"
HOST = exported.PROVENANCE["host"]["name"]


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    return exported.command(tmp_path, monkeypatch, capfd)


def observed_run(store):
    """Store a watched loop whose command and error have a secret."""
    return stored(
        store,
        *loop(command=COMMAND, facts={"host": exported.PROVENANCE["host"]}),
        made(number=1, status=Status.FAILED, steps=0, reason=f"it ran --hf-token {SECRET} twice"),
        provenance={**exported.PROVENANCE, "command": COMMAND},
        naming=Naming(command=COMMAND),
    )


def as_earlier_versions_stored_it(store):
    """Put the secrets into the rows of a store in which they are hidden."""
    with closing(sqlite3.connect(store)) as db, db:
        for table, column in (("run", "provenance"), ("trial", "provenance"), ("trial", "reason")):
            db.execute(
                f"UPDATE {table} SET {column}=replace(replace({column}, ?, ?), ?, ?)",
                ("'***'", SECRET, "***", SECRET),
            )


def shown(command):
    """Return what each command prints or writes of a run, by its name."""
    return {
        name: "".join(command(*arguments)[1:])
        for name, arguments in {
            "list": ("list", "runs"),
            "list json": ("list", "runs", "--json"),
            "show": ("show",),
            "explain": ("explain", "--all"),
            "markdown": ("report", "--md"),
            "json": ("report", "--json"),
            "jsonl": ("export", "jsonl"),
            "csv": ("export", "csv"),
            "trace": ("export", "trace", "--all"),
            "pyperf": ("export", "pyperf"),
        }.items()
    }


SHARED = ("markdown", "jsonl", "csv", "trace", "pyperf", "page", "archive", "list of runs")


@pytest.mark.sibling("observe")
@pytest.mark.parametrize("earlier", [False, True])
def test_secrets_and_the_host_are_not_shown(command, tmp_path, earlier):
    store = tmp_path / "dpbench.db"
    observed_run(store)
    assert SECRET not in store.read_bytes().decode("latin-1")
    if earlier:
        as_earlier_versions_stored_it(store)
        assert SECRET in store.read_bytes().decode("latin-1")
    texts = shown(command)
    assert command("report", "--report", "page.html")[0] == 0
    assert command("report")[0] == 0
    texts["page"] = (tmp_path / "page.html").read_text()
    texts["list of runs"] = (tmp_path / "reports/runs/index.html").read_text()
    texts["archive"] = "".join(
        path.read_text() for path in (tmp_path / "reports").rglob("*") if path.is_file()
    )
    for name, text in texts.items():
        assert SECRET not in text, name
    for name in ("list", "show", "markdown", "json", "page", "list of runs"):
        assert "--hf-token" in texts[name], name
        assert "***" in texts[name], name
    for name in SHARED:
        assert HOST not in texts[name], name
    assert HOST in texts["show"]


def test_a_list_of_runs_that_an_earlier_version_wrote_shows_no_secret(command, tmp_path):
    observed_run(tmp_path / "dpbench.db")
    assert command("report")[0] == 0
    [facts] = (tmp_path / "reports/runs").glob(f"*/{page.FACTS}")
    entry = {**json.loads(facts.read_text()), "run_id": "0" * 32, "command": COMMAND}
    older = facts.parent.with_name("0" * 12) / page.FACTS
    older.parent.mkdir()
    older.write_text(json.dumps(entry))
    assert command("report")[0] == 0
    text = (tmp_path / "reports/runs/index.html").read_text()
    assert "0" * 12 in text
    assert SECRET not in text


def test_an_export_that_an_earlier_version_wrote_is_read_without_secrets(tmp_path):
    trial = made(reason=f"--token {SECRET}", provenance={"command": COMMAND})
    file = tmp_path / "earlier.jsonl"
    file.write_text("".join(export.jsonl("r", [trial], summary.labels)))
    assert SECRET in file.read_text()
    _, [read] = export.read_run(file)
    assert SECRET not in f"{read.reason}{read.provenance}"


@pytest.mark.sibling("observe")
def test_next_says_what_to_fill_in(command, tmp_path):
    observed_run(tmp_path / "dpbench.db")
    [line] = [line for line in command("explain")[1].splitlines() if "watch train.py" in line]
    assert re.search(r"--hf-token '\*\*\*' --lr 0\.1 .*#.*--hf-token", line)


def test_facts_that_are_added_to_a_run_have_no_secrets(tmp_path):
    path = tmp_path / "dpbench.db"
    run_id = stored(path, made())
    with Store.create(path) as opened:
        opened.annotate(run_id, "added", {"command": COMMAND})
        assert SECRET not in str(opened.provenance(run_id))
