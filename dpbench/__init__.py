"""dpbench: measure single-machine data parallelism in PyTorch, phase by phase.

The names of the engine are loaded on first use, so that `import dpbench` does not import torch.
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
    "load_state_dict",
]

if TYPE_CHECKING:
    from dpbench.engine import (
        DataParallel,
        TrainStep,
        data_parallel,
        gather,
        load_state_dict,
        parallel_apply,
        reduce,
        replicate,
        scatter,
    )


def __getattr__(name: str) -> Any:
    """Import the engine on first use of one of its names; raise AttributeError for any other name."""
    if name in __all__:
        import dpbench.engine

        return getattr(dpbench.engine, name)
    raise AttributeError(f"module 'dpbench' has no attribute {name!r}")
