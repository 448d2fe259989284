"""Once: what a run measures or decides only once; its later trials leave it out or follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dpbench.analysis import summary
from dpbench.measure.noise import Slot
from dpbench.records import Case, Effort, Status, Trial, disturbance, registry
from dpbench.records.work import times_links


@dataclass
class Once:
    """What the trials of a run so far have measured for all, and decided for those like them.

    A trial that is repeated measures again what its predecessor had. `needed` has the rounds in
    which each case is measured in any event.
    """

    needed: Mapping[Case, range]
    _profiled: dict[Case, tuple[int, float]] = field(default_factory=dict)
    """The round in which a case was profiled, and the busy seconds of its busiest GPU."""
    _linked: Slot | None = None
    """The slot whose trial has the times of copies over the links of the most GPUs."""
    _slow: dict[tuple[str, int], bool] = field(default_factory=dict)
    """Whether trials that are compared (`_alike`) take only a few steps; the first decides."""

    def add(self, trial: Trial) -> None:
        """Add a trial that has ended."""
        if trial.status is Status.OK:
            self._slow.setdefault(self._alike(trial.case), trial.facts.slow)
        if trial.facts.links is not None:
            self._linked = trial.case, trial.round
        if busy_s := disturbance.gpu_busy_s(trial):
            self._profiled.setdefault(trial.case, (trial.round, busy_s))

    def busy_s(self, case: Case) -> float | None:
        """Return the busy seconds of a case's busiest GPU in a step, or None if not profiled."""
        return self._profiled[case][1] if case in self._profiled else None

    def left(self, effort: Effort, group: Sequence[Case], number: int) -> Effort:
        """Return the effort of a trial without what is measured already.

        The memory by phase, the cost of marks and the profile of a case belong to its first round,
        and the links to one trial. Where gradients are reduced during backward, only the profile
        shows the phase `reduce`, so each round is profiled.
        """
        reduces_in_backward = any(
            case.traits.ranks and case.traits.reduction is registry.Reduction.OVERLAPPED
            for case in group
        )
        unprofiled = any(self._profiled.get(case, (number, 0.0))[0] == number for case in group)
        first = any(number == self.needed[case].start for case in group)
        return replace(
            effort,
            memory_by_phase=effort.memory_by_phase and first,
            marks=effort.marks and first,
            profile=effort.profile and (unprofiled or reduces_in_backward),
            links=effort.links and any(self._unlinked(case, number) for case in group),
            slow=self._slow.get(self._alike(group[0])),
        )

    def _unlinked(self, case: Case, number: int) -> bool:
        widest = max((one.devices for one in self.needed if times_links(one)), default=0)
        is_widest = times_links(case) and case.devices == widest
        return is_widest and self._linked in (None, (case, number))

    def _alike(self, case: Case) -> tuple[str, int]:
        """Return what a case has in common with those to which it is compared.

        It is the model, and the batch size of their baseline.
        """
        home = next((one for one in summary.homes(case) if one in self.needed), case)
        return case.model, home.batch_size
