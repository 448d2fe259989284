"""The asv suite: what a step, its phases, the engine's verbs and an import cost, commit by commit.

asv takes this folder from the working tree and dpbench from the commit it measures. So the benchmarks import
dpbench inside their functions, and a commit too old to have a name is not applicable instead of broken.

asv reads {"samples", "number"} from a `track_` function as timings: median, interval and significance are its
business; warming up, and what one call is, are ours. DPBENCH_QUICK=1 takes fewer samples of the same work, so that
quick and full results share one series.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

QUICK = os.environ.get("DPBENCH_QUICK", "0") not in ("", "0")


def timing(**attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a `track_` function the attributes that asv looks for on it."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        common = {"unit": "seconds", "version": "1", "timeout": 300, "rounds": 1 if QUICK else 2}
        vars(function).update(common | attributes)
        return function

    return mark


def result(samples: list[float]) -> dict[str, Any]:
    """Return samples, one call each, as asv takes them."""
    return {"samples": samples, "number": 1}


EARLIER = {
    "records.ledger": ("analysis.ledger", "ledger"),
    "records.machine": ("machine",),
    "records.plan": ("plan",),
    "records.registry": ("registry",),
    "engine.replica_cache": ("engine.cached",),
    "hardware.samplers.nvml": ("samplers.nvml",),
    "measure.server": ("server",),
    "measure.worker.selfcheck": ("worker.selfcheck",),
}
"""The names that modules had in earlier commits, the latest first: a benchmark names a module as it is called today."""


def module(name: str) -> ModuleType:
    """Import a module of dpbench, under an earlier name in a commit that has no other."""
    names = [name, *EARLIER.get(name, ())]
    for number, one in enumerate(names, start=1):
        try:
            return importlib.import_module(f"dpbench.{one}")
        except ModuleNotFoundError as error:
            # if another module is lacking, this one is there and broken
            if number == len(names) or not f"dpbench.{one}".startswith(error.name or "-"):
                raise
    raise AssertionError(name)


@contextmanager
def names_of_the_commit() -> Iterator[None]:
    """Turn the lack of a name of dpbench's, a plug or a field into asv's "not applicable"."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "dpbench":  # a broken environment is no old commit
            raise
        raise NotImplementedError(str(error)) from error
    except (LookupError, TypeError) as error:
        raise NotImplementedError(str(error)) from error
