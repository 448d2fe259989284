"""One device that uses every core: what a CPU gives without any data parallelism.

Logical CPU devices have one thread each, so that device counts compare like with like. This row keeps a CPU
speed-up honest: it is no gain over the machine unless it beats this.
"""

from __future__ import annotations

from dpbench.hardware.provenance import usable_cores
from dpbench.records import Case
from dpbench.strategies.single import start, tasks

__all__ = ["start", "tasks", "skip", "threads"]


def threads(case: Case) -> int:
    """Return all the cores this process may use."""
    return usable_cores()


def skip(case: Case) -> str:
    """Refuse GPUs: a GPU always uses all of itself."""
    return "" if case.device_kind == "cpu" else "a GPU always uses all of itself: see the strategy single"
