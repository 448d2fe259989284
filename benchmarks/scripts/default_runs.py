"""Default runs: how often the default run of this machine settles its answers, and rightly.

    python benchmarks/scripts/default_runs.py FOLDER [--runs 20] [--beside 30] [--truth 20] [RUN...]

Each run is `dpbench run` without options, in a fresh process with a store of its own; RUN are
further options of it. With `--beside P`, a process that uses P % of a core runs beside it. `--truth
N` measures the same cases in N rounds instead, once. FOLDER gets a line per run in `runs.jsonl`; a
second call adds to it. `python benchmarks/scripts/default_runs.py FOLDER --table` prints how many
answers were settled, how long the runs took, which settled answers are wrong (another candidate, or
one device, is truly faster than the recommended case by more than 5 %), and how many rankings are
rough. Twenty runs take about 40 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dpbench
from dpbench.analysis.decision import WORTH, Choice

SPIN = """
import os, time
parent = os.getppid()
while os.getppid() == parent:
    until_s = time.monotonic() + {part}
    while time.monotonic() < until_s:
        pass
    time.sleep(0.1 - {part})
"""
"""A program that computes for `part` of every 0.1 seconds, and ends with its parent."""


@contextmanager
def beside(percent: int) -> Iterator[None]:
    """Run a process that uses `percent` of a core beside the body, if it is not 0."""
    program = [sys.executable, "-c", SPIN.format(part=percent / 1000)]
    process = subprocess.Popen(program) if percent else None
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()


def measured(kind: str, percent: int, options: list[str]) -> dict[str, Any]:
    """Return what one run found: for each model its choice, and the speed-up of each case."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        command = [sys.executable, "-m", "dpbench", "run", "-q", "--store", str(store), *options]
        began = time.perf_counter()
        with beside(percent):
            done = subprocess.run(
                [*command, "--report", str(Path(folder) / "page.html")],
                capture_output=True,
                text=True,
                check=False,
            )
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        run = dpbench.load(store)
        return {
            "kind": kind,
            "seconds": seconds,
            "status": run.status,
            "answers": [
                {
                    "model": answer.home.model,
                    "choice": str(answer.choice),
                    "case": answer.row.case.label if answer.row else "",
                    "settled": answer.settled,
                    "speedups": {
                        row.case.label: row.speedup.value if row.speedup else 1.0
                        for row in answer.ranking
                    },
                    "rounds": max(row.rounds for row in answer.ranking),
                    "noisy": "NOISY" in answer.labels,
                    "rough": "rough" in answer.ranked,
                    "intervals": {
                        row.case.label: [row.speedup.low, row.speedup.high]
                        for row in answer.ranking
                        if row.speedup
                    },
                }
                for answer in run.answers
            ],
        }


def right(answer: dict[str, Any], truth: dict[str, float]) -> bool:
    """Return whether no case is truly faster than the recommended one by more than `WORTH`.

    "Stay with one device" is also right if only one device with all cores is faster.
    """
    best = max(truth.values())
    if answer["choice"] == str(Choice.STAY) and " x1 " in f"{answer['case']} ":
        best = max(value for label, value in truth.items() if " x1 " not in f"{label} ")
    return best <= WORTH * truth[answer["case"]]


def table(lines: list[dict[str, Any]]) -> str:
    """Return the Markdown table of all runs."""
    truth = {
        one["model"]: one["speedups"]
        for line in lines
        if line["kind"] == "truth"
        for one in line["answers"]
    }
    rows = [
        "| runs | model | settled | wrong | rough | rounds, median (most) | s, median (most) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for kind in dict.fromkeys(line["kind"] for line in lines if line["kind"] != "truth"):
        runs = [line for line in lines if line["kind"] == kind]
        seconds = [line["seconds"] for line in runs]
        for model, speeds in truth.items() if runs else ():
            found = [one for line in runs for one in line["answers"] if one["model"] == model]
            settled = [one for one in found if one["settled"]]
            wrong = sum(not right(one, speeds) for one in settled)
            rounds = [one["rounds"] for one in found]
            rows.append(
                f"| {kind} | {model} | {len(settled)} of {len(found)} | {wrong} |"
                f" {sum(one.get('rough', False) for one in found)} |"
                f" {statistics.median(rounds):.0f} ({max(rounds)}) |"
                f" {statistics.median(seconds):.0f} ({max(seconds):.0f}) |"
            )
    true = [
        f"- {model}: {', '.join(f'{label} {value:.2f}' for label, value in speeds.items())}"
        for model, speeds in truth.items()
    ]
    return "\n".join([*rows, "", "True speed-ups:", "", *true])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--beside", type=int, default=0, metavar="P", help="%% of a core")
    parser.add_argument("--truth", type=int)
    parser.add_argument("--table", action="store_true")
    given, further = parser.parse_known_args()
    file = given.folder / "runs.jsonl"
    if given.table:
        print(table([json.loads(line) for line in file.read_text().splitlines()]))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    kind = f"beside {given.beside} %" if given.beside else "quiet"
    kind = "truth" if given.truth else kind
    options = ["--rounds", str(given.truth), "--budget", "1200"] if given.truth else []
    for _ in range(1 if given.truth else given.runs):
        found = measured(kind, given.beside, [*options, *further])
        with file.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
        settled = sum(one["settled"] for one in found["answers"])
        print(
            f"{kind}: {settled} of {len(found['answers'])} settled in {found['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
