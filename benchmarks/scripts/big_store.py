"""Big store: make a store with many trials, and measure how long the commands that read it take.

    python benchmarks/scripts/big_store.py STORE [--cases 500] [--rounds 3] [--steps 300] [--samples 1000000]

Each command runs alone on one core, in a fresh process. The output is one line per command: CPU seconds, peak memory
in MB, and the target.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from dpbench.analysis import validity
from dpbench.hardware import provenance
from dpbench.records import HOST, Case, Memory, Phase, Sample, Span, Step, Trial, Verified
from dpbench.store import Naming, Store

PHASES = {
    "single": (Phase.SCATTER, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER),
    "dp": (
        Phase.SCATTER, Phase.REPLICATE, Phase.FORWARD, Phase.GATHER, Phase.LOSS, Phase.BACKWARD, Phase.REDUCE,
        Phase.OPTIMIZER,
    ),
    "ddp": (Phase.SCATTER, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER),
}  # fmt: skip
SPREAD = {Phase.SCATTER, Phase.REPLICATE, Phase.FORWARD, Phase.BACKWARD}
"""The phases that run on each device; the others run on device 0."""
TARGETS = {
    "list runs": (0.2, ()), "report": (6.0, ("--html", "page.html")), "explain": (4.0, ()),
    "export csv": (10.0, ("--output", "rows.csv")),
}  # fmt: skip
"""For each command: the target in seconds on one core, and its further arguments. The memory target is 400 MB."""


def cases(count: int) -> list[Case]:
    """Return `count` cases: models and batch sizes, each with one device, and with two devices under two strategies."""
    found = []
    for number in range(-(-count // 3)):
        model = ("mlp", "resnet18", "vgg16", "transformer", "lstm")[number % 5]
        batch = 8 * (1 + number // 5)
        found += [
            Case(model=model, strategy="single", batch_size=batch),
            Case(model=model, strategy="dp", schedule="reference", devices=2, batch_size=batch),
            Case(model=model, strategy="ddp", devices=2, batch_size=batch),
        ]
    return found[:count]


def trial(case: Case, number: int, steps: int, samples: int, draw: np.random.Generator) -> Trial:
    """Return a trial with made-up times: `steps` steps after a warm-up, and `samples` samples of two metrics."""
    at, made, spans = 1000.0 * number, [], []
    scale = {"single": 1.0, "dp": 0.7, "ddp": 0.6}[case.strategy] * case.batch_size / 8 * 1e-3
    phases = PHASES[case.strategy]
    for step in range(steps):
        seconds = scale * float(np.exp(0.05 * draw.standard_normal()))
        part = 0.95 * seconds / len(phases)
        for turn, phase in enumerate(phases):
            for device in range(case.devices if phase in SPREAD else 1):
                start = at + turn * part
                spans.append(Span(step, phase, device, "host", start, start + part * (0.8 + 0.1 * device)))
        at += seconds
        made.append(Step(seconds, step < 20, at))
    times = np.linspace(1000.0 * number, at, max(1, samples // 2))
    values = draw.random(len(times))
    return Trial(
        case=case, round=number, verified=Verified.BITWISE, steps=tuple(made), spans=tuple(spans),
        memory=(Memory(HOST, 500_000_000, "rss"),), started_s=1e9 + number,
        samples=tuple(
            Sample(float(t), HOST, metric, float(v)) for metric in ("cpu_percent", "load_1m")
            for t, v in zip(times, values, strict=True)
        ),
    )  # fmt: skip


def fill(path: Path, count: int, rounds: int, steps: int, samples: int) -> None:
    """Make a store at `path` with one run."""
    draw, chosen = np.random.default_rng(0), cases(count)
    each = samples // (count * rounds)
    facts = provenance.collect({"physical_gpus": 0, "gpus": []})
    with Store.create(path, Naming(name="big")) as store:
        run_id, _ = store.begin_run(plan="big", host="host", code="code", rounds=rounds, provenance=facts)
        for number in range(rounds):
            for case in chosen:
                slot = store.begin_trial(run_id, case, number)
                made = trial(case, number, steps, each, draw)  # a run stores the results of the validity checks too
                store.end_trial(slot, replace(made, provenance={"validity": validity.facts(made, 2)}))
        store.end_run(run_id)


def measured(command: str, more: tuple[str, ...], store: Path, code: Path | None = None) -> dict[str, float]:
    """Return the CPU seconds and the peak memory in MB of a command in a fresh process on one core.

    `code` is the folder of the package dpbench; by default, it is the installed one.
    """
    arguments = [sys.executable, "-m", "dpbench", *command.split(), "--store", str(store), *more]
    env = {**os.environ, **({"PYTHONPATH": str(code)} if code else {})}
    core = {max(os.sched_getaffinity(0))}
    pid = os.fork()
    if pid == 0:
        os.sched_setaffinity(0, core)
        code = subprocess.run(arguments, check=False, stdout=subprocess.DEVNULL, cwd=store.parent, env=env).returncode
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = {
            "code": code,
            "cpu_s": round(used.ru_utime + used.ru_stime, 2),
            "peak_mb": round(used.ru_maxrss / 1024),
        }
        store.with_suffix(".json").write_text(json.dumps(found))
        os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(store.with_suffix(".json").read_text())


def main() -> None:
    """Make the store if it does not exist, run the commands, and print their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=1_000_000)
    asked = parser.parse_args()
    store = asked.store.absolute()
    if not store.exists():
        fill(store, asked.cases, asked.rounds, asked.steps, asked.samples)
    print(f"{store.stat().st_size / 1e6:.0f} MB")
    for command, (target_s, more) in TARGETS.items():
        found = measured(command, more, store, Path(__file__).parents[2])
        page = store.parent / more[1] if more else None
        size = f", wrote {page.stat().st_size / 1e6:.1f} MB" if page and page.exists() else ""
        used = f"{found['cpu_s']:7.2f} CPU-s (target {target_s}), {found['peak_mb']:.0f} MB"
        print(f"{command:<12} {used}{size}, exit {found['code']}")


if __name__ == "__main__":
    main()
