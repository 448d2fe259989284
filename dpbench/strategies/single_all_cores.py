"""One CPU device that uses every core: the gain from more cores without data parallelism."""

from __future__ import annotations

from dpbench.records import Case
from dpbench.strategies import Parallelism, Role, Traits
from dpbench.strategies.single import Single


class SingleAllCores(Single):
    """One device that uses every core: the performance of a CPU without data parallelism.

    Each logical CPU device of other strategies has one thread, so that comparisons of device counts
    are fair. A speed-up on a CPU is a gain for the whole machine only if it exceeds that of this
    strategy.
    """

    traits = Traits(parallelism=Parallelism.NONE, role=Role.ALL_CORES)

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case, or "" if it can."""
        return (
            ""
            if case.device_kind == "cpu"
            else "single_all_cores needs CPU devices; on other devices, use single"
        )


strategy = SingleAllCores()
