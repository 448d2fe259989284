"""Watching in turns: a watched loop waits for its turn, and no step contains the wait."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import dpbench
from dpbench.measure.turns import VARIABLE
from tests.measure.test_turns import PAUSE_S, Gate


def test_no_step_contains_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(tmp_path / "socket", [4, 4, 4])
    monkeypatch.setenv(VARIABLE, str(tmp_path / "socket"))

    class Ended(BaseException):
        """The signal that ends a loop has come."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    updates = []

    def train() -> None:
        with dpbench.watch(tmp_path / "runs.db"):
            for number in range(100):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                updates.append(number)

    try:
        with pytest.raises(Ended):
            train()
    finally:
        signal.signal(signal.SIGTERM, before)
        gate.close()
    assert len(updates) == 12  # the update after these ended the loop
    trials = dpbench.load(tmp_path / "runs.db").trials
    seconds = [step.seconds for trial in trials for step in trial.steps]
    assert len(seconds) == 12  # nothing marks the beginning of the first update
    assert max(seconds) < PAUSE_S
