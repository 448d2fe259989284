"""One side of the gate: a server that imports one tree's dpbench and forks for each request.

    PYTHONPATH=TREE python benchmarks/scripts/gate_side.py

The server reads lines from stdin. `fork MODEL SCHEDULE` forks a process that trains a small model
on two logical CPU devices. This process answers `block N` with the wall and CPU seconds of N steps
as JSON, and ends at `end`. Forked processes differ less than started ones, because they share the
memory of the imported modules. The first line of the output has the facts on the environment. The
script uses only dpbench.TrainStep, the schedules' names and `provenance.collect`, so that it runs
with every version that has them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo
from torch import nn

import dpbench
from dpbench.hardware import provenance
from dpbench.records import schedule as schedules

Step = Callable[[], object]
WARMUP_STEPS = 20
_LOCAL = "workers=pool,replicas=persistent,loss=local,backward=local"
EARLIER = {
    "local": _LOCAL,
    "allreduce": f"{_LOCAL},update=each",
    "sharded": f"{_LOCAL},storage=flat,update=sharded,optimizer=flat",
}
"""The schedules for versions of dpbench in which a schedule was a combination of switches."""


def build(case: str) -> Step:
    """Return a function that runs one training step of a case."""
    kind, schedule = case.split()
    if hasattr(schedules, "SWITCHES"):
        schedule = EARLIER.get(schedule, schedule)
    torch.manual_seed(0)
    nets = {
        "mlp": (
            nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]),
            (32, 64),
        ),
        "convolutions": (
            nn.Sequential(
                nn.Conv2d(3, 8, 3),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 8, 3),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(8, 64),
            ),
            (8, 3, 16, 16),
        ),
    }
    model, shape = nets[kind]
    step = dpbench.TrainStep(
        model,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        ["cpu", "cpu"],
        schedule=schedule,
    )
    inputs, target = torch.randn(shape), torch.randint(64, shape[:1])
    return lambda: step(inputs, target)


def serve(case: str, read: Callable[[], list[str]]) -> None:
    """Answer the requests for blocks of one case on stdout until the request `end`."""
    torch.set_num_threads(1)
    step = build(case)
    for _ in range(WARMUP_STEPS):
        step()
    gc.collect()
    gc.freeze()
    gc.disable()
    answer({"ready": case})
    while (request := read())[0] == "block":
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(request[1])):
            step()
        answer({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})


def answer(found: dict[str, object]) -> None:
    """Write one line of JSON to stdout at once."""
    os.write(1, (json.dumps(found) + "\n").encode())


def main() -> None:
    """Fork a process for each line `fork MODEL SCHEDULE` of stdin, one after the other."""
    # unbuffered, because a forked process reads on where its parent stopped
    source = open(0, "rb", buffering=0)  # noqa: SIM115 (open until the process ends)

    def read() -> list[str]:
        return source.readline().decode().split(maxsplit=1) or ["end"]

    facts = {**provenance.collect(), "torch": torch.__version__}
    answer({"dpbench": str(Path(dpbench.__file__).parent), "facts": facts})
    while (request := read())[0] == "fork":
        if not (child := os.fork()):
            code = 1
            try:
                serve(request[1].strip(), read)
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"the process of {request[1].strip()!r} failed; its error is above")


if __name__ == "__main__":
    main()
