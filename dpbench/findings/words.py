"""How numbers are said in findings: plain text, for a terminal as for a page."""

from __future__ import annotations

from dpbench.ladder import short
from dpbench.records import Case, Estimate


def ms(seconds: float) -> str:
    """Say seconds in milliseconds, or in microseconds below a tenth of one."""
    value = seconds * 1e3
    if abs(value) < 0.1:
        return f"{seconds * 1e6:.2g} µs" if value else "0 ms"
    places = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{places}f} ms"


def interval(estimate: Estimate) -> str:
    """Say seconds with their interval, in milliseconds."""
    return f"{ms(estimate.value)} ({estimate.low * 1e3:.3g}–{estimate.high * 1e3:.3g})"


def times(estimate: Estimate) -> str:
    """Say a ratio with its interval."""
    return f"{estimate.value:.2f}× ({estimate.low:.2f}–{estimate.high:.2f})"


def percent(share: float) -> str:
    """Say a fraction as a percentage."""
    return f"{share:.0%}" if share >= 0.1 else f"{share * 100:.1f}%"


def size(count: float) -> str:
    """Say bytes in binary units."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:.0f} B"


def strategy(case: Case) -> str:
    """Name a strategy with its schedule."""
    if case.strategy == "single_all_cores":
        return "one device with all cores"
    return f"{case.strategy}[{short(case.schedule)}]" if case.schedule else case.strategy


def devices(case: Case, count: int | None = None) -> str:
    """Say so many devices of the case's kind."""
    kind = {"cpu": "logical CPU devices", "cuda": "GPUs"}.get(case.device_kind, f"{case.device_kind} devices")
    colocated = " replicas sharing one GPU" if case.placement == "colocated" else f" {kind}"
    return f"{case.devices if count is None else count}{colocated}"
