"""What `tests/fakegpu/test_machine.py` does on fake GPUs, each experiment in a process of its own.

`python -m tests.fakegpu.experiments NAME` prints what it found as JSON. The experiments that call
the fake runtime through ctypes load no torch, so that they take a tenth of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.fakegpu import oplog

MIB = 1 << 20
NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
CAPTURE_MODES = {"global": GLOBAL, "thread": THREAD_LOCAL, "relaxed": RELAXED}
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def runtime() -> ctypes.CDLL:
    """The fake libraries, which the environment's path file has loaded into this process."""
    return ctypes.CDLL("libfakecuda.so")


def stream(flags: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    assert runtime().cudaStreamCreateWithFlags(ctypes.byref(made), flags) == 0
    return made


def event() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    assert runtime().cudaEventCreate(ctypes.byref(made)) == 0
    return made


def malloc(size: int) -> int:
    """The status of an allocation."""
    return int(runtime().cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(size)))


def in_thread(function: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def visible() -> dict[str, Any]:
    """The status of a first call, and the physical GPUs that this process sees."""
    count = ctypes.c_int()
    status = runtime().cudaGetDeviceCount(ctypes.byref(count))
    uuids = []
    for device in range(count.value):
        uuid = (ctypes.c_ubyte * 16)()
        runtime().cuDeviceGetUuid_v2(uuid, device)
        uuids.append(uuid[15])
    return {"status": status, "gpus": uuids}


def effect_orders() -> dict[str, list[str]]:
    """Deferred: the orders in which functions of the host ran, of two streams and the default one.

    With an event between the streams, without one, and with a stream that the default stream waits
    for. "free" is what had run when cudaFree returned, which waits for its GPU.
    """
    log: list[str] = []
    functions = {name: HostFunction(lambda _, name=name: log.append(name)) for name in "ABC"}

    def launch(on: ctypes.c_void_p | None, name: str) -> None:
        assert runtime().cudaLaunchHostFunc(on, functions[name], None) == 0

    def with_event(first: ctypes.c_void_p, second: ctypes.c_void_p) -> None:
        reached = event()
        launch(first, "A")
        runtime().cudaEventRecord(reached, first)
        runtime().cudaStreamWaitEvent(second, reached, 0)
        launch(second, "B")

    def without(first: ctypes.c_void_p, second: ctypes.c_void_p) -> None:
        launch(first, "A")
        launch(second, "B")

    def around_the_default_stream(first: ctypes.c_void_p, _: ctypes.c_void_p) -> None:
        launch(first, "A")
        launch(None, "B")
        launch(first, "C")

    def orders(act: Callable[[ctypes.c_void_p, ctypes.c_void_p], None], flags: int) -> list[str]:
        seen = set()
        for _ in range(20):
            log.clear()
            act(stream(flags), stream(flags))
            runtime().cudaDeviceSynchronize()
            seen.add("".join(log))
        return sorted(seen)

    def seen_after_a_free() -> list[str]:
        log.clear()
        memory = ctypes.c_void_p()
        runtime().cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(MIB))
        launch(stream(NON_BLOCKING), "A")
        runtime().cudaFree(memory)
        return list(log)

    return {
        "free": seen_after_a_free(),
        "event": orders(with_event, NON_BLOCKING),
        "nothing": orders(without, NON_BLOCKING),
        "default stream": orders(around_the_default_stream, 0),
        "default stream, non-blocking": orders(around_the_default_stream, NON_BLOCKING),
    }


def captures() -> dict[str, Any]:
    """What a capture of each mode forbids, and what an event says after its capture."""
    lib = runtime()
    found: dict[str, Any] = {}
    for mode, number in CAPTURE_MODES.items():
        for who, call in {"own": lambda malloc: malloc(), "other": in_thread}.items():
            captured, graph = stream(NON_BLOCKING), ctypes.c_void_p()
            lib.cudaStreamBeginCapture(captured, number)
            status = call(lambda: malloc(MIB))
            ended = lib.cudaStreamEndCapture(captured, ctypes.byref(graph))
            found[f"{mode} {who}"] = [status, ended]
    captured, mark, graph = stream(NON_BLOCKING), event(), ctypes.c_void_p()
    lib.cudaStreamBeginCapture(captured, RELAXED)
    lib.cudaEventRecord(mark, captured)
    lib.cudaStreamEndCapture(captured, ctypes.byref(graph))
    found["event of an ended capture"] = lib.cudaStreamWaitEvent(stream(NON_BLOCKING), mark, 0)
    return found


def hold() -> None:
    """Take 64 MiB on the first visible GPU until the input ends."""
    assert malloc(64 * MIB) == 0
    print("held", flush=True)
    sys.stdin.read()


def processes() -> list[list[tuple[int, int]]]:
    """NVML: of each physical GPU, the processes and the bytes that each uses."""
    import pynvml

    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    running = map(pynvml.nvmlDeviceGetComputeRunningProcesses, handles)
    return [[(one.pid, one.usedGpuMemory) for one in gpu] for gpu in running]


def clock() -> dict[str, Any]:
    """Torch on the virtual clock: times of copies, a graph, memory, addresses."""
    import torch

    host = torch.empty(512 * MIB, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    # the first copy keeps the stream busy, so that the time of the second has no gap of the host
    events[0].record()
    gpu.copy_(host, non_blocking=True)
    events[1].record()
    gpu[: 16 * MIB].copy_(host[: 16 * MIB], non_blocking=True)
    events[2].record()
    queried = events[2].query()
    torch.cuda.synchronize()
    found: dict[str, Any] = {
        "done before the copies' time": queried,
        "long copy, s": events[0].elapsed_time(events[1]) / 1e3,
        "short copy, s": events[1].elapsed_time(events[2]) / 1e3,
    }
    x = torch.ones(8, device="cuda")
    (x * 2 + 1).sum()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    found["replays"] = []
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        found["replays"].append(y.tolist())
    try:
        torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        found["out of memory"] = str(error)
    other = torch.ones(4, device="cuda:1")
    found["device of a copy"] = other.to("cuda:0").device.index
    tensors = {"first GPU": x, "second GPU": other, "pinned": host, "pageable": torch.ones(4)}
    for name, tensor in tensors.items():
        address = ctypes.c_void_p(tensor.data_ptr())
        found[name] = [runtime().fakecuda_device_of(address), tensor.is_pinned()]
    return found


def wrong_sums(wait: bool, record: bool) -> int:
    """How often of 20 a second stream computed a wrong number.

    It reads what the default stream wrote, which may reuse the memory afterwards.
    """
    import torch

    wrong = 0
    for _ in range(20):
        side = torch.cuda.Stream(0)
        x = torch.zeros(1000, device="cuda:0")
        torch.cuda.synchronize()
        x.fill_(1.0)
        if wait:
            side.wait_stream(torch.cuda.current_stream(0))
        with torch.cuda.stream(side):
            y = x * 2
        if record:
            x.record_stream(side)
        del x
        torch.full((1000,), 5.0, device="cuda:0")
        torch.cuda.synchronize()
        wrong += int((y.cpu() != 2).any())
    return wrong


def wrong_chains() -> int:
    """How many of 4 threads, each with streams on two GPUs, computed a wrong chain of numbers."""
    import torch

    right = []

    def chain(seed: int) -> None:
        here, there = torch.cuda.Stream(0), torch.cuda.Stream(1)
        with torch.cuda.stream(here):
            x = torch.full((100,), float(seed), device="cuda:0")
            for _ in range(10):
                x = x + 1
            y = x.to("cuda:1", non_blocking=True)
        there.wait_stream(here)
        with torch.cuda.stream(there):
            # `y` stays until the end: its memory is that of the default stream, whose next tensor,
            # of another thread, would not wait for this product
            z = y * 3
        there.synchronize()
        right.append(z.tolist() == [3.0 * (seed + 10)] * 100)

    threads = [threading.Thread(target=chain, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 4 - sum(right)


def deferred() -> dict[str, int]:
    """The law of the deferred mode: a missing wait or record_stream gives wrong numbers."""
    return {
        "right": wrong_sums(wait=True, record=True),
        "no wait": wrong_sums(wait=False, record=True),
        "no record_stream": wrong_sums(wait=True, record=False),
        "threads": wrong_chains(),
    }


def operations() -> dict[str, int]:
    """Log two kernels, the second of which waits for the first on another stream, and a fill.

    Return this process's id, its main thread's, and the host's times around the launches.
    """
    lib, first, second, reached = runtime(), stream(NON_BLOCKING), stream(NON_BLOCKING), event()
    memory = ctypes.c_void_p()
    lib.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(MIB))
    began = time.perf_counter_ns()
    oplog.submit(first.value or 0, "first", flops=20e9)
    lib.cudaEventRecord(reached, first)
    lib.cudaStreamWaitEvent(second, reached, 0)
    oplog.note("between")
    oplog.submit(second.value or 0, "second", flops=20e9)
    lib.cudaMemsetAsync(memory, 0, ctypes.c_size_t(MIB), second)
    ended = time.perf_counter_ns()
    oplog.submit(first.value or 0, "third", flops=20e9)
    lib.cudaDeviceSynchronize()
    thread = threading.get_native_id()
    return {"process": os.getpid(), "thread": thread, "began": began, "ended": ended}


EXPERIMENTS = (visible, effect_orders, captures, hold, processes, clock, deferred, operations)

if __name__ == "__main__":
    (experiment,) = (one for one in EXPERIMENTS if one.__name__ == sys.argv[1])
    print(json.dumps(experiment()))
