"""Noise: which trials of a run ran under too much foreign load, and why the run is NOISY."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dpbench.records import Case, Trial, disturbance
from dpbench.records.load import GpuLoad
from dpbench.records.words import count

Slot = tuple[Case, int]
"""A case and the number of the round in which it is measured."""


@dataclass
class Noise:
    """The trials of a run as far as foreign load disturbed them.

    `before` says which high loads there were before the sessions of the run; empty if none.
    """

    before: str
    _noisy: dict[Slot, Sequence[GpuLoad]] = field(default_factory=dict)
    """The slots whose last trusted trial (`Trial.trusted`) ran under too much load.

    Each has the GPUs of the case that others used.
    """
    _times: Counter[Slot] = field(default_factory=Counter)
    """How often each slot has a trusted trial."""

    def add(self, trial: Trial) -> None:
        """Add a trial; that of a slot which was measured again replaces the earlier one."""
        if not trial.trusted:
            return
        slot = trial.case, trial.round
        self._times[slot] += 1
        self._noisy.pop(slot, None)
        if disturbance.noisy(trial):
            self._noisy[slot] = [gpu for gpu in trial.facts.foreign_gpus if gpu.busy]

    def measured(self, case: Case, number: int) -> bool:
        """Return whether a case has a trusted trial in a round."""
        return self._times[case, number] > 0

    def repeatable(self) -> list[Slot]:
        """Return the slots that ran under too much load and were not repeated yet."""
        return [slot for slot in self._noisy if self._times[slot] == 1]

    def reasons(self) -> dict[str, str]:
        """Return the reasons for labelling the run NOISY: `before` and `during`, each a text."""
        found = {"before": self.before} if self.before else {}
        if self._noisy:
            gpus = {gpu.gpu: str(gpu) for loads in self._noisy.values() for gpu in loads}
            further = [text for text in gpus.values() if text not in self.before]
            used = f" ({'; '.join(further)})" if further else ""
            trials = count(len(self._noisy), "trial")
            found["during"] = f"{trials} ran under too much foreign load{used}"
        return found
