"""One device that uses every core: what a CPU gives without any data parallelism.

Logical CPU devices have one thread each, so that device counts compare like with like. A speed-up on a CPU is a gain of
the machine only if it is above this strategy's.
"""

from __future__ import annotations

from dpbench.records import Case
from dpbench.strategies import Parallelism, Role, Traits
from dpbench.strategies.single import Single


class SingleAllCores(Single):
    """A plain training loop on the CPU, with one intra-op thread per core."""

    traits = Traits(parallelism=Parallelism.NONE, role=Role.ALL_CORES)

    def skip(self, case: Case) -> str:
        """Refuse GPUs: a GPU always uses all of itself."""
        return "" if case.device_kind == "cpu" else "a GPU always uses all of itself: see the strategy single"


STRATEGY = SingleAllCores()
