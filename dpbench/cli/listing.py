"""Listing: the choices that `dpbench list` prints, read from the files themselves without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.records import machine, registry, words
from dpbench.records.schedule import FASTEST, LADDER, REFERENCE, RUNGS, TRAIN_STEP

if TYPE_CHECKING:
    from dpbench.store import StoredRun

METRICS = {
    "busy_s": "CPU seconds per step of the threads of one logical CPU device",
    "kernel_busy_s": "seconds in which a GPU ran kernels other than collectives, in one profiled step",
    "collective_busy_s": "seconds in which a GPU ran collective kernels, in one profiled step",
    "utilization_ratio": "share of time in which a GPU ran any kernel, from NVML",
    "memory_used_bytes": "memory in use on a GPU, from NVML",
    "process_memory_bytes": "memory of this run's processes on a GPU, from NVML",
    "foreign_memory_bytes": "memory of other processes on a GPU, from NVML",
    "power_w": "power of a GPU",
    "energy_j": "cumulative energy counter of a GPU",
    "sm_clock_hz": "clock of a GPU's multiprocessors",
    "memory_clock_hz": "clock of a GPU's memory",
    "temperature_c": "temperature of a GPU",
    "throttle_reasons": "NVML's bit mask of reasons for lower clocks",
    "pcie_rx_bytes_per_s": "PCIe traffic into a GPU",
    "pcie_tx_bytes_per_s": "PCIe traffic out of a GPU",
    "cpu_clock_hz": "the highest clock of the cores that the run may use",
    "process_cpu_ratio": "cores kept busy by this run's processes",
    "rss_bytes": "resident memory of this run's processes",
    "foreign_cpu_ratio": "cores kept busy by other processes",
    "core{i}_utilization_ratio": "share of time in which core i was busy",
    "load_1m": "the host's load average over one minute",
}

REMOVES = {
    "pool": "the start of one thread per replica in each step",
    "cached": "the rebuilding of the replicas' module trees in each step",
    "flat_storage": "the broadcast and the reduction of one tensor at a time",
    "persistent": "the copying of weights into new replicas, through autograd, in each forward",
    "local_loss": "the gathering of outputs on device 0, and the loss there",
    "local_backward": "the single backward that drives all devices from one thread",
    "overlap": "the reduction of gradients only after the whole backward",
    "allreduce": "the optimizer on device 0 alone, and the broadcast of new weights from it",
    "flat_optimizer": "the optimizer's loop over tensors",
    "zero1": "the update of all weights on every device: each updates its shard",
    "graphs": "the separate launch of each kernel",
    "bf16_comm": "half of the bytes in gradient transfers",
}
"""The cost that the switch of each rung removes from a step."""


def rows(kind: str) -> list[tuple[str, str]]:
    """Return (name, description) of each model, strategy, schedule, machine or metric; a description is one line."""
    if kind == "machines":
        loaded = {name: machine.load(name) for name in machine.names()}
        return [(name, f"{one.description} ({words.count(one.devices, 'GPU')})") for name, one in loaded.items()]
    if kind == "metrics":
        return sorted(METRICS.items())
    if kind == "schedules":
        return [*((name, _rung(name)) for name in RUNGS), (FASTEST, "the exact schedule that TrainStep selects")]
    own = registry.own(kind)
    found = [(name, _first_line(registry.folder_of(kind) / f"{name}.py")) for name in own]
    installed = [name for name in registry.names(kind) if name not in own]
    return [*found, *((name, _summary(registry.strategy(name))) for name in installed)]


def _rung(name: str) -> str:
    """Return a rung's switch, the cost that it removes and its requirements, as text."""
    if name == REFERENCE:
        return "all switches at their defaults: the work of torch.nn.DataParallel, in phases that can be timed"
    needs = {need for _, need in RUNGS[name].needs(TRAIN_STEP)}
    notes = [*(f"needs {need}" for need in sorted(needs)), *([] if RUNGS[name].exact else ["tolerance"])]
    said = f" ({', '.join(notes)})" if notes else ""
    return f"{'='.join(LADDER[name])}; removes {REMOVES[name]}{said}"


def runs(found: Iterable[tuple[StoredRun, int]]) -> list[tuple[str, str]]:
    """Return (id, description) of each run; the description has its start time, commit, number of cases and status."""
    lines = []
    for run, cases in found:
        code = run.provenance.get("dpbench") or {}
        commit = f"{str(code.get('commit') or 'no commit')[:9]}{'+' if code.get('dirty') else ''}"
        started = datetime.fromtimestamp(run.started, UTC).strftime("%Y-%m-%d %H:%M UTC")
        lines.append((run.id[:12], f"{started}  {commit:<10}  {words.count(cases, 'case')}  {run.status}"))
    return lines


def _summary(strategy: object) -> str:
    """Return the first line of the docstring of a strategy's class."""
    return (type(strategy).__doc__ or "").strip().partition("\n")[0]


def _first_line(path: Path) -> str:
    """Return the first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
