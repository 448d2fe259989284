"""A strategy in a user's file is run, verified, reported, explained and exported like any other."""

from __future__ import annotations

import json
import math
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.cli.options import EXIT_FAILED
from dpbench.records import Case, Step, Trial, Verified, registry
from dpbench.records.estimate import Estimate
from dpbench.records.registry import Parallelism, Role, Traits
from dpbench.store import Store
from tests import commands
from tests.exported import Command, command
from tests.trials import report_on

MINE = textwrap.dedent('''
    """Gradient accumulation over the chunks of a batch, on one device."""

    from contextlib import contextmanager

    from dpbench.records import Phase
    from dpbench.strategies import Strategy, Traits, optimizer_of


    class Chunks(Strategy):
        """Runs the chunks that the replicas would have, one after the other."""

        @contextmanager
        def start(self, case, model, devices, mark):
            optimizer, factor = optimizer_of(case)(model.module.parameters()), FACTOR

            def step(inputs, target):
                optimizer.zero_grad()
                total = 0.0
                chunks = zip(inputs.chunk(case.devices), target.chunk(case.devices))
                for number, (x, y) in enumerate(chunks):
                    with mark(Phase.FORWARD, number):
                        loss = model.loss(model.module(x), y) * (len(y) / len(target))
                    with mark(Phase.BACKWARD, number):
                        (factor * loss).backward()
                    total += loss.detach()
                with mark(Phase.OPTIMIZER, 0):
                    optimizer.step()
                return total

            yield step


    chunks = Chunks()
    plain = object()
''')


def shown_everywhere(dpbench: Command, name: str) -> None:
    """Run every reader in this process; each shows the strategy by its name."""
    exports = [("export", kind) for kind in ("csv", "trace", "pyperf")]
    for reader in (("report", "--md"), ("explain", "--all"), *exports):
        code, out, err = dpbench(*reader)
        assert code == 0, err
        assert name in out, reader
    assert dpbench("report", "--report", "page.html")[0] == 0
    assert name in Path("page.html").read_text()
    trials = [json.loads(line) for line in dpbench("export", "jsonl")[1].splitlines()]
    assert {trial["verified"] for trial in trials if trial["case"]["strategy"] == name} == {
        "bitwise"
    }


@pytest.fixture(scope="module")
def right_and_wrong(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[commands.Folder, subprocess.CompletedProcess[str]]]:
    """A run, and its output: strategies in files, one of them wrong, and an installed one."""
    with commands.folder(tmp_path_factory.mktemp("outside")) as folder:
        (folder.path / "mine.py").write_text(MINE.replace("FACTOR", "1.0"))
        (folder.path / "wrong.py").write_text(MINE.replace("FACTOR", "1.01"))
        (folder.path / "chunking.py").write_text(MINE.replace("FACTOR", "1.0"))
        described = folder.path / "chunking-1.0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: chunking\nVersion: 1.0\n")
        (described / "entry_points.txt").write_text(
            "[dpbench.strategies]\nchunked = chunking:chunks\n"
        )
        folder.paths = [folder.path]
        axes = ("--devices", "2", "--batch-sizes", "8", "--rounds", "1")
        files = ("--strategy", "mine.py:chunks", "--strategy", "wrong.py:chunks")
        yield (
            folder,
            folder.do("run", "--models", "mlp", "--strategies", "single,dp,chunked", *files, *axes),
        )


def ended(folder: commands.Folder, strategy: str) -> list[tuple]:
    """Return status and verdict of each trial of a strategy."""
    rows = folder.query("SELECT case_json, status, verified FROM trial")
    return [row[1:] for row in rows if json.loads(row[0])["strategy"] == strategy]


@pytest.mark.slow
def test_a_strategy_in_a_file_is_run_verified_reported_explained_and_exported(
    right_and_wrong: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # readers leave out figures that other processes made doubtful
    monkeypatch.setattr(Estimate, "WIDEST", math.inf)
    monkeypatch.setattr(Estimate, "ROUNDS", 1)  # or that have few rounds
    folder, done = right_and_wrong
    dpbench = command(folder.path, monkeypatch, capfd)
    assert ended(folder, "mine.py:chunks") == [("ok", "bitwise")], done.stderr
    aside = (folder.path / "mine.py").rename(folder.path / "aside")
    # a stored run tells the traits of its strategies without their code
    shown_everywhere(dpbench, "mine.py:chunks")
    aside.rename(folder.path / "mine.py")
    assert dpbench("report", "--md")[0] == 0
    with Store.read(folder.store) as store:
        cases = {trial.case for run in store.runs() for trial in store.trials(run.id)}
    (mine,) = (case for case in cases if case.strategy == "mine.py:chunks")
    assert mine.declared is not None
    assert mine.traits.threads


@pytest.mark.slow
def test_a_strategy_in_a_file_with_wrong_gradients_is_refused(right_and_wrong: Any) -> None:
    folder, done = right_and_wrong
    assert done.returncode == EXIT_FAILED
    assert ended(folder, "wrong.py:chunks") == [("failed", "no")]
    assert len(folder.query("SELECT 1 FROM trial WHERE verified = 'no'")) == 1


@pytest.mark.slow
def test_an_installed_strategy_is_known_by_the_name_of_its_entry_point(
    right_and_wrong: Any,
) -> None:
    folder, done = right_and_wrong
    assert ended(folder, "chunked") == [("ok", "bitwise")], done.stderr
    done = folder.do("list", "strategies")
    assert "chunked" in done.stdout, done.stderr


def test_an_outside_strategy_is_explained_next_to_the_others() -> None:
    mine = Case(
        model="mlp",
        strategy="mine.py:chunks",
        batch_size=8,
        devices=2,
        declared=Traits(strategy="mine.py:chunks"),
    )
    seconds = {
        mine: 0.015,
        replace(mine, strategy="dp", schedule="reference"): 0.03,
        replace(mine, strategy="single", devices=1): 0.04,
    }
    steps = {case: tuple(Step(s, False, 1.0 + k) for k in range(10)) for case, s in seconds.items()}
    trials = [
        Trial(case=case, steps=given, round=number, verified=Verified.BITWISE)
        for case, given in steps.items()
        for number in range(3)
    ]
    report = report_on(trials)
    (found,) = report.diagnoses
    assert found.row.case.strategy == "dp"
    (answer,) = report.answers
    assert "use mine.py:chunks on 2" in answer.headline


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none.py:chunks", "cannot import none.py in the folder"),
        ("mine.py:nothing", "mine.py has no object 'nothing'"),
        ("mine.py:plain", "object has no attribute `traits` of type Traits and no method start"),
        ("no_such_module:chunks", "cannot import no_such_module"),
        ("singel", "did you mean 'single'?"),
    ],
)
def test_what_is_no_strategy_is_refused_with_the_reason(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE.replace("FACTOR", "1.0"))
    with pytest.raises(LookupError) as caught:
        registry.check("strategies", name)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("code", "error"), [("def", "SyntaxError"), ("1 / 0", "ZeroDivisionError")]
)
def test_a_file_that_cannot_be_executed_is_refused_with_its_error(
    code: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(LookupError, match=f"broken.py:chunks: cannot import .*{error}"):
        registry.check("strategies", f"{tmp_path / 'broken.py'}:chunks")


def test_files_of_the_same_name_are_different_modules_and_import_their_own_neighbours(
    tmp_path: Path,
) -> None:
    modules = set()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared.py").write_text(f"HERE = {folder!r}")
        (tmp_path / folder / "mine.py").write_text(
            f"{MINE.replace('FACTOR', '1.0')}\nfrom .shared import HERE\n"
        )
        modules.add(type(registry.strategy(f"{tmp_path / folder / 'mine.py'}:chunks")).__module__)
        assert registry.outside("model", f"{tmp_path / folder / 'mine.py'}:HERE") == folder
    assert len(modules) == 2


FREE = (Role.OTHER, Role.OBSERVED, Role.LOADER)
"""The roles that no strategy of dpbench must have."""


def test_each_role_has_one_strategy_of_dpbench() -> None:
    roles = [
        role
        for name in registry.own("strategies")
        if (role := registry.traits(name).role) not in FREE
    ]
    assert sorted(roles) == sorted(role for role in Role if role not in FREE)
    assert all(registry.traits(registry.of_role(role)).role is role for role in roles)


def test_how_a_strategy_that_is_nowhere_uses_its_devices_is_unknown() -> None:
    unknown = Case(model="mlp", strategy="of another time", devices=4, batch_size=2)
    assert unknown.traits.role is Role.OTHER
    assert unknown.traits.parallelism is Parallelism.OTHER
    assert unknown.working == 4


def test_traits_that_another_version_has_stored_are_read() -> None:
    declared = {
        "strategy": "mine.py:layers",
        "parallelism": "layers",
        "stages": True,
        "needs_accelerator": False,
    }
    case = Case.from_dict(
        {"model": "mlp", "strategy": "mine.py:layers", "batch_size": 8, "declared": declared}
    )
    assert case.traits.strategy == "mine.py:layers"
    assert case.traits.parallelism is Parallelism.OTHER
