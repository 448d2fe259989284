"""dpbench: measure single-machine data parallelism in PyTorch, phase by phase.

The engine's names are loaded on first use, so that importing dpbench loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "DataParallel",
    "TrainStep",
    "data_parallel",
    "scatter",
    "replicate",
    "parallel_apply",
    "gather",
    "reduce",
]

if TYPE_CHECKING:
    from dpbench.engine import (
        DataParallel,
        TrainStep,
        data_parallel,
        gather,
        parallel_apply,
        reduce,
        replicate,
        scatter,
    )


def __getattr__(name: str) -> Any:
    """Load an engine name on first use."""
    if name in __all__:
        import dpbench.engine

        return getattr(dpbench.engine, name)
    raise AttributeError(f"module 'dpbench' has no attribute {name!r}")
