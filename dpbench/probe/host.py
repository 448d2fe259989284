"""Host: the probe's figures of the processor, which are durations of operations and rates of arithmetic and copies."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from queue import SimpleQueue

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dpbench import models
from dpbench.engine.collectives import reduce
from dpbench.engine.replicate import rebuild
from dpbench.hardware import processes
from dpbench.hardware.devices import resolve
from dpbench.probe.figures import (
    Figure,
    Step,
    Timing,
    Work,
    figure,
    rate,
    ratio,
    spread,
    time_before,
    time_call,
    time_new_threads,
    time_steps,
    time_together,
)

KIB, MIB = 2**10, 2**20
THREADS = (2, 4)
NETS = {"mlp": 32, "resnet18": 32, "transformer": 32}
"""The measured nets with their numbers of samples per replica.

One net has short matrix products, one has convolutions, and one has many small operations.
"""
SIDES = (64, 128, 256, 512, 1024)
COPIES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
POOL = 16 * MIB
"""The size in bytes of a pool of blocks, of which each call copies the next block.

The block to copy is then not in a core's private cache, as in a training step.
"""
SMALL, LARGE = 256 * KIB, 64 * MIB
"""The size in bytes of a block that fits into a core's private cache, and of one that is larger than all caches."""


def calls() -> Iterator[Figure]:
    """Yield the durations of single operations, and their slowdown when threads compete for the interpreter lock."""
    x = torch.ones(8)
    quiet = torch.inference_mode
    alone = time_call(lambda: torch.add(x, 1.0), setting=quiet)
    yield figure("op_s", alone, "torch.add of 8 elements without an autograd graph, in one thread")
    w = torch.ones(8, requires_grad=True)
    how = "torch.add of 8 elements, recorded in an autograd graph"
    yield figure("op_graph_s", time_call(lambda: torch.add(w, 1.0)), how)
    for name, value in (("short", x), ("long", torch.ones(4096))):
        one = time_call(_adder(value), setting=quiet)
        for count in THREADS:
            several = time_together([_adder(value.clone()) for _ in range(count)], setting=quiet)
            yield ratio(
                f"{name}_ops_{count}_threads_ratio", several, one,
                f"torch.add of {value.numel()} elements in {count} threads, relative to the same total number of calls "
                "in one thread: the cost of passing the interpreter lock between threads",
                share=count,
            )  # fmt: skip
    depth = 100
    chain = nn.Sequential(*(nn.Identity() for _ in range(depth)))
    how = f"the time per module when a chain of {depth} nn.Identity modules is called"
    yield figure("module_call_s", time_call(lambda: chain(x)), how, per=depth)


def _adder(x: torch.Tensor) -> Work:
    return lambda: torch.add(x, 1.0)


def nets() -> Iterator[Figure]:
    """Yield, for several nets, the slowdown of two concurrent replicas in persistent threads and in new threads.

    New threads are measured separately, because they start with empty thread-local caches of libraries and allocator.
    """
    for name, rows in NETS.items():
        count = repeats(name, rows)
        (forward, whole), (forwards, wholes) = (
            time_steps([timed_training(name, rows) for _ in range(threads)], count) for threads in (1, 2)
        )
        how = f"of {name} on {rows} rows in each of two threads, which start a step together, relative to one thread"
        yield ratio(
            f"{name}_forward_2_threads_ratio", forwards, forward,
            f"the duration of forward {how}; this ratio is 1 if the threads share nothing, and 2 if they take turns",
        )  # fmt: skip
        yield ratio(f"{name}_training_2_threads_ratio", wholes, whole, f"the duration of forward and backward {how}")
        works = [_forward(name, rows), _forward(name, rows)]
        yield ratio(
            f"{name}_forward_2_new_threads_ratio", time_new_threads(works, count, _backward),
            time_before(works[0], count, _backward),
            "forward in two new threads, including the start of the threads, relative to one call in an existing "
            "thread; an untimed backward follows each forward, so that activations are kept as long as in a step",
        )  # fmt: skip


def repeats(name: str, rows: int) -> int:
    """Return the number of steps to time for a net on `rows` samples: from 20 long steps to 80 short steps.

    Short steps are timed more often, because their durations vary more.
    """
    step = timed_training(name, rows)
    step()
    began_s, _, ended_s = step()
    return min(80, max(20, int(0.4 / (ended_s - began_s))))


def _backward(outputs: list[torch.Tensor]) -> None:
    """Run backward from the outputs of all replicas in the calling thread; this frees their activations."""
    torch.autograd.backward([output.sum() for output in outputs])


def _forward(name: str, rows: int) -> Work:
    model = models.load(name, "small", 0)
    arguments = models.positional(model.batch(rows, 0)[0])
    return lambda: model.module(*arguments)


def timed_training(name: str, rows: int) -> Step:
    """Return a function that runs forward and backward of a net on `rows` samples.

    The function returns three times in seconds: when the step began, when its forward ended, and when the step ended.
    """
    model = models.load(name, "small", 0)
    inputs, target = model.batch(rows, 0)
    arguments = models.positional(inputs)

    def step() -> tuple[float, float, float]:
        began_s = time.perf_counter()
        output = model.module(*arguments)
        forward_s = time.perf_counter()
        model.loss(output, target).backward()
        return began_s, forward_s, time.perf_counter()

    return step


def replication() -> Iterator[Figure]:
    """Yield the seconds to copy a module for a replica, and the seconds to join, copy and add small tensors."""
    module = models.load("resnet18", "small", 0).module
    modules = sum(1 for _ in module.modules())
    table = {id(t): t.detach() for t in (*module.parameters(), *module.buffers())}
    yield figure(
        "module_replica_s", time_call(lambda: rebuild(module, table)),
        f"the time per module when dpbench rebuilds a ResNet-18 of {modules} modules for a replica, without tensors",
        per=modules,
    )  # fmt: skip
    count = 200
    tensors = [torch.zeros(16) for _ in range(count)]
    flat = _flatten_dense_tensors(tensors)
    joined = time_call(lambda: _unflatten_dense_tensors(_flatten_dense_tensors(tensors), tensors))
    how = f"the time per tensor when {count} tensors of 64 bytes are joined and split again"
    yield figure("tensor_s", joined, how, per=count)
    del flat
    root, other = resolve(["cpu", "cpu"])
    how = f"the time per tensor when {count} tensors of 64 bytes are copied"
    yield figure("tensor_copy_s", time_call(lambda: other.clone(tensors)), how, per=count)
    pairs = [tensors, [t.clone() for t in tensors]]
    added = time_call(lambda: reduce(pairs, [root, other]), setting=torch.no_grad)
    yield figure("tensor_reduce_s", added, "the addition of two gradients of 64 bytes by dpbench's reduce", per=count)


def threads() -> Iterator[Figure]:
    """Yield the seconds to start and join a new thread, and those to wake a persistent thread and get its answer."""

    def start() -> None:
        thread = threading.Thread(target=processes.stay, args=(1,))
        thread.start()
        thread.join()

    yield figure("thread_s", time_call(start), "the start and the join of a Python thread on another core")
    inbox: SimpleQueue[object] = SimpleQueue()
    outbox: SimpleQueue[object] = SimpleQueue()

    def serve() -> None:
        processes.stay(1)
        while inbox.get() is not None:
            outbox.put(1)

    server = threading.Thread(target=serve, daemon=True)
    server.start()

    def wake() -> None:
        inbox.put(1)
        outbox.get()

    how = "waking a persistent thread on another core through a queue, and waiting for its answer"
    yield figure("wake_s", time_call(wake), how)
    inbox.put(None)
    server.join()


def arithmetic() -> Iterator[Figure]:
    """Yield the rates of matrix products, and the slowdown of a product while a second thread runs another.

    A line fitted to the durations gives the rate of large products (`flop_per_s`). Also yield the size in FLOP at which
    a product reaches half of this rate.
    """
    times: list[tuple[float, Timing]] = []
    for side in SIDES:
        spent = time_call(_product(side), setting=torch.inference_mode)
        times.append((2.0 * side**3, spent))
        yield rate(
            f"gemm_{side}_flop_per_s", spent, f"a product of two {side} x {side} matrices, fp32, in one thread",
            amount=2.0 * side**3,
        )  # fmt: skip
    starts_s, per_flops = lines(times)
    how = "the inverse slope of a line fitted to the seconds of products of all sizes as a function of FLOP, one thread"
    yield spread("flop_per_s", [1 / per_flop for per_flop in per_flops], how)
    halves = [start_s / per_flop for start_s, per_flop in zip(starts_s, per_flops, strict=True)]
    how = "the size, in FLOP, at which a matrix product reaches half of flop_per_s, according to the line fitted for it"
    yield spread("half_flop", halves, how)
    alone = time_call(_product(512), setting=torch.inference_mode)
    both = time_together([_product(512), _product(512)], setting=torch.inference_mode)
    how = "a product of two 512 x 512 matrices in each of two concurrent threads, relative to one thread"
    yield ratio("gemm_2_threads_ratio", both, alone, how)


def _product(side: int) -> Work:
    a, b, out = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    return lambda: torch.mm(a, b, out=out)


def memory() -> Iterator[Figure]:
    """Yield the bytes per second of copies and additions, and the slowdown of copies in two concurrent threads."""
    for size in COPIES:
        spent = time_call(_copy(size, POOL))
        how = f"copy_ of {size // KIB} KiB per call in one thread, block after block of {max(size, POOL) // MIB} MiB; "
        how += "each copied byte is read and written but counts once"
        yield rate(f"copy_{size // KIB}_kib_bytes_per_s", spent, how, amount=size)
    for name, size in (("cache", SMALL), ("memory", LARGE)):
        alone, both = time_call(_copy(size)), time_together([_copy(size), _copy(size)])
        yield ratio(
            f"{name}_2_threads_ratio", both, alone,
            f"copy_ of {size // KIB} KiB in each of two concurrent threads, relative to one thread; "
            "this ratio is 1 if the threads share nothing, and 2 if they take turns",
        )  # fmt: skip
    how = "torch.add of two tensors of 64 MiB, counting the bytes of both inputs and of the output"
    yield rate("memory_bytes_per_s", _add(LARGE), how, amount=3 * LARGE)


def _copy(size: int, pool: int = 0) -> Work:
    """Return a function that copies a block of `size` bytes.

    If `pool` is larger than `size`, each call copies the next block of a pool of `pool` bytes.
    """
    source, target = (torch.ones(max(size, pool) // 4).split(size // 4) for _ in range(2))
    pairs = itertools.cycle(zip(source, target, strict=True))

    def work() -> None:
        block, into = next(pairs)
        into.copy_(block)

    return work


def _add(size: int) -> Timing:
    a, b, out = torch.ones(size // 4), torch.ones(size // 4), torch.empty(size // 4)
    return time_call(lambda: torch.add(a, b, out=out), setting=torch.no_grad)


def lines(points: Sequence[tuple[float, Timing]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the three intercepts and the three slopes of lines fitted to the typical, the low and the high durations.

    `points` are pairs of an amount of work, such as FLOP or bytes, and the timing of this work. Intercepts are in
    seconds, slopes in seconds per unit of work.
    """
    edges = zip(*(astuple(spent) for _, spent in points), strict=True)
    found = [line([(work, seconds) for (work, _), seconds in zip(points, edge, strict=True)]) for edge in edges]
    starts, slopes = zip(*found, strict=True)
    return starts, slopes


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the intercept, at least 0, and the slope, above 0, of the line with the least squared relative errors.

    The line is fitted to `points`, which are pairs of an amount of work and its seconds. Noise can make large amounts
    as quick as small ones, so that the fitted slope is 0. The slope is then the smallest measured number of seconds per
    unit of work, and only the intercept is fitted.
    """
    design = np.array([[1 / seconds, work / seconds] for work, seconds in points])
    scale = np.abs(design).max(axis=0)
    (start, slope), _ = nnls(design / scale, np.ones(len(points)))
    if slope > 0:
        return float(start / scale[0]), float(slope / scale[1])
    least = min(seconds / work for work, seconds in points)
    (start,), _ = nnls(design[:, :1] / scale[0], 1 - design[:, 1] * least)
    return float(start / scale[0]), least
