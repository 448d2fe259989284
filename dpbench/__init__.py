"""dpbench: measure single-machine data parallelism in PyTorch, phase by phase.

The engine, whose functions and classes are available in this module, is imported on first use, so that `import dpbench`
does not import torch.
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
    """Import the engine and return its object `name`; raise AttributeError if `name` is not in `__all__`."""
    if name in __all__:
        import dpbench.engine

        return getattr(dpbench.engine, name)
    raise AttributeError(f"module 'dpbench' has no attribute {name!r}")
