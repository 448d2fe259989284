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
FLOAT32, SUM = 7, 0  # NCCL's numbers
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


def allocated(size: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    assert runtime().cudaMalloc(ctypes.byref(made), ctypes.c_size_t(size)) == 0
    return made


class Shape(ctypes.Structure):
    """CUDA's dim3."""

    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


def launch(on: ctypes.c_void_p | None = None) -> int:
    """The status of the launch of a kernel with one thread."""
    kernel = ctypes.c_void_p()
    runtime().cudaLibraryGetKernel(ctypes.byref(kernel), None, b"kernel")
    one = Shape(1, 1, 1)
    return int(runtime().cudaLaunchKernel(kernel, one, one, None, ctypes.c_size_t(0), on))


def elapsed_s(begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
    milliseconds = ctypes.c_float()
    assert runtime().cudaEventElapsedTime(ctypes.byref(milliseconds), begin, end) == 0
    return milliseconds.value / 1e3


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


def drift() -> list[float]:
    """The seconds that the events of each GPU tell for a copy of 100 MB from the host."""
    lib, size = runtime(), ctypes.c_size_t(100_000_000)
    host = ctypes.c_void_p()
    lib.cudaHostAlloc(ctypes.byref(host), size, 0)
    found = []
    for gpu in range(2):
        lib.cudaSetDevice(gpu)
        target, begin, end = allocated(size.value), event(), event()
        launch()  # so that the copy follows at once
        lib.cudaMemcpyAsync(target, host, ctypes.c_size_t(MIB), 4, None)
        lib.cudaEventRecord(begin, None)
        lib.cudaMemcpyAsync(target, host, size, 4, None)
        lib.cudaEventRecord(end, None)
        lib.cudaEventSynchronize(end)
        found.append(elapsed_s(begin, end))
    return found


def delays() -> float:
    """The seconds of a hundred kernels that wait behind a copy of 100 MB."""
    lib, size = runtime(), ctypes.c_size_t(100_000_000)
    host = ctypes.c_void_p()
    lib.cudaHostAlloc(ctypes.byref(host), size, 0)
    target, begin, end = allocated(size.value), event(), event()
    lib.cudaMemcpyAsync(target, host, size, 4, None)
    lib.cudaEventRecord(begin, None)
    for _ in range(100):
        launch()
    lib.cudaEventRecord(end, None)
    lib.cudaEventSynchronize(end)
    return elapsed_s(begin, end)


def contexts() -> list[float]:
    """The seconds of the first and second call on each of two GPUs."""
    found = []
    for gpu in (0, 1, 0, 1):
        began = time.perf_counter()
        assert runtime().cudaSetDevice(gpu) == 0
        found.append(time.perf_counter() - began)
    return found


def pressure() -> dict[str, Any]:
    """Of two GPUs: the free bytes, the status of 1 GiB, and NVML's bytes and processes."""
    import pynvml

    pynvml.nvmlInit()
    found: dict[str, Any] = {}
    for gpu in range(2):
        runtime().cudaSetDevice(gpu)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        runtime().cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        held = sum(process.usedGpuMemory for process in listed)
        found[str(gpu)] = [total.value - free.value, malloc(1 << 30), used - held]
    return found


def mixed() -> dict[str, int]:
    """The statuses of calls with parts of two GPUs; GPU 0 is the current one at each call."""
    lib = runtime()
    communicators = (ctypes.c_void_p * 2)()
    assert lib.ncclCommInitAll(communicators, 2, None) == 0

    def made_on(gpu: int) -> tuple[ctypes.c_void_p, ...]:
        lib.cudaSetDevice(gpu)
        return stream(NON_BLOCKING), event(), allocated(MIB)

    own, first, buffer = made_on(0)
    other, second, distant = made_on(1)
    lib.cudaEventRecord(second, other)
    lib.cudaSetDevice(0)
    lib.cudaEventRecord(first, own)

    def reduce(rank: int, data: ctypes.c_void_p, on: ctypes.c_void_p) -> int:
        communicator = ctypes.c_void_p(communicators[rank])
        count = ctypes.c_size_t(8)
        return int(lib.ncclAllReduce(data, data, count, FLOAT32, SUM, communicator, on))

    def grouped() -> int:
        lib.ncclGroupStart()
        reduce(0, buffer, other)
        reduce(1, distant, other)
        return int(lib.ncclGroupEnd())

    milliseconds = ctypes.c_float()
    return {
        "launch": launch(other),
        "launch on its own GPU": launch(own),
        "event": lib.cudaEventRecord(first, other),
        "elapsed": lib.cudaEventElapsedTime(ctypes.byref(milliseconds), first, second),
        "wait": lib.cudaStreamWaitEvent(own, second, 0),
        "collective": reduce(0, buffer, other),
        "buffer": reduce(0, distant, own),
        "group": grouped(),
    }


def mixed_memset() -> None:
    """Sets memory of GPU 1 on a stream of GPU 0, which CUDA does not define."""
    runtime().cudaSetDevice(1)
    memory = allocated(MIB)
    runtime().cudaSetDevice(0)
    runtime().cudaMemset(memory, 0, ctypes.c_size_t(MIB))


def faults() -> dict[str, Any]:
    """The statuses of calls on two GPUs, and what NVML says of them afterwards."""
    import pynvml

    lib = runtime()
    communicators = (ctypes.c_void_p * 2)()
    assert lib.ncclCommInitAll(communicators, 2, None) == 0
    found: dict[str, Any] = {}
    for gpu in range(2):
        lib.cudaSetDevice(gpu)
        found[f"allocations {gpu}"] = [malloc(MIB) for _ in range(4)]
        found[f"launches {gpu}"] = [launch() for _ in range(4)]
        found[f"waits {gpu}"] = [lib.cudaDeviceSynchronize(), lib.cudaStreamSynchronize(None)]
    results = []
    for _ in range(3):
        lib.ncclGroupStart()
        for communicator in communicators:
            none, count = ctypes.c_void_p(), ctypes.c_size_t(0)
            of = ctypes.c_void_p(communicator)
            lib.ncclAllReduce(none, none, count, FLOAT32, SUM, of, none)
        results.append(lib.ncclGroupEnd())
    found["collectives"] = results
    pynvml.nvmlInit()

    def told(gpu: int) -> Any:
        try:
            return pynvml.nvmlDeviceGetTotalEccErrors(pynvml.nvmlDeviceGetHandleByIndex(gpu), 1, 0)
        except pynvml.NVMLError as error:
            return str(error)

    return found | {"NVML": [told(gpu) for gpu in range(2)]}


EXPERIMENTS = (
    visible,
    effect_orders,
    captures,
    hold,
    processes,
    clock,
    deferred,
    drift,
    delays,
    contexts,
    pressure,
    mixed,
    mixed_memset,
    faults,
    operations,
)

if __name__ == "__main__":
    (experiment,) = (one for one in EXPERIMENTS if one.__name__ == sys.argv[1])
    print(json.dumps(experiment()))
