"""What there is to choose from, read from the files themselves without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.records import machine, registry, words
from dpbench.records.schedule import FASTEST, LADDER, REFERENCE, RUNGS, TRAIN_STEP

if TYPE_CHECKING:
    from dpbench.store import Run

METRICS = {
    "busy_s": "seconds of CPU time a step, per logical CPU device (its threads' own)",
    "kernel_busy_s": "seconds in which a GPU ran kernels, in one profiled step",
    "collective_busy_s": "seconds of collective kernels in one profiled step, apart from kernel_busy_s",
    "utilization_ratio": "share of time in which a GPU ran any kernel, as NVML says",
    "memory_used_bytes": "memory in use on a GPU, as NVML says",
    "process_memory_bytes": "memory of this run's processes on a GPU, as NVML says",
    "foreign_memory_bytes": "memory of other processes on a GPU, as NVML says",
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
    "pool": "a thread started for each replica in each step",
    "cached": "the replicas' module trees rebuilt in each step",
    "flat_storage": "weights broadcast and gradients added tensor by tensor",
    "persistent": "weights copied into new replicas, through autograd, in each forward",
    "local_loss": "outputs gathered on device 0, and the loss computed there",
    "local_backward": "one backward that drives all devices from a single thread",
    "overlap": "gradients that wait for the whole backward before they are reduced",
    "allreduce": "the optimizer on device 0 alone, and new weights sent out from it",
    "flat_optimizer": "an optimizer that goes tensor by tensor",
    "zero1": "every device updating all weights: each updates its share",
    "graphs": "kernels launched one by one",
    "bf16_comm": "half of the bytes that gradients take on their way",
}
"""What each rung's switch takes out of a step."""


def rows(kind: str) -> list[tuple[str, str]]:
    """Return (name, one line of words) for each model, strategy, schedule, machine or metric."""
    if kind == "machines":
        loaded = {name: machine.load(name) for name in machine.names()}
        return [(name, f"{one.description} ({words.count(one.devices, 'GPU')})") for name, one in loaded.items()]
    if kind == "metrics":
        return sorted(METRICS.items())
    if kind == "schedules":
        return [*((name, _rung(name)) for name in RUNGS), (FASTEST, "the exact schedule that TrainStep chooses itself")]
    own = registry.own(kind)
    found = [(name, _first_line(registry.folder_of(kind) / f"{name}.py")) for name in own]
    installed = [name for name in registry.names(kind) if name not in own]
    return [*found, *((name, _summary(registry.strategy(name))) for name in installed)]


def _rung(name: str) -> str:
    """Say which switch a rung turns, what that removes, and what it needs beyond any device and DataParallel."""
    if name == REFERENCE:
        return "no switch turned: what torch.nn.DataParallel does, in phases that can be timed"
    needs = {need for _, need in RUNGS[name].needs(TRAIN_STEP)}
    notes = [*(f"needs {need}" for need in sorted(needs)), *([] if RUNGS[name].exact else ["tolerance"])]
    said = f" ({', '.join(notes)})" if notes else ""
    return f"{'='.join(LADDER[name])}; removes {REMOVES[name]}{said}"


def runs(found: Iterable[tuple[Run, int]]) -> list[tuple[str, str]]:
    """Return (id, when, commit, cases, status) of runs and their counts of cases, the last four as one text."""
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
