"""Joining: put the loops of all ranks of a launch together, through files in the folder of rank 0's store.

Every rank writes its steps and spans when its script has ended, and rank 0 waits for the files of the other ranks. A
rank on a machine that does not share the store's folder is therefore missing, and the joined loop names it as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpbench.measure.merging import merge
from dpbench.observe.loop import Loop
from dpbench.records import Case, Memory, Trial
from dpbench.records.observed import SCRIPT, Held, Unknown, traits
from dpbench.records.registry import Parallelism
from dpbench.records.words import count, verb

DEADLINE_S = 30.0
"""The seconds for which rank 0 waits for the other ranks after its own script has ended."""
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Part:
    """The record of one process: its loop, its peak of memory, its GPUs, and the memory of GPUs that it holds.

    The record of a whole launch has the joined loop, and the memory and the GPUs of all ranks. `gpus` has the index in
    the loop and the UUID of each GPU.
    """

    loop: Loop
    memory: tuple[Memory, ...] = ()
    gpus: tuple[tuple[int, str], ...] = ()
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class Seat:
    """The place of this process in a launch: `rank` of `size` processes, and the folder for the files of the ranks.

    `alone` is whether all processes are known to run on this machine.
    """

    rank: int
    size: int
    folder: Path
    alone: bool = True

    @classmethod
    def of(cls, store: Path, environ: Mapping[str, str] = os.environ) -> Seat:
        """Return the place that torchrun's environment variables describe; without them, rank 0 of one process.

        The folder for the files of the ranks is in the same folder as the file `store`.
        """
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        launch = hashlib.sha256(json.dumps([environ.get(name) for name in names]).encode()).hexdigest()[:12]
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

    def write(self, part: Part) -> None:
        """Write the record of this rank to its file, which rank 0 reads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.file(self.rank).with_suffix(".part")
        held = [*map(asdict, part.held)]
        data = {"numbers": part.loop.numbers, "trial": _trial(part).to_dict(), "gpus": part.gpus, "held": held}
        unfinished.write_text(json.dumps(data), encoding="utf-8")
        unfinished.rename(self.file(self.rank))

    def joined(self, first: Part, deadline_s: float = DEADLINE_S) -> tuple[Part, int]:
        """Return the record of the launch, and the number of ranks in it; `first` is the record of rank 0.

        Ranks whose records do not arrive within `deadline_s` seconds are named in the loop's unknown parts.
        """
        until = time.monotonic() + deadline_s
        others = range(1, self.size)
        while time.monotonic() < until and not all(self.file(rank).exists() for rank in others):
            time.sleep(POLL_S)
        there = [rank for rank in others if self.file(rank).exists()]
        found, gpus, held = first.loop, [*first.gpus], [*first.held]
        parts: list[tuple[Sequence[int], Trial]] = [(found.numbers, _trial(first))]
        for rank in there:
            data: dict[str, Any] = json.loads(self.file(rank).read_text(encoding="utf-8"))
            parts.append((data["numbers"], Trial.from_dict(data["trial"])))
            gpus += [(index, uuid) for index, uuid in data["gpus"]]
            held += [Held(**one) for one in data["held"]]
        self.clear()
        common = set.intersection(*(set(numbers) for numbers, _ in parts))
        whole = merge([_only(numbers, trial, common) for numbers, trial in parts])
        unknown = [*found.unknown]
        if missing := [str(rank) for rank in others if rank not in there]:
            ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)}"
            problem = f"no steps arrived from {ranks} within {deadline_s:g} s"
            unknown.append(Unknown(problem=problem, steps=len(whole.steps)))
        if lost := len(found.steps) - len(whole.steps):
            problem = f"{count(lost, 'step')} of rank 0 {verb(lost, 'is', 'are')} left out, because not all ranks took "
            unknown.append(Unknown(problem=f"{problem}{verb(lost, 'it', 'them')}", steps=lost))
        kept = [at for at, number in enumerate(found.numbers) if number in common]
        together = replace(
            found, steps=tuple(whole.steps), spans=whole.spans, reads=tuple(found.reads[at] for at in kept),
            numbers=tuple(sorted(common)), unknown=tuple(unknown),
        )  # fmt: skip
        return Part(loop=together, memory=whole.memory, gpus=tuple(gpus), held=tuple(held)), len(parts)


def _trial(part: Part) -> Trial:
    """Return the steps, the spans and the memory of one rank as a trial, because `merge` takes trials."""
    case = Case(model=SCRIPT, strategy=SCRIPT, batch_size=1, declared=traits(Parallelism.RANKS))
    return Trial(case=case, steps=part.loop.steps, spans=part.loop.spans, memory=part.memory)


def _only(numbers: Sequence[int], trial: Trial, common: set[int]) -> Trial:
    """Return a trial with only the steps whose number is in `common`; `numbers` has the number of each step."""
    place = {at: new for new, at in enumerate(at for at, number in enumerate(numbers) if number in common)}
    return replace(
        trial, steps=tuple(trial.steps[at] for at in place),
        spans=tuple(replace(span, step=place[span.step]) for span in trial.spans if span.step in place),
    )  # fmt: skip
