"""`dpbench doctor` on fake GPUs: it names each planted fault, and no other."""

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
USUAL = {
    "FAKECUDA_DEVICES": "2",
    "FAKECUDA_PCIE": "1x1",
    "FAKECUDA_H2D_GBPS": "0.23",
    "FAKECUDA_D2H_GBPS": "0.23",
    "FAKECUDA_P2P_GBPS": "0.25",
    "FAKECUDA_STAGED_GBPS": "0.15",
}
"""Two GPUs whose copies take so long that the time of the host's own copy does not matter."""
OF_THIS_HOST = {
    "small /dev/shm",
    "core quota",
    "variable",
    "locked memory",
    "busy cores",
    "slow all-reduce",
}
"""Findings about the machine that runs the test, on which the fake NCCL moves the bytes."""


@pytest.fixture(autouse=True)
def _machine_of_its_own() -> Iterator[None]:
    yield
    forget(MACHINE)


def forget(machine: str) -> None:
    """Remove the counters of a machine with fake GPUs."""
    for counters in Path("/dev/shm").glob(f"fakegpu-*-{machine}"):
        counters.unlink()


def examined(settings: dict[str, str], folder: Path, machine: str = MACHINE) -> dict[str, Any]:
    """Return the JSON of the command in a folder, without the findings about this host."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FAKECUDA_", "CUDA_VISIBLE_DEVICES"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "dpbench", "doctor", "--json"],
        cwd=folder,
        env=inherited | USUAL | settings | {"FAKECUDA_MACHINE": machine, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["findings"] = [one for one in found["findings"] if one["name"] not in OF_THIS_HOST]
    return found


def fake(**settings: str) -> dict[str, str]:
    return {f"FAKECUDA_{name}": value for name, value in settings.items()}


PLANTED: dict[str, tuple[dict[str, str], set[str]]] = {
    "nothing": ({}, set()),
    "a pair that corrupts": (fake(CORRUPT="0-1"), {"corrupt transfer"}),
    "a pair that hangs": (fake(HANG="1-0"), {"failing transfer", "failing all-reduce"}),
    "a pair at a tenth": (fake(SLOW="1-0", P2P_GBPS="0.5"), {"slow pair"}),
    "no peer access": (fake(PEER="0"), {"no peer access"}),
    "a link to the host at a third": (
        fake(H2D_GBPS="0.08"),
        {"slow link to the host"},
    ),
    "one of two lanes": (
        fake(PCIE="1x2", PCIE_LANES="1-1", H2D_GBPS="0.4", D2H_GBPS="0.4"),
        {"narrow link"},
    ),
    "an NVLink that is down": (fake(NVLINK_DOWN="0-1"), {"NVLink down"}),
    "a lowered power limit": (fake(POWER_LIMIT="1-200"), {"power limit"}),
    "memory errors": (fake(ECC_ERRORS="0-3"), {"memory errors"}),
}
"""What is planted on fake GPUs, and the names of the findings."""


def together(*names: str) -> tuple[dict[str, str], set[str]]:
    """Return several planted faults as one."""
    settings: dict[str, str] = {}
    expected: set[str] = set()
    for name in names:
        settings |= PLANTED[name][0]
        expected |= PLANTED[name][1]
    return settings, expected


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        together("nothing"),
        together("a pair that corrupts", "a pair at a tenth"),
        together("a pair that hangs"),
        together(
            "one of two lanes",
            "an NVLink that is down",
            "a lowered power limit",
            "memory errors",
        ),
        together("no peer access"),
    ],
    ids=["nothing", "copies", "hang", "states", "no peers"],
)
def test_each_planted_fault_is_named_and_no_other(
    settings: dict[str, str], names: set[str], tmp_path: Path
) -> None:
    answer = examined(settings, tmp_path)
    assert {one["name"] for one in answer["findings"]} == names, answer["findings"]
    assert len(answer["copies"]) == 2 * 4 + 2 * 2
    assert "FAKE-GPU" in answer["labels"]

    for found in answer["findings"]:
        if found["name"] == "failing all-reduce":
            _names_ranks_and_collectives(found["evidence"])


def _names_ranks_and_collectives(evidence: str) -> None:
    for rank in range(2):
        assert f"rank {rank} was in collective 1, nccl:all_reduce of 262144 elements" in evidence
