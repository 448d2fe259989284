"""Watching on GPUs: the same losses as without, CUDA events as the clock, and true labels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dpbench
from dpbench.observe import watching
from dpbench.records import Phase, Trial
from dpbench.records.observed import Observed
from dpbench.store import Store
from tests.marked import patience
from tests.observe.watched_scripts import run

HEAD = """
import torch
from torch import nn

import dpbench

LOSSES = []
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
inputs = torch.randn(20, 8, 16)
targets = torch.randint(0, 4, (20, 8))
"""
LOOP = """
module = MODULE
for x, y in zip(inputs, targets):
    optimizer.zero_grad()
    loss = criterion(module(x.cuda()), y.cuda())
    loss.backward()
    optimizer.step()
    LOSSES.append(loss.item())
"""
STEP = """
step = dpbench.TrainStep(net, criterion, lambda p: torch.optim.SGD(p, lr=0.1), IDS)
for x, y in zip(inputs, targets):
    LOSSES.append(step(x, y).item())
step.close()
"""
GRAPH = """
x, y = inputs[0].cuda(), targets[0].cuda()

def train():
    optimizer.zero_grad()
    loss = criterion(net(x), y)
    loss.backward()
    optimizer.step()
    return loss

aside = torch.cuda.Stream()
aside.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(aside):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(aside)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = train()
for new_x, new_y in zip(inputs, targets):
    x.copy_(new_x)
    y.copy_(new_y)
    graph.replay()
    LOSSES.append(loss.item())
"""
PINNED = """
data = torch.utils.data.TensorDataset(inputs.flatten(0, 1), targets.flatten())
for x, y in torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True):
    optimizer.zero_grad()
    loss = criterion(net(x.to("cuda", non_blocking=True)), y.to("cuda", non_blocking=True))
    loss.backward()
    optimizer.step()
    LOSSES.append(loss.item())
"""
FUNCTIONAL = """
weight = torch.zeros(16, 4, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for x, y in zip(inputs, targets):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(x.cuda() @ weight, y.cuda())
    loss.backward()
    optimizer.step()
    LOSSES.append(loss.item())
"""


def trained(folder: Path, source: str, store: Path | None = None) -> list[float]:
    """Run a script, watched if a store is given; return its losses."""
    file = folder / "train.py"
    losses = folder / "losses.pt"
    file.write_text(f"{HEAD}{source}\ntorch.save(LOSSES, {str(losses)!r})\n")
    if store is None:
        assert run(file) == 0
    else:
        with watching.watch(store, script="train.py", command="train") as result:
            assert run(file) == 0
        assert result.run_id, result.unknown
    found: list[float] = torch.load(losses)
    return found


def watched(folder: Path, source: str) -> tuple[Trial, Observed]:
    """Watch a script, which must have the losses that it has without; return its first trial.

    A long loop has several trials.
    """
    expected = trained(folder, source)
    assert len(expected) == 20
    store = folder / "store.db"
    assert trained(folder, source, store) == expected
    with Store.read(store) as opened:
        trial = opened.trials(opened.runs()[0].id)[0]
    facts = trial.facts.loop
    assert facts
    return trial, facts


def clocks(trial: Trial, *phases: Phase) -> dict[int, set[str]]:
    """Return the clocks of the spans of some phases, by device."""
    found: dict[int, set[str]] = {}
    for span in trial.spans:
        if span.phase in phases:
            found.setdefault(span.device, set()).add(span.clock)
    return found


COMPUTED = (Phase.FORWARD, Phase.BACKWARD)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "source", [LOOP.replace("MODULE", "net"), PINNED, FUNCTIONAL], ids=["plain", "pinned", "raw"]
)
def test_a_loop_on_one_gpu_is_timed_by_its_events(source: str, tmp_path: Path) -> None:
    trial, facts = watched(tmp_path, source)
    case = trial.case
    assert (case.device_kind, case.devices, case.optimizer) == ("cuda", 1, "sgd")
    assert clocks(trial, *COMPUTED) == {0: {"cuda_event"}}
    assert facts.pinned is (source is PINNED)
    assert case.loader == (0 if source is PINNED else -1)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("source", "wrapper", "placement"),
    [
        (LOOP.replace("MODULE", "nn.DataParallel(net, [0, 1])"), "DataParallel", "spread"),
        (STEP.replace("IDS", "[0, 1]"), "TrainStep", "spread"),
        (STEP.replace("IDS", "[0, 0]"), "TrainStep", "colocated"),
    ],
    ids=["torch", "step", "colocated"],
)
def test_a_loop_on_two_gpus_is_timed_by_the_events_of_both(
    source: str, wrapper: str, placement: str, tmp_path: Path
) -> None:
    trial, facts = watched(tmp_path, source)
    case = trial.case
    assert (case.device_kind, case.devices, case.optimizer) == ("cuda", 2, "sgd")
    assert (case.placement, facts.wrapper) == (placement, wrapper)
    assert clocks(trial, *COMPUTED) == {0: {"cuda_event"}, 1: {"cuda_event"}}
    gathers = (
        {0, 1} if wrapper == "DataParallel" else set()
    )  # by default, TrainStep gathers nothing
    assert {*clocks(trial, Phase.GATHER)} == gathers


@pytest.mark.gpu
def test_a_captured_step_is_timed_by_its_replays_from_outside(tmp_path: Path) -> None:
    trial, facts = watched(tmp_path, GRAPH)
    assert trial.case.device_kind == "cuda"
    assert any("torch.cuda.graph" in one.problem for one in facts.unknown)
    assert len(trial.steps) > 10  # a step is a replay; the others are in the next trial
    assert clocks(trial, *COMPUTED).keys() <= {0}
    last = max(span.step for span in trial.spans if span.phase is Phase.BACKWARD)
    assert last < 3, "no phase of the capture or a replay is recorded"


@pytest.mark.gpu
def test_the_newer_settings_of_float32_products_are_what_the_run_says(tmp_path: Path) -> None:
    newer = """
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "ieee"
"""
    back = """
torch.backends.cuda.matmul.fp32_precision = "ieee"
torch.backends.cudnn.conv.fp32_precision = "tf32"
"""
    trial, _ = watched(tmp_path, newer + LOOP.replace("MODULE", "net") + back)
    assert trial.case.precision == "tf32"
    assert trial.provenance["float32"] == {"matmul": "tf32", "convolution": "ieee"}


RANKS = """
import os

import torch
import torch.distributed
from torch import nn

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl")
torch.manual_seed(rank)
net = nn.parallel.DistributedDataParallel(nn.Linear(16, 4).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(20):
    x, y = torch.randn(8, 16).cuda(), torch.randint(0, 4, (8,)).cuda()
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.multi_gpu
@pytest.mark.slow
def test_all_ranks_of_ddp_with_nccl_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    watch = ["-m", "dpbench", "watch", "--store", "store.db", "train.py"]
    subprocess.run(
        [sys.executable, *launch, *watch],
        check=True,
        timeout=patience(120),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(dpbench.__file__).parents[1])},
    )
    with Store.read(tmp_path / "store.db") as opened:
        (run,) = opened.runs()
        trials = opened.trials(run.id)
    assert sum(len(one.steps) for one in trials) == 19
    case = trials[0].case
    assert (case.devices, case.batch_size, case.device_kind) == (2, 16, "cuda")
    assert case.traits.ranks
    assert clocks(trials[0], *COMPUTED) == {0: {"cuda_event"}, 1: {"cuda_event"}}
    facts = trials[0].facts.loop
    assert facts
    assert facts.wrapper == "DistributedDataParallel"
    assert {one.rank for one in facts.held} == {0, 1}
