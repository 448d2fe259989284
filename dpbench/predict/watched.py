"""Watched: the profile of one device from an observed loop, whose script dpbench cannot build and trace.

The sizes of the model and the seconds of its phases come from the trials. The number of kernels that the host launches
is estimated from the number of parameter tensors, as for a model that is known by name only.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpbench.predict import counts, stored
from dpbench.records import HOST, Case, Phase, Profile, Source, Trial, ledger
from dpbench.records.machine import Machine, UnknownMachine

NEEDED = ("parameter_tensors", "parameter_bytes", "buffer_bytes", "input_bytes", "output_bytes")
"""The facts about the model without which a prediction is not possible, by their names in a trial's provenance."""
PRECISIONS = ("fp32", "bf16")
"""The precisions of predictions."""


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

    def on(self, machine: Machine) -> stored.Stored:
        """Return the loop's profile of one device, for predictions on a machine.

        Raises UnknownMachine if the loop lacks a fact, or if it ran on another kind of device than the machine has.
        """
        self._check(machine)
        device = stored.device_of(self.facts, self.case)
        label = (self.trials[0].source.value if self.trials else Source.MEASURED.value).upper()
        of = f" as a share of {self.case.devices} devices" if self.case.devices > 1 else ""
        basis = f"the phases of its steps{of} were {label} in the user's own loop, its launches are estimated,"
        return stored.Stored(self._profile(), device, (self.rows,), machine.gpu.name, basis)

    def _check(self, machine: Machine) -> None:
        kind = "cpu" if machine.logical else "cuda"
        lacking = [name for name in NEEDED if name not in self._model]
        problems = [
            (not self.trials, "no step has a result: watch more steps"),
            (not self.case.batch_size, "the batch size is unknown: give --step-s and --models instead"),
            (bool(lacking), f"the facts {', '.join(lacking)} about its model are unknown: give --model FILE.py:NAME"),
            (self.case.precision not in PRECISIONS, f"predictions know {' and '.join(PRECISIONS)} only, and it used "
             f"{self.case.precision}"),
            (self.case.device_kind != kind, f"it ran on devices of the kind {self.case.device_kind}, but the machine "
             f"{machine.name} has devices of the kind {kind}: choose another --machine"),
        ]  # fmt: skip
        if found := next((text for is_so, text in problems if is_so), ""):
            raise UnknownMachine(f"the loop {self.case.model} cannot be the basis of a prediction: {found}")

    @property
    def _model(self) -> Mapping[str, float]:
        return next((one.provenance["model"] for one in self.trials if one.provenance.get("model")), {})

    def _profile(self) -> Profile:
        """Return the profile of one device with its share of the batch."""
        model = self._model
        tensors = int(model["parameter_tensors"])
        forward = int(counts.LAUNCHES * tensors)
        counted = Profile(
            model=self.case.model, parameter_tensors=tensors, parameter_bytes=int(model["parameter_bytes"]),
            buffer_bytes=int(model["buffer_bytes"]), buffer_tensors=int(model.get("buffer_tensors", 0)),
            input_bytes=model["input_bytes"], output_bytes=model["output_bytes"], forward_flop=0.0, backward_flop=0.0,
            modules=int(model.get("modules") or counts.MODULES * tensors), forward_launches=forward,
            backward_launches=int(counts.BACKWARD * forward),
        )  # fmt: skip
        if self.case.devices == 1:
            return stored.of_trials(counted, self.trials)
        return stored.fit_profile(counted, {self.rows: self._phases()})

    def _phases(self) -> dict[Phase, float]:
        """Return the seconds of one device in each phase of a step, for a loop on several devices.

        A phase on the host or on device 0 alone, such as the loss of DataParallel, processes the samples of all
        devices; a device alone would process its share of them.
        """
        seconds: dict[Phase, list[float]] = defaultdict(list)
        shared: set[Phase] = set()
        for trial in self.trials:
            for step, spans in zip(trial.steps, ledger.by_step(trial.spans, len(trial.steps)), strict=True):
                if step.warmup:
                    continue
                each: dict[Phase, dict[int, float]] = defaultdict(lambda: defaultdict(float))
                for span in spans:
                    each[span.phase][span.device] += span.end_s - span.start_s
                for phase, by_device in each.items():
                    real = [s for device, s in by_device.items() if device != HOST] or [*by_device.values()]
                    seconds[phase].append(statistics.median(real))
                    if len(real) == 1:
                        shared.add(phase)
        found = {phase: statistics.median(values) for phase, values in seconds.items()}
        whole = shared & {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
        return {phase: s / self.case.devices if phase in whole else s for phase, s in found.items()}


def of_run(trials: Sequence[Trial], facts: Mapping[str, Any]) -> Loop | None:
    """Return the observed loop of a run with these trials and facts; None for a run of dpbench's own loops.

    Of several loops, the one with the most steps is returned.
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
