"""Needs: each device's memory for a case on a described machine, whether it fits, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dpbench.predict import counts
from dpbench.records import Case, Memory, Status, plan
from dpbench.records.machine import Machine

UNTRACED = "unknown: only dpbench's models and --model have a module to trace"


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory that a case's devices need: the allocator's peaks, and the totals as the driver would show them.

    `fits` is None if the machine file does not state the memory of a GPU. `largest` is the largest batch that fits: 0
    if no batch fits, None if there was no search. `reason` explains why the memory is not known.
    """

    case: Case
    memory: tuple[Memory, ...] = ()
    process_bytes: tuple[int, ...] = ()
    fits: bool | None = None
    failed_device: int | None = None
    largest: int | None = None
    reason: str = ""

    @property
    def status(self) -> Status:
        """Return the status of a trial of the case: OOM if the case does not fit, else OK."""
        return Status.OOM if self.fits is False else Status.OK

    def peaks(self, kind: str) -> list[int]:
        """Return the peak bytes of one kind ("allocated" or "reserved") for each device."""
        return [one.peak_bytes for one in self.memory if one.kind == kind]


def needs(cases: Sequence[Case], machine: Machine, *, largest: bool = False) -> Iterator[Need]:
    """Yield the memory of each case. Tracing takes a second or more for each distinct number of rows per device."""
    from dpbench.predict.memory import Traces, traces_of

    kept: dict[Case, Traces] = {}
    for case in cases:
        if counts.named(case.model):
            yield Need(case=case, reason=UNTRACED)
            continue
        key = plan.baseline(
            model=case.model, batch_size=1, size=case.size, optimizer=case.optimizer,
            precision=case.precision,
        )  # fmt: skip
        traces = kept.setdefault(key, traces_of(replace(key, device_kind=case.device_kind)))
        yield _need(case, traces, int(machine.gpu.memory_bytes), largest)


def _need(case: Case, traces: object, capacity_bytes: int, largest: bool) -> Need:
    """Return the memory of one case, from a replay of its devices' allocations."""
    from dpbench.predict import memory

    found = memory.needed(case, traces)  # type: ignore[arg-type]
    over = [one.device for one in found if capacity_bytes and one.process_bytes > capacity_bytes]
    most = None
    if largest and capacity_bytes:
        most = memory.largest_batch(lambda batch: replace(case, batch_size=batch), capacity_bytes)
    return Need(
        case=case, process_bytes=tuple(one.process_bytes for one in found), largest=most,
        fits=not over if capacity_bytes else None, failed_device=over[0] if over else None,
        memory=tuple(
            Memory(one.device, size, "replay", kind=kind)
            for one in found
            for kind, size in (("allocated", one.peak.allocated_bytes), ("reserved", one.peak.reserved_bytes))
        ),
    )  # fmt: skip
