"""The fake GPUs' NCCL, cuBLAS, cuDNN, CUPTI and NVML against the CPU and the virtual clock.

One process forks the ranks of all scenarios (tests/fakegpu/scenarios.py).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakegpu import scenarios

FAKE = importlib.util.find_spec("fakecuda") is not None
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(not FAKE, reason="needs the fake GPUs, which it tests: make test-gpu"),
]

FLOPS, BYTES_PER_S, LATENCY_NS = 20e12, 800e9, 3000
"""The fake GPU's rates, unless a FAKECUDA_* variable sets others."""
NVLINK_BYTES_PER_S, COLLECTIVE_LATENCY_NS = 20e9, 15000
SUM, MAX, AVERAGE = 0, 2, 4  # NCCL's numbers
NCCL_OPS = {"sum": SUM, "max": MAX, "avg": AVERAGE}
INVALID_USAGE = 5
ROOT = 1

sizes = pytest.mark.parametrize("size", [2, 4])
dtypes = pytest.mark.parametrize("dtype", scenarios.DTYPES)


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    """What every rank of every scenario found."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fakegpu.scenarios"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "FAKECUDA_NUMERICS": "0", "FAKECUDA_DEVICES": "4"},
        check=True,
    )
    return json.loads(done.stdout)


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction on the CPU, in the order of the ranks and in their type."""
    total = functools.reduce(torch.maximum if op == "max" else torch.add, parts)
    if op != "avg":
        return total
    rounding = None if total.is_floating_point() else "trunc"
    return torch.div(total, len(parts), rounding_mode=rounding)


def expected(name: str, rank: int, size: int) -> torch.Tensor:
    """What a rank gets from a collective of the scenario."""
    verb, *words = name.split()
    dtype, op = words[-1], words[0]
    parts = [scenarios.given(each, dtype, 12 * size) for each in range(size)]
    match verb:
        case "all_reduce":
            return reduced(parts, op)
        case "reduce_scatter":
            return reduced(parts, op)[12 * rank : 12 * rank + 12]
        case "reduce":
            return reduced(parts, op) if rank == ROOT else parts[rank]
        case "broadcast":
            return parts[ROOT]
    assert verb == "all_gather"
    return torch.cat(parts)


@sizes
@pytest.mark.slow
def test_collectives_between_processes_are_the_cpus(
    results: dict[str, list[Any]], size: int
) -> None:
    for rank, found in enumerate(results[f"collectives {size}"]):
        large = torch.arange(600_000)[::100_000] * size + sum(range(size))
        assert found.pop("all_reduce large") == large.tolist()
        pair = sum(scenarios.given(each, "float32") for each in range(2))
        assert found.pop("all_reduce of a pair", pair.tolist()) == pair.tolist()
        assert len(found) == len(scenarios.DTYPES) * 9
        for name, values in found.items():
            assert values == expected(name, rank, size).double().tolist(), (name, rank)


@dtypes
@sizes
def test_collectives_in_one_process_are_the_cpus(size: int, dtype: str) -> None:
    parts = [scenarios.given(rank, dtype, 12 * size) for rank in range(size)]
    inputs = [part.cuda(rank) for rank, part in enumerate(parts)]

    def empty(count: int) -> list[torch.Tensor]:
        return [torch.empty(count, dtype=parts[0].dtype, device=rank) for rank in range(size)]

    def check(outputs: list[torch.Tensor], verb: str) -> None:
        for rank, output in enumerate(outputs):
            torch.testing.assert_close(output.cpu(), expected(verb, rank, size), rtol=0, atol=0)

    nccl = torch.cuda.nccl
    for name, op in NCCL_OPS.items():
        outputs = empty(12 * size)
        nccl.all_reduce(inputs, outputs, op)
        check(outputs, f"all_reduce {name} {dtype}")
        outputs = empty(12)
        nccl.reduce_scatter(inputs, outputs, op)
        check(outputs, f"reduce_scatter {name} {dtype}")
    gathered = empty(12 * size * size)
    nccl.all_gather(inputs, gathered)
    check(gathered, f"all_gather {dtype}")
    outputs = [each.clone() for each in inputs]
    nccl.reduce(inputs, outputs[ROOT], ROOT)
    check(outputs, f"reduce sum {dtype}")
    nccl.broadcast(inputs, ROOT)
    check(inputs, f"broadcast {dtype}")


class Clique:
    """NCCL's own functions on the GPUs of this process."""

    def __init__(self, size: int) -> None:
        self.nccl = ctypes.CDLL("libnccl.so.2")
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        self.communicators = (ctypes.c_void_p * size)()
        assert self.nccl.ncclCommInitAll(self.communicators, size, None) == 0

    def all_reduce(self, rank: int, count: int, op: int = SUM) -> None:
        """Call for one rank; the memory is never touched if the group is wrong."""
        arguments = (ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(count), 7, op)
        communicator = ctypes.c_void_p(self.communicators[rank])
        assert self.nccl.ncclAllReduce(*arguments, communicator, ctypes.c_void_p()) == 0

    def group(self, calls: Callable[[], None]) -> tuple[int, str]:
        """Return the result of a group of calls, and the reason."""
        assert self.nccl.ncclGroupStart() == 0
        calls()
        return self.nccl.ncclGroupEnd(), self.nccl.ncclGetLastError(None).decode()


def test_a_group_without_a_rank_names_the_rank() -> None:
    clique = Clique(4)
    result, reason = clique.group(lambda: [clique.all_reduce(rank, 8) for rank in (0, 1, 3)])
    assert result == INVALID_USAGE
    assert "rank 2 of 4" in reason
    assert "ncclAllReduce of 8 float32" in reason


def test_a_second_call_of_one_rank_names_the_other() -> None:
    clique = Clique(2)
    result, reason = clique.group(lambda: [clique.all_reduce(rank, 0) for rank in (0, 1, 0)])
    assert result == INVALID_USAGE
    assert "rank 1 of 2" in reason


@pytest.mark.parametrize(("count", "op"), [(9, SUM), (8, MAX)])
def test_calls_of_one_group_that_disagree_are_named(count: int, op: int) -> None:
    clique = Clique(2)
    result, reason = clique.group(
        lambda: (clique.all_reduce(0, 8), clique.all_reduce(1, count, op))
    )
    assert result == INVALID_USAGE
    assert "ncclAllReduce of 8 float32, sum" in reason
    assert f"rank 1 of 2 ncclAllReduce of {count} float32" in reason


def test_two_ranks_of_one_gpu_are_refused(results: dict[str, list[Any]]) -> None:
    nccl = ctypes.CDLL("libnccl.so.2")
    assert nccl.ncclCommInitAll((ctypes.c_void_p * 2)(), 2, (ctypes.c_int * 2)(0, 0)) == (
        INVALID_USAGE
    )
    for rank in results["same GPU"]:
        assert "rank 0 and rank 1" in rank["error"]


def test_different_orders_of_two_processes_are_named(results: dict[str, list[Any]]) -> None:
    for rank in results["mismatched order"]:
        assert "rank 0 calls ncclAllReduce of 4 float32" in rank["error"]
        assert "rank 1 ncclBroadcast of 2 float32, root 0" in rank["error"]


def test_different_counts_of_two_processes_are_named(results: dict[str, list[Any]]) -> None:
    for rank in results["mismatched count"]:
        assert "rank 0 calls ncclAllReduce of 4 float32" in rank["error"]
        assert "rank 1 ncclAllReduce of 5 float32" in rank["error"]


def test_a_rank_that_dies_is_named_by_the_others(results: dict[str, list[Any]]) -> None:
    first, dead, last = results["dying rank"]
    assert dead is None
    for survivor in (first, last):
        assert "ncclRemoteError" in survivor["error"]
        assert "rank 1 (process" in survivor["error"]
        assert "died" in survivor["error"]


def test_a_rank_that_does_not_come_is_named(results: dict[str, list[Any]]) -> None:
    waiting, late = results["late rank"]
    assert late == {}  # it lived longer than the other waited
    assert "ncclSystemError" in waiting["error"]
    assert "rank 1 did not come" in waiting["error"]


def test_an_abort_ends_a_wait(results: dict[str, list[Any]]) -> None:
    waiting, other = results["aborted rank"]
    assert other == {}
    assert "aborted" in waiting["error"]


def test_a_collective_runs_beside_kernels_for_its_bytes(results: dict[str, list[Any]]) -> None:
    for spans in results["overlapped"]:
        began, ended = spans["collective"]
        assert began < spans["kernel"][0] < ended
        at_1_gb_per_s = COLLECTIVE_LATENCY_NS + 4 * scenarios.ALL_REDUCED / 1e9 * 1e9
        assert ended - began == pytest.approx(at_1_gb_per_s, rel=1e-3)


def product_ns(m: int, n: int, k: int, batch: int = 1, width: int = 4) -> float:
    """The time of a matrix product on the virtual clock."""
    operations_s = 2 * m * n * k * batch / FLOPS
    bytes_s = width * (m * k + k * n + m * n) * batch / BYTES_PER_S
    return LATENCY_NS + max(operations_s, bytes_s) * 1e9


@pytest.mark.parametrize(
    ("name", "kernels", "each_ns"),
    [
        ("float32", 1, product_ns(1024, 1024, 1024)),
        ("float64", 1, product_ns(1024, 1024, 1024, width=8)),
        ("bfloat16", 1, product_ns(1024, 1024, 1024, width=2)),
        ("batched", 1, product_ns(512, 512, 512, batch=8)),
        ("linear", 1, product_ns(512, 1024, 256)),
        ("row float32", 1, product_ns(2, 4096, 4096)),
        ("row bfloat16", 1, product_ns(2, 4096, 4096, width=2)),
        # forward, input's gradient, filter's gradient
        ("convolution", 3, product_ns(8 * 32 * 32, 128, 64 * 9)),
    ],
)
def test_times_are_operations_or_bytes_by_the_rate(
    results: dict[str, list[Any]], name: str, kernels: int, each_ns: float
) -> None:
    (found,) = results["clock"]
    times = [duration_ns for _, duration_ns in found[name]]
    assert times == pytest.approx([each_ns] * kernels, rel=1e-3)


def test_a_profile_after_warm_up_has_a_launch_for_each_kernel(
    results: dict[str, list[Any]],
) -> None:
    first, second = results["scheduled"][0]["cycles"]
    assert first == second
    assert first["kernels"] == first["launches"]
    assert first["kernels"] % 3 == 0  # three steps
    assert first["kernels"] > 3 * 8
    assert first["without launch"] == []


def test_a_profile_shifts_the_times_of_each_gpu(results: dict[str, list[Any]]) -> None:
    (found,) = results["clocks apart"]
    assert found == pytest.approx({"0": 0.02, "1": -0.03}, abs=0.01)


def test_what_runs_on_into_a_recorded_step_has_no_launch(results: dict[str, list[Any]]) -> None:
    (found,) = results["running over"]
    assert found["launched"] == found["launches"] == 2
    assert found["kernels"] > 10  # of the 60 of the step of warm-up


def test_nvml_counts_what_was_run(results: dict[str, list[Any]]) -> None:
    (found,) = results["counters"]
    memory = found["memory"]
    context_bytes = 300 << 20
    assert memory["own_bytes"] == memory["reserved_bytes"] + context_bytes
    assert memory["reserved_bytes"] >= found["kept_bytes"]
    assert memory["used_bytes"] == memory["all_bytes"] >= memory["own_bytes"]
    assert found["pcie_rx_bytes_per_s"] == pytest.approx(12e9, rel=0.01)
    busy_s = scenarios.LONG_PRODUCTS * product_ns(4096, 4096, 4096) / 1e9
    assert found["busy_s"] == pytest.approx(busy_s, rel=0.01)
    assert sum(found["samples"]) / 100 * 0.1 == pytest.approx(busy_s, rel=0.05)
    assert 100 in found["samples"]
    assert found["sample_type"] == 1  # unsigned int
    assert found["nvlink_sent_bytes"] == [4 << 20] * 2  # of a ring of two: all bytes, once


def test_nvml_tells_the_states_of_an_idle_and_a_busy_gpu(results: dict[str, list[Any]]) -> None:
    (found,) = results["counters"]
    idle, busy = found["idle"], found["busy"]
    changing = {
        "sm_clock_mhz": (210, 1200),  # FAKECUDA_CLOCK_MHZ
        "reasons": (1, 4),  # idle; software power cap
        "pcie_generation": (1, 4),
        "utilization": (0, 100),
        "power_mw": (30_000, 350_000),
    }
    assert {name: (idle[name], busy[name]) for name in changing} == changing
    same = {name: value for name, value in idle.items() if name not in changing}
    assert {name: busy[name] for name in same} == same
    assert "fake" in same["driver"]
    assert same["ecc"] == [0, 0]
    assert same["persistence"] == 1
    assert same["default_limit_mw"] == 350_000
