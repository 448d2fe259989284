"""CPU seconds and peak memory of the commands that read a store.

Each runs in a fresh process on one core. The store has 60 cases of 3 rounds and 300 steps, and
100,000 samples.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from dpbench.analysis import validity
from dpbench.hardware import provenance
from dpbench.records import HOST, Case, Memory, Phase, Sample, Span, Step, Trial, Verified
from dpbench.store import Identity, Naming, Store

PHASES = {
    "single": (Phase.SCATTER, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER),
    "dp": (
        Phase.SCATTER,
        Phase.REPLICATE,
        Phase.FORWARD,
        Phase.GATHER,
        Phase.LOSS,
        Phase.BACKWARD,
        Phase.REDUCE,
        Phase.OPTIMIZER,
    ),
    "ddp": (
        Phase.SCATTER,
        Phase.FORWARD,
        Phase.LOSS,
        Phase.BACKWARD,
        Phase.REDUCE,
        Phase.OPTIMIZER,
    ),
}
SPREAD = {Phase.SCATTER, Phase.REPLICATE, Phase.FORWARD, Phase.BACKWARD}
"""The phases that run on each device; the others run on device 0."""
COMMANDS = {
    "list runs": (),
    "report": ("--report", "page.html"),
    "explain": (),
    "export csv": ("--output", "rows.csv"),
}
"""The further arguments of each command."""


def cases(count: int) -> list[Case]:
    """Return `count` cases: models and batch sizes, on one device or two (two strategies)."""
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
    """Return a trial with made-up times: `steps` steps, and `samples` samples of two metrics."""
    at, made, spans = 1000.0 * number, [], []
    scale = {"single": 1.0, "dp": 0.7, "ddp": 0.6}[case.strategy] * case.batch_size / 8 * 1e-3
    phases = PHASES[case.strategy]
    for step in range(steps):
        seconds = scale * float(np.exp(0.05 * draw.standard_normal()))
        part = 0.95 * seconds / len(phases)
        for turn, phase in enumerate(phases):
            for device in range(case.devices if phase in SPREAD else 1):
                start = at + turn * part
                spans.append(
                    Span(step, phase, device, "host", start, start + part * (0.8 + 0.1 * device))
                )
        at += seconds
        made.append(Step(seconds, step < 20, at))
    times = np.linspace(1000.0 * number, at, max(1, samples // 2))
    values = draw.random(len(times))
    return Trial(
        case=case,
        round=number,
        verified=Verified.BITWISE,
        steps=tuple(made),
        spans=tuple(spans),
        memory=(Memory(HOST, 500_000_000, "rss"),),
        started_s=1e9 + number,
        samples=tuple(
            Sample(float(t), HOST, metric, float(v))
            for metric in ("cpu_percent", "load_1m")
            for t, v in zip(times, values, strict=True)
        ),
    )


def fill(path: Path, count: int, rounds: int, steps: int, samples: int) -> None:
    """Make a store at `path` with one run."""
    draw, chosen = np.random.default_rng(0), cases(count)
    each = samples // (count * rounds)
    facts = provenance.collect({"physical_gpus": 0, "gpus": []})
    with Store.create(path, Naming(name="big")) as store:
        run_id, _ = store.begin_run(
            Identity("big", "host", "code"), rounds=rounds, provenance=facts
        )
        for number in range(rounds):
            for case in chosen:
                slot = store.begin_trial(run_id, case, number)
                # a run stores the results of the validity checks too
                made = trial(case, number, steps, each, draw)
                store.end_trial(
                    slot, replace(made, provenance={"validity": validity.facts(made, 2)})
                )
        store.end_run(run_id)


def measured(command: str, store: Path) -> dict[str, float]:
    """Return CPU seconds and peak memory in MB of a command in a fresh process on one core."""
    arguments = [
        sys.executable,
        "-m",
        "dpbench",
        *command.split(),
        "--store",
        str(store),
        *COMMANDS[command],
    ]
    core = {max(os.sched_getaffinity(0))}
    pid = os.fork()
    if pid == 0:
        os.sched_setaffinity(0, core)
        code = subprocess.run(
            arguments, check=False, stdout=subprocess.DEVNULL, cwd=store.parent
        ).returncode
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


class Reading:
    """The commands that read a whole run."""

    params: ClassVar[list[str]] = list(COMMANDS)
    param_names: ClassVar[tuple[str, ...]] = ("command",)
    timeout = 300.0

    def setup_cache(self) -> str:
        """Make the store.

        Asv keeps the working folder until all benchmarks of the class have ended.
        """
        store = Path("big.db").absolute()
        fill(store, 60, 3, 300, 100_000)
        return str(store)

    def track_cpu_s(self, store: str, command: str) -> float:
        return self._measured(store, command)["cpu_s"]

    track_cpu_s.unit = "seconds"  # type: ignore[attr-defined]

    def track_peak_memory(self, store: str, command: str) -> float:
        return self._measured(store, command)["peak_mb"]

    track_peak_memory.unit = "MB"  # type: ignore[attr-defined]

    def _measured(self, store: str, command: str) -> dict[str, float]:
        found = measured(command, Path(store))
        if found["code"]:
            raise RuntimeError(f"dpbench {command} ended with {found['code']}")
        return found
