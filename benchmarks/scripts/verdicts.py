"""Verdicts: error rates of dpbench's verdicts on equal cases (A/A) and on a planted slowdown (A/B).

    python benchmarks/scripts/verdicts.py OUTPUT.jsonl [--aa 200] [--ab 50]

A/A: half of the comparisons are within one run. One worker measures both sides in alternating
blocks, and rounds are added until the ratio is known to 1 % or the budget of 12 s is spent. The
other half are between two runs of five rounds, each round under a new server, so that the runs
share only the machine. At most 5 % of the verdicts within a run, and 1 % of those between two runs,
should be a false "faster" or "slower". A/B: one phase (forward, loss and backward in rotation)
spins for 3 % of the step, and a comparison takes less than 60 s, of which 45 s are the budget of
its run. At least 90 % of the comparisons should find the slowdown and name its phase. Each
comparison appends one line to OUTPUT; a restarted script makes only the missing ones. All
comparisons take about 100 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import psutil

from dpbench.analysis import comparison, stats, summary
from dpbench.measure.run import run
from dpbench.measure.stopping import RoundsRule
from dpbench.records import Case, Effort, Trial
from dpbench.store import Store

CASE = Case(model="planted:none", strategy="dp", schedule="reference", devices=2, batch_size=64)
EFFORT = Effort(budget_s=0.4, max_steps=100, min_steps=20, memory_by_phase=False)
PHASES = ("forward", "loss", "backward")
SLOWDOWN = 0.03
PRECISION = 0.01
AA_BUDGET_S, AB_BUDGET_S = 12.0, 45.0


@dataclass
class UntilPrecise:
    """The rule that adds rounds until the ratio of two cases is known to within `PRECISION`."""

    name: ClassVar[str] = "until precise"
    least: ClassVar[int] = 5
    looks: ClassVar[int] = 1
    _series: dict[Case, stats.Timed] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        """Add an ended trial."""
        summary.add(self._series, trial)

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return both cases until their ratio is precise."""
        if number < self.least:
            return list(cases)
        ratio = stats.ratio(*self._series.values())
        precise = (ratio.high - ratio.low) / 2 <= PRECISION * ratio.value
        return [] if precise else list(cases)

    def unsettled(self) -> frozenset[Case]:
        """Return no case: the verdict is the script's."""
        return frozenset()


def measure(
    cases: list[Case],
    rounds: int | RoundsRule,
    *,
    paired: bool = False,
    budget_s: float | None = None,
) -> list[Trial]:
    """Run cases with a temporary store; return the trials."""
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder) / "store.db") as store:
        done = run(cases, store, rounds=rounds, paired=paired, effort=EFFORT, budget_s=budget_s)
        trials = store.trials(done.run_id)
    for trial in trials:
        if trial.status != "ok":
            raise RuntimeError(f"{trial.case.label}: {trial.status}: {trial.reason}")
    return trials


def inside(first: Case, second: Case, budget_s: float) -> dict[str, Any]:
    """Compare two cases within one run; a ratio above 1 means that the second case is faster."""
    trials = measure([first, second], UntilPrecise(), paired=True, budget_s=budget_s)
    sides = [[trial for trial in trials if trial.case == case] for case in (first, second)]
    one, other = (summary.measured(side) for side in sides)
    ratio = stats.ratio(one, other)
    changes = comparison.moved(*sides)
    phase = max(changes, key=lambda name: abs(changes[name]))
    return _row(ratio, stats.verdict(ratio)) | {
        "phase": phase,
        "phase_s": changes[phase],
        "step_s": stats.median(one).value,
    }


def between() -> dict[str, Any]:
    """Compare a case with itself in a second run."""
    first, second = (measure([CASE], 5) for _ in range(2))
    (found,) = comparison.compare(first, second)
    return _row(found.ratio, found.verdict) | {
        "step_s": stats.median(summary.measured(first)).value
    }


def _row(ratio: Any, verdict: str) -> dict[str, Any]:
    return {
        "ratio": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "rounds": ratio.n,
        "verdict": verdict,
    }


def planted(number: int) -> dict[str, Any]:
    """Compare the case with a variant that has a planted slowdown.

    Return the result and the size of the slowdown.
    """
    base_s = stats.median(summary.measured(measure([CASE], 3))).value
    phase = PHASES[number % len(PHASES)]
    os.environ |= {
        "DPBENCH_PLANTED_S": str(SLOWDOWN * base_s),
        "DPBENCH_PLANTED_DEVICES": str(CASE.devices),
    }
    found = inside(CASE, replace(CASE, model=f"planted:{phase}"), AB_BUDGET_S)
    return found | {"planted": phase, "planted_s": SLOWDOWN * base_s}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--aa", type=int, default=200)
    parser.add_argument("--ab", type=int, default=50)
    given = parser.parse_args()
    # the workers import `planted` from this folder
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    done = _lines(given.output)
    again = replace(CASE, options=(("role", "again"),))
    makers: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
        "inside": (given.aa - given.aa // 2, lambda i: inside(CASE, again, AA_BUDGET_S)),
        "between": (given.aa // 2, lambda i: between()),
        "planted": (given.ab, planted),
    }
    # interleave the kinds evenly: all see the same load of the machine, and an interrupted script
    # has results of each
    tries = sorted(
        (((i + 0.5) / n, kind, i, make) for kind, (n, make) in makers.items() for i in range(n)),
        key=lambda t: t[:3],
    )
    for _, kind, number, make in tries:
        if not any(line["kind"] == kind and line["number"] == number for line in done):
            psutil.cpu_percent()
            began = time.perf_counter()
            line = {"kind": kind, "number": number} | make(number)
            line |= {"seconds": time.perf_counter() - began, "cpu_percent": psutil.cpu_percent()}
            with given.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(tally(_lines(given.output)))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tally(lines: list[dict[str, Any]]) -> str:
    """Return the rates of correct and false verdicts as text."""
    text = []
    for kind in ("inside", "between", "planted"):
        mine = [line for line in lines if line["kind"] == kind]
        if not mine:
            continue
        counts = Counter(line["verdict"] for line in mine)
        width = statistics.median((line["high"] - line["low"]) / 2 / line["ratio"] for line in mine)
        words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        text.append(
            f"{kind}: {len(mine)}: {words}; the median half-width of an interval is {width:.1%}; "
            f"{statistics.median(line['rounds'] for line in mine):.0f} rounds, "
            f"{statistics.median(line['seconds'] for line in mine):.0f} s each"
        )
        if kind == "planted":
            slower = [line for line in mine if line["verdict"] == "slower"]
            named = sum(line["phase"] == line["planted"] for line in slower)
            text.append(
                f"  found {len(slower)}, and named its phase {named}, of {len(mine)}"
                f" ({named / len(mine):.0%})"
            )
        else:
            false = counts["faster"] + counts["slower"]
            text.append(f"  false verdicts: {false} of {len(mine)} ({false / len(mine):.1%})")
    return "\n".join(text)


if __name__ == "__main__":
    main()
