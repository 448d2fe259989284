"""Progress: show the progress of a run on stderr."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.progress_bar import ProgressBar
from rich.table import Table

from dpbench.analysis import lanes, stats, summary
from dpbench.records import Case, Status, Trial, disturbance, words
from dpbench.records.errors import UsageError
from dpbench.records.estimate import Estimate

if TYPE_CHECKING:
    from dpbench.measure.run import Ended, Note, Started


class Detail(Enum):
    """The amount of progress that `dpbench run` prints."""

    QUIET = auto()
    """No progress."""
    USUAL = auto()
    """A live display on a terminal, and otherwise one line per round."""
    VERBOSE = auto()
    """Also two lines per trial, with its stages, steps and memory."""

    @classmethod
    def of(cls, *, quiet: bool, verbose: bool) -> Self:
        """Return the amount of these options; raise UsageError if they contradict each other."""
        if quiet and verbose:
            raise UsageError(
                "{} and {verbose:True} contradict each other",
                option="quiet",
                value=True,
                remedy="leave out one of them",
            )
        return cls.QUIET if quiet else cls.VERBOSE if verbose else cls.USUAL


class _Console(Console):
    """A console that raises BrokenPipeError if the output is closed; Rich's own would exit."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the output was closed")


class _Live(RichProgress):
    """A progress bar, with the running speed-ups and the devices of the newest trial below it."""

    speedups: RunningSpeedups | None = None
    devices: Table | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.speedups and (shown := self.speedups.table()):
            yield shown
        if self.devices:
            yield self.devices


class RunningSpeedups:
    """The speed-ups computed from the trials so far, of the cases with the newest trial's model."""

    MOST = 15
    """The largest number of cases that the table shows."""

    def __init__(self) -> None:
        self._series: dict[Case, stats.Timed] = {}
        self._labels: dict[Case, tuple[str, ...]] = {}
        self._speedups: dict[Case, Estimate] = {}
        self._model = ""
        self._looks = 1

    def add(self, trial: Trial) -> None:
        """Add an ended trial, and compute the speed-ups of the cases with its model."""
        summary.add(self._series, trial)
        self._model = trial.case.model
        self._looks = max(self._looks, trial.facts.looks)
        noisy = [disturbance.NOISY] * bool(self._series[trial.case].noisy)
        self._labels[trial.case] = tuple(dict.fromkeys([*summary.labels(trial), *noisy]))
        alike = {case: series for case, series in self._series.items() if case.model == self._model}
        self._speedups = summary.speedups(alike, self._looks)

    def table(self) -> Table | None:
        """Return a table of the speed-ups with 95 % intervals and labels; None without any."""
        if not self._speedups:
            return None
        shown = Table("case", "speed-up so far", "labels", box=None, padding=(0, 2, 0, 0))
        for case, estimate in [*self._speedups.items()][: self.MOST]:
            shown.add_row(escape(case.label), words.times(estimate), " ".join(self._labels[case]))
        return shown


def device_bars(trial: Trial, most: int = 8) -> Table | None:
    """Return a table with a bar for each of the first `most` devices of a trial.

    A bar shows the share of the trial's median step in which a phase was open on the device. Return
    None if the trial is not trusted, or has no timed step with phases on devices.
    """
    timeline = lanes.of_trial(trial) if trial.trusted else None
    used = [lane for lane in timeline.lanes if lane.device >= 0] if timeline else []
    if not used:
        return None
    what = f"{escape(trial.case.label)}: share of the median step with an open phase"
    shown = Table("device", what, "", "labels", box=None, padding=(0, 2, 0, 0))
    labels = " ".join(summary.labels(trial))
    for lane in used[:most]:
        share = 1 - lane.idle_share
        shown.add_row(
            str(lane.device),
            ProgressBar(total=1.0, completed=share, width=30),
            words.percent(share),
            labels,
        )
    if len(used) > most:
        shown.caption = f"{words.count(len(used) - most, 'more device')} not shown"
    return shown


class Progress:
    """A context manager that shows the progress of a run; see `Detail`.

    On a terminal it shows a progress bar, speed-ups, and a bar for each device. `plan` is printed
    when the run starts.
    """

    def __init__(
        self, detail: Detail = Detail.USUAL, console: Console | None = None, *, plan: str = ""
    ) -> None:
        self._detail = detail
        self._plan = plan
        self._console = console or _Console(stderr=True, highlight=False, soft_wrap=True)
        live = self._console.is_terminal and detail is not Detail.QUIET
        self._bar = _Live(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not live,
        )
        self._bar.speedups = RunningSpeedups() if live else None
        self._task: Any = None
        self._round = -1

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def listen(self, event: Started | Ended | Note) -> None:
        """Show a message, or the start of the run, or the start or end of a trial."""
        from dpbench.measure.run import Ended, Note

        if self._detail is Detail.QUIET:
            return
        if isinstance(event, Note):
            self._console.print(escape(event.text))
        elif isinstance(event, Ended):
            self._ended(event)
        elif event.case is None:
            self._task = self._bar.add_task(
                "starting", total=event.total, completed=event.done, left=""
            )
            if self._plan:
                self._console.print(escape(self._plan))
            if event.done:
                self._console.print(
                    f"resuming run {event.run_id[:8]}, which has {event.done} of {event.total}"
                    " trials"
                )
        else:
            what = f"{event.case.label}, round {event.round + 1}"
            self._bar.update(self._task, description=escape(what))

    def _ended(self, event: Ended) -> None:
        trial = event.trial
        left = left_text(event.left_s)
        failed = trial.status not in (Status.OK, Status.SKIPPED)
        if failed or self._detail is Detail.VERBOSE:
            line = f"{trial.case.label}, round {trial.round + 1}: {outcome(trial)}"
            self._console.print(escape(line))
        if self._detail is Detail.VERBOSE:
            self._console.print(escape(f"    {details(trial)}"))
        if trial.round > self._round and not self._console.is_terminal:
            self._round = trial.round
            started = f"round {trial.round + 1}, {words.count(event.done, 'trial')} measured"
            self._console.print(", ".join(filter(None, (started, left))))
        if self._bar.speedups:
            self._bar.speedups.add(trial)
            self._bar.devices = device_bars(trial) or self._bar.devices
        self._bar.update(self._task, completed=event.done, total=event.total, left=left)


def brief(trial: Trial) -> str:
    """Return the last line of a trial's reason, because a traceback ends with the error.

    For a timeout, return the first line, because stacks of the processes follow.
    """
    lines = [line for line in trial.reason.splitlines() if line.strip()] or [""]
    return lines[0 if trial.status is Status.TIMEOUT else -1].strip()


def outcome(trial: Trial) -> str:
    """Return the outcome of a trial as text: its median step, or why it failed."""
    if trial.status is not Status.OK:
        return f"{trial.status}: {brief(trial)}"
    return f"ok, {words.time(statistics.median(trial.timed))}" if trial.timed else "ok"


def left_text(left_s: float | None) -> str:
    """Return the expected rest of a run as text, such as "about 2 min left".

    "" if it is unknown or less than a second.
    """
    return f"about {words.long_time(left_s)} left" if left_s and left_s >= 1 else ""


def details(trial: Trial) -> str:
    """Return the times of a trial's stages, its steps, memory peaks and verification as text."""
    warmup = sum(step.warmup for step in trial.steps)
    peaks = [peak for peak in trial.memory if not peak.phase and peak.kind == "allocated"]
    named = [
        ("host" if peak.device < 0 else f"device {peak.device}", words.size(peak.peak_bytes))
        for peak in peaks
    ]
    parts = [
        ", ".join(
            f"{name.removesuffix('_s')} {words.time(seconds)}"
            for name, seconds in trial.setup.items()
        ),
        (
            f"{words.count(len(trial.timed), 'timed step')}, {warmup} of warm-up"
            if trial.steps
            else ""
        ),
        ", ".join(f"{device} {size}" for device, size in named),
        f"gradients: {trial.verified.value}",
    ]
    return "; ".join(filter(None, parts))
