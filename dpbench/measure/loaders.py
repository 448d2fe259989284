"""Loaders: sweep the arguments of a DataLoader, and time the step that it feeds. This module does not import torch.

Each measurement has a fresh process, so that a dataset that raises, hangs or ends the process fails only one
measurement. Each round starts a new server, and measures all settings and the step once, in random order. A setting
that failed once is not measured again.
"""

from __future__ import annotations

import json
import mmap
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Self

from dpbench.analysis.loaders import LoaderReading, Setting
from dpbench.hardware import foreign_load, provenance
from dpbench.measure.request import Loading, Request, Synthetic, WorkKind
from dpbench.measure.scratch import folder
from dpbench.measure.server import Server, again_if_killed
from dpbench.records import Case, Effort, Status, Trial, words

READING, PROGRESS = "reading.json", "progress"
"""The files of a measurement: its result, and its progress (`LoaderProgress`)."""
TURNS = 3
"""The least number of batches that each worker loads in the steady part, after the queues of batches have filled."""
STEP_LIMIT_S, STEP_EFFORT = 120.0, Effort(memory_by_phase=False)


class LoaderProgress:
    """A file that all processes of a measurement map into memory, and that the parent reads if a measurement hangs.

    It has the number of batches that the consumer received and, for each worker, the index of the example that the
    worker began last (-1 before the first). All numbers are 64-bit integers.
    """

    def __init__(self, folder: Path) -> None:
        with (folder / PROGRESS).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._numbers = memoryview(self._map).cast("q")

    @classmethod
    def created(cls, folder: Path, workers: int) -> Self:
        """Create the file for `workers` workers; the main process counts as worker 0 if it loads the examples."""
        part = folder / f"{PROGRESS}.part"
        part.write_bytes(array("q", [0, *[-1] * workers]).tobytes())
        part.rename(folder / PROGRESS)
        return cls(folder)

    def received(self) -> None:
        """Increase the number of received batches by one."""
        self._numbers[0] += 1

    def last(self, worker: int) -> memoryview:
        """Return the index of the example that a worker began last, as a writable view of one element."""
        return self._numbers[1 + worker : 2 + worker]

    @staticmethod
    def read(folder: Path) -> tuple[int, Sequence[int]]:
        """Return the number of received batches, and the last index of each worker; (0, []) without the file."""
        path = folder / PROGRESS
        batches, *last = array("q", path.read_bytes()) if path.exists() else [0]
        return batches, last


def stacks(folder: Path, worker: int) -> Path:
    """Return the file to which a worker of the DataLoader writes its Python stacks."""
    return folder / f"stacks-worker-{worker}"


class Unfit(ValueError):
    """The requested sweep cannot be measured; the message has the reason and the remedy."""


class Failed(RuntimeError):
    """The dataset raised, hung or ended its process before the first round."""


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """The plan of a sweep: the settings of a DataLoader to measure on a dataset, and the step to compare with.

    `examples` is the least number of examples of each measurement; if it is None, a short trial determines it. `step`
    is a case whose step is timed on data in memory, or the seconds of a step, or None for no step. `limit_s` is the
    time in seconds in which a batch must arrive. `seed` determines the random order within each round.
    """

    dataset: str | Synthetic
    settings: tuple[Setting, ...]
    batch_size: int = 32
    examples: int | None = None
    rounds: int = 5
    limit_s: float = 60.0
    step: Case | float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The measurements of a plan, with at least `examples` examples each.

    `step_s` has the seconds of each step by round; it is empty if dpbench timed no step, or if the step failed.
    `step_reason` says why the step failed; it is empty if the step did not fail. `noisy` describes the foreign load if
    it was too high, and is empty otherwise.
    """

    plan: LoaderPlan
    examples: int
    readings: tuple[LoaderReading, ...]
    step_s: dict[int, list[float]] = field(default_factory=dict)
    step_reason: str = ""
    noisy: str = ""

    @property
    def step(self) -> dict[int, list[float]] | float | None:
        """Return the step to compare with: the measured seconds by round, the given seconds, or None without a step."""
        return self.plan.step if isinstance(self.plan.step, float) else self.step_s or None

    @property
    def failed(self) -> bool:
        """Return whether the measurement of a setting or of the step failed."""
        return bool(self.step_reason) or any(one.status is not Status.OK for one in self.readings)

    @property
    def warnings(self) -> list[str]:
        """Return the reasons why results are uncertain or missing, as lines of text."""
        reasons = dict.fromkeys(f"{one.setting}: {one.reason}" for one in self.readings if one.reason)
        step = [f"the step was not measured: {self.step_reason}"] if self.step_reason else []
        cpu = isinstance(self.plan.step, Case) and self.plan.step.device_kind == "cpu" and not self.step_reason
        shared = ["the step and the workers were measured separately; in training they share the cores"] if cpu else []
        return [*reasons, *step, *shared, *([f"NOISY: {self.noisy}"] if self.noisy else [])]

    @property
    def facts(self) -> str:
        """Return the conditions of the measurement as one line of text."""
        dataset = self.plan.dataset
        if isinstance(dataset, Synthetic):
            rate = f", at most {dataset.examples_per_s:g} examples/s" if dataset.examples_per_s else ""
            dataset = (
                f"synthetic dataset: {words.time(dataset.wait_s)} of waiting, {words.time(dataset.cpu_s)} of CPU time "
                f"and {words.size(dataset.example_bytes)} per example{rate}"
            )
        return (
            f"MEASURED on {words.count(provenance.usable_cores(), 'core')}: {dataset}; batch {self.plan.batch_size}, "
            f"at least {self.examples:,} examples per measurement, {words.count(self.plan.rounds, 'round')}."
        )

    def to_json(self) -> str:
        """Return the plan, the measurements and the facts about the host as JSON."""
        step = self.plan.step.to_dict() if isinstance(self.plan.step, Case) else self.plan.step
        plan = {**asdict(self.plan), "step": step}
        return words.dumps({**asdict(self), "plan": plan, "provenance": provenance.collect()}, default=str)


def default_workers(cores: int) -> tuple[int, ...]:
    """Return 0 and the powers of two up to the number of cores, at least up to 4."""
    return 0, *(2**power for power in range(max(cores, 4).bit_length()))


def settings(
    workers: Iterable[int], pin_memory: Iterable[bool], prefetch_factors: Iterable[int], persistent: Iterable[bool]
) -> tuple[Setting, ...]:
    """Return all combinations of the values, each once.

    In combinations with 0 workers, `prefetch_factors` and `persistent` are left out, because they have no effect.
    """
    combined = [
        Setting(workers=count, pin_memory=pin, prefetch_factor=factor, persistent_workers=stays)
        if count
        else Setting(workers=0, pin_memory=pin)
        for count, pin, factor, stays in product(workers, pin_memory, prefetch_factors, persistent)
    ]
    return tuple(dict.fromkeys(combined))


def run(plan: LoaderPlan, say: Callable[[str], None], *, patience_s: float | None = None) -> Sweep:
    """Measure a plan; `say` gets one line of text per measurement.

    Raises Unfit if the dataset cannot be measured as requested, and Failed if it fails in a trial of half a second.
    """
    with folder() as scratch:
        foreign_load.wait(foreign_load.patience(patience_s), say)
        with Server(scratch) as server:
            examples = _examples(plan, _trial(plan, server), say)
        before = foreign_load.snapshot()
        sweep = _rounds(plan, examples, scratch, say)
        load = foreign_load.since(before)
    return replace(sweep, noisy=str(load) if foreign_load.busy(load) else "")


def _trial(plan: LoaderPlan, server: Server) -> LoaderReading:
    """Load batches for half a second without workers, and return the reading.

    Raises Unfit if the dataset cannot be measured as requested, and Failed if it raises, hangs or ends the process.
    """
    setting = Setting(workers=0, pin_memory=any(one.pin_memory for one in plan.settings))
    loading = Loading(dataset=plan.dataset, setting=setting, batch_size=plan.batch_size, examples=0)
    reading = measure(server, loading, plan.limit_s)
    if reading.status is Status.SKIPPED:
        raise Unfit(reading.reason)
    if reading.status is not Status.OK:
        raise Failed(f"{reading.status.value}: {reading.reason}")
    return reading


def _examples(plan: LoaderPlan, trial: LoaderReading, say: Callable[[str], None]) -> int:
    """Return the number of examples of each measurement.

    By default, a measurement has as many examples as are loaded in about a second without workers, but at least
    `TURNS` batches per worker, and not more than the dataset has. Raises Unfit if the dataset has too few examples.
    """
    rate = plan.batch_size * len(trial.waits_s) / sum(trial.waits_s)
    widest = max(plan.settings, key=lambda one: one.fill + one.ahead)
    wanted = plan.examples or max(round(rate), TURNS * widest.turn * plan.batch_size)
    turns = (trial.length // plan.batch_size - widest.fill - widest.ahead) // widest.turn
    most = turns * widest.turn * plan.batch_size
    if most < (plan.examples or 1):
        needed = widest.batches(plan.batch_size, plan.examples or 1) * plan.batch_size
        raise Unfit(
            f"the dataset has {words.count(trial.length, 'example')}, but a measurement with {widest} and batches of "
            f"{plan.batch_size} needs {needed:,}, including those that workers load ahead; give fewer --workers or "
            "--examples, or a smaller --batch-size"
        )
    found = min(wanted, most)
    say(f"{found:,} examples per measurement; a trial without workers loaded {words.number(rate)} examples/s")
    return found


def _rounds(plan: LoaderPlan, examples: int, scratch: Path, say: Callable[[str], None]) -> Sweep:
    """Measure all rounds with `examples` examples per measurement; `say` gets one line of text per measurement."""
    readings: list[LoaderReading] = []
    steps: list[Trial] = []
    for number in range(plan.rounds):
        asked = _asked(plan, readings, steps)
        with Server(scratch) as server:
            for one in random.Random(f"{plan.seed} {number}").sample(asked, len(asked)):
                if isinstance(one, Case):
                    steps.append(server.run(one, STEP_EFFORT, number, STEP_LIMIT_S))
                    said = f"{one.label}: {_failure(steps[-1]) or 'ok'}"
                else:
                    loading = Loading(
                        dataset=plan.dataset, setting=one, batch_size=plan.batch_size, examples=examples,
                        round=number,
                    )  # fmt: skip
                    readings.append(measure(server, loading, plan.limit_s))
                    said = f"{one}: {_said(readings[-1])}"
                say(f"[round {number + 1} of {plan.rounds}] {said}")
    reason = next(filter(None, map(_failure, steps)), "")
    step_s = {trial.round: [step.seconds for step in trial.steps if not step.warmup] for trial in steps}
    return Sweep(
        plan=plan, examples=examples, readings=tuple(readings), step_s={} if reason else step_s, step_reason=reason
    )


def _asked(plan: LoaderPlan, readings: Iterable[LoaderReading], steps: Iterable[Trial]) -> list[Setting | Case]:
    """Return the settings, and the step's case if any, that have not failed yet; the next round measures them."""
    failed = {one.setting for one in readings if one.status is not Status.OK}
    step = [plan.step] if isinstance(plan.step, Case) and not any(map(_failure, steps)) else []
    return [*(one for one in plan.settings if one not in failed), *step]


def _failure(trial: Trial) -> str:
    return "" if trial.status is Status.OK else f"{trial.status.value}: {trial.reason}"


def _said(reading: LoaderReading) -> str:
    if reading.status is not Status.OK:
        return f"{reading.status.value}: {reading.reason}"
    return f"{words.number(reading.batch_size / reading.batch_s)} examples/s"


def measure(server: Server, loading: Loading, limit_s: float) -> LoaderReading:
    """Make one measurement in a fresh process of the server; return its reading, even if the process hangs or dies.

    The process is killed if no batch arrives for `limit_s` seconds. If a signal from outside ends the process, the
    measurement is tried once more. Raises OSError if temporary files cannot be written.
    """
    (reading,) = again_if_killed(lambda: [_measured(server, loading, limit_s)])
    return reading


def _measured(server: Server, loading: Loading, limit_s: float) -> LoaderReading:
    with server.folder() as folder:
        request = Request(
            job=WorkKind.LOAD, cases=(), effort=Effort(), folder=folder, round=loading.round, loading=loading
        )
        end = server.attempt(request, limit_s, lambda: LoaderProgress.read(folder)[0])
        written = folder / READING
        if end.late:
            return lost(loading, Status.TIMEOUT, _hung(loading, limit_s, folder))
        if written.exists():
            return LoaderReading.from_dict(json.loads(written.read_text(encoding="utf-8")))
        failure = end.failure(limit_s, folder)
        return lost(loading, failure.status, failure.reason)


def lost(loading: Loading, status: Status, reason: str) -> LoaderReading:
    """Return the reading of a measurement that failed."""
    return LoaderReading(
        setting=loading.setting, round=loading.round, batch_size=loading.batch_size, status=status, reason=reason
    )


def _hung(loading: Loading, limit_s: float, folder: Path) -> str:
    """Return a message that names the worker whose batch is missing, the example that it loads, and its stack."""
    workers = loading.setting.workers
    batches, last = LoaderProgress.read(folder)
    worker = batches % max(1, workers)  # batches arrive in order, and workers take turns
    index = last[worker] if last else -1
    who = f"worker {worker}" if workers else "the main process"
    what = f"loads example {index}" if index >= 0 else "has not begun an example"
    dumped = stacks(folder, worker) if workers else folder / "stacks"
    stack = dumped.read_text(errors="replace", encoding="utf-8").strip() if dumped.exists() else ""
    return (
        f"no batch for {limit_s:g} s (--limit) after {words.count(batches, 'batch', 'batches')}; {who} {what}; "
        f"its Python stack:\n{stack or 'none received'}"
    )
