"""Facts: the types of the provenance of runs and trials.

A stored fact of another type makes its row damaged. Only the facts that dpbench reads again are
listed; each may be missing, because earlier versions did not store it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dpbench.records.observed import Observed
from dpbench.records.trial import TrialHost
from dpbench.records.work import CopyTimes, Operations

LATEST_S = 253402300799.0
"""The last second of the year 9999, in seconds since the epoch."""


class _Host(msgspec.Struct):
    name: str = ""
    cpu: str = ""
    cores: int = 0
    memory_bytes: int = 0
    system: str = ""
    machine: str = ""


class _Gpu(msgspec.Struct):
    name: str | None = None
    uuid: str | None = None
    memory_bytes: int | None = None


class _Gpus(msgspec.Struct):
    gpus: list[_Gpu] | None = None


class _MeasuredHost(msgspec.Struct):
    cpu: str
    cores: int
    memory_bytes: int


class _MachineFacts(msgspec.Struct):
    host: _MeasuredHost
    software: dict[str, Any]
    gpus: _Gpus = msgspec.field(default_factory=_Gpus)


class _Machine(msgspec.Struct):
    name: str
    machine: str
    ranks: list[int]
    facts: _MachineFacts


class _Machines(msgspec.Struct):
    machines: list[_Machine] = []


class _Code(msgspec.Struct):
    version: str | None = None
    commit: str | None = None
    dirty: bool | None = None


class _ModelCheck(msgspec.Struct):
    seen: dict[str, Any]
    notes: list[str]


class _RunLoad(msgspec.Struct):
    unknown: str = ""


class _Run(msgspec.Struct):
    name: str = ""
    tags: dict[str, str] = {}
    command: str = ""
    host: _Host = msgspec.field(default_factory=_Host)
    gpus: _Gpus = msgspec.field(default_factory=_Gpus)
    packages: dict[str, Any] = {}
    dpbench: _Code = msgspec.field(default_factory=_Code)
    project: _Code = msgspec.field(default_factory=_Code)
    hosts: _Machines = msgspec.field(default_factory=_Machines)
    rounds: dict[str, str] = {}
    noisy: dict[str, str] = {}
    foreign_load: _RunLoad = msgspec.field(default_factory=_RunLoad)


class _Load(msgspec.Struct):
    foreign: float
    steal: float
    cores: int
    seconds: float


class _GpuProcess(msgspec.Struct):
    pid: int
    share: float | None
    memory_bytes: int | None


class _GpuLoad(msgspec.Struct):
    gpu: int
    share: float | None
    memory_bytes: int | None
    processes: list[_GpuProcess]


class _Check(msgspec.Struct):
    value: float
    limit: float
    ok: bool


class _Trial(msgspec.Struct):
    host: _Host = msgspec.field(default_factory=_Host)
    gpus: _Gpus = msgspec.field(default_factory=_Gpus)
    hosts: list[TrialHost] = []
    failed_hosts: dict[str, str] = {}
    foreign_load: _Load | None = None
    foreign_gpus: list[_GpuLoad] = []
    gpu_busy_s: float | None = None
    model: dict[str, float | None] | None = None
    links: list[CopyTimes] = []
    operations: Operations | None = None
    observed: Observed | None = None
    validity: dict[str, _Check] | None = None
    clock_error_s: float | None = None
    no_peer_access: list[Any] | None = None
    error_draws: list[float] = []
    interval_80_s: tuple[float, float] | None = None
    model_check: _ModelCheck | None = None


def check_run(provenance: Mapping[str, Any], started_s: float) -> None:
    """Raise ValueError if a run's start is no time, or a fact has a wrong type."""
    msgspec.convert(provenance, _Run)
    check_time(started_s)


def check_trial(provenance: Mapping[str, Any], started_s: float) -> None:
    """Raise ValueError if a trial's start is no time, or a fact has a wrong type."""
    msgspec.convert(provenance, _Trial)
    check_time(started_s)


def check_time(started_s: float) -> None:
    """Raise ValueError if a start, in seconds since the epoch, is no time before the year 10000."""
    if not 0 <= started_s <= LATEST_S:
        raise ValueError(
            f"the start, {started_s} s after the year 1970 began, is not before the year 10000"
        )
