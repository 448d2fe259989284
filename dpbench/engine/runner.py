"""Runner: how the steps of one schedule run, and what it keeps between them."""

from __future__ import annotations

from dpbench.engine.parallel_apply import Spawn, Workers
from dpbench.engine.replicate import Replicate, replicate
from dpbench.records.schedule import Schedule


class Runner:
    """How the steps of one schedule run: by default, by `step.step`.

    It uses `workers` and `replicate`. Each step reads the module anew and copies its weights, so
    that nothing needs to notice a change. `schedule` is the schedule that runs, and `note` says why
    it is not the preferred one. `unfit` is a reason, found in a step, for which replicas should not
    be kept.
    """

    unfit = ""

    def __init__(
        self,
        schedule: Schedule,
        note: str = "",
        workers: Workers = Spawn(),  # noqa: B008  it has no state
        replicate: Replicate = replicate,
    ) -> None:
        self.schedule = schedule
        self.note = note
        self.workers = workers
        self.replicate = replicate

    @property
    def settled(self) -> bool:
        """Return whether the next steps run alike, because no alternatives are tried."""
        return self.workers.turn.settled

    def changed(self) -> bool:
        """Return whether something has changed on which the persistent state depends."""
        return False

    def stale(self) -> list[int]:
        """Return the indices of parameters that differ between the module and its replicas."""
        return []

    def sync(self) -> None:
        """Make the next step copy the weights to all replicas."""

    def abandon(self) -> None:
        """After a failed step, leave each `.grad` as an ordinary loop would."""

    def close(self) -> None:
        """End the threads; leave module and optimizer as an ordinary loop would."""
        self.workers.close()
