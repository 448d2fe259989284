"""Watching: no error of dpbench's own code ends the user's script, or changes its results."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpbench
from dpbench.observe import modules, seams, watching
from dpbench.observe.recorder import Recorder
from dpbench.store import Store

STEPS = 12


def losses(after: Callable[[int], object] = lambda step: None) -> list[float]:
    """Train with every kind of call that is watched; return the losses."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    found = []
    data = torch.utils.data.TensorDataset(torch.randn(4 * STEPS, 4), torch.ones(4 * STEPS, 4))
    for step, (inputs, target) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), target)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
        after(step)
    return found


def watched_losses(path: Path, **options: Any) -> tuple[list[float], list[str]]:
    """Return the losses of a watched training, and the problems that the stored run names."""
    with dpbench.watch(path, **options) as result:
        found = losses()
    return found, result.unknown


def fault(*_: object, **__: object) -> Any:
    raise ArithmeticError("planted")


OWN_CODE: dict[str, tuple[Any, str]] = {
    "module": (modules, "_kind"),
    "facts": (modules, "_note_facts"),
    "precision": (modules, "precision"),
    "hook": (modules.Outermost, "_hook"),
    "place": (seams, "place"),
    "owner": (Recorder, "owner"),
    "keeping": (Recorder, "_keeps"),
}


@pytest.mark.parametrize("name", OWN_CODE)
def test_an_error_in_own_code_ends_the_recording_and_not_the_script(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses()
    place, function = OWN_CODE[name]
    installed = seams.installed

    def broken(recorder: Recorder) -> Any:
        recorder.listeners.append(lambda ends: plant() if len(ends) == 3 else None)
        recorder._most = 1  # so that `_keeps` is called
        return installed(recorder)

    def plant() -> None:
        monkeypatch.setattr(place, function, fault)

    if name in ("hook", "facts", "precision", "place"):  # called or held from the start
        plant()
    monkeypatch.setattr(seams, "installed", broken)
    found, unknown = watched_losses(path)
    assert found == expected
    assert any("planted" in one for one in unknown)


def test_what_was_recorded_before_the_error_is_stored_with_a_note(path: Path) -> None:
    installed = seams.installed

    def broken(recorder: Recorder) -> Any:
        recorder.listeners.append(lambda ends: fault() if len(ends) == 8 else None)
        return installed(recorder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seams, "installed", broken)
        found, unknown = watched_losses(path)
    assert found == losses()
    assert [one for one in unknown if "in update 8" in one and "ArithmeticError: planted" in one]
    with Store.read(path) as opened:
        (trial,) = opened.trials(opened.runs()[0].id)
        facts = trial.facts.loop
    assert len(trial.steps) == 7
    assert facts
    assert any("planted" in one.problem for one in facts.unknown)


def test_a_store_that_cannot_be_written_lets_the_code_after_the_block_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    with caplog.at_level(logging.ERROR):
        found, _ = watched_losses(tmp_path / "folder")  # not a file
    assert found == losses()
    assert "not stored" in caplog.text
    assert "--store" in caplog.text, "the option as on the command line"


def test_samplers_that_raise_let_the_script_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching.samplers, "sampling", fault)
    found, unknown = watched_losses(path)
    assert found == losses()
    assert any("planted" in one for one in unknown)


def test_a_closed_terminal_ends_no_script(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LIVE_S", 0.0)
    stream = io.StringIO()
    stream.close()
    found, unknown = watched_losses(path, live=stream)
    assert found == losses()
    assert not any("stopped recording" in one for one in unknown)
