"""Gate: decide whether a commit of the user's project made its training step slower.

Two copies of the project, of the base and of the checkout, take blocks of steps in turn. `trees`
makes the copies, `sides` starts their processes, `pairs` lets them take turns until the answer is
decided, `judge` decides it, and `verdict` prints it.
"""

from __future__ import annotations

from dpbench.records.siblings import Sibling

SIBLING = Sibling(
    commands={"gate": "dpbench.gating.commands:gate"},
    functions={"gate": "dpbench.gating.pairs:gate"},
)
LIMIT, BUDGET_S = 0.05, 300.0
"""The default of the slow-down that is accepted, and of the seconds of a gate."""
