"""Compare `fastest`, `copying` and two ranks of DDP on gloo, on two logical CPU devices.

    python benchmarks/scripts/fastest_vs_ddp.py [--runs 5] [--nets wide,conv,tiny] [--out FOLDER]

Each run is a fresh process with OMP_NUM_THREADS=1 whose threads are not bound to cores. `fastest`
and `copying`, the default of TrainStep, train in that process. The ranks are its children, and
block on a pipe while these run. All sides take their warm-up steps, then blocks of steps in ABBA
order. The result of a run is the median over blocks of a ratio of seconds per step, DDP over
`fastest`: above 1, `fastest` is faster. The ratio of `copying` to `fastest` shows the cost of the
default. Three more ratios explain the result. DDP over a second DDP shows the noise. DDP over a DDP
that keeps freed memory, as `fastest` does, shows the effect of the allocator. This third DDP over
`fastest` shows the effect of the schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROWS = {"wide": 256, "conv": 64, "tiny": 16}
SCHEDULES = ("fastest", "copying")
RANKS = ("ddp", "ddp again", "ddp, memory kept")
SIDES = (*SCHEDULES, *RANKS)
RATIOS = {
    "copying / fastest": ("copying", "fastest"),
    "ddp / fastest": ("ddp", "fastest"),
    "ddp, memory kept / fastest": ("ddp, memory kept", "fastest"),
    "ddp / ddp, memory kept": ("ddp", "ddp, memory kept"),
    "ddp / ddp again": ("ddp", "ddp again"),
}
WARMUP, BLOCKS, SECONDS = 40, 12, 0.4
Step = Callable[[], Any]


def net(name: str) -> Any:
    """Return a wide MLP, a small convolutional network, or 150 tiny layers, with seeded weights."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "wide":
        return nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
    if name == "conv":
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))
    return nn.Sequential(
        *(layer for _ in range(150) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 10)
    )


def batch(name: str) -> tuple[Any, Any]:
    """Return the inputs and the class labels of the global batch."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = {"wide": (512,), "conv": (3, 32, 32), "tiny": (16,)}[name]
    return torch.randn(ROWS[name], *shape, generator=generator), torch.arange(ROWS[name]) % 10


def optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def timed(step: Step, count: int) -> float:
    """Return the mean seconds per step of `count` steps."""
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


def trained(step: Any, inputs: Any, target: Any, count: int) -> float:
    """Return the mean seconds per step of `count` steps of a TrainStep."""
    return timed(lambda: step(inputs, target), count)


def rank_of(rank: int, name: str, folder: str, keep: bool, pipe: Connection) -> None:
    """Run one rank: take the number of steps received, send the seconds per step; stop at 0."""
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from dpbench.hardware import processes

    if keep:
        processes.keep()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    model = DistributedDataParallel(net(name))
    stepper = optimizer(model.parameters())
    inputs, target = (one.chunk(2)[rank].clone() for one in batch(name))

    def step() -> None:
        stepper.zero_grad(set_to_none=True)
        cross_entropy(model(inputs), target).backward()
        stepper.step()

    while count := pipe.recv():
        dist.barrier()
        pipe.send(timed(step, count))
    dist.destroy_process_group()


class Ranks:
    """Two ranks of DistributedDataParallel that take steps on request."""

    def __init__(self, name: str, folder: str, *, keep: bool) -> None:
        context = get_context("spawn")
        Path(folder).mkdir(mode=0o700)
        self._pipes, self._processes = [], []
        for rank in range(2):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=rank_of, args=(rank, name, folder, keep, theirs), daemon=True
            )
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def __call__(self, count: int) -> float:
        """Take `count` steps; return the seconds per step of the slower rank."""
        for pipe in self._pipes:
            pipe.send(count)
        return max(pipe.recv() for pipe in self._pipes)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(0)
            process.join()


def one_run(name: str) -> dict[str, Any]:
    """Return each side's seconds per step in each block, and the schedule `fastest` selected."""
    import torch.nn.functional as F

    import dpbench

    with tempfile.TemporaryDirectory() as folder:
        others = [
            Ranks(name, f"{folder}/{i}", keep=side.endswith("kept")) for i, side in enumerate(RANKS)
        ]
        inputs, target = batch(name)
        with ExitStack() as open_steps:
            steps = [
                open_steps.enter_context(
                    dpbench.TrainStep(
                        net(name), F.cross_entropy, optimizer, ["cpu", "cpu"], schedule
                    )
                )
                for schedule in SCHEDULES
            ]
            trainings = [partial(trained, step, inputs, target) for step in steps]
            sides = dict(zip(SIDES, [*trainings, *others], strict=True))
            for side in sides.values():
                side(WARMUP)
            counts = {side: max(3, round(SECONDS / run(5))) for side, run in sides.items()}
            seconds: dict[str, list[float]] = {side: [] for side in SIDES}
            for block in range(BLOCKS):
                for side in SIDES if block % 2 == 0 else SIDES[::-1]:
                    seconds[side].append(sides[side](counts[side]))
            found = {"net": name, "seconds": seconds, "schedule": str(steps[0].schedule)}
        for ranks in others:
            ranks.close()
    return found


def ratios(run: dict[str, Any]) -> dict[str, float]:
    """Return a run's ratios, each the median over blocks."""
    return {
        title: statistics.median(
            a / b for a, b in zip(run["seconds"][top], run["seconds"][bottom], strict=True)
        )
        for title, (top, bottom) in RATIOS.items()
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of each net's ratios: the median, and the value of every run."""
    lines = ["| net | ratio | median of runs | runs |", "|---|---|---|---|"]
    for name in dict.fromkeys(run["net"] for run in runs):
        found = [ratios(run) for run in runs if run["net"] == name]
        for title in RATIOS:
            each = sorted(one[title] for one in found)
            lines.append(
                f"| {name} | {title} | {statistics.median(each):.3f} |"
                f" {', '.join(f'{one:.2f}' for one in each)} |"
            )
    below = sum(ratios(run)["ddp / fastest"] < 0.97 for run in runs)
    return "\n".join(
        [*lines, "", f"{below} of {len(runs)} runs have `fastest` more than 3 % slower than DDP."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--nets", default=",".join(ROWS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=list(ROWS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one_run(given.one)))
        return
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    runs = []
    for _ in range(given.runs):
        for name in given.nets.split(","):
            command = [sys.executable, __file__, "--one", name]
            answer = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            )
            runs.append(json.loads(answer.stdout.splitlines()[-1]))
            print(
                name,
                runs[-1]["schedule"],
                {k: round(v, 3) for k, v in ratios(runs[-1]).items()},
                flush=True,
            )
    print(table(runs))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
        (given.out / "table.md").write_text(table(runs) + "\n")


if __name__ == "__main__":
    main()
