"""The fake GPUs themselves: the laws of their clock, memory, captures and deferred effects.

These tests run where the fake GPUs are installed (`make test-gpu`). Each experiment of
tests/fakegpu/experiments.py runs in a process of its own, because the settings are read once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import uuid
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
OUT_OF_MEMORY, DEVICE_UNAVAILABLE, ECC_UNCORRECTABLE = 2, 46, 214
INVALID_HANDLE, LAUNCH_FAILURE = 400, 719
NCCL_CUDA_ERROR, NCCL_SYSTEM_ERROR, NCCL_INVALID_ARGUMENT = 1, 2, 4
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURED_EVENT = 900, 901, 907


@pytest.fixture(scope="module", autouse=True)
def _machine_of_its_own() -> Iterator[None]:
    yield
    for counters in Path("/dev/shm").glob(f"fakegpu-*-{MACHINE}"):
        counters.unlink()


@pytest.fixture
def machine() -> Iterator[str]:
    """The name of a machine whose GPUs have had no faults yet."""
    name = f"{MACHINE}-{uuid.uuid4().hex[:8]}"
    yield name
    for counters in Path("/dev/shm").glob(f"fakegpu-*-{name}"):
        counters.unlink()


def start(name: str, machine: str = MACHINE, **settings: str) -> subprocess.Popen[str]:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FAKECUDA_", "CUDA_VISIBLE_DEVICES"))
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakegpu.experiments", name],
        cwd=ROOT,
        env=inherited | settings | {"FAKECUDA_MACHINE": machine},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def found(name: str, machine: str = MACHINE, **settings: str) -> Any:
    """What an experiment found with these settings."""
    process = start(name, machine, **settings)
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
        FAKECUDA_DRIFT_PPM="0",
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


def test_events_count_the_clock_of_their_gpu() -> None:
    times = found("drift", FAKECUDA_H2D_GBPS="1", FAKECUDA_DATA="0", FAKECUDA_DRIFT_PPM="200,-300")
    true_s = 6e-6 + 0.1
    assert times == pytest.approx([true_s * 1.0002, true_s * 0.9997], rel=1e-6)


def test_delays_are_random_and_the_same_for_a_seed() -> None:
    def seconds(seed: str) -> float:
        slow = {"FAKECUDA_H2D_GBPS": "1", "FAKECUDA_DATA": "0", "FAKECUDA_DRIFT_PPM": "0"}
        return float(found("delays", **slow, FAKECUDA_DELAY_US="50", FAKECUDA_SEED=seed))

    first, again, other = seconds("1"), seconds("1"), seconds("2")
    assert first == again != other
    kernels_s = 100 * 3e-6
    for drawn in (first, other):
        assert kernels_s + 100 * 10e-6 < drawn < kernels_s + 100 * 50e-6


def test_each_context_costs_its_time_once() -> None:
    first, second, again, once_more = found("contexts", FAKECUDA_CONTEXT_S="0.3")
    assert min(first, second) >= 0.3
    assert max(again, once_more) < 0.3


def test_memory_that_another_container_takes_is_used_by_no_listed_process(machine: str) -> None:
    gpus = found(
        "pressure",
        machine,
        FAKECUDA_MEMORY="4G",
        FAKECUDA_CONTEXT="100M",
        FAKECUDA_TAKEN="1-3G",
    )
    context = 100 * MIB
    assert gpus == {
        "0": [context, 0, 0],
        "1": [context + 3072 * MIB, OUT_OF_MEMORY, 3072 * MIB],
    }


@pytest.mark.parametrize("is_deferred", ["0", "1"])
def test_a_call_with_parts_of_two_gpus_fails_and_says_which(is_deferred: str) -> None:
    process = start("mixed", FAKECUDA_DEVICES="2", FAKECUDA_DEFERRED=is_deferred)
    out, err = process.communicate(timeout=60)
    assert json.loads(out) == {
        "launch": INVALID_HANDLE,
        "launch on its own GPU": 0,
        "event": INVALID_HANDLE,
        "elapsed": INVALID_HANDLE,
        "wait": 0,
        "collective": NCCL_CUDA_ERROR,
        "buffer": NCCL_INVALID_ARGUMENT,
        "group": NCCL_CUDA_ERROR,
    }
    said = [line for line in err.splitlines() if line.startswith("fakecuda: ")]
    collective = "fakecuda: ncclAllReduce: stream of GPU 1 used with communicator of GPU 0"
    assert said == [
        "fakecuda: kernel: stream of GPU 1 used with the current GPU 0",
        "fakecuda: cudaEventRecord: stream of GPU 1 used with an event of GPU 0",
        "fakecuda: cudaEventElapsedTime: event of GPU 1 used with one of GPU 0",
        collective,
        "fakecuda: ncclAllReduce: buffer of GPU 1 used with communicator of GPU 0",
        collective,
    ]


def test_what_cuda_does_not_define_ends_the_process() -> None:
    process = start("mixed_memset")
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGABRT
    assert "cudaMemset: memory of GPU 1 used with a stream of GPU 0" in err


def test_without_faults_every_call_succeeds(machine: str) -> None:
    assert found("faults", machine, FAKECUDA_DEVICES="2") == {
        **{f"allocations {gpu}": [0] * 4 for gpu in range(2)},
        **{f"launches {gpu}": [0] * 4 for gpu in range(2)},
        **{f"waits {gpu}": [0] * 2 for gpu in range(2)},
        "collectives": [0] * 3,
        "NVML": [0, 0],
    }


@pytest.mark.parametrize(
    ("fault", "differs"),
    [
        ({"FAKECUDA_FAIL_ALLOC": "1-3"}, {"allocations 1": [0, 0, OUT_OF_MEMORY, OUT_OF_MEMORY]}),
        (
            {"FAKECUDA_FAIL_LAUNCH": "1-3"},
            {
                "launches 1": [0, 0, 0, LAUNCH_FAILURE],
                "waits 1": [LAUNCH_FAILURE] * 2,
                "collectives": [NCCL_CUDA_ERROR] * 3,
            },
        ),
        (
            {"FAKECUDA_FAIL_ECC": "1-1"},
            {
                "launches 1": [0, *[ECC_UNCORRECTABLE] * 3],
                "waits 1": [ECC_UNCORRECTABLE] * 2,
                "collectives": [NCCL_CUDA_ERROR] * 3,
                "NVML": [0, 1],
            },
        ),
        (
            {"FAKECUDA_FAIL_GPU": "1-2"},
            {
                "launches 1": [0, *[DEVICE_UNAVAILABLE] * 3],
                "waits 1": [DEVICE_UNAVAILABLE] * 2,
                "collectives": [NCCL_CUDA_ERROR] * 3,
                "NVML": [0, "GPU is lost"],
            },
        ),
        ({"FAKECUDA_FAIL_NCCL": "1-2"}, {"collectives": [0, *[NCCL_SYSTEM_ERROR] * 2]}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_the_nth_of_its_kind_fails_and_no_other(
    fault: dict[str, str], differs: dict[str, Any], machine: str
) -> None:
    usual = found("faults", machine, FAKECUDA_DEVICES="2")
    assert found("faults", machine, FAKECUDA_DEVICES="2", **fault) == usual | differs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FAKECUDA_DEVICES", "17"),
        ("FAKECUDA_MEMORY", "1GB"),
        ("FAKECUDA_FAIL_ALLOC", "5"),
        ("FAKECUDA_TAKEN", "1-3GB"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name: str, value: str) -> None:
    process = start("visible", **{name: value})
    _, err = process.communicate()
    assert process.returncode == 64
    assert f"{name}={value}" in err
