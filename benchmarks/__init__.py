"""The asv suite: the time of a training step, its phases, the engine's verbs and an import, for each commit.

asv takes this folder from the working tree and dpbench from the commit that it measures. Benchmarks therefore import
dpbench inside their functions. If the commit lacks a name that a benchmark needs, the benchmark is reported as not
applicable, not as failed.

A `track_` function does the warm-up itself and returns timings as {"samples", "number"}, from which asv computes a
median, an interval and the significance of changes. With DPBENCH_QUICK=1, benchmarks take fewer samples of the same
work, so that quick and full results form one series.
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
    """Return a decorator that sets the attributes which asv reads from a `track_` function."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        common = {"unit": "seconds", "version": "1", "timeout": 300, "rounds": 1 if QUICK else 2}
        vars(function).update(common | attributes)
        return function

    return mark


def result(samples: list[float]) -> dict[str, Any]:
    """Return `samples`, each of which is the seconds of one call, in asv's format for timings."""
    return {"samples": samples, "number": 1}


EARLIER = {
    "records.ledger": ("analysis.ledger", "ledger"),
    "records.machine": ("machine",),
    "records.plan": ("plan",),
    "records.registry": ("registry",),
    "engine.replica_cache": ("engine.cached",),
    "engine.collectives": ("engine.broadcast",),
    "hardware.samplers.nvml": ("samplers.nvml",),
    "measure.server": ("server",),
    "measure.worker.selfcheck": ("worker.selfcheck",),
}
"""The names that a module had in earlier commits, the latest first, by the present name of the module."""


def module(name: str) -> ModuleType:
    """Import a module of dpbench by its present name, or by an earlier name if the measured commit is older."""
    names = [name, *EARLIER.get(name, ())]
    for number, one in enumerate(names, start=1):
        try:
            return importlib.import_module(f"dpbench.{one}")
        except ModuleNotFoundError as error:
            # if another module is missing, this module exists and its imports fail
            if number == len(names) or not f"dpbench.{one}".startswith(error.name or "-"):
                raise
    raise AssertionError(name)


def attribute(name: str, *attributes: str) -> Any:
    """Return the object of a module of dpbench with the first of the names `attributes` that exists.

    The module is searched for under its present name and its earlier names, because in an earlier commit another module
    may have the present name. Raises ImportError if no object is found.
    """
    for one in (name, *EARLIER.get(name, ())):
        try:
            found = importlib.import_module(f"dpbench.{one}")
        except ModuleNotFoundError:
            continue
        for candidate in attributes:
            if hasattr(found, candidate):
                return getattr(found, candidate)
    raise ImportError(
        f"the module dpbench.{name} has no {' or '.join(attributes)} in this commit", name=f"dpbench.{name}"
    )


@contextmanager
def names_of_the_commit() -> Iterator[None]:
    """Return a context that converts a missing module, name or field of dpbench to asv's "not applicable"."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "dpbench":  # the environment is broken
            raise
        raise NotImplementedError(str(error)) from error
    except (LookupError, TypeError) as error:
        raise NotImplementedError(str(error)) from error
