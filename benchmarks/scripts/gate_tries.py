"""How often the gate calls an unchanged engine slower, and how often it finds 5 % planted work.

    python benchmarks/scripts/gate_tries.py OUTPUT.jsonl [--tries 20] [--minutes 10]

A try compares this commit with a copy of it: an exact copy, or one whose TrainStep does real work
for a further 5 % of the step's CPU time, calibrated in each process. "cannot tell" counts as a miss
for planted work, and as no alarm for the exact copy. At most one of 20 tries with the exact copy
should be an alarm, and 18 of 20 planted ones should be found. Each try appends one line to OUTPUT;
a restarted script makes only the missing tries.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import gate

PLANTED = '''

def _plant() -> None:
    """Make each step of TrainStep do further work for SHARE of its CPU time."""
    import time

    import torch

    step, square = TrainStep.__call__, torch.ones(24, 24)
    spent = {"steps": 0, "cpu_s": 0.0, "debt_s": 0.0}

    def slower(self, *arguments, **named):
        start = time.process_time()
        found = step(self, *arguments, **named)
        spent["debt_s"] += (time.process_time() - start) * SHARE
        while spent["debt_s"] > 0:
            before = time.process_time()
            for _ in range(4):
                square @ square
            spent["debt_s"] -= time.process_time() - before
        return found

    TrainStep.__call__ = slower


_plant()
'''


def plant(tree: Path, share: float) -> None:
    """Add work for `share` of each step to the TrainStep of a tree."""
    module = tree / "dpbench" / "engine" / "train_step.py"
    module.write_text(module.read_text() + PLANTED.replace("SHARE", str(share)))


def run(planted: bool, seconds: float) -> dict[str, Any]:
    """Return the result of one try as a line of the output."""
    start = time.monotonic()
    with gate.tree_of("HEAD") as base, gate.tree_of("HEAD") as head:
        if planted:
            plant(head, 0.05)
        found = gate.decide(base, head, cases=gate.CASES, seconds=seconds, margin=0.05)
    return {
        "planted": planted,
        "answer": gate.whole(found).value,
        "seconds": round(time.monotonic() - start, 1),
        "cases": {
            one.case: {
                "answer": one.answer.value,
                "time": one.time,
                "pairs": one.pairs,
                "ratio": round(one.ratio, 4),
                "low": round(one.low, 4),
                "high": round(one.high, 4),
            }
            for one in found
        },
    }


def main() -> None:
    """Make the missing tries, alternately exact and planted, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--tries", type=int, default=20, help="the number of tries of each kind")
    parser.add_argument("--minutes", type=float, default=10.0, help="the most minutes of one try")
    arguments = parser.parse_args()
    gate.on_one_core()
    lines = arguments.output.read_text().splitlines() if arguments.output.exists() else []
    done = [json.loads(line) for line in lines]
    for number in range(len(done), 2 * arguments.tries):
        done.append(run(bool(number % 2), 60 * arguments.minutes))
        with arguments.output.open("a") as out:
            out.write(json.dumps(done[-1]) + "\n")
        print(number + 1, done[-1]["planted"], done[-1]["answer"], done[-1]["seconds"], flush=True)
    alarms = sum(one["answer"] == gate.Answer.SLOWER for one in done if not one["planted"])
    found = sum(one["answer"] == gate.Answer.SLOWER for one in done if one["planted"])
    print(
        f"alarms: {alarms} of {arguments.tries}; planted work found: {found} of {arguments.tries}"
    )


if __name__ == "__main__":
    main()
