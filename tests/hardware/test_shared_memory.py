"""A run says that /dev/shm is too small before the processes that need it fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.hardware import gpus, shared_memory
from dpbench.hardware.shared_memory import SharedMemory
from dpbench.measure import selection
from dpbench.records.options import Options
from tests.doctor import machines
from tests.measure.test_gpu_budget import machine


@pytest.mark.parametrize(
    ("options", "count", "said"),
    [
        ({}, 2, True),
        ({"strategies": ("ddp",), "devices": (2,)}, 2, True),
        ({"strategies": ("single", "dp"), "devices": (1, 2)}, 2, False),
        ({"strategies": ("ddp",), "devices": (1,)}, 2, False),
        ({"strategies": ("single",), "loader": (2,)}, 1, True),
        ({"strategies": ("single",), "loader": (0,)}, 1, False),
        ({"strategies": ("ddp",), "devices": (2,), "device_kind": "cpu"}, 2, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("size_bytes", [64 * 2**20, 2**30, None])
def test_a_run_whose_processes_need_it_names_its_size_and_the_change(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, object],
    count: int,
    said: bool,
    size_bytes: int | None,
) -> None:
    monkeypatch.setattr(gpus, "of_torch", lambda: machine(count))
    monkeypatch.setattr(
        shared_memory, "read", lambda: SharedMemory(size_bytes=size_bytes, container=True)
    )
    selection.cases_of(Options.of(**options))
    warned = [text for text in caplog.messages if "/dev/shm" in text]
    assert len(warned) == (said and size_bytes == 64 * 2**20)
    if warned:
        assert "64.0 MiB" in warned[0]
        assert "--shm-size" in warned[0]


def test_files_of_a_recorded_machine_are_read(tmp_path: Path) -> None:
    machines.read(tmp_path, "container")
    found = shared_memory.read(tmp_path)
    assert (found.size_bytes, found.container) == (64 * 2**20, True)
    assert found.small
    assert shared_memory.read(tmp_path / "absent") == SharedMemory(size_bytes=None, container=False)
