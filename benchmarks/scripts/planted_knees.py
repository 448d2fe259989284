"""Planted knees: the error of `dpbench loaders` on datasets of which the knee is known.

    python benchmarks/scripts/planted_knees.py OUTPUT.jsonl [--runs 20]

An example waits 10 ms, and all workers together get at most (K - 0.3) / 10 ms examples per second, so that K workers
are the least number that reaches this rate; for K = 1, the main process alone reaches it, and the knee is 0. K goes
from 1 to 6 in turn, and the sweep from 0 to K + 2 workers. Neither wait depends on the number of cores. At least 18 of
20 runs should find the knee within one worker.

Each run is also compared with two steps: one of half the time of a batch at the limit of the rate, so that the
DataLoader is the limit with every number of workers, and one of twice that time, so that about K / 2 workers are
enough. Two more cases time a real step: a slow dataset with the mlp, and a fast one with the resnet18.

Each run appends one line to OUTPUT; a restarted script makes only the missing ones. All take about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from dpbench.analysis import loaders as analysis
from dpbench.analysis.loaders import Bound, Curve
from dpbench.measure import loaders
from dpbench.measure.request import Synthetic
from dpbench.records import Case, registry
from dpbench.records.registry import Role

WAIT_S, BATCH, EXAMPLES, KNEES = 0.010, 4, 96, 6
COSTS = {
    "loader-bound": (Synthetic(wait_s=0.010, example_bytes=1000), "mlp"),
    "compute-bound": (Synthetic(example_bytes=1000), "resnet18"),
}


def planted(number: int) -> dict[str, Any]:
    """Sweep a dataset with a planted knee; return the knee that was found, and both verdicts against a step."""
    most = number % KNEES + 1
    rate = (most - 0.3) / WAIT_S
    plan = loaders.LoaderPlan(
        dataset=Synthetic(wait_s=WAIT_S, examples_per_s=rate, example_bytes=1000), batch_size=BATCH, examples=EXAMPLES,
        settings=loaders.settings(range(most + 3), [False], [2], [False]), seed=100 * number,
    )  # fmt: skip
    sweep = loaders.run(plan, print)
    (found,) = analysis.curves(sweep.readings)
    (fast,) = analysis.curves(sweep.readings, 0.5 * BATCH / rate)
    (slow,) = analysis.curves(sweep.readings, 2 * BATCH / rate)
    assert slow.enough is not None
    return {
        "planted": least(most - 0.3), "found": found.knee.workers, "possible": found.knee.possible,
        "shape": found.shape.value, "fast_step": bounds(fast), "slow_step": bounds(slow), "enough": slow.enough.workers,
        "planted_enough": least((most - 0.3) / 2), "noisy": sweep.noisy,
        "batch_s": [[one.setting.workers, one.round, one.batch_s] for one in sweep.readings],
    }  # fmt: skip


def least(workers: float) -> int:
    """Return the least number of workers; the main process alone loads as many examples as one worker."""
    return 0 if workers <= 1 else math.ceil(workers)


def stepped(label: str) -> dict[str, Any]:
    """Sweep a dataset against the step of a model; return the verdicts."""
    cost, model = COSTS[label]
    step = Case(model=model, strategy=registry.of_role(Role.BASELINE), batch_size=16)
    plan = loaders.LoaderPlan(
        dataset=cost, batch_size=16, settings=loaders.settings((0, 1, 2), [False], [2], [False]), step=step
    )
    sweep = loaders.run(plan, print)
    (found,) = analysis.curves(sweep.readings, sweep.step)
    return {"expected": label, "bounds": bounds(found), "noisy": sweep.noisy}


def bounds(curve: Curve) -> dict[str, str]:
    """Return the slower one at each number of workers."""
    return {str(point.setting.workers): point.bound.value for point in curve.points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    given = parser.parse_args()
    done = {line["run"] for line in _lines(given.output)}
    for run in [*range(given.runs), *COSTS]:
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
    near = sum(line["found"] is not None and abs(line["found"] - line["planted"]) <= 1 for line in runs)
    exact = sum(line["found"] == line["planted"] for line in runs)
    held = sum(line["planted"] in line["possible"] for line in runs)
    fast = sum({*line["fast_step"].values()} == {Bound.LOADER.value} for line in runs)
    slow = sum(line["slow_step"][str(line["planted"])] == Bound.STEP.value for line in runs)
    enough = sum(line["enough"] is not None and abs(line["enough"] - line["planted_enough"]) <= 1 for line in runs)
    text = [
        f"knee within one worker: {near} of {len(runs)}; exact: {exact}; in the interval: {held}",
        f"fast step, loader-bound with every number of workers: {fast} of {len(runs)}",
        f"slow step, compute-bound at the knee: {slow} of {len(runs)}; least number within one worker: {enough}",
    ]
    for line in lines:
        if "expected" in line:
            text.append(f"{line['expected']}: {line['bounds']}")
    return "\n".join(text)


if __name__ == "__main__":
    main()
