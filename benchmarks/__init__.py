"""The asv suite: times of a training step, its phases, the engine's verbs and an import, by commit.

asv takes this folder from the working tree and dpbench from the commit that it measures. Benchmarks
therefore import dpbench inside their functions. If the commit lacks a name that a benchmark needs,
the benchmark is reported as not applicable, not as failed.

A `track_` function does the warm-up itself and returns timings as {"samples", "number"}, from which
asv computes a median, an interval and the significance of changes. With DPBENCH_QUICK=1, benchmarks
take fewer samples of the same work, so that quick and full results form one series.

If DPBENCH_HISTORY is set, benchmarks that run trials store them in the file with this name and the
suffix .db, and list them in the file with the suffix .jsonl, which has the run of each result.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

QUICK = os.environ.get("DPBENCH_QUICK", "0") not in ("", "0")


def timing(**attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that sets the attributes which asv reads from a `track_` function."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        common = {"unit": "seconds", "version": "1", "timeout": 300}
        vars(function).update(common | attributes)
        return function

    return mark


def result(samples: list[float]) -> dict[str, Any]:
    """Return `samples`, each of which is the seconds of one call, in asv's format for timings."""
    return {"samples": samples, "number": 1}


EARLIER = {
    "records.ledger": ("analysis.ledger", "ledger"),
    "predict.machine": ("records.machine", "machine"),
    "records.plan": ("plan",),
    "records.registry": ("registry",),
    "engine.fast.cached": ("engine.replicate", "engine.replica_cache", "engine.cached"),
    "engine.replicate": ("engine.collectives", "engine.broadcast"),
    "hardware.samplers.nvml": ("samplers.nvml",),
    "measure.server": ("server",),
}
"""The names that a module had in earlier commits, the latest first, by the present name of the
module.
"""


def module(name: str) -> ModuleType:
    """Import a module of dpbench by its present name, or in an older commit by an earlier name."""
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
    """Return the first of `attributes` that exists in a module of dpbench.

    The module is searched for under its present name and its earlier names, because in an earlier
    commit another module may have the present name. Raises ImportError if no object is found.
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
        f"the module dpbench.{name} has no {' or '.join(attributes)} in this commit",
        name=f"dpbench.{name}",
    )


def gpus() -> int:
    """Return the number of GPUs that torch sees.

    Torch is not loaded if DPBENCH_GPUS has the number.
    """
    counted = os.environ.get("DPBENCH_GPUS")
    if counted is None:
        import torch

        counted = os.environ["DPBENCH_GPUS"] = str(torch.cuda.device_count())
    return int(counted)


def keep(benchmark: Callable[..., Any] | str, params: Sequence[Any], trials: Sequence[Any]) -> None:
    """Store the trials of one result, and list their run, if DPBENCH_HISTORY is set.

    `params` are the values of the benchmark's parameters; they are empty if one group of trials has
    all its results. A commit whose store has another interface stores nothing, and its results have
    no trials.
    """
    target = os.environ.get("DPBENCH_HISTORY")
    if not target:
        return
    file, commit = Path(f"{target}.db"), Path(target).name
    name = (
        f"{benchmark.__module__.rpartition('.')[2]}.{benchmark.__name__}"
        if callable(benchmark)
        else benchmark
    )
    try:
        from dpbench.hardware import provenance
        from dpbench.store import Identity, Store

        facts = provenance.collect()
        facts["dpbench"] = {"version": facts["dpbench"]["version"], "commit": commit}
        facts["command"] = f"asv run --bench '{name}'"
        with Store.create(file) as store:
            run_id, _ = store.begin_run(
                Identity(
                    json.dumps([name, *map(repr, params)]),
                    provenance.host_key(facts),
                    provenance.code_key(facts),
                ),
                rounds=len({trial.round for trial in trials}),
                provenance=facts,
            )
            for trial in trials:
                store.end_trial(store.begin_trial(run_id, trial.case, trial.round), trial)
            store.end_run(run_id)
    except (ImportError, AttributeError, TypeError, LookupError) as error:
        print(f"this commit stores no trials of {name}: {error}", file=sys.stderr)
        return
    entry = {
        "benchmark": name,
        "params": [repr(value) for value in params],
        "commit": commit,
        "run": run_id,
        "store": f".asv/trials/{file.name}",
        "fingerprints": sorted({trial.case.fingerprint for trial in trials}),
        "noisy": _noisy(trials),
    }
    with file.with_suffix(".jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(entry) + "\n")


def _noisy(trials: Sequence[Any]) -> bool:
    """Return whether a trial is NOISY; False in a commit that does not know this."""
    try:
        return any(map(module("hardware.foreign_load").noisy, trials))
    except (ImportError, AttributeError):
        return False


@contextmanager
def names_of_the_commit() -> Iterator[None]:
    """Convert a missing module, name or field of dpbench to asv's "not applicable"."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "dpbench":  # the environment is broken
            raise
        raise NotImplementedError(str(error)) from error
    except (LookupError, TypeError) as error:
        raise NotImplementedError(str(error)) from error
