"""Without the GIL: the same steps with and without Python's interpreter lock.

    python -m benchmarks.scripts.without_the_gil SET... [--minutes M] [--folder FOLDER]
    python -m benchmarks.scripts.without_the_gil --table [--folder FOLDER]

The interpreter must be free-threaded: the only difference between the two sides of a pair is
PYTHON_GIL=1 or 0. In each round, every case of a set is measured once with and once without the
lock, in processes forked from two servers that are new in each round; the side that comes first
changes with every round. FOLDER gets a line per pair in `SET.jsonl.gz`. A further call goes on with
it, but not with other code, or in another environment. The sets are `cpu`, `emulated`, `fake-gpus`
(tests/fakegpu/README.md, with FAKECUDA_NUMERICS=0 FAKECUDA_DATA=0, in an environment with torch's
CUDA build) and `control`, whose two sides both have the lock: what it shows is noise. Any
interpreter can measure it.

Without --folder, the data lie in reports/without-the-gil. `--table` writes the report
(`without_the_gil_report.py`).
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

import msgspec

from dpbench.hardware import foreign_load, provenance
from dpbench.measure.server import Server
from dpbench.records import Case, Effort, Trial, disturbance, plan, sources, words
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
CODE, FAKES = "code", "fakes"
"""The facts on the code that measures, and on the variables of fake GPUs."""


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
    now = facts(name)
    if file.exists():
        first, pairs = read(file)
        if unlike := unlikeness(first, now):
            raise SystemExit(f"{file} is of {unlike}: give another --folder")
        if unknown := unknown_facts(first):
            print(f"note: {file} does not state {unknown}, which may have been others")
        done = {(pair["case"], pair["round"]) for pair in pairs}
    else:
        append(file, now)
        done = set()
    for number in itertools.count():
        if not (cases := [case for case in planned(name) if (case, number) not in done]):
            continue
        load = foreign_load.wait(foreign_load.patience(), print, cases)
        before = {
            "load": str(load.cores),
            "busy": disturbance.told(load, cases) if disturbance.busy(load, cases) else "",
        }
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
                append(file, {"case": case.to_dict(), "round": number, **before, "sides": sides})
                print(number, case.label, *(said(one) for one in sides), flush=True)


def facts(name: str) -> dict[str, Any]:
    """Return the facts on this environment and on the code that measures a set, as plain data.

    The lock of this interpreter is none of them, because each side of a pair states its own.
    """
    every = {**provenance.collect(), "gil": None}
    names = sources.names_of(planned(name))
    return {
        **provenance.environment(),
        CODE: provenance.code_key(every, names),
        FAKES: provenance.variables(os.environ, ["FAKECUDA_"]),
    }


def unlikeness(first: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the facts that forbid to put pairs together, as text; "" if there are none.

    A fact that `first` does not state forbids nothing.
    """
    some, others = (replace(Environment.of(RunFacts.of(one)), gil=None) for one in (first, now))
    if unlike := forbidding(some, others):
        return f"another environment: {'; '.join(map(str, unlike))}"
    for fact, text in ((FAKES, "other variables of fake GPUs"), (CODE, "other code")):
        if first.get(fact, now[fact]) != now[fact]:
            return f"{text}: {first[fact]}, but now {now[fact]}"
    return ""


def unknown_facts(first: dict[str, Any]) -> str:
    """Return, as text, what earlier versions of this script have not stored; "" if nothing."""
    known = {CODE: "the code that measured it", FAKES: "the variables FAKECUDA_*"}
    return " and ".join(text for fact, text in known.items() if fact not in first)


def plain(trial: Trial, gil: str) -> dict[str, Any]:
    """Return a trial as plain data: the timed steps by phase, in microseconds.

    Raises SystemExit if the lock was on although the trial was to run without it, or off.
    """
    found: dict[str, Any] = {
        "status": str(trial.status),
        "reason": trial.refusal or trial.reason,
        "verified": str(trial.verified),
    }
    if trial.refusal:
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
    load = msgspec.to_builtins(trial.facts.foreign_load)
    return {**found, "gil": state, "foreign_load": load, "phases_us": series}


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
    first, *pairs = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    return first, [{**pair, "case": Case.from_dict(pair["case"])} for pair in pairs]


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
