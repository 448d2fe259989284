"""Commands that make trials of the user's training.

`dpbench watch` runs a training script unchanged and records its steps. `dpbench import` reads
profiler traces.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dpbench.api import STORE
from dpbench.api.reports import report_of
from dpbench.api.stored import choose
from dpbench.cli import shapes
from dpbench.cli.options import (
    EXIT_FAILED,
    EXIT_USAGE,
    Documented,
    json_option,
    option_of,
    store_option,
)
from dpbench.cli.showing import print_results, try_report
from dpbench.cli.streams import hand_over, open_streams
from dpbench.records import signals
from dpbench.records.errors import told
from dpbench.records.files import UnreadableFile

if TYPE_CHECKING:
    from dpbench.observe.imported import Aligned, ImportedLoop, ImportedTrace
    from dpbench.observe.watching import WatchResult
    from dpbench.store import Naming


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one device in a trace file, in seconds.

    `device` is the device's number in the file, and `name` its model, empty if unknown. `span_s` is
    the time from the start of its first activity to the end of its last. `compute_s`, `copies_s`
    and `communication_s` are the seconds in which at least one activity of that kind ran; different
    kinds may overlap. Memory fills count as copies, and copies between two devices as
    communication. `exposed_copies_s` and `exposed_communication_s` are the parts in which no
    compute kernel ran. `kernels_s` are the seconds in which a compute kernel or a copy ran. During
    `idle_s` the device ran nothing.
    """

    device: int
    name: str
    span_s: float
    compute_s: float
    copies_s: float
    exposed_copies_s: float
    communication_s: float
    exposed_communication_s: float
    kernels_s: float
    idle_s: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One step: its start since the first event of the file, its duration, and its phases.

    A step lasts from the end of the devices' work of the step before to the end of the work that
    the host launched in it. `partial` is True if the trace lacks its beginning; the step then
    starts with its first kernel or copy. `phases` are the seconds on the critical path of host and
    devices, which sum to `seconds`; null if the trace leaves them unknown. `host` are the seconds
    that the host spent in each phase, whatever the devices did meanwhile. Both have all phases,
    with 0 for one that does not occur, and `phases` also has `unattributed`. `host_ahead_s` are the
    seconds from the end of the step on the host to its end on the devices, negative if the host
    ended it later; null if the step is an interval of the host.
    """

    name: str
    start_s: float
    seconds: float
    phases: Mapping[str, float] | None
    host: Mapping[str, float]
    host_ahead_s: float | None
    partial: bool


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """One trace file: its rank in a process group of `world_size` ranks, its devices and its steps.

    `clock` is null for the first rank, and if the collectives of the two ranks do not match.
    """

    path: str
    rank: int
    world_size: int
    clock: Aligned | None
    devices: Sequence[DeviceTime]
    steps: Sequence[StepTime]
    notes: Sequence[str]


class Import(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench import`: the id of the stored run, its results file, and each trace."""

    schema: int
    run: str
    store: str
    files: Sequence[TraceFile]


@click.command(
    "import",
    cls=Documented,
    short_help="Import traces of torch.profiler as a run.",
    exits={
        0: "the traces were imported",
        EXIT_FAILED: "a file cannot be read, is not a trace, or cannot be written",
        EXIT_USAGE: "wrong usage",
    },
)
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--batch",
    type=click.IntRange(1, 10**9),
    help="The samples in a step of one process; `dpbench predict --from` needs them.",
)
@option_of("name")
@json_option
@store_option
def import_(
    traces: tuple[Path, ...], store: Path, batch: int | None, name: str | None, as_json: bool
) -> None:
    """Import traces that torch.profiler wrote (Chrome's JSON, or gzip of it) as a run of the store.

    Each file is one process; files of different ranks of one process group become one case. The
    host's steps are those that the profiler has marked; in a trace without such marks, a step ends
    where the optimizer's step ends. A step lasts until the devices have done the work that the host
    launched in it. The JSON has, for each device of a file, span_s, compute_s, copies_s,
    communication_s, exposed_communication_s and idle_s, and, for each step of a file, the seconds
    of its phases, and in host_ahead_s how far the host was ahead of the devices.
    """
    from dpbench.observe import imported
    from dpbench.store import Naming

    naming = Naming(name=name or "")
    loops = imported.load(traces, batch or 0)
    run_id = imported.store(store, loops, naming)
    files = [_file(trace, loop) for loop in loops for trace in loop.traces]
    if as_json:
        shapes.show(Import(schema=shapes.SCHEMA, run=run_id, store=str(store), files=files))
        return
    for loop in loops:
        click.echo(imported.described(loop))
    for file in files:
        _print(file)
    for note in dict.fromkeys(note for file in files for note in file.notes):
        click.echo(f"note: {note}", err=True)
    click.echo(
        f"store: {store}   run: {run_id[:8]}   next: dpbench explain --run {run_id[:8]}", err=True
    )
    sys.stdout.flush()


def _file(trace: ImportedTrace, loop: ImportedLoop) -> TraceFile:
    from dpbench.records import UNATTRIBUTED, Phase
    from dpbench.records.activity import busy
    from dpbench.records.ledger import Ledger

    attributed = trace.attributed
    profile = trace.profile
    names = {gpu.id: gpu.name for gpu in profile.gpus}
    every = [phase.value for phase in Phase]
    return TraceFile(
        path=profile.file,
        rank=profile.rank,
        world_size=profile.world_size,
        clock=trace.aligned,
        devices=[
            DeviceTime(device=device, name=names.get(device) or "", **asdict(times))
            for device, times in busy(attributed.activities).items()
        ],
        steps=[
            StepTime(
                name=name,
                start_s=step.start_s,
                seconds=step.seconds,
                partial=step.warmup,
                phases=None
                if trace.hidden
                else {phase: seconds.get(phase, 0.0) for phase in (*every, UNATTRIBUTED)},
                host={phase: host.get(phase, 0.0) for phase in every},
                host_ahead_s=ahead_s,
            )
            for name, step, seconds, host, ahead_s in zip(
                attributed.names,
                attributed.steps,
                Ledger(attributed.steps, attributed.spans).phases,
                attributed.host,
                attributed.ahead_s or [None] * len(attributed.steps),
                strict=True,
            )
        ],
        notes=loop.notes,
    )


def _print(file: TraceFile) -> None:
    import statistics

    from dpbench.records import words

    name = Path(file.path).name
    for device in file.devices:
        shares = ", ".join(
            f"{what} {words.time(seconds)}"
            for what, seconds in (
                ("compute", device.compute_s),
                ("copies", device.copies_s),
                ("communication", device.communication_s),
                ("exposed communication", device.exposed_communication_s),
                ("idle", device.idle_s),
            )
        )
        click.echo(
            f"  {name} device {device.device} {device.name}: {words.time(device.span_s)}: {shares}"
        )
    timed = [step for step in file.steps if not step.partial]
    if shown := timed or file.steps:
        step_s = statistics.median(step.seconds for step in shown)
        what = "median step" if timed else "no step is timed; the median of what the trace shows is"
        click.echo(f"  {name} {what} {words.time(step_s)}: {_middle(shown)}")
    if leads := [step.host_ahead_s for step in file.steps if step.host_ahead_s is not None]:
        lead_s = statistics.median(leads)
        order = "before" if lead_s >= 0 else "after"
        click.echo(f"  {name} host: ends a step {words.time(abs(lead_s))} {order} the devices")


def _middle(steps: Sequence[StepTime]) -> str:
    """Return the median seconds of each phase over some steps as text."""
    import statistics

    from dpbench.records import words

    known = [step.phases for step in steps if step.phases is not None]
    if not known:
        return "its phases are unknown"
    middle = {phase: statistics.median(one[phase] for one in known) for phase in known[0]}
    return ", ".join(
        f"{phase} {words.time(seconds)}"
        for phase, seconds in middle.items()
        if words.measurable(seconds)
    )


@click.command(
    cls=Documented,
    short_help="Run a training script unchanged, and record its steps.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    exits={
        0: "the script ended",
        EXIT_FAILED: (
            "no training step was detected, there is no such script, or the page cannot be written"
        ),
        EXIT_USAGE: "wrong usage",
    },
)
@click.option(
    "-m", "module", is_flag=True, help="SCRIPT is the name of a module, as for python -m."
)
@option_of("name")
@option_of("tag")
@store_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def watch(
    script: str,
    arguments: tuple[str, ...],
    module: bool,
    store: Path,
    name: str | None,
    tag: tuple[str, ...],
) -> None:
    """Run a training script in this process, unchanged, and store its steps as a run.

    Options for dpbench come before SCRIPT; all words after SCRIPT are the script's arguments. The
    script handles its signals. If it fails, the exit code is that of the script; if a signal ends
    it, its steps are stored before.
    """
    from dpbench.measure import turns
    from dpbench.observe import imports
    from dpbench.observe.script import INTERRUPTED, run
    from dpbench.records.options import tags
    from dpbench.store import Naming

    if not module and not Path(script).is_file():
        raise UnreadableFile(
            f"the script {script} does not exist; for a module, give -m and its name"
        )
    command = shlex.join(["dpbench", "watch", *(["-m"] if module else []), script, *arguments])
    naming = Naming(name=name or "", tags=tags(tag), command=command)
    # a gate shows results of its own
    watched = _Watched(store, Path(script).name, naming, shows=turns.VARIABLE not in os.environ)
    imports.after("torch", watched.begin)
    signals.hand_over(watched.end)
    hand_over()
    code = run(script, arguments, module=module)
    shown = watched.end(interrupted=code == INTERRUPTED)
    if code == INTERRUPTED:
        raise signals.ScriptInterrupted
    sys.exit(code or (0 if shown else EXIT_FAILED))


class _Watched:
    """A script in this process, watched from its import of torch to its end."""

    def __init__(self, store: Path, script: str, naming: Naming, *, shows: bool) -> None:
        self._store = store
        self._script = script
        self._naming = naming
        self._process = os.getpid()
        self._folder = Path.cwd()
        self._path = [*sys.path]
        self._streams = sys.stdout, sys.stderr
        self._stack = ExitStack()
        self._result: WatchResult | None = None
        self._shows = shows
        self._ended = False

    def begin(self) -> None:
        """Watch the training loop from now on."""
        with self._own_path():
            from dpbench.observe.watching import watch as watching

            alone = os.environ.get("RANK", "0") == "0"
            live = sys.stderr if sys.stderr.isatty() and alone else None
            given = asdict(self._naming)  # the name, the tags and the command
            try:
                self._result = self._stack.enter_context(
                    watching(self._store, script=self._script, live=live, **given)
                )
            except Exception as error:  # the script goes on
                why = f"{type(error).__name__}: {told(error)}"
                click.echo(f"error: dpbench does not watch the script: {why}", err=True)

    def end(self, *, interrupted: bool = True) -> bool:
        """Store and print what was recorded; return whether there is a run with its page.

        Only the first call acts, and only in the process in which the script began.
        """
        if self._ended or os.getpid() != self._process:
            return True
        self._ended = True
        with self._own_path(), self._own_streams(), chdir(self._folder):
            if self._result is not None:
                self._result.interrupted = interrupted
            self._stack.close()
            shown = not self._shows or self._show()
            sys.stdout.flush()
        return shown

    @contextmanager
    def _own_path(self) -> Iterator[None]:
        """Let dpbench's own imports find no file of the script."""
        scripts = [*sys.path]
        sys.path[:] = self._path
        try:
            yield
        finally:
            sys.path[:] = scripts

    @contextmanager
    def _own_streams(self) -> Iterator[None]:
        """Let dpbench print where it printed before the script, which may have closed a stream."""
        open_streams()
        with ExitStack() as stack:
            out, err = (
                stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                if stream.closed
                else stream
                for stream in self._streams
            )
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            yield

    def _show(self) -> bool:
        result = self._result  # None if the script has not imported torch
        if result and result.rank:
            return True
        if result and result.run_id:
            return _show(self._store, result.run_id)
        for problem in result.unknown if result else ():
            click.echo(f"note: {problem}", err=True)
        if not (result and result.steps):
            click.echo("error: dpbench detected no training step, so it stored no run", err=True)
        return False


def _show(store: Path, run_id: str) -> bool:
    """Print the answers and the table of a run; return whether its page was written."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        chosen = choose(opened, run_id)
        shown = report_of(chosen, opened.summaries(run_id))
    where = [] if store == STORE else ["--store", str(store)]
    print_results(shown, shlex.join(["dpbench", "explain", "--run", chosen.id[:8], *where]))
    return try_report(None, shown, store)
