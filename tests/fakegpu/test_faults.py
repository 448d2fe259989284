"""`dpbench run` on fake GPUs that fail: one trial ends with its cause, and the others are measured.

Each run has a machine of its own, whose GPU 1 fails once by one of the settings FAKECUDA_FAIL_*.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dpbench
from dpbench.records import Status, Trial
from tests import commands

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("fakecuda") is None,
        reason="no fake GPUs: `make test-gpu` installs them into .venv-gpu",
    ),
]
RUN = ("run", "--models", "mlp", "--devices", "2", "--rounds", "1", "--limit", "60", "--quiet")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a machine whose GPUs have had no faults yet, for this test's commands."""
    name = f"faults-{os.getpid()}-{request.node.callspec.id}"
    monkeypatch.setenv("FAKECUDA_MACHINE", name)
    yield name
    for counters in Path("/dev/shm").glob(f"fakegpu-*-{name}"):
        counters.unlink()


@dataclass(frozen=True)
class Expected:
    """What a fault makes of a run: the failed trial's status, and what its reason and page say."""

    variable: str
    number: int
    strategies: str
    status: Status
    said: str
