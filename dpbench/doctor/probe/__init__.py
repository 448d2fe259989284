"""Probe: measure the costs and rates of a machine with GPUs, and write them as a machine file.

A pass measures every figure once, in a fresh process. There are several passes, because the
contention of two threads for the interpreter lock differs between processes, and the machine's load
changes. A figure's value is the median over the passes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import msgspec
import torch

from dpbench.doctor import transfers
from dpbench.doctor.examination import DIRECT
from dpbench.doctor.probe import all_reduce, gpu, host
from dpbench.doctor.probe.figures import Figure
from dpbench.doctor.transfers import Say
from dpbench.hardware import foreign_load, interpreter, nvml, processes, provenance
from dpbench.measure.server import environment
from dpbench.records import HOST, fake
from dpbench.records.disturbance import NOISY, busy, told
from dpbench.records.errors import UsageError
from dpbench.records.facts import Gpu, RunFacts
from dpbench.records.load import Load, Measured, UnknownLoad
from dpbench.records.spelling import dashed

PASSES = 3
"""The planned number of passes."""
BUDGET_S = 120.0
"""The seconds after which no further pass begins; one on four GPUs takes about 36 s."""
MODULE_S = 16e-6
"""The seconds to copy one module for a replica on a host whose factor is 1."""


@dataclass(frozen=True)
class Probe:
    """The result of a probe: the measured machine and its figures.

    `name` is the processor's, and `cores` the number that this process may use. `gpus` are the
    names of the GPUs, at least one; `gpu_memory_bytes` is the memory of GPU 0. `figures` has the
    median over all passes by name. `passes` is the number of passes that were made, and `seconds`
    the duration of the probe.
    """

    name: str
    cores: int
    gpus: tuple[str, ...]
    gpu_memory_bytes: int
    figures: Mapping[str, float]
    passes: int
    seconds: float
    load: Measured
    """The load of other processes during the passes, or before them if it was high or unknown."""
    left_out: tuple[str, ...] = ()
    """What was left out, and why, each as a clause."""
    peer_access: bool = False
    """Whether all GPUs can access each other's memory; False with fewer than two."""
    facts: tuple[Gpu, ...] = ()
    """What NVML says about each GPU; empty if it does not list them."""
    gil: bool = True
    """Whether Python has its interpreter lock, with torch imported."""


class BusyMachine(RuntimeError):
    """The load of other processes is too high for a probe."""


class PassFailed(RuntimeError):
    """The process of a pass failed."""


@dataclass(frozen=True)
class LeftOut:
    """A part that a pass could not measure, and the reason, as the clause `left_out`."""

    left_out: str


def probe(say: Say, *, patience_s: float | None = None, anyway: bool = False) -> Probe:
    """Measure this machine with its GPUs, and return the figures.

    `say` is called with each line of progress and each warning. If other processes keep the cores
    busy, wait up to `patience_s` seconds; None means DPBENCH_PATIENCE or the default. Raises
    BusyMachine if the cores are still busy then, unless `anyway`; ValueError without a GPU;
    PassFailed if the first pass fails. A later pass that fails ends the probe, and is left out.
    """
    count = torch.cuda.device_count()
    if not count:
        raise UsageError(
            "torch finds no GPU on this machine, and predictions are for GPUs only; `dpbench run`"
            " measures steps on this processor within minutes"
        )
    load = foreign_load.wait(foreign_load.patience(patience_s), say, gpus=range(count))
    is_busy = busy(load)
    if is_busy and not anyway:
        raise BusyMachine(
            f"the machine is too busy for a probe: {told(load)}; end the other"
            f" processes, wait longer ({dashed('patience', 'SECONDS')}), or measure anyway and"
            f" label the machine file {NOISY} ({dashed('anyway')})"
        )
    begin = time.perf_counter()
    before = foreign_load.snapshot()
    passes = 0
    values: dict[str, list[float]] = {}
    left_out: dict[str, None] = {}
    ended = f"the probe's budget of {BUDGET_S:.0f} s was spent"
    while passes < PASSES and time.perf_counter() - begin < BUDGET_S:
        try:
            measured = _pass(f"pass {passes + 1} of {PASSES}", say)
        except PassFailed as failed:
            if not passes:
                raise
            ended = str(failed)
            break
        passes += 1
        for one in measured:
            if isinstance(one, LeftOut):
                left_out[one.left_out] = None
            else:
                values.setdefault(one[0], []).append(one[1])
    if not is_busy and isinstance(load.cores, Load):
        # GPUs were measured before the passes only
        load = Measured(foreign_load.since(before), load.gpus)
    host_facts = provenance.host_facts()
    pairs = list(permutations(range(count), 2))
    described = nvml.describe()
    listed = msgspec.convert(described["gpus"], tuple[Gpu, ...])
    facts = listed if len(listed) == count else ()
    if pairs and not (facts and all(map(_tells_ends, facts))):
        left_out["NVLinks between GPUs, because NVML does not tell where they end"] = None
    if missing := PASSES - passes:
        left_out[f"{missing} of {PASSES} passes, because {ended}"] = None
    result = Probe(
        name=host_facts["cpu"],
        cores=host_facts["cores"],
        gpus=_gpu_names(count, described),
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        figures={name: statistics.median(each) for name, each in values.items()},
        passes=passes,
        seconds=time.perf_counter() - begin,
        load=load,
        left_out=tuple(left_out),
        peer_access=bool(pairs) and all(torch.cuda.can_device_access_peer(*one) for one in pairs),
        facts=facts,
        gil=interpreter.gil() == "on",
    )
    for line in _endings(result):
        say(line)
    return result


def _tells_ends(gpu: Gpu) -> bool:
    return gpu.nvlinks.ends is not None or not gpu.nvlinks.active


def _gpu_names(count: int, described: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the GPUs; those of fake ones say so, which labels predictions."""
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    fakes = fake.fake_gpus(RunFacts.of({"gpus": described}))
    return tuple(
        f"{fake.NAME} {name}" if fakes and not name.startswith(fake.NAME) else name
        for name in names
    )


def _endings(result: Probe) -> Iterator[str]:
    yield from (f"left out: {one}" for one in result.left_out)
    if busy(result.load):
        yield f"{NOISY}: {told(result.load)}"
    elif isinstance(result.load.cores, UnknownLoad):
        yield str(result.load.cores)


def _pass(name: str, say: Say) -> list[Figure | LeftOut]:
    """Run one pass in a fresh process; as in a worker, torch uses one thread per operation."""
    command = [sys.executable, "-m", "dpbench.doctor.probe", str(os.getpid())]
    measured: list[Figure | LeftOut] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            if isinstance(found, str):
                say(f"measuring {found}, {name} ...")
            else:
                measured.append(LeftOut(**found) if isinstance(found, dict) else tuple(found))
        if process.wait():
            errors.seek(0)
            raise PassFailed(
                f"a pass of the probe ended with exit status {process.returncode}; the last line of"
                f" its error output is: {processes.last_line(errors.read())}"
            )
    return measured


def measure() -> Iterator[str | Figure | LeftOut]:
    """Yield the name of each part of the probe, then its figures, measured in this process.

    All-reduces without a result, for example because a rank is slow, are left out.
    """
    torch.set_num_threads(1)
    processes.keep()
    yield "the host"
    with processes.staying(0):
        yield from host.figures()
    # as in the workers, the threads that measure GPUs are not bound to cores
    count = torch.cuda.device_count()
    yield "GPU 0"
    yield from gpu.figures()
    yield "copies from the host and between GPUs"
    yield from _copies(count)
    if count > 1:
        yield "all-reduce between GPUs"
        try:
            yield from all_reduce.figures(count)
        except all_reduce.NoResult as failed:
            yield LeftOut(f"all-reduces between GPUs, because {failed}")


def _copies(count: int) -> Iterator[Figure]:
    """Yield the rates of copies from the host to each GPU, and directly between all pairs of GPUs.

    Raises RuntimeError if a copy hangs or fails.
    """
    wanted = [one for one in transfers.copies(count) if one.source == HOST or one.way == DIRECT]
    for one in transfers.measured(wanted):
        if one.failure:
            raise RuntimeError(f"{one.copy}: {one.failure}")
        source, target = ("host" if end == HOST else end for end in one.copy.ends)
        yield f"{one.copy.way}_{source}_{target}_bytes_per_s", one.bytes_per_s


def to_toml(result: Probe) -> str:
    """Return the text of a machine file; links from the host to GPUs have the rate of GPU 0."""
    passes = f"{result.passes} of {PASSES} passes in {result.seconds:.0f} s"
    how = f"measured by dpbench doctor in {passes} with torch {torch.__version__}"
    how = "; ".join([how, *_endings(result)])
    noisy = f" ({NOISY})" if busy(result.load) else ""
    count = len(result.gpus)
    # with the lock, two threads that take turns need twice as long as one
    turns = 1 if result.gil else 2
    what = f"{result.name}, {result.cores} cores: {count} x {result.gpus[0]}{noisy}"
    found = result.figures
    formats = (
        f"{name} = {_number(found[figure])}"
        for name in gpu.DTYPES
        if (figure := f"{name}_flop_per_s") in found
    )
    lines = [
        f"description = {_text(what)}",
        f"source = {_text(how)}",
        f"peer_access = {str(result.peer_access).lower()}",
        "",
        "[gpu]",
        f"name = {_text(result.gpus[0])}",
        f"count = {count}",
        f"memory_bytes = {_number(result.gpu_memory_bytes)}",
        f"memory_bytes_per_s = {_number(found['gpu_memory_bytes_per_s'])}",
        f"flop_per_s = {{ {', '.join(formats)} }}",
        "",
        "[host]",
        f"factor = {_number(found['module_replica_s'] / MODULE_S)}",
        f"cores = {result.cores}",
        f"pageable_bytes_per_s = {_number(found['pageable_host_0_bytes_per_s'])}",
        f"launch_s = {_number(found['launch_s'])}",
        f"module_s = {_number(found['module_replica_s'])}",
        f"tensor_s = {_number(found['tensor_s'])}",
        f"thread_s = {_number(found['thread_s'])}",
        f"gil = {str(result.gil).lower()}",
        f"measured_gil = {str(result.gil).lower()}",
        f"hand_off = {_number(max(0.0, turns * found['long_ops_2_threads_ratio'] - 1))}",
        "",
        "[[link]]",
        f'between = ["{"gpu0" if count == 1 else f"gpu0-{count - 1}"}", "cpu0"]',
        'kind = "pcie"',
        f"bytes_per_s = {_number(found['pinned_host_0_bytes_per_s'])}",
    ]
    lines += _nvlinks(result)
    if "all_reduce_bytes_per_s" in found:
        lines += [
            "",
            "[collective]",
            f"bytes_per_s = {_number(found['all_reduce_bytes_per_s'])}",
            f"start_s = {_number(found['all_reduce_start_s'])}",
        ]
    return "\n".join([*lines, ""])


def _nvlinks(result: Probe) -> Iterator[str]:
    """Yield a link between two GPUs, or from a GPU to NVSwitch, where NVML shows NVLinks.

    Its rate is the median of the direct copies over it, one at a time.
    """
    rates: dict[tuple[str, str], list[float]] = {}
    for source, target in permutations(range(len(result.facts)), 2):
        one, other = result.facts[source], result.facts[target]
        if nvml.nvlinks(one, other):
            ends = (
                (f"gpu{source}", "nvswitch")
                if nvml.SWITCH in (one.nvlinks.ends or {})
                else (f"gpu{min(source, target)}", f"gpu{max(source, target)}")
            )
            rates.setdefault(ends, []).append(
                result.figures[f"direct_{source}_{target}_bytes_per_s"]
            )
    for (first, second), each in rates.items():
        yield from (
            "",
            "[[link]]",
            f'between = ["{first}", "{second}"]',
            'kind = "nvlink"',
            f"bytes_per_s = {_number(statistics.median(each))}",
        )


def _number(value: float) -> str:
    """Return a TOML value; floats are rounded to four or five significant digits."""
    return (
        str(value)
        if isinstance(value, int)
        else f"{value:.4g}"
        if abs(value) < 1e4
        else f"{value:.4e}"
    )


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
