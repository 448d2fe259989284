"""Planted knees: the error of `dpbench loaders` on datasets of which the knee is known.

    python benchmarks/scripts/planted_knees.py OUTPUT.jsonl [--runs 20]

An example waits 10 ms, and all workers together get at most (K - 0.3) / 10 ms examples per second,
so that K workers are the least number that reaches this rate; for K = 1, the main process alone
reaches it, and the knee is 0. K goes from 1 to 6 in turn, and the sweep from 0 to K + 2 workers.
Neither wait depends on the number of cores. At least 18 of 20 runs should find the knee within one
worker.

Each run is also compared with two steps: one of half the time of a batch at the limit of the rate,
so that the DataLoader is the limit with every number of workers, and one of twice that time, so
that about K / 2 workers are enough. Two more cases time a real step: a slow dataset with the mlp,
and a fast one with the resnet18.

Each run appends one line to OUTPUT; a restarted script makes only the missing ones. All take about
20 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import Dataset

from dpbench.analysis import loaders, summary
from dpbench.analysis.loaders import Bound, LoaderCurve
from dpbench.measure import run as runner
from dpbench.records import Case, Trial, registry
from dpbench.records.loading import Loading
from dpbench.records.registry import Role
from dpbench.store import Store

WAIT_S, BATCH, EXAMPLES, KNEES, ROUNDS = 0.010, 4, 96, 6, 5
MODELS = {"loader-bound": "mlp", "compute-bound": "resnet18"}


class Limited(Dataset[torch.Tensor]):
    """Examples that wait `wait_s` seconds.

    All processes together get at most `examples_per_s`, 0 for no limit.
    """

    def __init__(self, wait_s: float, examples_per_s: float = 0.0) -> None:
        self._wait_s, self._examples_per_s = wait_s, examples_per_s
        self._next = multiprocessing.Value("d", 0.0)
        """The earliest time of the next example on the clock of `time.monotonic`, which all
        processes share.
        """

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._examples_per_s:
            with self._next.get_lock():
                now = time.monotonic()
                turn = max(now, self._next.value)
                self._next.value = turn + 1 / self._examples_per_s
            time.sleep(turn - now)
        if self._wait_s:
            time.sleep(self._wait_s)
        return torch.full((1000,), index % 256, dtype=torch.uint8)


def limit(knee: int) -> float:
    """Return the rate limit in examples per second with which `knee` workers are needed."""
    return (knee - 0.3) / WAIT_S


globals().update(
    {f"knee{knee}": partial(Limited, WAIT_S, limit(knee)) for knee in range(1, KNEES + 1)}
)
DATASETS = {"loader-bound": partial(Limited, WAIT_S), "compute-bound": partial(Limited, 0.0)}
globals().update({name.replace("-", "_"): dataset for name, dataset in DATASETS.items()})


def measured(cases: Sequence[Case]) -> tuple[list[Trial], str]:
    """Return the trials of the cases, and why the run was NOISY, or an empty text."""
    with TemporaryDirectory() as folder, Store.create(Path(folder) / "x.db") as store:
        outcome = runner.run(cases, store, rounds=ROUNDS)
        (run,) = store.runs()
        return store.trials(outcome.run_id), "; ".join(run.provenance.get("noisy", {}).values())


def planted(number: int) -> dict[str, Any]:
    """Sweep a dataset with a planted knee.

    Return the knee that was found, and both verdicts against a step.
    """
    most = number % KNEES + 1
    batch_s = BATCH / limit(most)
    loading, dataset = Loading(examples=EXAMPLES), f"{__file__}:knee{most}"
    trials, noisy = measured([loading.case(dataset, workers, BATCH) for workers in range(most + 3)])
    found = curve(trials)
    fast, slow = (
        curve(
            [
                replace(
                    trial,
                    case=replace(loading, step_s=step_s).case(dataset, trial.case.loader, BATCH),
                )
                for trial in trials
            ]
        )
        for step_s in (0.5 * batch_s, 2 * batch_s)
    )
    return {
        "planted": least(most - 0.3),
        "found": found.knee,
        "possible": found.possible,
        "shape": found.shape.value,
        "fast_step": bounds(fast),
        "slow_step": bounds(slow),
        "enough": slow.advised,
        "planted_enough": least((most - 0.3) / 2),
        "noisy": noisy,
        "batch_s": [
            [one.case.loader, one.round, sum(one.timed) / len(one.timed)]
            for one in trials
            if one.timed
        ],
    }


def curve(trials: Sequence[Trial]) -> LoaderCurve:
    """Return the curve of a run."""
    found = loaders.curve(summary.rows(trials))
    assert found is not None
    return found


def least(workers: float) -> int:
    """Return the least number of workers.

    The main process alone loads as many examples as one worker.
    """
    return 0 if workers <= 1 else math.ceil(workers)


def stepped(label: str) -> dict[str, Any]:
    """Sweep a dataset against the step of a model; return the verdicts."""
    step = Case(model=MODELS[label], strategy=registry.of_role(Role.BASELINE), batch_size=16)
    dataset = f"{__file__}:{label.replace('-', '_')}"
    trials, noisy = measured(
        [*(Loading().case(dataset, workers, 16) for workers in (0, 1, 2)), step]
    )
    return {"expected": label, "bounds": bounds(curve(trials)), "noisy": noisy}


def bounds(found: LoaderCurve) -> dict[str, str]:
    """Return the slower one at each number of workers."""
    return {str(point.workers): point.bound.value for point in found.points}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    given = parser.parse_args()
    done = {line["run"] for line in _lines(given.output)}
    for run in [*range(given.runs), *MODELS]:
        if run not in done:
            began = time.perf_counter()
            found = {"run": run} | (planted(run) if isinstance(run, int) else stepped(run))
            with given.output.open("a") as file:
                file.write(json.dumps(found | {"seconds": time.perf_counter() - began}) + "\n")
    print(tally(_lines(given.output)))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tally(lines: list[dict[str, Any]]) -> str:
    """Return the numbers of correct results as text."""
    runs = [line for line in lines if "planted" in line]
    near = sum(
        line["found"] is not None and abs(line["found"] - line["planted"]) <= 1 for line in runs
    )
    exact = sum(line["found"] == line["planted"] for line in runs)
    held = sum(line["planted"] in line["possible"] for line in runs)
    fast = sum({*line["fast_step"].values()} == {Bound.LOADER.value} for line in runs)
    slow = sum(line["slow_step"].get(str(line["planted"])) == Bound.STEP.value for line in runs)
    enough = sum(
        line["enough"] is not None and abs(line["enough"] - line["planted_enough"]) <= 1
        for line in runs
    )
    text = [
        f"knee within one worker: {near} of {len(runs)}; exact: {exact}; in the interval: {held}",
        f"fast step, loader-bound with every number of workers: {fast} of {len(runs)}",
        (
            f"slow step, compute-bound at the knee: {slow} of {len(runs)}; least number within one"
            f" worker: {enough}"
        ),
    ]
    for line in lines:
        if "expected" in line:
            text.append(f"{line['expected']}: {line['bounds']}")
    return "\n".join(text)


if __name__ == "__main__":
    main()
