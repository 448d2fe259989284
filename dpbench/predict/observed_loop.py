"""Observed loop: the profile of one device, from the trials of a watched or imported loop.

dpbench cannot build and trace the script of an observed loop. The sizes of its model and the
seconds of its phases come from the trials, and the number of kernels is estimated from that of the
parameter tensors, as for a model that is known by name only.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpbench.predict import counts
from dpbench.predict.machine import Machine, UnknownMachine
from dpbench.predict.stored import Stored, fit_profile, of_trials
from dpbench.predict.work import Profile
from dpbench.records import HOST, Case, Phase, Source, Span, Trial, fake, ledger
from dpbench.records.options import PREDICTABLE
from dpbench.records.registry import Role
from dpbench.records.work import Sizes


@dataclass(frozen=True)
class ObservedLoop:
    """An observed loop: its case, trusted trials with spans, and the name of its GPUs."""

    case: Case
    trials: tuple[Trial, ...]
    gpu: str

    @property
    def rows(self) -> int:
        """Return the number of samples that one device processes in a step."""
        return max(self.case.rows)

    def on(self, target: Machine) -> Stored:
        """Return the loop's profile of one device, for predictions on the machine `target`.

        Raises UnknownMachine if the loop cannot be predicted, for example because it did not run on
        GPUs.
        """
        self._check()
        label = (self.trials[0].source.value if self.trials else Source.MEASURED.value).upper()
        of = f" (per device, on {self.case.devices} devices)" if self.case.devices > 1 else ""
        basis = (
            f"its launches are estimated, and the phases of its steps{of} were {label} in the"
            " user's own loop"
        )
        return Stored(self._profile(), self.gpu, (self.rows,), target.gpu.name, basis)

    def _check(self) -> None:
        lacking = counts.lacking(self._model)
        ranks = max((one.facts.trace.world_size for one in self.trials), default=1)
        problems = [
            (not self.trials, "it has no usable timed step; watch more steps"),
            (
                any(trial.on_fake_gpus for trial in self.trials),
                f"{fake.WHY}; watch the loop on a real GPU",
            ),
            (
                any(loop.hidden for trial in self.trials if (loop := trial.facts.loop)),
                "its trace leaves the phases unknown (`dpbench explain` says why); record another",
            ),
            (
                not self.case.batch_size,
                (
                    "its batch size is unknown; import its trace with {batch}, or give"
                    " {models:FILE.py:NAME} and {step_s} instead"
                ),
            ),
            (
                ranks > 1,
                (
                    f"its trace is of one of {ranks} ranks, whose phases contain the waits for the"
                    " other ranks; import the trace of a training on one GPU"
                ),
            ),
            (
                bool(lacking),
                (
                    f"its run lacks {', '.join(lacking)}; record shapes in a trace"
                    " (record_shapes=True), or give {models:FILE.py:NAME} and {step_s} instead"
                ),
            ),
            (
                self.case.precision not in PREDICTABLE,
                (
                    f"it used {self.case.precision}, but only {' and '.join(PREDICTABLE)} can be"
                    " predicted; watch the loop with one of these precisions"
                ),
            ),
            (
                self.case.device_kind != "cuda",
                (
                    f"it ran on devices of the kind {self.case.device_kind}, and predictions "
                    "are for GPUs only; watch the loop on a GPU"
                ),
            ),
        ]
        if problem := next((text for is_so, text in problems if is_so), ""):
            raise UnknownMachine(
                f"the loop {{model}} cannot be the basis of a prediction: {problem}",
                option="from",
                model=self.case.model,
            )

    @property
    def _model(self) -> Sizes:
        return next((one.facts.model for one in self.trials if one.facts.model), Sizes())

    def _profile(self) -> Profile:
        counted = counts.of_sizes(self.case.model, self._model)
        if self.case.devices == 1:
            return of_trials(counted, self.trials)
        return fit_profile(counted, {self.rows: self._phases()})

    def _phases(self) -> dict[Phase, float]:
        """Return the seconds of one device in each phase, for a loop on several devices.

        A forward, loss or backward on a single device, such as the loss of DataParallel, processes
        the samples of all devices, so its seconds are divided by their number. Ranks process their
        own samples only.
        """
        seconds: dict[Phase, list[float]] = defaultdict(list)
        shared: set[Phase] = set()
        for trial in self.trials:
            for spans in _timed(trial):
                each: dict[Phase, dict[int, float]] = defaultdict(lambda: defaultdict(float))
                for span in spans:
                    each[span.phase][span.device] += span.end_s - span.start_s
                for phase, by_device in each.items():
                    spent = [s for device, s in by_device.items() if device != HOST]
                    spent = spent or [*by_device.values()]
                    seconds[phase].append(statistics.median(spent))
                    if len(spent) == 1 and not self.case.traits.ranks:
                        shared.add(phase)
        medians = {phase: statistics.median(values) for phase, values in seconds.items()}
        whole = shared & {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
        return {
            phase: s / self.case.devices if phase in whole else s for phase, s in medians.items()
        }


def _timed(trial: Trial) -> Iterator[Sequence[Span]]:
    """Yield the spans of each timed step, or of the median step if only its spans are kept."""
    if not trial.spans:
        number, spans_of_median = trial.ledger.median_step or (None, ())
        yield tuple(span for span in spans_of_median if span.step == number)
        return
    for step, spans in zip(trial.steps, ledger.by_step(trial.spans, len(trial.steps)), strict=True):
        if not step.warmup:
            yield spans


def of_run(trials: Sequence[Trial], gpu: str) -> ObservedLoop | None:
    """Return the observed loop of a run with the most timed steps, or None if it has none.

    `gpu` is the name of the run's GPUs.
    """
    by_case: dict[Case, list[Trial]] = {}
    for trial in trials:
        if trial.case.traits.role is Role.OBSERVED:
            by_case.setdefault(trial.case, []).append(trial)
    if not by_case:
        return None
    case = max(by_case, key=lambda one: sum(len(trial.timed) for trial in by_case[one]))
    usable = [trial for trial in by_case[case] if trial.trusted and trial.timed]
    return ObservedLoop(case, tuple(usable), gpu)
