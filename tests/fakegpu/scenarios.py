"""Programs on fake GPUs whose results tests/fakegpu/test_libraries.py checks, as JSON on stdout.

`python -m tests.fakegpu.scenarios` loads torch once and forks the ranks of every scenario, which
compute no numbers of kernels (FAKECUDA_NUMERICS=0): collectives and copies move bytes all the same.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml
import torch
import torch.distributed as dist

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
SHORT_S = "0.5"
MATMUL = 1024
LONG_PRODUCTS = 360
"""Products of 4096 x 4096 matrices, which take two and a half seconds."""
COPY_BYTES = 64 << 20
ALL_REDUCED = 64 << 20
"""Elements of float32 whose all-reduce by two ranks takes a quarter of a second at 1 GB/s."""


def given(rank: int, dtype: str, count: int = 12) -> torch.Tensor:
    """What a rank gives to a collective: small numbers, so that products fit into 8 bits."""
    return ((torch.arange(count) * 5 + rank * 3) % 7).to(getattr(torch, dtype))


def join(rank: int, size: int, folder: str, device: int | None = None) -> None:
    torch.cuda.set_device(rank if device is None else device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )


def collectives(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Every collective with every type: what this rank gets."""
    join(rank, size, folder)
    found = {}
    for dtype in DTYPES:
        mine = given(rank, dtype, 12 * size).cuda()
        for name, op in OPS.items():
            reduced = mine.clone()
            dist.all_reduce(reduced, op)
            found[f"all_reduce {name} {dtype}"] = reduced
            scattered = torch.empty(12, dtype=mine.dtype, device=mine.device)
            dist.reduce_scatter_tensor(scattered, mine, op)
            found[f"reduce_scatter {name} {dtype}"] = scattered
        reduced = mine.clone()
        dist.reduce(reduced, 1)
        found[f"reduce sum {dtype}"] = reduced
        same = mine.clone()
        dist.broadcast(same, 1)
        found[f"broadcast {dtype}"] = same
        gathered = torch.empty(mine.numel() * size, dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(gathered, mine)
        found[f"all_gather {dtype}"] = gathered
    large = torch.arange(rank, rank + 600_000, dtype=torch.float32).cuda()  # several pieces
    dist.all_reduce(large)
    found["all_reduce large"] = large.cpu()[::100_000]
    pair = dist.new_group([0, 1])  # ncclCommSplit, or a communicator of its own
    if rank < 2:
        mine = given(rank, "float32").cuda()
        dist.all_reduce(mine, group=pair)
        found["all_reduce of a pair"] = mine
    return {name: tensor.cpu().double().tolist() for name, tensor in found.items()}


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    """The text of the error of a call, and after how many seconds it came."""
    began = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {"error": "", "seconds": time.monotonic() - began}


def mismatched_order(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Two ranks make the same two calls in different orders."""
    join(rank, size, folder)
    calls = [
        lambda: dist.all_reduce(torch.ones(4, device="cuda")),
        lambda: dist.broadcast(torch.ones(2, device="cuda"), 0),
    ]
    return error_of(calls[rank])


def mismatched_count(rank: int, size: int, folder: str) -> dict[str, Any]:
    join(rank, size, folder)
    return error_of(lambda: dist.all_reduce(torch.ones(4 + rank, device="cuda")))


def dying_rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Rank 1 ends without a word after the first call."""
    join(rank, size, folder)
    mine = torch.ones(4, device="cuda")
    dist.all_reduce(mine)
    if rank == 1:
        os._exit(9)
    return error_of(lambda: dist.all_reduce(mine))


def late_rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Rank 1 lives, but never makes the second call."""
    join(rank, size, folder)
    mine = torch.ones(4, device="cuda")
    dist.all_reduce(mine)
    os.environ["FAKECUDA_NCCL_TIMEOUT_S"] = SHORT_S
    if rank == 0:
        return error_of(lambda: dist.all_reduce(mine))
    time.sleep(3 * float(SHORT_S))
    return {}


def aborted_rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Rank 0 aborts its communicator while it waits for rank 1, which lives."""
    join(rank, size, folder)
    mine = torch.ones(4, device="cuda")
    dist.all_reduce(mine)
    if rank == 1:
        time.sleep(1)
        return {}
    threading.Timer(0.3, dist.distributed_c10d._abort_process_group).start()
    return error_of(lambda: dist.all_reduce(mine))


def same_gpu(rank: int, size: int, folder: str) -> dict[str, Any]:
    join(rank, size, folder, device=0)
    return error_of(lambda: dist.all_reduce(torch.ones(4, device="cuda")))


def profiled(run: Callable[[], Any]) -> tuple[list[Any], set[int]]:
    """The kernels of a function, and the correlation ids of its launches."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    return kernels_and_launches(profile.profiler.kineto_results.events())


def kernels_and_launches(events: list[Any]) -> tuple[list[Any], set[int]]:
    host = [one for one in events if one.device_type() == torch._C._autograd.DeviceType.CPU]
    launches = {one.correlation_id() for one in host if "Launch" in one.name()}
    names = {one.name() for one in host}  # of an annotation, both sides have an event
    kernels = [one for one in events if one not in host and one.name() not in names]
    return [one for one in kernels if not one.name().startswith(("Mem", "Context"))], launches


def overlapped(rank: int, size: int, folder: str) -> dict[str, Any]:
    """An all-reduce beside kernels of the same GPU: when each ran."""
    join(rank, size, folder)
    large = torch.empty(ALL_REDUCED, device="cuda")
    left = torch.empty(MATMUL, MATMUL, device="cuda")
    dist.all_reduce(torch.ones(1, device="cuda"))
    left @ left

    def run() -> None:
        work = dist.all_reduce(large, async_op=True)
        left @ left
        work.wait()

    kernels, _ = profiled(run)
    spans = {}
    for one in kernels:
        kind = "collective" if one.name().startswith("nccl") else "kernel"
        spans[kind] = (one.start_ns(), one.start_ns() + one.duration_ns())
    return spans


def clock(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Kernels on the virtual clock, and what the profiler says of them."""
    found: dict[str, Any] = {}
    products = {
        "float32": lambda: square(torch.float32),
        "float64": lambda: square(torch.float64),
        "bfloat16": lambda: square(torch.bfloat16),
        "batched": lambda: torch.bmm(*(torch.empty(8, 512, 512, device="cuda") for _ in "ab")),
        "linear": lambda: torch.nn.functional.linear(
            *(torch.empty(shape, device="cuda") for shape in ((512, 256), (1024, 256), (1024,)))
        ),
        "row float32": lambda: row(torch.float32),
        "row bfloat16": lambda: row(torch.bfloat16),
        "convolution": convolution,
    }
    for name, run in products.items():
        run()
        kernels, _ = profiled(run)
        costly = [one for one in kernels if one.name().startswith("fake_")]
        found[name] = [(one.name(), one.duration_ns()) for one in costly]
    return found


def square(dtype: torch.dtype) -> torch.Tensor:
    matrix = torch.empty(MATMUL, MATMUL, device="cuda", dtype=dtype)
    return matrix @ matrix


def row(dtype: torch.dtype) -> torch.Tensor:
    """A product that reads much more than it computes."""
    left, right = (torch.empty(rows, 4096, device="cuda", dtype=dtype) for rows in (2, 4096))
    return left @ right


def convolution() -> None:
    """Forward and both directions of backward of one convolution."""
    module = torch.nn.Conv2d(64, 128, 3, padding=1, bias=False).cuda()
    images = torch.empty(8, 64, 32, 32, device="cuda", requires_grad=True)
    module(images).sum().backward()


def scheduled(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Training steps under a schedule with warm-up: kernels and launches of each cycle."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    module.cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batch = torch.empty(16, 64, device="cuda")
    cycles = []

    def keep(profile: Any) -> None:
        kernels, launches = kernels_and_launches(profile.profiler.kineto_results.events())
        orphans = [one.name() for one in kernels if one.correlation_id() not in launches]
        cycles.append(
            {"kernels": len(kernels), "launches": len(launches), "without launch": orphans}
        )

    schedule = torch.profiler.schedule(wait=1, warmup=2, active=3, repeat=2)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=keep, acc_events=True
    ) as profile:
        for _ in range(12):
            optimizer.zero_grad()
            module(batch).sum().backward()
            optimizer.step()
            torch.cuda.synchronize()
            profile.step()
    return {"cycles": cycles}


def clocks_apart(rank: int, size: int, folder: str) -> dict[str, Any]:
    """How long after its launch a kernel of each GPU begins, in the profiler's records."""
    found = {}
    for gpu in range(2):
        values = torch.zeros(8, device=gpu)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            time.sleep(0.05)
            values.add_(1)
            torch.cuda.synchronize(gpu)
            time.sleep(0.05)
        events = profile.profiler.kineto_results.events()
        (kernel,) = kernels_and_launches(events)[0]
        (launch,) = (
            one
            for one in events
            if "Launch" in one.name() and one.correlation_id() == kernel.correlation_id()
        )
        found[str(gpu)] = (kernel.start_ns() - launch.start_ns()) / 1e9
    return found


def running_over(rank: int, size: int, folder: str) -> dict[str, Any]:
    """A step of warm-up whose kernels still run when the recorded step begins.

    Of those that run on, the profile has no launch.
    """
    matrix = torch.empty(4096, 4096, device="cuda")
    product = torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    found = {}

    def keep(profile: Any) -> None:
        kernels, launches = kernels_and_launches(profile.profiler.kineto_results.events())
        own = [one for one in kernels if one.correlation_id() in launches]
        found.update(kernels=len(kernels), launches=len(launches), launched=len(own))

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=keep, acc_events=True
    ) as profile:
        for products in (60, 2):
            for _ in range(products):
                torch.mm(matrix, matrix, out=product)
            profile.step()
    return found


def counters(rank: int, size: int, folder: str) -> dict[str, Any]:
    """NVML's counters around work whose bytes and times are known."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    os.environ["FAKECUDA_CLOCK_MHZ"] = "1200"
    time.sleep(0.3)  # until the work of the scenario before is forgotten
    idle = states(gpu)
    kept = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    found: dict[str, Any] = {"idle": idle, "memory": memory_of(gpu), "kept_bytes": kept.numel()}

    # copies to the device, one second of them
    pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    for _ in range(180):
        kept[:COPY_BYTES].copy_(pinned, non_blocking=True)
    rates = [pynvml.nvmlDeviceGetPcieThroughput(gpu, 1) for _ in range(8)]
    found["pcie_rx_bytes_per_s"] = max(rates) * 1e3
    torch.cuda.synchronize()

    # kernels, two and a half seconds of them
    matrix = torch.empty(4096, 4096, device="cuda")
    product = torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    energy_mj, began = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), time.monotonic()
    began_us = int(time.time() * 1e6)
    for _ in range(LONG_PRODUCTS):
        torch.mm(matrix, matrix, out=product)
    end = torch.cuda.Event()
    end.record()
    while not end.query():
        found["busy"] = states(gpu)
        time.sleep(0.02)
    used_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - energy_mj
    found["busy_s"] = (used_mj / 1e3 - 30 * (time.monotonic() - began)) / 320
    time.sleep(0.2)  # until the last sample is complete
    kind, samples = pynvml.nvmlDeviceGetSamples(gpu, pynvml.NVML_GPU_UTILIZATION_SAMPLES, began_us)
    found["samples"] = [sample.sampleValue.uiVal for sample in samples]
    found["sample_type"] = kind

    before = [nvlink_sent_bytes(index) for index in range(2)]
    tensors = [torch.empty(1 << 20, device=index) for index in range(2)]
    torch.cuda.nccl.all_reduce(tensors)
    torch.cuda.synchronize(0)
    found["nvlink_sent_bytes"] = [nvlink_sent_bytes(index) - before[index] for index in range(2)]
    return found


def states(gpu: Any) -> dict[str, Any]:
    return {
        "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
        "pcie_generation": pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        "utilization": pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "power_mw": pynvml.nvmlDeviceGetPowerUsage(gpu),
        "default_limit_mw": pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu),
        "persistence": pynvml.nvmlDeviceGetPersistenceMode(gpu),
        "compute_mode": pynvml.nvmlDeviceGetComputeMode(gpu),
        "ecc": pynvml.nvmlDeviceGetEccMode(gpu),
        "nvlink": pynvml.nvmlDeviceGetNvLinkState(gpu, 0),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
    }


def memory_of(gpu: Any) -> dict[str, Any]:
    listed = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)}
    return {
        "own_bytes": listed.get(os.getpid()),
        "all_bytes": sum(listed.values()),
        "used_bytes": pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "reserved_bytes": torch.cuda.memory_reserved(0),
    }


def nvlink_sent_bytes(index: int) -> int:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    (value,) = pynvml.nvmlDeviceGetFieldValues(gpu, [(138, 2**32 - 1)])
    return int(value.value.ullVal) * 1024


SCENARIOS: dict[str, tuple[Callable[[int, int, str], dict[str, Any]], int, dict[str, str]]] = {
    "collectives 2": (collectives, 2, {}),
    "collectives 4": (collectives, 4, {}),
    "mismatched order": (mismatched_order, 2, {}),
    "mismatched count": (mismatched_count, 2, {}),
    "dying rank": (dying_rank, 3, {}),
    "late rank": (late_rank, 2, {}),
    "aborted rank": (aborted_rank, 2, {}),
    "same GPU": (same_gpu, 2, {}),
    "overlapped": (overlapped, 2, {"FAKECUDA_DATA": "0", "FAKECUDA_P2P_GBPS": "1"}),
    "clock": (clock, 1, {"FAKECUDA_DATA": "0"}),
    "scheduled": (scheduled, 1, {}),
    "running over": (running_over, 1, {"FAKECUDA_DATA": "0"}),
    "clocks apart": (clocks_apart, 1, {"FAKECUDA_CUPTI_OFFSET_US": "20000,-30000"}),
    "counters": (counters, 1, {"FAKECUDA_DATA": "0"}),
}


def run(name: str) -> list[Any]:
    """What each rank of a scenario returned; None of a rank that ended without a result."""
    function, size, environment = SCENARIOS[name]
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(size)]

        def act(rank: int) -> None:
            os.environ |= environment
            pipes[rank][1].send(function(rank, size, folder))
            os._exit(0)  # neither waits for a broken process group nor for its watchdog

        ranks = [fork.Process(target=act, args=(rank,)) for rank in range(size)]
        for process in ranks:
            process.start()
        results = []
        for process, (receiver, sender) in zip(ranks, pipes, strict=True):
            sender.close()
            try:
                results.append(receiver.recv() if receiver.poll(30) else "hangs")
            except EOFError:
                results.append(None)
            process.kill()
            process.join()
    return results


if __name__ == "__main__":
    # the first optimizer and the first profile of each rank would load it
    importlib.import_module("torch._dynamo")
    json.dump({name: run(name) for name in sys.argv[1:] or SCENARIOS}, sys.stdout)
