"""Without the GIL: the same steps with and without Python's interpreter lock.

    python -m benchmarks.scripts.without_the_gil SET... [--minutes M] [--folder FOLDER]
    python -m benchmarks.scripts.without_the_gil --table [--folder FOLDER]

The interpreter must be free-threaded: the only difference between the two sides of a pair is
PYTHON_GIL=1 or 0. In each round, every case of a set is measured once with and once without the
lock, in processes forked from two servers that are new in each round; the side that comes first
changes with every round. FOLDER gets a line per pair in `SET.jsonl.gz`, and a further call goes on
with it. The sets are `cpu`, `emulated`, `fake-gpus` (tests/fakegpu/README.md, with
FAKECUDA_NUMERICS=0 FAKECUDA_DATA=0, in an environment with torch's CUDA build) and `control`, whose
two sides both have the lock: what it shows is noise. Any interpreter can measure it.

Without --folder, the data lie in reports/without-the-gil. `--table` writes the report from the data
alone (`without_the_gil_report.py`).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from dpbench.hardware import foreign_load, provenance
from dpbench.measure.server import Server
from dpbench.records import Case, Effort, Trial, plan, words
from dpbench.records.environment import Environment, forbidding
from dpbench.records.facts import RunFacts
from dpbench.records.ledger import PHASES

FOLDER = Path(__file__).parents[2] / "reports" / "without-the-gil"
SETS = ("cpu", "emulated", "fake-gpus", "control")
HOST_BOUND = "benchmarks/models/bound.py:host"
MODELS = {
    HOST_BOUND: 16,
    "benchmarks/models/bound.py:compute": 256,
}
"""The rows of each model's batch."""
ENGINE = [f"dp[{name}]" for name in ("pool", "cached", "local", "allreduce", "sharded")]
EFFORT = Effort(
    budget_s=0.4,
    warmup_steps=3,
    min_steps=8,
    max_steps=60,
    block_steps=4,
    memory_by_phase=False,
    profile=False,
    marks=False,
    links=False,
)
LIMIT_S = 120.0


def planned(name: str) -> list[Case]:
    """Return the cases of a set."""
    few = ["torch_dp", "dp[cached]", "dp[local]"]
    sweeps: list[tuple[list[str], list[int]]] = {
        "cpu": [(["single", "dp", *ENGINE, "ddp", "fsdp"], [2]), (["dp"], [1])],
        "emulated": [(few, [2])],
        "fake-gpus": [(["single"], [1]), (few, [1, 2, 4, 8])],
        "control": [(["single", "dp", "dp[local]"], [2])],
    }[name]
    found = [
        case
        for model, rows in MODELS.items()
        for strategies, devices in sweeps
        for case in plan.sweep(
            models=[model],
            strategies=strategies,
            devices=devices,
            batch_sizes=[rows],
            device_kind={"emulated": "emulated", "fake-gpus": "cuda"}.get(name, "cpu"),
        )
    ]
    if name == "control":
        return found
    found += [limit(case) for case in found if case.devices > 1]
    if name == "fake-gpus":  # their steps are the host's time alone, and have no numbers to verify
        found = [replace(case, unverified=True) for case in found if case.model == HOST_BOUND]
    return [*dict.fromkeys(found)]


def limit(case: Case) -> Case:
    """Return the step of one device with its share of the batch and the whole update.

    On two logical CPU devices, another process takes the same steps at the same time, on the other
    core. Devices of other kinds run alone.
    """
    share = replace(plan.alone(case, case.batch_size // case.devices), options=plan.LIMIT)
    return replace(share, neighbour=case.model) if case.device_kind == "cpu" else share


def measure(name: str, file: Path, end_s: float) -> None:
    """Add pairs of a set to its file until `end_s`, a time of `time.monotonic`."""
    gils = ("1", "1") if name == "control" else ("1", "0")
    if "0" in gils and not sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise SystemExit("this interpreter cannot run without its lock: use a free-threaded one")
    os.environ.pop("PYTHON_GIL", None)
    now = provenance.environment()
    if file.exists():
        first, pairs = read(file)
        if unlike := forbidding(*(Environment.of(RunFacts.of(one)) for one in (first, now))):
            raise SystemExit(f"{file} is of another environment: {'; '.join(map(str, unlike))}")
        done = {(pair["case"], pair["round"]) for pair in pairs}
    else:
        append(file, now)
        done = set()
    for number in itertools.count():
        if not (cases := [case for case in planned(name) if (case, number) not in done]):
            continue
        load = foreign_load.wait(foreign_load.patience(), print, cases).cores
        with ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="without-the-gil-"))
            servers = [stack.enter_context(Server(Path(scratch))) for _ in gils]
            for case in cases:
                if time.monotonic() > end_s:
                    return
                sides: list[dict[str, Any]] = [{}, {}]
                for i in (0, 1) if number % 2 else (1, 0):
                    os.environ["PYTHON_GIL"] = gils[i]  # the server starts with the first trial
                    sides[i] = plain(servers[i].run(case, EFFORT, number, LIMIT_S), gils[i])
                append(
                    file,
                    {"case": case.to_dict(), "round": number, "load": str(load), "sides": sides},
                )
                print(number, case.label, *(said(one) for one in sides), flush=True)


def plain(trial: Trial, gil: str) -> dict[str, Any]:
    """Return a trial as plain data: the timed steps by phase, in microseconds.

    Raises SystemExit if the lock was on although the trial was to run without it, or off.
    """
    found = {"status": str(trial.status), "reason": trial.reason, "verified": str(trial.verified)}
    if not trial.timed:
        return found
    state = {"1": "on", "0": "off"}[gil]
    if trial.facts.gil != state:
        raise SystemExit(
            f"PYTHON_GIL={gil}, but the lock was {trial.facts.gil}: {trial.case.label}"
        )
    rows = [
        phases
        for step, phases in zip(trial.steps, trial.ledger.phases, strict=True)
        if not step.warmup
    ]
    used = [phase for phase in PHASES if any(phase in row for row in rows)]
    series = {phase: [round(1e6 * row.get(phase, 0.0)) for row in rows] for phase in used}
    return {**found, "gil": state, "phases_us": series}


def said(side: dict[str, Any]) -> str:
    """Return the mean step of a side, or why there is none."""
    if "phases_us" not in side:
        return side["reason"][:100]
    return words.time(1e-6 * mean(map(sum, zip(*side["phases_us"].values(), strict=True))))


def append(file: Path, value: dict[str, Any]) -> None:
    """Add a line to a file at once, so that an interrupt leaves whole lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lines:
        lines.write(gzip.compress(f"{json.dumps(value)}\n".encode(), mtime=0))


Pair = dict[str, Any]


def read(file: Path) -> tuple[dict[str, Any], list[Pair]]:
    """Return the facts on the environment, and the pairs with their cases."""
    facts, *pairs = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    return facts, [{**pair, "case": Case.from_dict(pair["case"])} for pair in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*", metavar="SET", help=", ".join(SETS))
    parser.add_argument("--minutes", type=float, default=5.0, help="for each set")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if unknown := {*given.sets} - {*SETS}:
        parser.error(f"unknown: {', '.join(unknown)}; the sets are {', '.join(SETS)}")
    for name in given.sets:
        end_s = time.monotonic() + 60 * given.minutes
        measure(name, given.folder / f"{name}.jsonl.gz", end_s)
    if given.table:
        from benchmarks.scripts import without_the_gil_report

        without_the_gil_report.write(given.folder)


if __name__ == "__main__":
    main()
