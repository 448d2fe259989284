"""Watching: record the training loop of a script or code block, and store it as a run."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from dpbench.hardware import foreign_load, nvml, samplers
from dpbench.measure import scratch
from dpbench.measure.turns import Turns
from dpbench.observe import loop, seams, trials
from dpbench.observe.modules import in_group
from dpbench.observe.recorder import Recorder, Seen
from dpbench.records import HOST, Sample
from dpbench.records.errors import told
from dpbench.records.load import Load, UnknownLoad
from dpbench.records.observed import Unknown
from dpbench.records.words import count
from dpbench.store import Naming

log = logging.getLogger(__name__)

LIVE_S = 0.5
"""The least time in seconds between two updates of the line on the terminal."""
SAMPLED_S = 0.5
"""The seconds between two readings of the counters: a watched loop may run for hours."""


@dataclass
class WatchResult:
    """The result of watching: the id of the stored run, its steps, and the loop's problems.

    The id is empty if the loop took no steps or could not be stored, and in ranks other than 0.
    `interrupted` is whether an interrupt or a signal ended the block.
    """

    run_id: str = ""
    steps: int = 0
    rank: int = 0
    unknown: list[str] = field(default_factory=list)
    interrupted: bool = False


@contextmanager
def watch(
    path: str | Path = "dpbench.db",
    *,
    name: str = "",
    tags: Mapping[str, str] | None = None,
    script: str = "",
    command: str = "",
    live: TextIO | None = None,
) -> Iterator[WatchResult]:
    """Record the training loop inside the `with` block as a run of the store `path`.

    `script` is the name of the model in reports (default: that of the running script), and
    `command` the command that ran it. On the stream `live`, a line shows the number of updates and
    their duration. The steps are stored even if the block raises, after KeyboardInterrupt as an
    interrupted run; a process that the block has forked stores none. Yields the result, which is
    complete after the block. If the run cannot be stored, the error is logged, and the code after
    the block goes on.
    """
    path = Path(path).absolute()  # the block may change the working folder
    process = os.getpid()
    naming = Naming(name=name, tags=dict(tags or {}), command=command)
    recorder = Recorder()
    result = WatchResult()
    seat = trials.WatchedRank.of(path)
    if seat.rank == 0 and seat.size > 1:
        with suppress(OSError):  # files of an earlier launch; storing the run names the error
            seat.clear()
    if live is not None:
        recorder.listeners.append(_line(live))
    if turns := Turns.of_environment():
        recorder.listeners.append(_in_turns(recorder, turns))
    with ExitStack() as stack:
        beside = _sampling(stack, seat)
        try:
            with seams.installed(recorder):
                yield result
        except KeyboardInterrupt:
            result.interrupted = True
            raise
        finally:
            if os.getpid() == process:
                if live is not None:
                    _write(live, "\r\x1b[K")
                source = script or Path(sys.argv[0]).name, command or shlex.join(sys.argv)
                try:
                    _store(recorder, result, path, naming, source, seat, beside)
                except Exception as error:  # the user's code after the block must run
                    kind = type(error).__name__
                    log.error("the run was not stored in %s: %s: %s", path, kind, told(error))


@dataclass(frozen=True)
class _Beside:
    """The samplers that run during a loop; `problem` says why some are missing.

    `series` is None if none run. `visible` has NVML's facts about the sampled GPUs. `before` are
    the times of the cores at the start, and `root` is the root of the watched processes.
    """

    series: samplers.SampleFile | None = None
    visible: Sequence[Mapping[str, Any]] = ()
    problem: str = ""
    before: foreign_load.Snapshot | UnknownLoad | None = None
    root: int = 0

    @property
    def load(self) -> Load | None:
        """The foreign load of the cores since the start; None if it is unknown."""
        load = foreign_load.since(self.before, {self.root}) if self.before else None
        return load if isinstance(load, Load) else None

    def during(self, part: trials.RankRecord) -> tuple[Sample, ...]:
        """Return the samples during a loop, with the loop's indices of devices."""
        steps = part.loop.steps
        if self.series is None or not steps:
            return ()
        # the samplers number the GPUs by CUDA ordinal, and the loop numbers the devices on which it
        # trains
        places: dict[int, list[int]] = {HOST: [HOST]}
        for gpu in self.visible:
            places[gpu["index"]] = [
                number for number, uuid in part.gpus if nvml.same_gpu(uuid, gpu["uuid"])
            ]
        samples = self.series.cut(steps[0].start_s, steps[-1].end_s)
        return tuple(
            replace(one, device=place) for one in samples for place in places.get(one.device, ())
        )


def _sampling(stack: ExitStack, seat: trials.WatchedRank) -> _Beside:
    """Start the samplers, which `stack` ends; in a launch, only rank 0 does, for all ranks."""
    if seat.rank:
        return _Beside()
    if not seat.alone:  # the clocks of machines differ
        return _Beside(problem="GPUs and host are not sampled in a launch on several machines")
    # the other ranks have the same parent, so that their work does not count as foreign load
    root = os.getppid() if seat.size > 1 else os.getpid()
    before = foreign_load.snapshot({root})
    visible: Sequence[Mapping[str, Any]] = ()
    problem = ""
    try:
        if torch.version.cuda:
            visible = nvml.describe()["gpus"]
    except Exception as error:  # of a library that may be any version, in a user's process
        problem = f"the GPUs are not sampled: {error}"
    try:
        file = stack.enter_context(scratch.folder()) / "samples.jsonl"
        series = stack.enter_context(
            samplers.sampling([gpu["index"] for gpu in visible], file, SAMPLED_S, root_pid=root)
        )
    except Exception as error:
        why = f"GPUs and host are not sampled: {error}"
        return _Beside(problem=why, before=before, root=root)
    if series.pid is None:
        why = "GPUs and host are not sampled, because the samplers did not start"
        return _Beside(problem=why, before=before, root=root)
    return _Beside(series, visible, problem, before, root)


def _store(
    recorder: Recorder,
    result: WatchResult,
    path: Path,
    naming: Naming,
    source: tuple[str, str],
    seat: trials.WatchedRank,
    beside: _Beside,
) -> None:
    """Stop a recorder, store its steps as a run, and complete the result.

    Only rank 0 of a launch stores, with the steps of all ranks. `source` is the script and its
    command.
    """
    try:
        recorder.stop()
    # a GPU error that ended the script; the times of the steps are lost
    except RuntimeError as error:
        result.unknown += [
            *recorder.seen.unknown,
            f"the times of the work on the GPUs are unknown: {error}",
        ]
        return
    part = trials.RankRecord(
        loop=loop.of(recorder, first=seat.rank),
        memory=(trials.resident(),),
        gpus=trials.gpus(seat.rank, recorder.seen),
        held=trials.held(seat.rank, recorder.seen),
    )
    ranks = 1
    result.rank = seat.rank
    result.steps = len(part.loop.steps)
    apart = seat.size > 1 and bool(part.loop.steps) and not _together(recorder.seen)
    if seat.rank:
        if not apart:
            seat.write(part)
        return
    unreduced = seat.size > 1 and not apart and not recorder.seen.ranks
    if seat.size > 1 and not apart:
        part, ranks = seat.joined(part)
        recorder.seen.ranks = True
    why = (
        f"torch.distributed joined none of the {seat.size} processes of this launch: they count as"
        " trained alone; these are the steps of rank 0, and those of the others are not stored"
    )
    alone = (
        "no wrapper that adds the gradients of the ranks was seen, such as DistributedDataParallel"
        " or FSDP: if nothing else adds them, each rank trains a model of its own"
    )
    for problem in filter(None, (why * apart, alone * unreduced, beside.problem)):
        noted = (*part.loop.unknown, Unknown(problem=problem, steps=0))
        part = replace(part, loop=replace(part.loop, unknown=noted))
    result.unknown = [
        f"{one.problem} ({count(one.steps, 'step')})" if one.steps else one.problem
        for one in part.loop.unknown
    ]
    if not part.loop.steps:
        return
    watched = trials.Watched(
        script=source[0],
        command=source[1],
        part=part,
        seen=recorder.seen,
        ranks=ranks,
        samples=beside.during(part),
        load=beside.load,
        interrupted=result.interrupted,
    )
    result.run_id = trials.store(path, watched, naming)


def _together(seen: Seen) -> bool:
    """Return whether the ranks of a launch train one model, as far as torch.distributed tells."""
    return seen.ranks or seen.grouped or in_group()


def _line(stream: TextIO) -> Callable[[array[float]], None]:
    shown, shown_s = 0, 0.0

    def show(ends: array[float]) -> None:
        nonlocal shown, shown_s
        if ends[-1] - shown_s >= LIVE_S:
            since = len(ends) - 1 - shown
            each_ms = (ends[-1] - ends[shown]) / max(1, since) * 1e3
            _write(stream, f"\r\x1b[Kdpbench: update {len(ends)}, {each_ms:.3g} ms per update")
            shown, shown_s = len(ends) - 1, ends[-1]

    return show


def _in_turns(recorder: Recorder, turns: Turns) -> Callable[[array[float]], None]:
    """Return a listener that makes the loop wait for its turn after each block of updates."""
    left = 1

    def take(ends: array[float]) -> None:
        nonlocal left
        left -= 1
        if left:
            return
        left = turns.next()
        if not left:
            signal.raise_signal(signal.SIGTERM)
        recorder.resume()

    return take


def _write(stream: TextIO, text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal is gone, or the script has closed the stream
        stream.write(text)
        stream.flush()
