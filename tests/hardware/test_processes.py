"""Steady host times: threads that stay on a core, and memory that stays with the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from dpbench import models
from dpbench.engine import DataParallel, parallel_apply
from dpbench.engine.fast.pool import Pool
from dpbench.engine.parallel_apply import Spawn, Workers
from dpbench.hardware import processes
from dpbench.hardware.devices import open_devices, resolve
from dpbench.measure.worker import trial
from dpbench.records import Case
from tests.runs import TWO_STEPS

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(not processes.CORES, reason="threads cannot be bound to cores here")


def here() -> set[int]:
    return os.sched_getaffinity(0)


def core(number: int) -> set[int]:
    return {processes.CORES[number % len(processes.CORES)]}


class Where(nn.Module):
    """Tells in which thread, and on which cores, it ran."""

    def forward(self, x: torch.Tensor) -> tuple[int, set[int]]:
        return threading.get_ident(), here()


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, (0, 2, 1, 3)),
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, (0, 1, 2, 3)),
        ({}, (0, 1, 2, 3)),
    ],
)
def test_devices_get_physical_cores_before_they_share_one(
    siblings: dict[int, str], expected: tuple[int, ...], tmp_path: Path
) -> None:
    for number, text in siblings.items():
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    assert processes.spread([3, 2, 1, 0], tmp_path) == expected


@linux
def test_a_thread_stays_and_roams_again() -> None:
    with processes.staying(1):
        assert here() == core(1)
        processes.stay(len(processes.CORES))
        assert here() == core(0), "they are counted round"
    assert here() == set(processes.CORES)


@linux
@pytest.mark.parametrize("workers", [Spawn(), Pool()])
def test_replicas_of_a_case_work_on_a_core_each_and_the_caller_stays_where_it_is(
    workers: Workers,
) -> None:
    devices = open_devices("cpu", 2)
    for _ in range(2):
        found = parallel_apply(
            [Where(), Where()], [torch.ones(1)] * 2, None, devices, workers=workers
        )
        for i, (thread, where) in enumerate(found):
            assert where == (set(processes.CORES) if thread == threading.get_ident() else core(i))
    assert here() == set(processes.CORES)
    workers.close()


@linux
def test_a_users_own_threads_go_where_they_like() -> None:
    found = parallel_apply([Where()] * 2, [torch.ones(1)] * 2, None, resolve(["cpu", "cpu"]))
    assert [where for _, where in found] == 2 * [set(processes.CORES)]
    assert DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])(torch.ones(4, 2)).shape == (4, 2)
    assert here() == set(processes.CORES)


@linux
@pytest.mark.parametrize("strategy", ["single", "single_all_cores"])
def test_a_worker_stays_on_its_devices_core_unless_the_device_is_all_cores(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = core(0) if strategy == "single" else set(processes.CORES)
    seen: list[set[int]] = []
    load = models.load

    def watched(*arguments: object) -> models.Model:
        seen.append(here())
        return load(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(models, "load", watched)
    done = trial.run(Case(model="mlp", strategy=strategy, batch_size=4), TWO_STEPS, tmp_path)
    assert done.status == "ok"
    assert seen
    assert all(where == expected for where in seen)


FAULTS = """
import os, resource, sys, threading
from dpbench.hardware import processes
if sys.argv[1] == "keep":
    processes.keep()
import torch
def run(work):
    threads = len(os.listdir("/proc/self/task"))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    # until then, the next thread would get another arena
    while len(os.listdir("/proc/self/task")) > threads:
        os.sched_yield()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = []
        run(lambda: blocks.extend(torch.ones(2**18) for _ in range(16)))
        blocks.clear()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
faults()
print(faults(), resident())
processes.release()
print(resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_is_kept_is_not_faulted_in_anew() -> None:
    found = {}
    for mode in ("keep", "default"):
        command = [sys.executable, "-c", FAULTS, mode]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found[mode], resident, released = map(int, done.stdout.split())
        if mode == "keep":
            assert released < resident - 8 * 2**20, (
                "what is not in use is given back when asked for"
            )
    each = 16 * 2**20 // 4096  # pages of one of twenty rounds
    assert found["keep"] < each
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    by_itself = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)  # torch keeps it
    # with huge pages, a fault brings in 512 pages
    if not by_itself and not (huge.exists() and "[always]" in huge.read_text()):
        assert found["default"] > each


@linux
def test_a_thread_that_may_not_be_bound_runs_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError("planted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with processes.staying(0):
        assert here() == set(processes.CORES)


@linux
def test_what_a_user_has_bound_is_so_again() -> None:
    os.sched_setaffinity(0, core(1))
    try:
        with processes.staying(0):
            assert here() == core(0)
        assert here() == core(1)
    finally:
        os.sched_setaffinity(0, processes.CORES)
