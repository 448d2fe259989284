"""`dpbench doctor` on fake GPUs: it names each planted fault of a copy, and no other."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("fakecuda") is None,
        reason="no fake GPUs: `make test-gpu` installs them into .venv-gpu",
    ),
]
MACHINE = f"doctor-{os.getpid()}"
USUAL = {"FAKECUDA_DEVICES": "3", "FAKECUDA_P2P_GBPS": "4", "FAKECUDA_STAGED_GBPS": "3"}
"""Three GPUs whose copies take so long that the time of the host's own copy does not matter."""
OF_THIS_HOST = {
    "small /dev/shm",
    "core quota",
    "variable",
    "locked memory",
    "governor",
    "slow link to the host",
    "slow all-reduce",
}
"""Findings about the machine that runs the test, and rates that fake GPUs do not have."""


@pytest.fixture(autouse=True)
def _machine_of_its_own() -> Iterator[None]:
    yield
    for counters in Path("/dev/shm").glob(f"fakegpu-*-{MACHINE}"):
        counters.unlink()


def examined(**settings: str) -> tuple[set[str], dict[str, Any]]:
    """Return the names of the findings on the GPUs, and the JSON of the command."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FAKECUDA_", "CUDA_VISIBLE_DEVICES"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "dpbench", "doctor", "--json"],
        cwd=ROOT,
        env=inherited | USUAL | settings | {"FAKECUDA_MACHINE": MACHINE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    return {one["name"] for one in found["findings"]} - OF_THIS_HOST, found


PLANTED = {"FAKECUDA_CORRUPT": "0-2", "FAKECUDA_HANG": "1-2", "FAKECUDA_SLOW": "2-0"}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, set()),
        (PLANTED, {"corrupt transfer", "failing transfer", "slow pair"}),
        ({"FAKECUDA_PEER": "0"}, {"no peer access"}),
    ],
    ids=["nothing", "copies", "no peers"],
)
def test_each_planted_fault_is_named_and_no_other(
    settings: dict[str, str], names: set[str]
) -> None:
    found, answer = examined(**settings)
    assert found == names, answer["findings"]
    assert len(answer["copies"]) == 3 * 4 + 2 * 6
