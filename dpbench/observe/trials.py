"""Trials: store a watched loop as the trials of one case, with the provenance that a run has.

The timed steps are cut into consecutive parts, which are stored as the rounds of the case. The parts show how much the
loop varies in one process; they do not show differences between processes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from dpbench.hardware import provenance
from dpbench.hardware.nvml import describe
from dpbench.measure import stopping
from dpbench.observe.loop import Loop
from dpbench.observe.recorder import Seen
from dpbench.records import HOST, Case, Memory, Sample, Trial
from dpbench.records.observed import OBSERVED, SCRIPT, Observed, traits
from dpbench.records.registry import Parallelism, Reduction
from dpbench.store import Naming, Store

PARTS, LEAST, WARMUP = 5, 8, 5
"""The largest number of parts, the least number of timed steps in a part, and the least number of warm-up steps."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A loop that was watched, of one process or of all ranks, with the facts that its trials need."""

    script: str
    command: str
    loop: Loop
    seen: Seen
    ranks: int = 1
    memory: tuple[Memory, ...] = ()
    samples: tuple[Sample, ...] = ()


def case_of(watched: Watched) -> Case:
    """Return the case of a watched loop."""
    seen = watched.seen
    rows = seen.rows.most_common(1)[0][0] if seen.rows else 0
    parallelism = Parallelism.RANKS if seen.ranks else Parallelism.THREADS if seen.threads else Parallelism.NONE
    reduction = Reduction.IN_BACKWARD if seen.threads else Reduction.OVERLAPPED
    names = sorted(set(seen.optimizers.values()))
    return Case(
        model=watched.script, strategy=SCRIPT, batch_size=rows * watched.ranks,
        devices=seen.devices * watched.ranks, device_kind=seen.device_kind, precision=seen.precision,
        optimizer="+".join(names).lower() or "none", loader=watched.loop.loader_workers, compile=seen.compiled,
        inputs="pageable" if seen.pinned is False else "pinned", declared=traits(parallelism, reduction),
    )  # fmt: skip


def trials_of(watched: Watched) -> list[Trial]:
    """Return one trial per part of a watched loop, with the facts about the loop in the provenance of each.

    The steps of warm-up are in the first part.
    """
    loop, seen = watched.loop, watched.seen
    warm = stopping.warmup([step.seconds for step in loop.steps], least=WARMUP)
    timed = len(loop.steps) - warm
    parts = max(1, min(PARTS, timed // LEAST))
    cuts = [0, *(warm + timed * part // parts for part in range(1, parts)), len(loop.steps)]
    facts = {
        "torch": torch.__version__, "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        **({"model": seen.model} if seen.model else {}),
        OBSERVED: _observed(watched, warm).to_dict(),
    }  # fmt: skip
    steps = [replace(step, warmup=at < warm) for at, step in enumerate(loop.steps)]
    found = []
    for number, (first, last) in enumerate(pairwise(cuts)):
        mine = steps[first:last]
        ends = (mine[0].start_s, mine[-1].end_s) if mine else (0.0, 0.0)
        found.append(
            Trial(
                case=case_of(watched),
                reason="the script ended",
                steps=tuple(mine),
                round=number,
                spans=tuple(replace(span, step=span.step - first) for span in loop.spans if first <= span.step < last),
                samples=tuple(one for one in watched.samples if ends[0] <= one.time_s <= ends[1]),
                memory=watched.memory,
                provenance=facts,
                started_s=time.time(),
                setup={"steps_s": sum(step.seconds for step in mine)},
            )
        )
    return found


def _observed(watched: Watched, warm: int) -> Observed:
    """Return the facts about the loop; reads count the timed steps, which begin at the index `warm`."""
    loop, seen = watched.loop, watched.seen
    reads: dict[str, int] = {}
    for places in loop.reads[warm:]:
        for place in places:
            reads[place] = reads.get(place, 0) + 1
    return Observed(
        command=watched.command, wrapper=seen.wrapper, updates=loop.updates, skipped_updates=seen.skipped,
        loader_workers=loop.loader_workers, pinned=seen.pinned, reads=reads, evaluation_s=loop.evaluation_s,
        checkpoint_s=loop.checkpoint_s, unknown=loop.unknown,
    )  # fmt: skip


def store(path: Path, found: Sequence[Trial], naming: Naming, command: str) -> str:
    """Add a run with these trials to the store at `path`, and return the id of the run."""
    facts = {**provenance.collect(describe()), "command": command}
    with Store.create(path, naming) as opened:
        run_id, _ = opened.begin_run(
            plan=f"watch {uuid.uuid4().hex}", host=provenance.host_key(facts), code=provenance.code_key(facts),
            rounds=len(found), provenance=facts,
        )  # fmt: skip
        for one in found:
            opened.end_trial(opened.begin_trial(run_id, one.case, one.round), one)
        opened.end_run(run_id)
    return run_id


def resident() -> Memory:
    """Return the peak of this process's resident memory."""
    import resource

    return Memory(HOST, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "rss")
