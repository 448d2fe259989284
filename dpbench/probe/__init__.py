"""Probe: measure what this machine costs and reaches, and write it down as a machine file.

It goes over all figures several times, each time in a fresh process: what two threads make of one interpreter lock
differs from process to process, and what else a machine does from one moment to the next.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from dpbench.hardware import affinity, foreign_load, malloc
from dpbench.measure.server import environment
from dpbench.probe import collective, engine, gpu, host
from dpbench.probe.figures import Figure, over_passes

PASSES, BUDGET_S = 3, 58.0
"""A pass that would not end within the budget, if it took as long as the one before, is not begun."""
Say = Callable[[str], None]
MODULE_S = 16e-6
"""What a module copied for a replica costs where the host's factor is 1; the factor is this machine's against it."""


@dataclass(frozen=True)
class Probe:
    """A machine and its figures."""

    name: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    gpu_memory_bytes: int
    figures: tuple[Figure, ...]
    seconds: float
    load: foreign_load.Measured
    """The most that other processes took of the cores, before it and in each pass."""

    def __getitem__(self, name: str) -> float:
        """Return a figure's value."""
        for one in self.figures:
            if one.name == name:
                return one.value
        raise LookupError(f"no figure {name!r}; known: {', '.join(one.name for one in self.figures)}")


class Busy(RuntimeError):
    """Other processes take too much of the cores for a probe."""


def probe(say: Say = lambda _: None, *, patience_s: float | None = None, anyway: bool = False) -> Probe:
    """Measure this machine, its GPUs if it has some; `say` gets a line for each part.

    A busy machine is waited for, up to `patience_s` seconds; None takes the environment's or the default. Raises Busy
    if it stays busy, unless `anyway`. Raises RuntimeError, with what it said last, when a pass fails.
    """
    loads = [foreign_load.wait(foreign_load.patience(patience_s), say)]
    if foreign_load.busy(loads[0]) and not anyway:
        raise Busy(
            f"busy machine: {loads[0]}; end what runs there, wait longer (--patience SECONDS), or measure all the same "
            f"and label the file {foreign_load.NOISY} (--anyway)"
        )
    begin = time.perf_counter()
    passes: list[list[Figure]] = []
    last_s = 0.0
    while len(passes) < PASSES and time.perf_counter() - begin + last_s < BUDGET_S:
        began, before = time.perf_counter(), foreign_load.snapshot()
        passes.append(_pass(f"pass {len(passes) + 1} of {PASSES}", say))
        loads.append(foreign_load.since(before))
        last_s = time.perf_counter() - began
    names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    found = Probe(
        name=_processor(), cores=os.cpu_count() or 1, memory_bytes=psutil.virtual_memory().total, gpus=names,
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if names else 0,
        figures=over_passes(passes), seconds=time.perf_counter() - begin, load=_worst(loads),
    )  # fmt: skip
    for line in _endings(found):
        say(line)
    return found


def _worst(loads: Sequence[foreign_load.Measured]) -> foreign_load.Measured:
    """Return the highest load; an unknown one where none is too high, so that it is not called quiet."""
    known = [load for load in loads if isinstance(load, foreign_load.Load)]
    unknown = [load for load in loads if isinstance(load, foreign_load.UnknownLoad)]
    highest = max(known, key=lambda load: load.taken, default=None)
    return highest if highest and (foreign_load.busy(highest) or not unknown) else unknown[0]


def _endings(found: Probe) -> Iterator[str]:
    """Yield the limits of the figures, a line each: fewer passes than planned, and noise."""
    for passes in range(1, PASSES):
        early = [one for one in found.figures if one.passes == passes]
        if early:
            yield (
                f"stopped early: {len(early)} of {len(found.figures)} figures rest on {passes} of {PASSES} passes, "
                f"because another would not have ended within {BUDGET_S:.0f} s"
            )
    yield from _noise(found.load)


def _noise(load: foreign_load.Measured) -> Iterator[str]:
    """Yield that the figures are NOISY, or that this is unknown."""
    if foreign_load.busy(load):
        yield f"{foreign_load.NOISY}: {load}"
    elif isinstance(load, foreign_load.UnknownLoad):
        yield str(load)


def _pass(name: str, say: Say) -> list[Figure]:
    """Measure all figures once, in a process of its own with one thread an operation, as in the workers."""
    command = [sys.executable, "-m", "dpbench.probe", str(os.getpid())]
    figures: list[Figure] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            if isinstance(found, str):
                say(f"measuring {found}, {name} ...")
            else:
                figures.append(Figure(**found))
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"a pass of the probe ended with {process.returncode}: {errors.read()[-500:]}")
    return figures


def measure() -> Iterator[str | Figure]:
    """Measure all figures in this process; yield what comes next, and each figure."""
    torch.set_num_threads(1)
    malloc.keep()
    for what, part in _on_the_host():
        yield what
        with affinity.staying(0):
            yield from part()
    for what, part in _on_gpus():
        yield what
        yield from part()


def measure_toml(say: Say = lambda _: None, *, patience_s: float | None = None, anyway: bool = False) -> str:
    """Measure this machine and return its file; see `probe`."""
    return to_toml(probe(say, patience_s=patience_s, anyway=anyway))


Parts = Iterator[tuple[str, Callable[[], Iterator[Figure]]]]
"""What is measured, in words, and what measures it."""


def _on_the_host() -> Parts:
    """Yield what is measured by threads that keep to a core each."""
    yield "operations and the interpreter's lock", host.calls
    yield "modules and tensors", host.replication
    yield "threads", host.threads
    yield "arithmetic", host.arithmetic
    yield "memory", host.memory
    yield "dpbench's engine on tiny nets", engine.figures
    yield "nets in two threads", host.nets
    # where GPUs reduce, their figures have these names
    sizes = collective.SIZES if torch.cuda.device_count() < 2 else ()
    yield "two processes", lambda: collective.figures(host.NETS, sizes)


def _on_gpus() -> Parts:
    """Yield what is measured on GPUs, from threads that run where they like, as the workers' do."""
    count = torch.cuda.device_count()
    if count:
        yield "GPU 0", gpu.figures
    if count > 1:
        yield "all-reduce between GPUs", lambda: collective.all_reduce(count, "nccl")


def _processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def to_toml(found: Probe) -> str:
    """Write a probe as a machine file: what predictions read, then every figure with how it was measured.

    Links between GPUs are not measured by this suite: the file says which lines to add for them.
    """
    how = f"measured by dpbench probe in {found.seconds:.0f} s, torch {torch.__version__}"
    how = "; ".join([how, *_noise(found.load)])
    noisy = f" ({foreign_load.NOISY})" if foreign_load.busy(found.load) else ""
    logical = not found.gpus
    what = f"{len(found.gpus)} x {found.gpus[0]}" if found.gpus else "logical CPU devices"
    devices = len(found.gpus) or found.cores
    lines = [
        f"description = {_text(f'{found.name}, {found.cores} cores: {what}{noisy}')}",
        f"source = {_text(how)}",
        "peer_access = false",
        "",
        "[gpu]",
        f"name = {_text(found.name if logical else found.gpus[0])}",
        f"count = {devices}",
        f"memory_bytes = {_number(found.memory_bytes if logical else found.gpu_memory_bytes)}",
        f"memory_bytes_per_s = {_number(found['memory_bytes_per_s' if logical else 'gpu_memory_bytes_per_s'])}",
        f"flop_per_s = {{ fp32 = {_number(found['flop_per_s' if logical else 'fp32_flop_per_s'])} }}",
        "",
        "[host]",
        f"factor = {_number(found['module_replica_s'] / MODULE_S)}",
        f"cores = {found.cores}",
        f"launch_s = {_number(found['op_graph_s' if logical else 'launch_s'])}",
        f"module_s = {_number(found['module_replica_s'])}",
        f"tensor_s = {_number(found['tensor_s'])}",
        f"thread_s = {_number(found['thread_s'])}",
        f"hand_off = {_number(max(0.0, found['long_ops_2_threads_ratio'] - 1))}",
        "",
        "[[link]]",
        f'between = ["{"gpu0" if devices == 1 else f"gpu0-{devices - 1}"}", "cpu0"]',
        f"kind = {_text('memory' if logical else 'pcie')}",
        f"bytes_per_s = {_number(found['copy_16384_kib_bytes_per_s' if logical else 'pinned_to_device_bytes_per_s'])}",
    ]
    if not logical and len(found.gpus) > 1:
        lines.append("# links between the GPUs, and peer_access: see `nvidia-smi topo -m` and `nvidia-smi topo -p2p r`")
    lines += [
        "",
        "[collective]",
        f"bytes_per_s = {_number(found['all_reduce_bytes_per_s'])}",
        f"start_s = {_number(found['all_reduce_start_s'])}",
    ]
    return "\n".join([*lines, *(line for one in found.figures for line in _table(one)), ""])


def _table(one: Figure) -> Iterator[str]:
    """Yield one figure as a table."""
    yield from ("", f"[probe.{one.name}]", f"value = {_number(one.value)}")
    for edge, value in (("low", one.low), ("high", one.high)):
        if value is not None:
            yield f"{edge} = {_number(value)}"
    yield f"passes = {one.passes}"
    if one.passes < PASSES:
        yield "stopped_early = true"
    yield f"how = {_text(one.how)}"


def _number(value: float) -> str:
    """Write a number so that TOML reads it as one; four digits are more than any figure holds."""
    return str(value) if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.4e}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
