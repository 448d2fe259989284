"""Turns: a process takes the steps that it is given, and waits between them."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, dataloader

from dpbench.measure import turns
from dpbench.measure.turns import VARIABLE, Turns

PAUSE_S = 0.3


class Gate:
    """The other end: gives these blocks of steps, with a pause before each."""

    def __init__(self, path: Path, blocks: list[int]) -> None:
        self.path = path
        self.answers: list[dict[str, Any]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, args=(blocks,))
        self._thread.start()

    def _serve(self, blocks: list[int]) -> None:
        try:
            joined, _ = self._listener.accept()
        except OSError:  # the test was skipped before it joined
            return
        with joined, joined.makefile("rb") as lines:
            self.answers.append(json.loads(lines.readline()))
            for steps in blocks:
                time.sleep(PAUSE_S)
                joined.sendall(f"{steps}\n".encode())
                self.answers.append(json.loads(lines.readline()))

    def close(self) -> None:
        self._thread.join(20)
        self._listener.close()

    def stop(self) -> None:
        """Wait for nobody any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "socket", [2, 5, 3])
    yield made
    made.stop()


def test_it_takes_the_steps_that_it_is_given(gate: Gate) -> None:
    taken = []
    for steps in Turns(str(gate.path)):
        time.sleep(0.01 * steps)
        taken.append(steps)
    gate.close()
    assert taken == [2, 5, 3]
    first, *blocks = gate.answers
    assert first == {"pid": os.getpid()}
    assert all(
        0.01 * steps <= one["wall_s"] < PAUSE_S for steps, one in zip(taken, blocks, strict=True)
    )
    assert all(one["cpu_s"] < one["wall_s"] for one in blocks)
    assert all(one["memory_bytes"] > 0 for one in blocks)


def test_the_first_block_has_the_files_of_modules(gate: Gate) -> None:
    for _ in Turns(str(gate.path)):
        pass
    gate.close()
    _, first, *others = gate.answers
    assert __file__ in first["files"]
    assert torch.__file__ in first["files"]
    assert all(not one["files"] for one in others)


def test_the_blocks_have_what_workers_have_fetched(gate: Gate) -> None:
    torchs_own = dataloader._MultiProcessingDataLoaderIter._next_data
    batches: Any = iter(DataLoader(range(100), num_workers=2, prefetch_factor=3))
    for steps in Turns(str(gate.path)):
        for _ in range(steps):
            next(batches)
        deadline = time.monotonic() + 60
        while steps == 3 and turns._ready(batches) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
    gate.close()
    _, *blocks = gate.answers
    assert [one["batches"] for one in blocks] == [2, 5, 3]
    assert [one["ahead"] for one in blocks] == [6, 6, 6]
    assert all(0 <= one["ready"] <= 6 for one in blocks)
    assert blocks[-1]["ready"] == 6
    assert dataloader._MultiProcessingDataLoaderIter._next_data is torchs_own


def test_a_finished_epoch_has_nothing_ahead(gate: Gate) -> None:
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    assert len([*loader]) == 4  # a later worker would keep this test's end of the socket open
    for steps in Turns(str(gate.path)):
        if steps == 2:
            assert len([*loader]) == 4
    gate.close()
    _, *blocks = gate.answers
    assert [(one["batches"], one["ahead"]) for one in blocks] == [(4, 0), (0, 0), (0, 0)]


def test_without_workers_nothing_is_fetched_ahead(gate: Gate) -> None:
    batches = iter(DataLoader(range(100)))
    for steps in Turns(str(gate.path)):
        for _ in range(steps):
            next(batches)
    gate.close()
    _, *blocks = gate.answers
    assert all(one["batches"] == one["ahead"] == one["ready"] == 0 for one in blocks)


def test_a_process_that_it_starts_takes_no_turns(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(gate.path))
    found = Turns.of_environment()
    assert found is not None
    assert VARIABLE not in os.environ
    assert Turns.of_environment() is None
    assert list(found) == [2, 5, 3]


def test_without_a_gate_there_are_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Turns.of_environment() is None
