"""Watching: record the training loop of a script, or of a block of code, and store its steps as a run."""

from __future__ import annotations

import shlex
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from dpbench.observe import joining, loop, seams, trials
from dpbench.observe.recorder import Recorder
from dpbench.records.words import count
from dpbench.store import Naming

LIVE_S = 0.5
"""The least seconds between two updates of the live line."""


@dataclass
class Result:
    """The result of watching: the id of the stored run.

    The id is empty if the loop took no steps, and in ranks other than 0.
    """

    run_id: str = ""
    steps: int = 0
    rank: int = 0
    unknown: list[str] = field(default_factory=list)


@contextmanager
def watch(
    path: str | Path = "dpbench.db", *, name: str = "", tags: Mapping[str, str] | None = None, script: str = "",
    command: str = "", live: TextIO | None = None,
) -> Iterator[Result]:  # fmt: skip
    """Record the training loop inside the `with` block, and store its steps as a run of the store `path`.

    The run gets the name `name` and the tags `tags`. `script` is the name of the model in reports (default: that of the
    running script), and `command` the command that ran it. `live` is the stream on which a line shows the last steps.
    The steps are stored also if the block raises. Yields the result, which is complete after the block.
    """
    naming = Naming(name=name, tags=dict(tags or {}), command=command)
    recorder, result, seat = Recorder(), Result(), joining.Seat.of(Path(path))
    if seat.rank == 0 and seat.size > 1:
        seat.clear()
    if live is not None:
        recorder.listeners.append(_line(live))
    try:
        with seams.installed(recorder):
            yield result
    finally:
        if live is not None:
            live.write("\r\x1b[K")
        source = script or Path(sys.argv[0]).name, command or shlex.join(sys.argv)
        _store(recorder, result, Path(path), naming, source, seat)


def _store(
    recorder: Recorder, result: Result, path: Path, naming: Naming, source: tuple[str, str], seat: joining.Seat
) -> None:
    """Stop a recorder, store its steps as a run, and complete the result; `source` is the script and its command.

    Only rank 0 of a launch stores, together with the steps of the other ranks.
    """
    try:
        recorder.stop()
    except RuntimeError as error:  # an error of a GPU, which also ended the script, leaves no times of its steps
        result.unknown.append(f"the GPUs cannot tell when they did the work: {error}")
        return
    part = joining.Part(
        loop=loop.of(recorder, first=seat.rank), memory=(trials.resident(),),
        held=trials.held(seat.rank, recorder.seen) if recorder.seen.device_kind == "cuda" else (),
    )  # fmt: skip
    ranks, result.rank, result.steps = 1, seat.rank, len(part.loop.steps)
    if seat.rank:
        seat.write(part)
        return
    if seat.size > 1:
        part, ranks = seat.joined(part)
        recorder.seen.ranks = True
    result.unknown = [
        f"{one.problem} ({count(one.steps, 'step')})" if one.steps else one.problem for one in part.loop.unknown
    ]
    if not part.loop.steps:
        return
    watched = trials.Watched(script=source[0], command=source[1], part=part, seen=recorder.seen, ranks=ranks)
    result.run_id = trials.store(path, trials.trials_of(watched), naming, source[1])


def _line(stream: TextIO) -> Callable[[array[float]], None]:
    """Return a function that shows the number of updates, and the time between the last ones, on one line."""
    shown = [0, 0.0]

    def show(ends: array[float]) -> None:
        if ends[-1] - shown[1] >= LIVE_S:
            since = len(ends) - 1 - int(shown[0])
            each_ms = (ends[-1] - ends[int(shown[0])]) / max(1, since) * 1e3
            stream.write(f"\r\x1b[Kdpbench: update {len(ends)}, {each_ms:.3g} ms each")
            stream.flush()
            shown[:] = [len(ends) - 1, ends[-1]]

    return show
