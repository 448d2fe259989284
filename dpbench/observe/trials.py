"""Trials: store a watched loop of all ranks of its launch as a run with one case.

Every rank writes its steps and spans to a file when its script has ended, and rank 0 waits for
these files in the folder of its store. A rank on a machine that does not share this folder is
therefore missing, and the joined loop names it as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpbench.hardware import nvml, processes, provenance
from dpbench.hardware.devices import open_devices
from dpbench.hardware.nvml import Library
from dpbench.measure import stopping
from dpbench.measure.merging import merge
from dpbench.measure.worker.facts import gpu_uuids, process_facts, torch_facts
from dpbench.observe import parts, source
from dpbench.observe.loop import WARMUP, WatchedLoop
from dpbench.observe.recorder import Seen
from dpbench.records import HOST, Case, Memory, Sample, Trial, files
from dpbench.records.facts import stated
from dpbench.records.load import Load
from dpbench.records.observed import SCRIPT, Held, Observed, Unknown, traits
from dpbench.records.registry import Parallelism, Reduction
from dpbench.records.trial import only
from dpbench.records.words import count, verb
from dpbench.store import FINISHED, INTERRUPTED, Identity, Naming, Store

DEADLINE_S = 30.0
"""The seconds for which rank 0 waits for the other ranks after its own script has ended."""
POLL_S = 0.05
LEAST = 8
"""The least number of timed steps in a part of a loop."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The record of one process: its loop, its peak of memory, its GPUs, and its memory on them.

    The record of a launch has the joined loop, and the memory and the GPUs of all ranks. `gpus` has
    the index in the loop and the UUID of each GPU, `arrivals` the waits of ranks for each other.
    """

    loop: WatchedLoop
    memory: tuple[Memory, ...] = ()
    gpus: tuple[tuple[int, str], ...] = ()
    held: tuple[Held, ...] = ()
    arrivals: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class WatchedRank:
    """The place of this process in a launch: `rank` of `size`, and the folder of the ranks' files.

    `alone` is whether all processes are known to run on this machine.
    """

    rank: int
    size: int
    folder: Path
    alone: bool = True

    @classmethod
    def of(cls, store: Path, environ: Mapping[str, str] = os.environ) -> WatchedRank:
        """Return the place in torchrun's environment variables; without them, rank 0 of 1.

        The folder for the ranks' files is beside the file `store`.
        """
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        launch = hashlib.sha256(
            json.dumps([environ.get(name) for name in names]).encode()
        ).hexdigest()[:12]
        rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        folder = store.with_name(f"{store.name}.ranks") / launch
        return cls(rank, size, folder, alone=int(environ.get("LOCAL_WORLD_SIZE", "1")) == size)

    def file(self, rank: int) -> Path:
        """Return the path of the file in which a rank writes its record."""
        return self.folder / f"{rank}.json"

    def clear(self) -> None:
        """Remove the files of all ranks, and then their folders if these are empty."""
        for rank in range(self.size):
            self.file(rank).unlink(missing_ok=True)
        for folder in (self.folder, self.folder.parent):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def write(self, part: RankRecord) -> None:
        """Write the record of this rank to its file, which rank 0 reads."""
        data = {
            "numbers": part.loop.numbers,
            "trial": _trial(part).to_dict(),
            "gpus": part.gpus,
            "held": [*map(asdict, part.held)],
        }
        files.write(self.file(self.rank), json.dumps(data))

    def joined(self, first: RankRecord, deadline_s: float = DEADLINE_S) -> tuple[RankRecord, int]:
        """Return the record of the launch and the number of ranks in it; `first` is that of rank 0.

        Ranks whose records do not arrive within `deadline_s` seconds are named in the loop's
        `unknown`.
        """
        until = time.monotonic() + deadline_s
        others = range(1, self.size)
        while time.monotonic() < until and not all(self.file(rank).exists() for rank in others):
            time.sleep(POLL_S)
        there = [rank for rank in others if self.file(rank).exists()]
        loop = first.loop
        gpus = [*first.gpus]
        held = [*first.held]
        parts: list[tuple[Sequence[int], Trial]] = [(loop.numbers, _trial(first))]
        for rank in there:
            data: dict[str, Any] = json.loads(self.file(rank).read_text(encoding="utf-8"))
            parts.append((data["numbers"], Trial.from_dict(data["trial"])))
            gpus += [(index, uuid) for index, uuid in data["gpus"]]
            held += [Held(**one) for one in data["held"]]
        self.clear()
        common = set.intersection(*(set(numbers) for numbers, _ in parts))
        whole = merge(
            [
                only(trial, [at for at, number in enumerate(numbers) if number in common])
                for numbers, trial in parts
            ]
        )
        unknown = [*loop.unknown]
        if missing := [str(rank) for rank in others if rank not in there]:
            ranks = f"{verb(len(missing), 'rank', 'ranks')} {', '.join(missing)}"
            problem = (
                f"no steps arrived from {ranks} within {deadline_s:g} s: look for errors of the"
                " script there; all ranks must write to one folder"
            )
            unknown.append(Unknown(problem=problem, steps=len(whole.steps)))
        if lost := len(loop.steps) - len(whole.steps):
            problem = (
                f"{count(lost, 'step')} of rank 0 {verb(lost, 'is', 'are')} left out, because not"
                f" all ranks took {verb(lost, 'it', 'them')}"
            )
            unknown.append(Unknown(problem=problem, steps=lost))
        kept = [place for place, number in enumerate(loop.numbers) if number in common]
        together = replace(
            loop,
            steps=tuple(whole.steps),
            spans=whole.spans,
            reads=tuple(loop.reads[place] for place in kept),
            numbers=tuple(sorted(common)),
            unknown=tuple(unknown),
        )
        record = RankRecord(
            loop=together,
            memory=whole.memory,
            gpus=tuple(gpus),
            held=tuple(held),
            arrivals=tuple(whole.samples) if self.alone else (),  # the clocks of machines differ
        )
        return record, len(parts)


def _trial(part: RankRecord) -> Trial:
    """Return the record of one rank as a trial, because `merge` takes trials."""
    case = Case(model=SCRIPT, strategy=SCRIPT, batch_size=1, declared=traits(Parallelism.RANKS))
    return Trial(case=case, steps=part.loop.steps, spans=part.loop.spans, memory=part.memory)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A watched loop of one process or of all ranks, with the facts that its trials need."""

    script: str
    command: str
    part: RankRecord
    seen: Seen
    ranks: int = 1
    samples: tuple[Sample, ...] = ()
    load: Load | None = None
    interrupted: bool = False


def case_of(watched: Watched) -> Case:
    """Return the case of a watched loop."""
    seen = watched.seen
    parallelism = (
        Parallelism.RANKS
        if seen.ranks
        else Parallelism.THREADS
        if seen.threads
        else Parallelism.NONE
    )
    reduction = Reduction.IN_BACKWARD if seen.threads else Reduction.OVERLAPPED
    loop = watched.part.loop
    return Case(
        model=watched.script,
        strategy=SCRIPT,
        batch_size=loop.rows * watched.ranks,
        devices=seen.devices * watched.ranks,
        device_kind=seen.device_kind,
        placement="colocated" if len({*seen.device_ids}) < len(seen.device_ids) else "spread",
        precision=loop.precision,
        optimizer="+".join(sorted({*loop.optimizers})).lower() or "none",
        loader=loop.loader_workers,
        compile=loop.compiled,
        inputs="pageable" if seen.pinned is False else "pinned",
        declared=traits(parallelism, reduction),
    )


def trials_of(watched: Watched) -> list[Trial]:
    """Return one trial per part of a loop, each with the facts about the loop."""
    loop = watched.part.loop
    case = case_of(watched)
    warm = stopping.warmup([step.seconds for step in loop.steps], least=WARMUP)
    ids = watched.seen.device_ids[:1]
    facts = {
        **torch_facts(case, open_devices(case.device_kind, 1, ids=ids)[0]),
        **process_facts(),
        **(stated(float32=loop.products) if loop.products else {}),
        **({"model": dict(loop.model)} if loop.model else {}),
        **(stated(foreign_load=watched.load) if watched.load else {}),
        **stated(loop=_observed(watched, warm)),
    }
    whole = Trial(
        case=case,
        reason=f"the script {'was interrupted' if watched.interrupted else 'ended'}",
        spans=loop.spans,
        samples=(*watched.samples, *watched.part.arrivals),
        memory=watched.part.memory,
        steps=tuple(replace(step, warmup=at < warm) for at, step in enumerate(loop.steps)),
        provenance=facts,
        started_s=time.time() - (time.perf_counter() - loop.steps[0].start_s),
    )
    return parts(whole, LEAST)


def _observed(watched: Watched, warm: int) -> Observed:
    """Return the facts about the loop; reads are counted from the step `warm` on."""
    loop = watched.part.loop
    seen = watched.seen
    reads: dict[str, int] = {}
    for places in loop.reads[warm:]:
        for place in places:
            reads[place] = reads.get(place, 0) + 1
    file = Path(seen.file)
    notes = source.notes(file, on_gpus=seen.device_kind == "cuda")
    forwards = seen.synchronized.total()
    return Observed(
        command=watched.command,
        wrapper=seen.wrapper,
        synchronized=seen.synchronized[True] / forwards if forwards else None,
        binding=tuple(source.missing_binding(file)) if seen.ranks else (),
        batches=loop.batches,
        updates=loop.updates,
        skipped_updates=loop.skipped,
        loader_workers=loop.loader_workers,
        pinned=seen.pinned,
        reads=reads,
        evaluation_s=loop.evaluation_s,
        checkpoint_s=loop.checkpoint_s,
        unknown=(*loop.unknown, *(Unknown(problem=note, steps=0) for note in notes)),
        held=watched.part.held,
    )


def store(path: Path, watched: Watched, naming: Naming) -> str:
    """Add the run of a watched loop to the store at `path`, and return the id of the run."""
    recorded = trials_of(watched)
    count = torch.cuda.device_count() if recorded[0].case.device_kind == "cuda" else 0
    gpus_there = nvml.describe_for(gpu_uuids(range(count)))
    facts = {**provenance.collect(gpus_there), "command": watched.command}
    with Store.create(path, naming) as opened:
        return opened.add(
            recorded,
            Identity(
                f"watch {uuid.uuid4().hex}", provenance.host_key(facts), provenance.code_key(facts)
            ),
            provenance=facts,
            status=INTERRUPTED if watched.interrupted else FINISHED,
        )


def gpus(rank: int, seen: Seen) -> tuple[tuple[int, str], ...]:
    """Return the index and UUID of each GPU on which this rank trains; empty if unknown."""
    return tuple(enumerate(gpu_uuids(seen.device_ids), start=rank))


def held(rank: int, seen: Seen, library: Library = None) -> tuple[Held, ...]:
    """Return the memory that this process holds on each GPU; empty if its loop trains on none.

    `library` replaces pynvml in tests.
    """
    trained_on = [uuid for _, uuid in gpus(rank, seen)]
    return tuple(
        Held(
            rank=rank,
            gpu=gpu.index,
            uuid=gpu.uuid,
            held_bytes=size,
            own=any(nvml.same_gpu(gpu.uuid, own_uuid) for own_uuid in trained_on),
        )
        for gpu, size in (nvml.held_by(os.getpid(), library) if seen.device_ids else ())
    )


def resident() -> Memory:
    """Return the peak of this process's resident memory."""
    return Memory(HOST, processes.resident_peak(), "rss")
