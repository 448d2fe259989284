"""The fake GPUs themselves: the laws of their clock, memory, captures and deferred effects.

These tests run where the fake GPUs are installed (`make test-gpu`). Each experiment of
tests/fakegpu/experiments.py runs in a process of its own, because the settings are read once.
"""

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
from tests.fakegpu import oplog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("fakecuda") is None,
        reason="no fake GPUs: `make test-gpu` installs them into .venv-gpu",
    ),
]
MACHINE = f"test-{os.getpid()}"
MIB = 1 << 20
NO_DEVICE = 100
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURED_EVENT = 900, 901, 907


@pytest.fixture(scope="module", autouse=True)
def _machine_of_its_own() -> Iterator[None]:
    yield
    for counters in Path("/dev/shm").glob(f"fakegpu-*-{MACHINE}"):
        counters.unlink()


def start(name: str, **settings: str) -> subprocess.Popen[str]:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FAKECUDA_", "CUDA_VISIBLE_DEVICES"))
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakegpu.experiments", name],
        cwd=ROOT,
        env=inherited | settings | {"FAKECUDA_MACHINE": MACHINE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def found(name: str, **settings: str) -> Any:
    """What an experiment found with these settings."""
    process = start(name, **settings)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def clock() -> dict[str, Any]:
    return found(
        "clock",
        FAKECUDA_DEVICES="2",
        FAKECUDA_MEMORY="1G",
        FAKECUDA_DATA="0",
        FAKECUDA_H2D_GBPS="1",
        FAKECUDA_COPY_US="10",
    )


@pytest.fixture(scope="module")
def deferred() -> dict[str, int]:
    return found("deferred", FAKECUDA_DEVICES="2", FAKECUDA_DEFERRED="1")


def test_the_time_of_a_copy_is_its_latency_and_its_bytes_at_the_rate(clock: dict[str, Any]) -> None:
    assert not clock["done before the copies' time"]
    assert clock["short copy, s"] == pytest.approx(10e-6 + 16 * MIB / 1e9, rel=1e-5)
    assert clock["long copy, s"] >= 10e-6 + 512 * MIB / 1e9


def test_a_replayed_graph_computes_from_what_its_inputs_hold_now(clock: dict[str, Any]) -> None:
    assert clock["replays"] == [[7.0] * 8, [11.0] * 8]


def test_torch_reports_a_full_gpu(clock: dict[str, Any]) -> None:
    assert "CUDA out of memory. Tried to allocate 8.00 GiB" in clock["out of memory"]
    assert "total capacity of 1024.00 MiB" in clock["out of memory"]


def test_an_address_knows_its_gpu_and_whether_it_is_pinned(clock: dict[str, Any]) -> None:
    assert clock["first GPU"] == [0, False]
    assert clock["second GPU"] == [1, False]
    assert clock["pinned"] == [-1, True]
    assert clock["pageable"] == [-1, False]
    assert clock["device of a copy"] == 0


def test_a_missing_wait_gives_wrong_numbers_in_deferred_mode(deferred: dict[str, int]) -> None:
    assert deferred["right"] == 0
    assert deferred["no wait"] > 0
    assert deferred["no record_stream"] > 0


def test_threads_with_right_waits_are_right_in_deferred_mode(deferred: dict[str, int]) -> None:
    assert deferred["threads"] == 0


def test_effects_run_in_every_order_that_events_and_the_default_stream_allow() -> None:
    assert found("effect_orders", FAKECUDA_DEFERRED="1") == {
        "free": ["A"],
        "event": ["AB"],
        "nothing": ["AB", "BA"],
        "default stream": ["ABC"],
        "default stream, non-blocking": ["ABC", "ACB", "BAC"],
    }


def test_a_capture_forbids_what_its_mode_says_and_is_then_lost() -> None:
    lost, kept = [CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED], [0, 0]
    assert found("captures") == {
        "global own": lost,
        "global other": lost,
        "thread own": lost,
        "thread other": kept,
        "relaxed own": kept,
        "relaxed other": kept,
        "event of an ended capture": CAPTURED_EVENT,
    }


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [
        ("2,0", [2, 0]),
        ("GPU-11,3", [1, 3]),
        ("0,7,1", [0]),  # the first name of no GPU ends the list
        ("1,1", []),
        ("", []),
    ],
)
def test_cuda_visible_devices_chooses_and_orders(listed: str, gpus: list[int]) -> None:
    status = 0 if gpus else NO_DEVICE
    assert found("visible", CUDA_VISIBLE_DEVICES=listed) == {"status": status, "gpus": gpus}


def test_nvml_sees_the_memory_of_each_process() -> None:
    holder = start("hold", CUDA_VISIBLE_DEVICES="2", FAKECUDA_CONTEXT="100M")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    during = found("processes", FAKECUDA_DEVICES="3")
    holder.kill()
    holder.communicate()
    assert during == [[], [], [[holder.pid, 164 * MIB]]]
    assert found("processes", FAKECUDA_DEVICES="3") == [[], [], []]


def test_the_log_says_what_ran_where_and_when(tmp_path: Path) -> None:
    """A product of 20 GFLOP takes a millisecond at 20 TFLOP/s, after the kernel's 3 µs."""
    ran = found("operations", FAKECUDA_LOG=str(tmp_path / "log"))
    (file,) = tmp_path.iterdir()
    assert file.name == f"log.{ran['process']}"
    lines = oplog.read(file)
    said = [(line.kind, line.name) for line in lines]
    assert said == [
        ("kernel", "first"),
        ("record", ""),
        ("wait", ""),
        ("note", "between"),
        ("kernel", "second"),
        ("memset", "Memset"),
        ("kernel", "third"),
    ]
    first, record, wait, _, second, fill, third = lines
    assert [line.end_ns - line.start_ns for line in (first, second, third)] == [1_003_000] * 3
    assert (record.end_ns, wait.end_ns) == (first.end_ns, first.end_ns)
    assert record.event == wait.event > 0
    assert first.stream == record.stream == third.stream != second.stream == wait.stream
    assert first.end_ns <= second.start_ns <= second.end_ns <= fill.start_ns
    assert fill.end_ns <= third.start_ns  # a GPU runs one kernel at a time
    assert fill.bytes == MIB
    assert {(line.gpu, line.current, line.thread) for line in lines} == {(0, 0, ran["thread"])}
    assert all(ran["began"] <= line.host_ns <= ran["ended"] for line in lines[:-1])


@pytest.mark.parametrize(
    ("name", "value"), [("FAKECUDA_DEVICES", "17"), ("FAKECUDA_MEMORY", "1GB")]
)
def test_a_setting_that_cannot_be_is_refused(name: str, value: str) -> None:
    process = start("visible", **{name: value})
    _, err = process.communicate()
    assert process.returncode == 64
    assert f"{name}={value}" in err
