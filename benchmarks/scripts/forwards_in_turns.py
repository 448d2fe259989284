"""Forwards in turns: whether two forwards are faster one after another than at once.

    PYTHON_GIL=1 python -m benchmarks.scripts.forwards_in_turns [--rounds 8]
    PYTHON_GIL=0 python -m benchmarks.scripts.forwards_in_turns [--rounds 8]

The schedule `pool` measures both kinds during a training and takes the faster one
(`engine/fast/turns.py`). Here, the forwards of a step on two logical CPU devices are of each kind
in turn. A round is a new training of 120 steps; the ratio is paired by rounds. PYTHON_GIL=0 needs a
free-threaded interpreter.
"""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks.models import bound
from dpbench.analysis import stats
from dpbench.engine import TrainStep
from dpbench.engine.fast.turns import TurnsIfFaster
from dpbench.hardware import interpreter
from dpbench.records import words

MODELS = {"host": (bound.host, 16), "compute": (bound.compute, 256)}
"""The models and the rows of their batches."""
STEPS, FIRST = 120, 10
"""The steps of a training, and how many of them are left out."""


def training(model: SimpleNamespace, rows: int) -> dict[bool, list[float]]:
    """Return the seconds of the forwards in turns (True) and at once (False) of a training."""
    runs: list[tuple[bool, float]] = []

    def alternate(turns: TurnsIfFaster, seconds: float) -> None:
        runs.append((turns.taken, seconds))
        turns.taken = not turns.taken

    module = model.build("small")
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    batch = model.batch(rows, 0, "small")
    with (
        mock.patch.object(TurnsIfFaster, "choose", alternate),
        TrainStep(module, model.loss, lambda _: optimizer, ["cpu", "cpu"], "pool") as step,
    ):
        for _ in range(STEPS):
            step(*batch)
    return {kind: [s for taken, s in runs[FIRST:] if taken is kind] for kind in (True, False)}


def main() -> None:
    """Print the times of both kinds for each model, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    rounds = range(parser.parse_args().rounds)
    torch.set_num_threads(1)
    python = f"Python {sys.version.partition(' ')[0]}, torch {torch.__version__}"
    print(f"{python}, lock {interpreter.gil()}, {words.count(len(rounds), 'round')}")
    for name, (model, rows) in MODELS.items():
        found = {number: training(model, rows) for number in rounds}
        in_turns, at_once = (
            stats.Timed({number: each[kind] for number, each in found.items()})
            for kind in (True, False)
        )
        print(
            f"{name}: in turns {words.ms(stats.median(in_turns))}, at once"
            f" {words.ms(stats.median(at_once))}; at once takes"
            f" {words.times(stats.ratio(at_once, in_turns))} the time",
            flush=True,
        )


if __name__ == "__main__":
    main()
