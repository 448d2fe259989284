"""Loaded: count wrong verdicts of runs beside one and two processes that keep cores busy.

    python benchmarks/scripts/loaded.py OUTPUT.jsonl [--runs 10] [--budget 120]

Each run measures the small resnet18 at batch 64 on two cores: one device, and DDP and DataParallel
on two devices. Without a load, DDP gives 1.3 to 1.5 times the speed of one device, and DataParallel
less (reports/answers-2-cores). The first run beside each load also measures one device with all
cores. Other processes take cores from cases with several processes first, so that a loaded run may
show the opposite. A verdict is wrong if a shown interval of a speed-up is on the wrong side of 1,
if an answer follows from it, or if `dpbench compare` tells two such runs apart. The script starts
the busy processes itself and ends them. Each run appends one line to OUTPUT; a restarted script
makes only the missing runs. The last lines state, for each load, the answers, the wrong verdicts,
the intervals that would have been wrong verdicts but are withheld, and how many trials of each case
were labelled NOISY. No verdict should be wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOADS = (1, 2)
TRUTH = {"resnet18 ddp x2": 1, "resnet18 dp[reference] x2": -1}
"""By the beginning of a case's label: 1 if it is faster than one device, -1 if it is slower."""
BUSY = (
    "import os, sys\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
)
"""A process that keeps one core busy, and ends soon after its parent."""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy by child processes, which are not part of dpbench's process tree."""
    children = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def dpbench(*arguments: str, codes: Sequence[int] = (0,)) -> str:
    """Return what the command prints to stdout."""
    command = [sys.executable, "-m", "dpbench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout


def side(speedup: dict[str, Any]) -> int:
    """Return 1 or -1 for an interval above or below 1; 0 if it contains 1."""
    return 1 if speedup["low"] > 1 else -1 if speedup["high"] < 1 else 0


def measured(store: Path, budget_s: float, *options: str) -> None:
    """Measure one run of resnet18 into the store.

    Trials beside the load are labelled, and not repeated.
    """
    dpbench(
        "run",
        "--models",
        "resnet18",
        "--batch-sizes",
        "64",
        "--budget",
        str(budget_s),
        "--patience",
        "0",
        *options,
        "--store",
        str(store),
    )


def noisy(store: Path) -> dict[str, list[int]]:
    """Return, by case of the newest run, the numbers of NOISY ok trials and of all ok trials."""
    found: dict[str, list[int]] = {}
    for line in dpbench("export", "jsonl", "--store", str(store)).splitlines():
        trial = json.loads(line)
        if trial["status"] == "ok":
            counts = found.setdefault(
                f"{trial['case']['strategy']} x{trial['case']['devices']}", [0, 0]
            )
            counts[0] += "NOISY" in trial["labels"]
            counts[1] += 1
    return found


def once(store: Path, budget_s: float) -> dict[str, Any]:
    """Measure one run into the store.

    Return its verdicts, the speed-ups and the counts of NOISY trials by case.
    """
    again = f"number={len(runs_of(store))}"
    measured(
        store,
        budget_s,
        "--strategies",
        "single,ddp,dp",
        "--devices",
        "2",
        "--rounds",
        "3",
        "--tag",
        again,
    )
    found = json.loads(dpbench("report", "--json", "--store", str(store)))
    speedups = {
        known: case["speedup"]
        for case in found["cases"]
        for known in TRUTH
        if case["label"].startswith(known) and case["speedup"]
    }
    answer = found["answers"][0]
    return {
        "choice": answer["choice"],
        "case": answer["case"],
        "headline": answer["headline"],
        "labels": answer["labels"],
        "speedups": speedups,
        "noisy": noisy(store),
        "compared": compared(store),
    }


def all_cores(store: Path, budget_s: float) -> dict[str, list[int]]:
    """Return the counts of `noisy` for one device with all cores."""
    measured(store, budget_s, "--strategies", "single_all_cores", "--rounds", "1")
    return noisy(store)


def runs_of(store: Path) -> list[dict[str, Any]]:
    if not store.exists():
        return []
    return list(json.loads(dpbench("list", "runs", "--json", "--store", str(store)))["runs"])


def compared(store: Path) -> list[str]:
    """Return the verdicts of the comparison of the newest two runs of the store.

    Empty for a single run.
    """
    runs = runs_of(store)
    if len(runs) < 2:
        return []
    text = dpbench(
        "compare", runs[1]["id"], runs[0]["id"], "--json", "--store", str(store), codes=(0, 1, 3)
    )
    return [case["verdict"] for case in json.loads(text)["cases"]]


def wrong(line: dict[str, Any]) -> list[str]:
    """Return the wrong verdicts of a run, as texts."""
    found = [
        f"{name}: {one['value']:.3f} ({one['low']:.3f}-{one['high']:.3f})"
        for name, one in line["speedups"].items()
        if side(one) == -TRUTH[name] and not one["withheld"]
    ]
    if line["choice"] == "stay with one device" and "single " in (line["case"] or ""):
        found.append(line["headline"])
    if line["choice"] == "use" and "ddp" not in (line["case"] or ""):
        found.append(line["headline"])
    found += [
        f"compared with the run before: {verdict}"
        for verdict in line["compared"]
        if verdict in ("faster", "slower")
    ]
    return found


def tally(lines: Sequence[dict[str, Any]]) -> str:
    """Return the counts of verdicts and of NOISY trials, by load, as text."""
    said = []
    for load in LOADS:
        mine = [line for line in lines if line["load"] == load]
        mistakes = [one for line in mine for one in wrong(line)]
        choices = Counter(line["choice"] for line in mine)
        answers = ", ".join(f"{count} {choice}" for choice, count in choices.most_common())
        said.append(
            f"{load} busy processes: {len(mine)} runs: {answers}; wrong verdicts: {len(mistakes)}"
        )
        said += [f"  wrong: {one}" for one in mistakes]
        shown = [
            (name, one)
            for line in mine
            for name, one in line["speedups"].items()
            if one["rounds"] >= 3
        ]
        hidden = sum(side(one) == -TRUTH[name] and bool(one["withheld"]) for name, one in shown)
        said.append(
            f"  {hidden} of {len(shown)} intervals from three rounds or more are wrong, but"
            " withheld"
        )
        counts: dict[str, list[int]] = {}
        for line in mine:
            for label, (noisy, trials) in line["noisy"].items():
                both = counts.setdefault(label, [0, 0])
                both[0] += noisy
                both[1] += trials
        said += [
            f"  NOISY: {noisy} of {trials} trials of {label}"
            for label, (noisy, trials) in counts.items()
        ]
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=int, default=10, help="the number of runs beside each load")
    parser.add_argument(
        "--budget", type=float, default=120.0, help="the budget of each run in seconds"
    )
    given = parser.parse_args()
    done = _lines(given.output)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.runs):
            for load in LOADS:
                if any((line["load"], line["number"]) == (load, number) for line in done):
                    continue
                with busy(load):
                    line = {"load": load, "number": number} | once(
                        Path(folder) / f"{load}.db", given.budget
                    )
                    if number == 0:
                        line["noisy"] |= all_cores(
                            Path(folder) / f"{load}-all-cores.db", given.budget / 2
                        )
                with given.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(
                    f"{load} busy, run {number}: {line['headline']}; wrong:"
                    f" {wrong(line) or 'none'}",
                    flush=True,
                )
    lines = _lines(given.output)
    print(tally(lines))
    sys.exit(1 if any(wrong(line) for line in lines) else 0)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
