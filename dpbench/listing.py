"""What there is to choose from, read from the files themselves without importing them."""

from __future__ import annotations

import ast
from pathlib import Path

from dpbench import registry
from dpbench.schedule import FASTEST, RUNGS

METRICS = {
    "busy_s": "seconds of CPU time a step, per logical CPU device (its threads' own)",
    "kernel_busy_s": "seconds in which a GPU ran kernels, in one profiled step",
    "collective_busy_s": "seconds of collective kernels in one profiled step, apart from kernel_busy_s",
    "utilization_ratio": "share of time in which a GPU ran any kernel, as NVML says",
    "memory_used_bytes": "memory in use on a GPU, as NVML says",
    "process_memory_bytes": "memory of this run's processes on a GPU, as NVML says",
    "power_w": "power of a GPU",
    "energy_j": "cumulative energy counter of a GPU",
    "sm_clock_hz": "clock of a GPU's multiprocessors",
    "memory_clock_hz": "clock of a GPU's memory",
    "temperature_c": "temperature of a GPU",
    "throttle_reasons": "NVML's bit mask of reasons for lower clocks",
    "pcie_rx_bytes_per_s": "PCIe traffic into a GPU",
    "pcie_tx_bytes_per_s": "PCIe traffic out of a GPU",
    "process_cpu_ratio": "cores kept busy by this run's processes",
    "rss_bytes": "resident memory of this run's processes",
    "foreign_cpu_ratio": "cores kept busy by other processes",
    "core{i}_utilization_ratio": "share of time in which core i was busy",
    "load_1m": "the host's load average over one minute",
}


def rows(kind: str) -> list[tuple[str, str]]:
    """Return (name, one line of words) for each model, strategy, schedule or metric."""
    if kind == "metrics":
        return sorted(METRICS.items())
    if kind == "schedules":
        return [*((name, f"rung {i} of the ladder") for i, name in enumerate(RUNGS)), (FASTEST, "the best exact rung")]
    return [(name, _first_line(Path(__file__).parent / kind / f"{name}.py")) for name in registry.names(kind)]


def _first_line(path: Path) -> str:
    """Return the first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
