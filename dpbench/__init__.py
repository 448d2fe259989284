"""dpbench: measure single-machine data parallelism in PyTorch, phase by phase.

    import dpbench as dp

    run = dp.run(models=["mlp"], devices=[1, 2])    # measure, with options of `dpbench run`
    run = dp.load("dpbench.db", run="@last")        # or read a stored run
    run = dp.open_trials("trials.jsonl.gz")         # or read exported trials
    print(run.verdict)
    run.frame                                       # also run.steps, run.phases, run.samples
    run.report("report.html")

    with dp.watch("dpbench.db"):                    # record the steps of your own training loop
        ...

The engine (`DataParallel`, `TrainStep` and the functions of torch.nn.parallel) trains models in
your own code. All names are imported on first use, so that `import dpbench` imports neither torch
nor pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "__version__",
    "run",
    "load",
    "open_trials",
    "watch",
    "gate",
    "Run",
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
    __version__: str
    from dpbench.api.functions import load, open_trials, run
    from dpbench.api.runs import Run
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
    from dpbench.gating.pairs import gate
    from dpbench.observe.watching import watch

_HOMES = {
    "run": "dpbench.api.functions",
    "load": "dpbench.api.functions",
    "open_trials": "dpbench.api.functions",
    "Run": "dpbench.api.runs",
}
"""The names in `__all__` that neither `dpbench.engine` nor a sibling defines, with the modules that
define them.
"""


def __getattr__(name: str) -> Any:
    """Import and return the object `name` of the interface.

    Raise AttributeError if `name` is not in `__all__`.
    """
    if name == "__version__":
        return import_module("dpbench.hardware.provenance").own_version()
    if name in __all__:
        theirs = import_module("dpbench.records.siblings")
        if place := theirs.named("functions").get(name):
            return theirs.at(place)
        return getattr(import_module(_HOMES.get(name, "dpbench.engine")), name)
    raise AttributeError(f"module 'dpbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the sorted names in `__all__`, also those of objects that are not imported yet."""
    return sorted(__all__)
