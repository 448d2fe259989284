"""The model of a session reaches the processes of a run, in a file that only its user can open."""

from __future__ import annotations

import os
import stat
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dpbench as dp
from dpbench import models
from dpbench.measure import handing
from dpbench.records import Case, Step, session, sources
from tests import standing_in
from tests.exported import command


class Net:
    width = 5

    def build(self, size: str) -> nn.Module:
        return nn.Linear(8, self.width)

    def batch(self, n: int, seed: int, size: str) -> Any:
        return torch.ones(n, 8), torch.zeros(n, dtype=torch.int64)

    loss = staticmethod(nn.functional.cross_entropy)


@pytest.mark.parametrize("names", ["mlp", ["mlp", "a.py:net"], ("mlp",), None])
def test_names_stay_names(names: Any) -> None:
    with handing.named({"model": names, "rounds": 2}) as given:
        assert given == {"model": names, "rounds": 2}
        assert session.VARIABLE not in os.environ


def test_the_file_of_a_model_is_private_and_ends_with_the_run() -> None:
    pytest.importorskip("cloudpickle", reason="pip install '.[notebook]'")
    given = Net()
    given.width = 7
    with handing.named({"model": given}) as options:
        assert options == {"model": "__main__:Net"}
        path = session.file_of("__main__:Net")
        assert [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)] == [0o600, 0o700]
        assert models.load("__main__:Net", "small", 0).module.out_features == 7
    assert not path.parent.exists()
    with pytest.raises(LookupError, match=r"write the model to a file, and give models="):
        models.load("__main__:Net", "small", 0)


@pytest.mark.parametrize("model", [nn.Linear(2, 3), lambda: None, SimpleNamespace(build=1), 3])
def test_an_object_of_another_form_is_refused_with_the_parts_that_it_lacks(model: Any) -> None:
    with pytest.raises(ValueError, match=r"lacks .*batch, loss: give an object whose build"):
        dp.run(model=model)


def test_without_cloudpickle_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(LookupError, match=r"pip install 'torch-dpbench\[notebook\]', or write the"):
        dp.run(model=Net())


def test_an_object_that_cannot_be_pickled_is_refused() -> None:
    pytest.importorskip("cloudpickle", reason="pip install '.[notebook]'")
    given = Net()
    given.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"this Net cannot be sent .*lock.*write the model to a"):
        dp.run(model=given)


def test_the_command_line_refuses_the_name_of_such_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(tmp_path, monkeypatch, capfd)("run", "--models", "__main__:Net")
    assert (code, out) == (64, "")
    assert "--models file.py:name" in err


@pytest.mark.usefixtures("quick")
def test_an_interrupted_run_of_such_a_model_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cloudpickle", reason="pip install '.[notebook]'")
    monkeypatch.chdir(tmp_path)
    left = [1]

    def interrupted(case: Case, effort: object) -> dict[str, object]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return {"steps": tuple(Step(0.01, False, float(n + 1)) for n in range(3))}

    monkeypatch.setattr(standing_in.Server, "act", staticmethod(interrupted))

    def measure() -> dp.Run:
        return dp.run(model=Net(), strategies="single", devices=1, rounds=2, quiet=True)

    with pytest.raises(KeyboardInterrupt, match="a run of a session's model cannot be resumed"):
        measure()
    first = dp.load()
    assert (first.status, len(first.trials)) == ("interrupted", 1)
    left[0] = 9
    again = measure()
    assert again.id != first.id
    assert len(again.trials) == 2


def test_no_run_of_such_a_model_has_the_code_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("__main__.py").write_text("Net = 1\n")
    assert sources.digest(["__main__:Net"]) != sources.digest(["__main__:Net"])
