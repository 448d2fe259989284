"""Schedules: the ways in which the engine can run a step.

The schedules form a ladder. `reference` is the step of torch.nn.DataParallel; each schedule above
it keeps the changes of the schedules below and makes one more. "copying" and "fastest" are no
schedules: for them, TrainStep selects one.
"""

from __future__ import annotations

from enum import StrEnum

from dpbench.records.errors import UsageError


class Schedule(StrEnum):
    """A way to run a step, in ladder order. The text is the name that users and stores know."""

    REFERENCE = "reference"
    POOL = "pool"
    CACHED = "cached"
    LOCAL = "local"
    ALLREDUCE = "allreduce"
    SHARDED = "sharded"

    @property
    def keeps_replicas(self) -> bool:
        """Return whether each device keeps its replica, and computes its part of the loss."""
        return self in (Schedule.LOCAL, Schedule.ALLREDUCE, Schedule.SHARDED)

    @property
    def updates_everywhere(self) -> bool:
        """Return whether every device updates weights, and not device 0 alone."""
        return self in (Schedule.ALLREDUCE, Schedule.SHARDED)


EFFECTS: dict[Schedule, str] = {
    Schedule.POOL: "threads persist between steps, and run forwards in turns if this is faster",
    Schedule.CACHED: "replicas are refreshed and not rebuilt",
    Schedule.LOCAL: (
        "each device keeps its replica, and computes its part of the loss and its own backward"
    ),
    Schedule.ALLREDUCE: (
        "every device updates its own weights, and must notice all other writes to weights"
    ),
    Schedule.SHARDED: (
        "parameters move in one buffer, of which each device updates a part, and must notice all"
        " other writes to weights"
    ),
}
"""What each schedule above `reference` changes, as a clause."""

COPYING = "copying"
FASTEST = "fastest"
SELECTED: dict[str, Schedule] = {COPYING: Schedule.LOCAL, FASTEST: Schedule.SHARDED}
"""The names for which TrainStep selects an exact schedule, and the highest that it may select.

Under `copying`, every step copies device 0's weights to the other devices, so that it need not
notice when a training loop writes weights. Under `fastest`, a device may keep the weights that it
has updated itself.
"""


def parse(text: str) -> Schedule:
    """Return the schedule of this name.

    Raises ValueError for an unknown name, and for those in `SELECTED`, whose schedules only
    TrainStep can select.
    """
    try:
        return Schedule(text)
    except ValueError:
        known = ", ".join((*Schedule, *SELECTED))
        raise UsageError(f"unknown schedule {text!r}; give one of {known}") from None


def known(text: str) -> Schedule | None:
    """Return the schedule of this name; None for names in `SELECTED` or of other versions.

    Stored runs keep the names of the version that measured them.
    """
    try:
        return Schedule(text)
    except ValueError:
        return None


def available(text: str) -> bool:
    """Return whether this version of dpbench has the schedule `text` of a stored case.

    Other strategies have the empty text. Stored runs keep the schedules of the version that
    measured them.
    """
    return text in ("", *SELECTED) or known(text) is not None
