"""One device that uses every core: the performance of a CPU without data parallelism.

Logical CPU devices have one thread each, so that device counts are compared at equal resources. A speed-up on a CPU is
a gain for the whole machine only if it exceeds the speed-up of this strategy.
"""

from __future__ import annotations

from dpbench.records import Case
from dpbench.strategies import Parallelism, Role, Traits
from dpbench.strategies.single import Single


class SingleAllCores(Single):
    """A plain training loop on the CPU, with one intra-op thread per core."""

    traits = Traits(parallelism=Parallelism.NONE, role=Role.ALL_CORES)

    def skip(self, case: Case) -> str:
        """Return the reason to skip a case whose devices are not logical CPU devices; otherwise ""."""
        return "" if case.device_kind == "cpu" else "single_all_cores needs CPU devices; elsewhere, use single"


STRATEGY = SingleAllCores()
