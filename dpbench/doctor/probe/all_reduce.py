"""All-reduce: figures of all-reduces between the GPUs of this machine, one process per GPU.

A fresh process forks the ranks, because a process that has run tensor operations or initialised
CUDA must not fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from dpbench.doctor.probe.figures import Figure, line, typical
from dpbench.hardware import processes
from dpbench.measure import scratch
from dpbench.measure.ranks import run
from dpbench.records import files

KIB = 2**10
MIB = 2**20
SIZES = tuple(32 * KIB * 4**i for i in range(6))
"""The sizes of the all-reduces in bytes."""
COMPUTED_S = 1e-3
"""The seconds of computation before each all-reduce."""
WARM = 3
"""The number of untimed all-reduces of each size, which connect ranks and allocate pages."""
LIMIT_S = 60.0
START_S, POLL_S = 120.0, 0.05
"""The seconds in which the ranks must join, and the seconds between two looks at them."""
BEFORE_S = 2.0
"""The seconds before the end of the time limit at which a rank writes what it has recorded."""
RECORDER = {"TORCH_FR_BUFFER_SIZE": "1000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "1000"}
"""The number of entries of torch's flight recorder, by its new and its old name."""


class NoResult(RuntimeError):
    """The ranks failed, or took longer than `LIMIT_S`."""


def figures(
    ranks: int, backend: str = "nccl", sizes: Sequence[int] = SIZES, limit_s: float | None = None
) -> Iterator[Figure]:
    """Yield the start-up time and the rate of all-reduces.

    They are the intercept and the inverse slope of a line, fitted to the seconds over the bytes
    that each of n ranks sends in a ring all-reduce: 2 (n - 1) / n times the size. `sizes` are in
    bytes. `backend` is torch.distributed's: "nccl" between GPUs, "gloo" between CPU processes.
    Raises NoResult if a rank fails, or if the ranks take longer than `limit_s` (by default
    `LIMIT_S`) once all have joined; the error then says in which collective each was.
    """
    measured = _measured(ranks, backend, sizes, LIMIT_S if limit_s is None else limit_s)
    sent = 2 * (ranks - 1) / ranks
    start_s, per_byte = line([(sent * size, seconds) for size, seconds in measured])
    yield "all_reduce_start_s", start_s
    yield "all_reduce_bytes_per_s", 1 / per_byte


def _measured(
    ranks: int, backend: str, sizes: Sequence[int], limit_s: float
) -> list[tuple[int, float]]:
    with scratch.folder() as folder:
        module = ("-m", "dpbench.doctor.probe.all_reduce", str(os.getpid()), str(folder))
        with (
            (folder / "answer").open("wb") as answer,
            (folder / "errors").open("wb") as errors,
            subprocess.Popen(
                [sys.executable, *module, str(ranks), backend, json.dumps(sizes), str(limit_s)],
                env={**os.environ, **RECORDER},
                stdout=answer,
                stderr=errors,
            ) as process,
        ):
            if late := _late(process, folder, ranks, limit_s):
                process.kill()
                raise NoResult(f"the ranks did not {late}: {_stages(folder, ranks)}")
        if process.returncode:
            said = (folder / "errors").read_text(encoding="utf-8", errors="replace")
            raise NoResult(
                f"the probe's ranks ended with exit status {process.returncode}; the last line of"
                f" their error output is: {processes.last_line(said)}"
            )
        answer_line = (folder / "answer").read_text(encoding="utf-8").splitlines()[-1]
    return [(size, seconds) for size, seconds in json.loads(answer_line)]


def _late(process: subprocess.Popen[bytes], folder: Path, ranks: int, limit_s: float) -> str:
    """Wait for the end of a process, and return what the ranks did not do in time; "" if all.

    Until they have joined, each loads torch, so that the limit counts from then on.
    """
    for what, within_s in (("join", START_S), ("end", limit_s)):
        until_s = time.monotonic() + within_s
        while process.poll() is None:
            if what == "join" and all(_joined(folder, rank) for rank in range(ranks)):
                break
            if time.monotonic() > until_s:
                return f"{what} within {within_s:g} s"
            time.sleep(POLL_S)
    return ""


def _joined(folder: Path, rank: int) -> bool:
    return (folder / f"joined-{rank}").exists()


def _stages(folder: Path, ranks: int) -> str:
    """Return in which collective each rank was when the time was over, by torch's recorder."""
    last: dict[int, Collective] = {}
    stages = []
    for rank in range(ranks):
        path = folder / f"recorded-{rank}"
        if not _joined(folder, rank):
            stages.append(f"rank {rank} had not joined the others")
            continue
        entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if entries:
            last[rank] = Collective.of(entries[-1])
        elif entries is None:
            stages.append(f"rank {rank} had joined, and torch's flight recorder has nothing of it")
        else:
            stages.append(f"rank {rank} had joined and started no collective")
    newest = max(last.values(), key=lambda one: one.number, default=None)
    for rank, one in last.items():
        if newest is None or one.number == newest.number:
            stages.append(f"rank {rank} was in {one}")
        else:
            stages.append(
                f"rank {rank} had not entered collective {newest.number}, its last was {one}"
            )
    return "; ".join(stages)


@dataclass(frozen=True)
class Collective:
    """A collective in torch's flight recorder: its number, operation, sizes of inputs and state."""

    number: int
    operation: str
    sizes: Sequence[Sequence[int]]
    state: str

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Self:
        """Return the collective of an entry."""
        names = ("collective_seq_id", "profiling_name", "input_sizes", "state")
        return cls(*(entry[name] for name in names))

    def __str__(self) -> str:
        sizes = ", ".join(" x ".join(map(str, shape)) for shape in self.sizes)
        return f"collective {self.number}, {self.operation} of {sizes} elements ({self.state})"


def _record(folder: Path, backend: str, rank: int) -> None:
    """Write the entries of torch's flight recorder, None if this torch has none."""
    from torch._C import _distributed_c10d as recorder

    name = "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json"
    dump = getattr(recorder, name, None)
    entries = json.loads(dump()).get("entries", []) if dump else None
    files.write(folder / f"recorded-{rank}", json.dumps(entries))


def _rank(
    folder: Path, backend: str, sizes: Sequence[int], limit_s: float, rank: int
) -> list[tuple[int, float]]:
    """Return, for each size in bytes, the typical seconds of an all-reduce.

    Each follows a computation, as in a step, because an idle core responds later. It lasts from the
    last rank's start to the last rank's end. A rank that is still here shortly before the end of
    the time limit writes what torch's flight recorder has.
    """
    (folder / f"joined-{rank}").touch()
    record = threading.Timer(max(0.0, limit_s - BEFORE_S), _record, (folder, backend, rank))
    record.daemon = True
    record.start()
    torch.set_num_threads(1)
    processes.keep()
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    answer = []
    for size in sizes:
        value = torch.zeros(size // 4, device=device)
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
        answer.append((size, typical(seconds[WARM:])))
    record.cancel()
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


def _main(parent: str, folder: str, ranks: str, backend: str, sizes: str, limit_s: str) -> None:
    processes.die_with_parent(int(parent))
    work = partial(_rank, Path(folder), backend, json.loads(sizes), float(limit_s))
    answers = run(work, int(ranks), Path(folder), backend)
    print(json.dumps(answers[0]), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
