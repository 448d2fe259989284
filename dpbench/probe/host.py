"""Host: the costs of calls, modules, threads and the interpreter lock, and the rates of arithmetic and memory."""

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
"""Nets with short matrix products, with convolutions, and with many small operations; and the rows per replica."""
SIDES = (64, 128, 256, 512, 1024)
COPIES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
POOL = 16 * MIB
"""The bytes of the pool of blocks that are copied in turn.

As in a step, a block is then not in a core's private cache.
"""
SMALL, LARGE = 256 * KIB, 64 * MIB
"""A block that fits a core's private cache, and one that is larger than all caches."""


def calls() -> Iterator[Figure]:
    """Yield the costs of single operations, alone and while several threads compete for the interpreter lock."""
    x = torch.ones(8)
    quiet = torch.inference_mode
    alone = time_call(lambda: torch.add(x, 1.0), setting=quiet)
    yield figure("op_s", alone, "torch.add of 8 elements, no graph, one thread")
    w = torch.ones(8, requires_grad=True)
    yield figure("op_graph_s", time_call(lambda: torch.add(w, 1.0)), "torch.add of 8 elements into a graph")
    for name, value in (("short", x), ("long", torch.ones(4096))):
        one = time_call(_adder(value), setting=quiet)
        for count in THREADS:
            several = time_together([_adder(value.clone()) for _ in range(count)], setting=quiet)
            yield ratio(
                f"{name}_ops_{count}_threads_ratio", several, one,
                f"torch.add of {value.numel()} elements in {count} threads, relative to the same number of calls "
                "in one thread: the cost of handing over the interpreter lock",
                share=count,
            )  # fmt: skip
    depth = 100
    chain = nn.Sequential(*(nn.Identity() for _ in range(depth)))
    yield figure("module_call_s", time_call(lambda: chain(x)), f"a chain of {depth} nn.Identity", per=depth)


def _adder(x: torch.Tensor) -> Work:
    return lambda: torch.add(x, 1.0)


def nets() -> Iterator[Figure]:
    """Yield the slowdown of two concurrent replicas, in persistent and in new threads, for several kinds of nets.

    New threads are measured separately, because they lack the thread-local caches of libraries and of the allocator.
    """
    for name, rows in NETS.items():
        count = repeats(name, rows)
        (forward, whole), (forwards, wholes) = (
            time_steps([timed_training(name, rows) for _ in range(threads)], count) for threads in (1, 2)
        )
        how = f"of {name} on {rows} rows in two threads, started together for each step, relative to one thread"
        yield ratio(
            f"{name}_forward_2_threads_ratio", forwards, forward,
            f"forward, in a step, {how}: 1 if they share nothing, 2 if they take turns",
        )  # fmt: skip
        yield ratio(f"{name}_training_2_threads_ratio", wholes, whole, f"forward and backward {how}")
        works = [_forward(name, rows), _forward(name, rows)]
        yield ratio(
            f"{name}_forward_2_new_threads_ratio", time_new_threads(works, count, _backward),
            time_before(works[0], count, _backward),
            "forward in two new threads, including their start, relative to one call in an existing thread; an untimed "
            "backward follows each forward, so that activations live as long as in a step",
        )  # fmt: skip


def repeats(name: str, rows: int) -> int:
    """Return the number of timed steps of a net: larger for short steps, because their durations vary more."""
    step = timed_training(name, rows)
    step()
    began_s, _, ended_s = step()
    return min(80, max(20, int(0.4 / (ended_s - began_s))))


def _backward(outputs: list[torch.Tensor]) -> None:
    """Run the backward of all replicas in the calling thread, which frees the activations."""
    torch.autograd.backward([output.sum() for output in outputs])


def _forward(name: str, rows: int) -> Work:
    model = models.load(name, "small", 0)
    arguments = models.positional(model.batch(rows, 0)[0])
    return lambda: model.module(*arguments)


def timed_training(name: str, rows: int) -> Step:
    """Return a step of forward and backward; the step returns when it began, when forward ended, and when it ended."""
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
    """Yield the host's costs of copying a tree of modules, and of joining, copying and adding many small tensors."""
    module = models.load("resnet18", "small", 0).module
    modules = sum(1 for _ in module.modules())
    table = {id(t): t.detach() for t in (*module.parameters(), *module.buffers())}
    yield figure(
        "module_replica_s", time_call(lambda: rebuild(module, table)),
        f"dpbench's rebuild of a ResNet-18's {modules} modules for one replica, tensors not copied", per=modules,
    )  # fmt: skip
    count = 200
    tensors = [torch.zeros(16) for _ in range(count)]
    flat = _flatten_dense_tensors(tensors)
    joined = time_call(lambda: _unflatten_dense_tensors(_flatten_dense_tensors(tensors), tensors))
    yield figure("tensor_s", joined, f"{count} tensors of 64 bytes joined into one and split again", per=count)
    del flat
    root, other = resolve(["cpu", "cpu"])
    yield figure("tensor_copy_s", time_call(lambda: other.clone(tensors)), "a tensor of 64 bytes copied", per=count)
    pairs = [tensors, [t.clone() for t in tensors]]
    added = time_call(lambda: reduce(pairs, [root, other]), setting=torch.no_grad)
    yield figure("tensor_reduce_s", added, "two gradients of 64 bytes added by dpbench's reduce", per=count)


def threads() -> Iterator[Figure]:
    """Yield the costs of starting a thread and of waking a persistent one."""

    def start() -> None:
        thread = threading.Thread(target=processes.stay, args=(1,))
        thread.start()
        thread.join()

    yield figure("thread_s", time_call(start), "a Python thread started, on another core, and joined")
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

    yield figure("wake_s", time_call(wake), "a persistent thread woken through a queue, and its answer awaited")
    inbox.put(None)
    server.join()


def arithmetic() -> Iterator[Figure]:
    """Yield the rates of matrix products, the work at half of the best rate, and the slowdown in two threads."""
    times: list[tuple[float, Timing]] = []
    for side in SIDES:
        spent = time_call(_product(side), setting=torch.inference_mode)
        times.append((2.0 * side**3, spent))
        yield rate(
            f"gemm_{side}_flop_per_s", spent, f"a {side} x {side} product, fp32, one thread", amount=2.0 * side**3
        )
    starts_s, per_flops = lines(times)
    how = "the inverse slope of a line fitted to seconds over FLOP for all products, one thread"
    yield spread("flop_per_s", [1 / per_flop for per_flop in per_flops], how)
    halves = [start_s / per_flop for start_s, per_flop in zip(starts_s, per_flops, strict=True)]
    yield spread("half_flop", halves, "the FLOP at which half of that rate is reached, from the same line")
    alone = time_call(_product(512), setting=torch.inference_mode)
    both = time_together([_product(512), _product(512)], setting=torch.inference_mode)
    yield ratio("gemm_2_threads_ratio", both, alone, "a 512 x 512 product in two concurrent threads, relative to one")


def _product(side: int) -> Work:
    a, b, out = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    return lambda: torch.mm(a, b, out=out)


def memory() -> Iterator[Figure]:
    """Yield the rates of copies and additions, and the slowdown of copies in two concurrent threads."""
    for size in COPIES:
        spent = time_call(_copy(size, POOL))
        how = f"copy_ of {size // KIB} KiB, blocks in turn from {max(size, POOL) // MIB} MiB, one thread: "
        how += "bytes copied, each read and written"
        yield rate(f"copy_{size // KIB}_kib_bytes_per_s", spent, how, amount=size)
    for name, size in (("cache", SMALL), ("memory", LARGE)):
        alone, both = time_call(_copy(size)), time_together([_copy(size), _copy(size)])
        yield ratio(
            f"{name}_2_threads_ratio", both, alone,
            f"copy_ of {size // KIB} KiB in two concurrent threads, relative to one thread: "
            "1 if they share nothing, 2 if they take turns",
        )  # fmt: skip
    yield rate("memory_bytes_per_s", _add(LARGE), "torch.add of two tensors of 64 MiB: 3 x 64 MiB", amount=3 * LARGE)


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
    """Return the intercepts and the slopes of three fitted lines.

    `points` are pairs of work and duration. The lines are fitted to the typical, the low and the high durations.
    """
    edges = zip(*(astuple(spent) for _, spent in points), strict=True)
    found = [line([(work, seconds) for (work, _), seconds in zip(points, edge, strict=True)]) for edge in edges]
    starts, slopes = zip(*found, strict=True)
    return starts, slopes


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return (intercept, slope), both at least 0, of the line fitted to `points` by least squared relative errors.

    `points` are pairs of (work, seconds).
    """
    design = np.array([[1 / seconds, work / seconds] for work, seconds in points])
    scale = np.abs(design).max(axis=0)
    (start, slope), _ = nnls(design / scale, np.ones(len(points)))
    return float(start / scale[0]), float(slope / scale[1])
