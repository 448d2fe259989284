"""All-reduce: figures of all-reduces between the GPUs of this machine, one process per GPU.

A fresh process forks the ranks, because a process that has run tensor operations or initialised
CUDA must not fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpbench.doctor.probe.figures import Figure, Timing, figure, last_line, lines, spread, timing
from dpbench.hardware import processes
from dpbench.measure import scratch
from dpbench.measure.ranks import run

KIB = 2**10
MIB = 2**20
SIZES = tuple(32 * KIB * 4**i for i in range(6))
"""The sizes of the all-reduces in bytes."""
COMPUTED_S = 1e-3
"""The seconds of computation before each all-reduce."""
WARM = 3
"""The number of untimed all-reduces of each size, which connect ranks and allocate pages."""
LIMIT_S = 60.0


class NoResult(RuntimeError):
    """The ranks failed, or took longer than `LIMIT_S`."""


def figures(
    ranks: int, backend: str = "nccl", sizes: Sequence[int] = SIZES, limit_s: float | None = None
) -> Iterator[Figure]:
    """Yield the seconds of an all-reduce of each size, and the start-up time and rate of a line.

    `sizes` are in bytes. `backend` is torch.distributed's: "nccl" between GPUs, "gloo" between CPU
    processes. The line is fitted to the seconds over the bytes that each of n ranks sends in a ring
    all-reduce: 2 (n - 1) / n times the size. Raises NoResult if a rank fails, or if the ranks take
    longer than `limit_s` (by default `LIMIT_S`); the error then says what each rank was doing.
    """
    timings = _measured(ranks, backend, sizes, LIMIT_S if limit_s is None else limit_s)
    for size, spent in timings:
        how = (
            f"all_reduce of {size // KIB} KiB between {ranks} ranks with {backend}, after "
            f"{COMPUTED_S * 1e3:g} ms of computation"
        )
        yield figure(f"all_reduce_{size // KIB}_kib_s", spent, how)
    sent = 2 * (ranks - 1) / ranks
    starts_s, per_bytes = lines([(sent * size, spent) for size, spent in timings])
    line = (
        "a line fitted to the seconds of an all_reduce as a function of the bytes that each rank"
        " sends"
    )
    yield spread("all_reduce_start_s", starts_s, f"the intercept of {line}")
    yield spread(
        "all_reduce_bytes_per_s",
        [1 / per_byte for per_byte in per_bytes],
        f"the inverse slope of {line}, or the best rate of any size if the seconds do not grow with"
        " the bytes",
    )


def _measured(
    ranks: int, backend: str, sizes: Sequence[int], limit_s: float
) -> list[tuple[int, Timing]]:
    with scratch.folder() as folder:
        command = [
            sys.executable,
            "-m",
            "dpbench.doctor.probe.all_reduce",
            str(os.getpid()),
            str(folder),
        ]
        try:
            done = subprocess.run(
                [*command, str(ranks), backend, json.dumps(sizes)],
                timeout=limit_s,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NoResult(
                f"the ranks did not end within {limit_s:g} s{_stages(folder, ranks)}"
            ) from None
    if done.returncode:
        raise NoResult(
            f"the probe's ranks ended with exit status {done.returncode}; the last line of their"
            f" error output is: {last_line(done.stderr)}"
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    return [(size, Timing(**seconds)) for size, seconds in answer]


def _stages(folder: Path, ranks: int) -> str:
    """Return what each rank was doing when the time was over, after a colon."""
    stages = []
    for rank in range(ranks):
        path = folder / f"stage-{rank}"
        stage = path.read_text(encoding="utf-8") if path.exists() else "had not started"
        stages.append(f"rank {rank} {stage}")
    return f": {'; '.join(stages)}"


def _rank(
    folder: Path, backend: str, sizes: Sequence[int], rank: int
) -> list[tuple[int, dict[str, float]]]:
    """Return, for each size in bytes, the fields of the `Timing` of an all-reduce.

    Each follows a computation, as in a step, because an idle core responds later. It lasts from the
    last rank's start to the last rank's end.
    """
    torch.set_num_threads(1)
    processes.keep()
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    answer = []
    for size in sizes:
        value = torch.zeros(size // 4, device=device)
        stage = f"was in the all-reduces of {size // KIB} KiB"
        (folder / f"stage-{rank}").write_text(stage, encoding="utf-8")
        times = []
        for _ in range(WARM + (20 if size <= MIB else 8)):
            _compute()
            begin = time.perf_counter()
            dist.all_reduce(value)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((begin, time.perf_counter()))
        by_step = zip(*_of_all_ranks(times), strict=True)
        seconds = [
            max(end for _, end in ranks) - max(begin for begin, _ in ranks) for ranks in by_step
        ]
        answer.append((size, asdict(timing(seconds[WARM:]))))
    (folder / f"stage-{rank}").write_text("had ended", encoding="utf-8")
    return answer


def _compute() -> None:
    square = torch.ones(64, 64)
    begin = time.perf_counter()
    while time.perf_counter() < begin + COMPUTED_S:
        torch.mm(square, square)


def _of_all_ranks(times: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, times)
    return every


def _main(parent: str, folder: str, ranks: str, backend: str, sizes: str) -> None:
    processes.die_with_parent(int(parent))
    work = partial(_rank, Path(folder), backend, json.loads(sizes))
    answers = run(work, int(ranks), Path(folder), backend)
    print(json.dumps(answers[0]), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
