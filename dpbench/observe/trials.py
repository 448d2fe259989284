"""Trials: store a watched loop as a run with the trials of one case, and with the provenance of a run."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dpbench.hardware import nvml, processes, provenance
from dpbench.hardware.devices import open_devices
from dpbench.hardware.nvml import Library
from dpbench.measure import stopping
from dpbench.measure.worker.facts import gpu_uuids, torch_facts
from dpbench.observe import parts
from dpbench.observe.joining import Part
from dpbench.observe.loop import WARMUP
from dpbench.observe.recorder import Seen
from dpbench.records import HOST, Case, Memory, Sample, Trial
from dpbench.records.observed import OBSERVED, SCRIPT, Held, Observed, traits
from dpbench.records.registry import Parallelism, Reduction
from dpbench.store import Naming, Store

LEAST = 8
"""The least number of timed steps in a part of a loop."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A watched loop of one process or of all ranks, with the facts that its trials need."""

    script: str
    command: str
    part: Part
    seen: Seen
    ranks: int = 1
    samples: tuple[Sample, ...] = ()


def case_of(watched: Watched) -> Case:
    """Return the case of a watched loop."""
    seen = watched.seen
    parallelism = Parallelism.RANKS if seen.ranks else Parallelism.THREADS if seen.threads else Parallelism.NONE
    reduction = Reduction.IN_BACKWARD if seen.threads else Reduction.OVERLAPPED
    loop, names = watched.part.loop, sorted(set(watched.part.loop.optimizers))
    return Case(
        model=watched.script, strategy=SCRIPT, batch_size=loop.rows * watched.ranks,
        devices=seen.devices * watched.ranks, device_kind=seen.device_kind, precision=loop.precision,
        optimizer="+".join(names).lower() or "none", loader=loop.loader_workers, compile=loop.compiled,
        inputs="pageable" if seen.pinned is False else "pinned", declared=traits(parallelism, reduction),
    )  # fmt: skip


def trials_of(watched: Watched) -> list[Trial]:
    """Return one trial per part of a watched loop, with the facts about the loop in the provenance of each."""
    loop, case = watched.part.loop, case_of(watched)
    warm = stopping.warmup([step.seconds for step in loop.steps], least=WARMUP)
    facts = {
        **torch_facts(case, open_devices(case.device_kind, 1)[0]),
        **({"model": dict(loop.model)} if loop.model else {}),
        OBSERVED: _observed(watched, warm).to_dict(),
    }
    whole = Trial(
        case=case, reason="the script ended", spans=loop.spans, samples=watched.samples, memory=watched.part.memory,
        steps=tuple(replace(step, warmup=at < warm) for at, step in enumerate(loop.steps)),
        provenance=facts, started_s=time.time(),
    )  # fmt: skip
    return parts(whole, LEAST)


def _observed(watched: Watched, warm: int) -> Observed:
    """Return the facts about the loop; reads are counted in timed steps only, which begin at the index `warm`."""
    loop, seen = watched.part.loop, watched.seen
    reads: dict[str, int] = {}
    for places in loop.reads[warm:]:
        for place in places:
            reads[place] = reads.get(place, 0) + 1
    return Observed(
        command=watched.command, wrapper=seen.wrapper, updates=loop.updates, skipped_updates=loop.skipped,
        loader_workers=loop.loader_workers, pinned=seen.pinned, reads=reads, evaluation_s=loop.evaluation_s,
        checkpoint_s=loop.checkpoint_s, unknown=loop.unknown, held=watched.part.held,
    )  # fmt: skip


def store(path: Path, found: Sequence[Trial], naming: Naming, command: str) -> str:
    """Add a run with these trials to the store at `path`, and return the id of the run."""
    count = torch.cuda.device_count() if found[0].case.device_kind == "cuda" else 0
    facts = {**provenance.collect(nvml.describe_for(gpu_uuids(range(count)))), "command": command}
    with Store.create(path, naming) as opened:
        return opened.add(
            found, plan=f"watch {uuid.uuid4().hex}", host=provenance.host_key(facts), code=provenance.code_key(facts),
            provenance=facts,
        )  # fmt: skip


def gpus(rank: int, seen: Seen) -> tuple[tuple[int, str], ...]:
    """Return the index and the UUID of each GPU on which this rank trains; empty if the UUIDs are unknown."""
    return tuple(enumerate(gpu_uuids(seen.device_ids), start=rank))


def held(rank: int, seen: Seen, library: Library = None) -> tuple[Held, ...]:
    """Return the memory of each GPU that this process, the rank `rank`, holds; empty if its loop trains on no GPU.

    `library` replaces pynvml in tests.
    """
    own = [uuid for _, uuid in gpus(rank, seen)]
    return tuple(
        Held(
            rank=rank, gpu=gpu.index, uuid=gpu.uuid, held_bytes=size,
            own=any(nvml.same_gpu(gpu.uuid, one) for one in own),
        )
        for gpu, size in (nvml.held_by(os.getpid(), library) if seen.device_ids else ())
    )  # fmt: skip


def resident() -> Memory:
    """Return the peak of this process's resident memory."""
    return Memory(HOST, processes.resident_peak(), "rss")
