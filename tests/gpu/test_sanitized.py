"""torch's own race detector for CUDA (`sanitized.py`) is silent, and finds planted faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpbench.records.schedule import Schedule

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.sanitized"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("rung", Schedule)
def test_a_rung_has_no_race_that_csan_sees(report: dict[str, Any], rung: str) -> None:
    assert report["clean"][rung] == 0


# in a step, only the copies of weights through autograd follow the work of another stream
MISSED = [("no wait", rung) for rung in Schedule] + [
    ("no follow", rung) for rung in Schedule if not rung.keeps_replicas
]


@pytest.mark.parametrize(("fault", "rung"), MISSED)
def test_csan_finds_a_missing_wait(report: dict[str, Any], fault: str, rung: str) -> None:
    assert report["found"][fault][rung] > 0
