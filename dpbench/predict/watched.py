"""Watched: the profile of one device from an observed training loop, whose model dpbench cannot build and trace.

The sizes of the model and the seconds of its phases come from the trials. The number of kernels that the host launches
is estimated from the number of parameter tensors, as for a model that is known by name only.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpbench.predict import counts, stored
from dpbench.records import HOST, Case, Phase, Profile, Source, Span, Trial, ledger, machine, registry
from dpbench.records.machine import Machine, UnknownMachine
from dpbench.records.observed import Alternative
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate

NEEDED = ("parameter_tensors", "parameter_bytes", "buffer_bytes", "input_bytes", "output_bytes")
"""The facts about the model without which a prediction is not possible, by their names in a trial's provenance."""
PRECISIONS = ("fp32", "bf16")
"""The precisions of observed loops that can be predicted."""


@dataclass(frozen=True)
class Loop:
    """An observed loop: its case, its trusted trials with their spans, and the facts stored with its run."""

    case: Case
    trials: tuple[Trial, ...]
    facts: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """Return the number of samples that one device processes in a step."""
        return max(self.case.rows)

    def on(self, target: Machine) -> stored.Stored:
        """Return the loop's profile of one device, for predictions on the machine `target`.

        Raises UnknownMachine if a needed fact is missing, if the loop's precision cannot be predicted, or if the loop
        ran on another kind of device than the machine has.
        """
        self._check(target)
        device = stored.device_of(self.facts, self.case)
        label = (self.trials[0].source.value if self.trials else Source.MEASURED.value).upper()
        of = f" (per device, on {self.case.devices} devices)" if self.case.devices > 1 else ""
        basis = f"its launches are estimated, and the phases of its steps{of} were {label} in the user's own loop"
        return stored.Stored(self._profile(), device, (self.rows,), target.gpu.name, basis)

    def _check(self, target: Machine) -> None:
        kind = "cpu" if target.logical else "cuda"
        lacking = [name for name in NEEDED if name not in self._model]
        problems = [
            (not self.trials, "it has no usable timed step; watch more steps"),
            (not self.case.batch_size, "its batch size is unknown; give --model FILE.py:NAME and --step-s instead"),
            (bool(lacking), f"its run lacks {', '.join(lacking)}; give --model FILE.py:NAME and --step-s instead"),
            (self.case.precision not in PRECISIONS, f"it used {self.case.precision}, but only "
             f"{' and '.join(PRECISIONS)} can be predicted"),
            (self.case.device_kind != kind, f"it ran on devices of the kind {self.case.device_kind}, but the machine "
             f"{target.name} has devices of the kind {kind}; choose another --machine"),
        ]  # fmt: skip
        if found := next((text for is_so, text in problems if is_so), ""):
            raise UnknownMachine(f"the loop {self.case.model} cannot be the basis of a prediction: {found}")

    @property
    def _model(self) -> Mapping[str, float]:
        return next((one.provenance["model"] for one in self.trials if one.provenance.get("model")), {})

    def _profile(self) -> Profile:
        """Return the profile of one device, which processes its share of the batch.

        The seconds of each phase are known, but not its FLOP. The FLOP are assumed; they only divide the seconds of a
        phase among the parts of the phase.
        """
        model = self._model
        tensors = int(model["parameter_tensors"])
        forward = int(counts.LAUNCHES * tensors)
        counted = Profile(
            model=self.case.model, parameter_tensors=tensors, parameter_bytes=int(model["parameter_bytes"]),
            buffer_bytes=int(model["buffer_bytes"]), buffer_tensors=int(model.get("buffer_tensors", 0)),
            input_bytes=model["input_bytes"], output_bytes=model["output_bytes"], forward_flop=1.0, backward_flop=2.0,
            modules=int(model.get("modules") or counts.MODULES * tensors), forward_launches=forward,
            backward_launches=int(counts.BACKWARD * forward),
        )  # fmt: skip
        if self.case.devices == 1:
            return stored.of_trials(counted, self.trials)
        return stored.fit_profile(counted, {self.rows: self._phases()})

    def _phases(self) -> dict[Phase, float]:
        """Return the seconds of one device in each phase of a step, for a loop on several devices.

        A forward, loss or backward on a single device, such as the loss of DataParallel, processes the samples of all
        devices. Its seconds are therefore divided by the number of devices. Ranks process their own samples only.
        """
        seconds: dict[Phase, list[float]] = defaultdict(list)
        shared: set[Phase] = set()
        for trial in self.trials:
            for spans in _timed(trial):
                each: dict[Phase, dict[int, float]] = defaultdict(lambda: defaultdict(float))
                for span in spans:
                    each[span.phase][span.device] += span.end_s - span.start_s
                for phase, by_device in each.items():
                    real = [s for device, s in by_device.items() if device != HOST] or [*by_device.values()]
                    seconds[phase].append(statistics.median(real))
                    if len(real) == 1 and not self.case.traits.ranks:
                        shared.add(phase)
        found = {phase: statistics.median(values) for phase, values in seconds.items()}
        whole = shared & {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
        return {phase: s / self.case.devices if phase in whole else s for phase, s in found.items()}


def _timed(trial: Trial) -> Iterator[Sequence[Span]]:
    """Yield the spans of each timed step, or of the median step alone if the trial keeps no other spans."""
    if not trial.spans:
        yield trial.ledger.median_step[1] if trial.ledger.median_step else ()
        return
    for step, spans in zip(trial.steps, ledger.by_step(trial.spans, len(trial.steps)), strict=True):
        if not step.warmup:
            yield spans


def alternatives(trials: Sequence[Trial], facts: Mapping[str, Any]) -> dict[Case, Alternative | str]:
    """Return, for each observed loop in which one process runs several GPUs, the prediction with one process per GPU.

    The links of the loop's machine are unknown. Therefore, all described machines with enough GPUs of the same model
    are predicted, and the slowest prediction is returned. Without such a machine, or if the loop cannot be predicted,
    the value is the reason as text.
    """
    found: dict[Case, Alternative | str] = {}
    for case in dict.fromkeys(trial.case for trial in trials):
        if case.traits.observed and case.traits.threads and case.devices > 1 and case.device_kind == "cuda":
            loop = of_run([trial for trial in trials if trial.case == case], facts)
            if loop and loop.trials:
                found[case] = _alternative(loop)
    return found


def _alternative(loop: Loop) -> Alternative | str:
    from dpbench.predict.cases import Predictor

    device = stored.device_of(loop.facts, loop.case)
    known = [machine.load(name) for name in machine.names()]
    alike = [one for one in known if loop.case.devices <= one.gpu.count and stored.alike(one.gpu.name, device)]
    if not alike:
        return (
            f"no described machine has {loop.case.devices} GPUs of the model {device}; describe yours in a file, and "
            "run dpbench predict --machine FILE.toml --from RUN"
        )
    own = loop.case
    case = Case(
        model=own.model, strategy=registry.of_role(Role.CONTROL), batch_size=own.batch_size, devices=own.devices,
        device_kind=own.device_kind, precision=own.precision,
    )  # fmt: skip
    predicted = []
    for one in alike:
        try:
            measured = {counts.key(case): loop.on(one).profile}
            predicted.append(Predictor(one, measured=measured).predict(case))
        except UnknownMachine as error:
            return str(error)
    worst = max(predicted, key=lambda each: each.seconds)
    step = Estimate(worst.seconds, worst.low_s, worst.high_s, 0)
    return Alternative(step=step, basis=f"on {worst.machine}, the slowest described machine with this GPU")


def of_run(trials: Sequence[Trial], facts: Mapping[str, Any]) -> Loop | None:
    """Return the observed loop of a run with these trials and facts; None for a run without an observed loop.

    If the run has several observed loops, return the one with the most timed steps.
    """
    mine: dict[Case, list[Trial]] = {}
    for trial in trials:
        if trial.case.traits.observed:
            mine.setdefault(trial.case, []).append(trial)
    if not mine:
        return None
    case = max(mine, key=lambda one: sum(len(trial.timed) for trial in mine[one]))
    good = [trial for trial in mine[case] if trial.trusted and trial.timed]
    return Loop(case, tuple(good), facts)
