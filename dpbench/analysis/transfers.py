"""Transfers: the bytes that one training step must move, by phase, source and target, worked out from shapes.

What must cross a link whatever carries it: copies within a device, padding, and the few bytes of losses and weights
of local losses are left out. An all-reduce counts as a ring's. docs/measuring.md says what that leaves open.
"""

from __future__ import annotations

from dpbench.records import Case, registry
from dpbench.records.moves import Move, Shapes


def moves(case: Case, shapes: Shapes) -> list[Move]:
    """Return what one step of a case moves; nothing where that is not known, or where replicas share a device."""
    if case.placement == "colocated":
        return []
    try:
        found = registry.strategy(case.strategy).moves(case, shapes)
    except LookupError:  # a strategy of an earlier run that is not installed any more
        return []
    return [move for move in found if move.bytes > 0]
