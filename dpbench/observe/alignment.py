"""Alignment: put the traces of several ranks on one clock, by the collectives that all of them take part in.

No rank leaves an all-reduce before the last one has arrived, so the ranks' kernels of one collective end at almost the
same moment. The ranks' clocks may differ, as those of two machines do.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from dpbench.observe.kineto import Profile
from dpbench.records.activity import Kind, kind_of

LEAST = 3
"""The least number of collectives from which clocks are aligned."""
WIDEST_S = 0.01
"""The largest deviation of a collective from the median difference of two clocks, in seconds, that is accepted."""


@dataclass(frozen=True, kw_only=True)
class Aligned:
    """The seconds to add to the times of a rank, so that its collectives end when those of the first rank end.

    `uncertainty_s` is the largest deviation of one of the `collectives` from their median. It contains the time in
    which the ranks leave a collective one after the other.
    """

    shift_s: float
    uncertainty_s: float
    collectives: int


def align(first: Profile, other: Profile) -> Aligned | None:
    """Return how the clock of `other` differs from that of `first`; None if it does not follow from the collectives.

    A kind of collective that occurs a different number of times in the two traces, as in sampled traces, is ignored.
    """
    mine, theirs = _ends(first), _ends(other)
    differences = [
        (a - b) / 1e6
        for name in mine.keys() & theirs.keys()
        if len(mine[name]) == len(theirs[name])
        for a, b in zip(mine[name], theirs[name], strict=True)
    ]
    if len(differences) < LEAST:
        return None
    shift_s = statistics.median(differences)
    uncertainty_s = max(abs(one - shift_s) for one in differences)
    if uncertainty_s > WIDEST_S:
        return None
    return Aligned(shift_s=shift_s, uncertainty_s=uncertainty_s, collectives=len(differences))


def _ends(profile: Profile) -> dict[str, list[float]]:
    """Return the ends of the kernels of each kind of collective in microseconds, in order of time."""
    found: dict[str, list[float]] = {}
    for event in sorted(profile.device, key=lambda event: event.end_us):
        if kind_of(event.name) is Kind.COMMUNICATION and not event.name.startswith("Memcpy"):
            found.setdefault(event.name.partition("(")[0], []).append(event.end_us)
    return found
