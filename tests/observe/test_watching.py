"""Watched scripts of usual styles keep their results, and delays appear in the right phase."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, dataloader

import dpbench
from dpbench.cli import cli
from dpbench.hardware import nvml
from dpbench.observe import loop, moments, seams, trials, watching
from dpbench.observe.moments import GpuTimes
from dpbench.observe.recorder import Recorder, Seen
from dpbench.records import HOST, UNATTRIBUTED, Phase, Sample, ledger
from dpbench.records.observed import Held
from dpbench.records.registry import Parallelism, Role
from dpbench.store import Store
from tests.amounts import amounts
from tests.commands import ROOT
from tests.marked import patience
from tests.measure.test_clocks import Time, gpus
from tests.observe.watched_scripts import lent, run
from tests.recorded_nvml import recorded

HEAD = '''
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PLANT, WIDTH, STEPS = sys.argv[1], int(sys.argv[2]), 24
SLEPT = []


def plant(name):
    """Sleep in every second step if the delay is planted here; note the step and the seconds."""
    if name == PLANT and len(losses) % 2:
        at = time.perf_counter()
        time.sleep(0.006)
        SLEPT.append((len(losses), time.perf_counter() - at))


class Rows(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(n, 32, generator=g), torch.randint(10, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if i % 16 == 0:
            plant("dataset")
        return self.x[i], self.y[i]


def collate(rows):
    plant("collate")
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        plant("backward")
        return g


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        first, middle = nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(first, nn.ReLU(), middle, nn.Dropout(0.1), nn.Linear(WIDTH, 10))

    def forward(self, x):
        plant("forward")
        return Backward.apply(self.layers(x))


def criterion(output, target):
    plant("loss")
    return nn.functional.cross_entropy(output, target)


def batches(n=STEPS, workers=0):
    return DataLoader(Rows(16 * n), batch_size=16, collate_fn=collate, num_workers=workers)


torch.manual_seed(0)
net = Net()
losses = []
'''
TAIL = """
import random
WEIGHTS = [p.detach().clone() for p in net.parameters()]
RESULT = [losses, WEIGHTS, torch.get_rng_state(), random.getstate()]
"""
SCRIPTS = {
    "plain": (
        """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in batches():
    opt.zero_grad()
    loss = criterion(net(x), y)
    loss.backward()
    plant("clip-before")
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    losses.append(loss.item())
"""
    ),
    "workers": (
        """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in batches(workers=2):
    loss = criterion(net(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
"""
    ),
    "scaler": (
        """
opt, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cpu", init_scale=16.0)
for i, (x, y) in enumerate(batches(2 * STEPS)):
    with torch.autocast("cpu", torch.bfloat16):
        loss = criterion(net(x), y) / 2
    scaler.scale(loss * (float("inf") if i in (1, 21) else 1.0)).backward()
    if i % 2:
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
"""
    ),
    "gan": (
        """
other = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 32))
d, g = torch.optim.Adam(net.parameters()), torch.optim.Adam(other.parameters())
bce = nn.BCEWithLogitsLoss()
one, zero = torch.ones(16, 10), torch.zeros(16, 10)
for x, _ in batches():
    d.zero_grad()
    real = bce(net(x), one)
    real.backward()
    fake = other(torch.randn(16, 8))
    plant("forward-between")
    false = bce(net(fake.detach()), zero)
    false.backward()
    d.step()
    g.zero_grad()
    loss = bce(net(fake), one)
    loss.backward()
    g.step()
    losses.append(loss.item())
"""
    ),
    "lbfgs": (
        """
opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
for x, y in batches():
    def closure():
        opt.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        return loss
    losses.append(opt.step(closure).item())
"""
    ),
    "hand": (
        """
for _ in range(STEPS):
    x, y = torch.randn(16, 32), torch.randint(10, (16,))
    loss = criterion(net(x), y)
    loss.backward()
    with torch.no_grad():
        plant("update")
        for p in net.parameters():
            p -= 0.1 * p.grad
            p.grad.zero_()
    losses.append(loss.item())
"""
    ),
    "hand-loader": (
        """
for x, y in batches():
    loss = criterion(net(x), y)
    grads = torch.autograd.grad(loss, list(net.parameters()))
    for p, g in zip(net.parameters(), grads):
        p.data.add_(g, alpha=-0.1)
    plant("update")
    losses.append(float(loss.detach()))
"""
    ),
    "evaluated": (
        """
opt, ema, teacher = torch.optim.SGD(net.parameters(), lr=0.1), Net().eval(), Net().eval()
for epoch in range(4):
    net.train()
    for x, y in batches(STEPS // 4):
        with torch.no_grad():
            aim = teacher(x)
        loss = criterion(net(x), y) + nn.functional.mse_loss(net(x), aim)
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        for x, y in batches(3):
            criterion(net(x), y)
            time.sleep(0.01)
    torch.save(net.state_dict(), __import__("io").BytesIO())
    torch.save(net, __import__("io").BytesIO())
    losses.append(loss.item())
"""
    ),
    "engine": (
        """
import dpbench
net.layers[3].p = 0.0  # replicas draw random numbers in the order in which their threads run
wrapped = dpbench.DataParallel(net, device_ids=["cpu", "cpu"])
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in batches():
    opt.zero_grad()
    loss = criterion(wrapped(x), y)
    loss.backward()
    opt.step()
    losses.append(loss.item())
"""
    ),
    "graph": (
        """
opt = torch.optim.Adam(net.parameters())
data = Rows(64)
for _ in range(STEPS):
    net.train()
    opt.zero_grad()
    loss = nn.functional.nll_loss(net(data.x).log_softmax(1), data.y)
    loss.backward()
    opt.step()
    net.eval()
    with torch.no_grad():
        net(data.x).argmax(1)
        time.sleep(0.003)
        net(data.x).argmax(1)
    losses.append(loss.item())
"""
    ),
}
PHASES = {
    "dataset": "data",
    "collate": "data",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "clip-before": "clip",
    "update": "optimizer",
    "forward-between": UNATTRIBUTED,
}
PLANTS = {
    "plain": ("dataset", "collate", "forward", "loss", "backward", "clip-before"),
    "scaler": ("loss",),
    "gan": ("forward", "forward-between"),
    "lbfgs": ("forward", "loss", "backward"),
    "hand": ("update", "loss"),
    "hand-loader": ("update", "collate"),
    "graph": ("backward",),
}


def ran(folder: Path, name: str, plant: str = "", width: int = 16) -> dict[str, Any]:
    """Run a script, and return its variables."""
    file = folder / f"{name}.py"
    file.write_text(HEAD + SCRIPTS[name] + TAIL + "sys.modules['left'] = sys.modules['__main__']\n")
    assert run(file, [plant, str(width)]) == 0
    return vars(sys.modules.pop("left"))


def watched(
    folder: Path, name: str, plant: str = "", width: int = 16
) -> tuple[loop.WatchedLoop, Recorder, dict[str, Any]]:
    """Run a script under the seams.

    Return its loop, the recorder, and the variables of the script.
    """
    recorder = Recorder()
    with seams.installed(recorder):
        variables = ran(folder, name, plant, width)
    recorder.stop()
    return loop.of(recorder), recorder, variables


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_watched_script_has_the_same_results_and_covered_steps(name: str, tmp_path: Path) -> None:
    # the hand-over to threads, and the look for new modules, take long beside a small step
    width = {"engine": 2560, "evaluated": 2048}.get(name, 1024)
    found, recorder, variables = watched(tmp_path, name, width=width)
    expected = ran(tmp_path, name, width=width)
    losses, weights, *states = variables["RESULT"]
    losses_alone, weights_alone, *states_alone = expected["RESULT"]
    assert losses == losses_alone
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_alone, strict=True))
    assert torch.equal(states[0], states_alone[0])
    assert states[1] == states_alone[1]
    rows = ledger.Ledger(found.steps, found.spans).phases[3:]
    assert len(found.steps) == (22 if name == "hand" else 23)
    shares = statistics.quantiles(row[UNATTRIBUTED] / sum(row.values()) for row in rows)
    # the first steps of an epoch look for new modules, and these epochs have six steps
    assert shares[0 if name == "evaluated" else 1] < 0.05
    assert found.updates == {"scaler": 2, "gan": 3, "lbfgs": 3}.get(name, 1)
    assert found.skipped == (name == "scaler")
    assert found.loader_workers == {"hand": -1, "graph": -1, "workers": 2}.get(name, 0)
    assert (found.evaluation_s > 0.05) == (name in ("evaluated", "graph"))
    assert (found.checkpoint_s > 0) == (name == "evaluated")
    assert recorder.seen.devices == (2 if name == "engine" else 1)
    assert ({"scatter", "replicate", "gather"} <= {*rows[-1]}) == (name == "engine")
    assert not torch.nn.Module.__call__.__qualname__.startswith("Outermost")
    assert "item" not in vars(torch.Tensor)


def test_a_watched_step_calls_few_functions_of_dpbench(tmp_path: Path) -> None:
    calls, until = 0, list[int]()

    def called(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(
            str(Path(seams.__file__).parent)
        )

    recorder = Recorder()
    recorder.listeners.append(lambda _: until.append(calls))
    with seams.installed(recorder):
        sys.setprofile(called)
        try:
            ran(tmp_path, "plain")
        finally:
            sys.setprofile(None)
    steps = [after - before for before, after in pairwise(until[8:])]
    # clipping moves each norm, which a CPU build has no hook for
    moves = 7 if torch.version.cuda else 0
    assert statistics.mode(steps) <= 44 + moves


@pytest.mark.parametrize(
    ("name", "place"), [(n, p) for n, places in PLANTS.items() for p in places]
)
def test_a_planted_delay_appears_in_its_phase(name: str, place: str, tmp_path: Path) -> None:
    found, _, variables = watched(tmp_path, name, place)
    rows = ledger.Ledger(found.steps, found.spans).phases
    slept = Counter[int]()
    for step, seconds in variables["SLEPT"]:
        slept[step] += seconds
    # the first update has no step, and with it the first loss
    times = [(row.get(PHASES[place], 0.0), slept[at + 1]) for at, row in enumerate(rows)][3:]
    # the least disturbed steps, because other processes may use the cores
    without = min(seconds for seconds, planted in times if not planted)
    remains = min(seconds - planted for seconds, planted in times if planted)
    assert remains == pytest.approx(without, abs=max(0.3e-3, 0.1 * min(slept.values())))


def test_moments_on_gpus_are_placed_where_the_device_reaches_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a CUDA build of torch asks the driver, which may be absent
    monkeypatch.setattr(moments, "capturing", lambda: False)
    time = Time()
    (device,) = gpus(time, 1.0001)
    times = GpuTimes([device], time.now)
    waited = device.synchronised
    found = []
    for _ in range(3):
        device.launch(0.5)
        start = times.now()
        device.launch(2.0)
        found.append((start, times.now()))
        time.at += 0.1  # the host runs ahead
        times.updated()
    assert device.synchronised == waited
    times.stop()
    assert [float(start) for start, _ in found] == pytest.approx([1000, 1000.1, 1000.2])
    placed = [(times.seconds(start, 0), times.seconds(end, 0)) for start, end in found]
    for (start, end), expected in zip(placed, [1000.5, 1003, 1005.5], strict=True):
        assert (start, end) == pytest.approx((expected, expected + 2), abs=1e-3)


def test_long_loops_keep_a_sample_without_a_period() -> None:
    recorder = Recorder(spans=200)
    kept = []
    for number in range(20_000):
        if recorder.begin(Phase.FORWARD):
            recorder.end()
            kept.append(number)
        recorder.update(1, "SGD")
    assert kept[:100] == list(range(100))
    assert 300 < len(recorder.intervals) == len(kept) < 2000
    assert len(recorder.ends) == 20_000
    found = loop.of(recorder)
    assert len(found.steps) == len(kept) - 1
    assert all(step.seconds < 0.1 for step in found.steps)
    blocks = {number // 32 for number in kept if number > 1000}
    assert {block % 2 for block in blocks} == {0, 1}


def test_other_threads_and_forked_processes_record_nothing() -> None:
    recorder = Recorder()
    began: list[bool] = []
    thread = threading.Thread(target=lambda: began.append(recorder.begin(Phase.READ)))
    thread.start()
    thread.join()
    assert began == [False]
    pid = os.fork()
    if pid == 0:
        os._exit(int(recorder.begin(Phase.READ)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert recorder.begin(Phase.READ)


ENDS = {
    "pass": 0,
    "sys.exit(3)": 3,
    "sys.exit('bad luck')": 1,
    "raise RuntimeError('mine')": 1,
    "raise KeyboardInterrupt": 130,
}


@pytest.mark.parametrize("last", ENDS)
def test_a_script_that_ends_early_keeps_its_exit_code_and_its_steps(
    last: str,
    tmp_path: Path,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(
        HEAD
        + SCRIPTS["plain"]
        + f"assert __name__ == '__main__' and __file__ == sys.argv[0]\n{last}\n"
    )
    options = ["--store", str(path), "--name", "mine", "--tag", "a=b"]
    with lent():
        done = CliRunner().invoke(cli, ["watch", *options, str(file), "x", "16", "--name", "z"])
    assert done.exit_code == ENDS[last], done.output
    error = capfd.readouterr().err + done.output
    assert ("RuntimeError: mine" in error) == ("mine" in last)
    assert "dpbench/observe" not in error
    with Store.read(path) as opened:
        (run,) = opened.runs()
        found = opened.trials(run.id)
    assert run.naming.name == "mine"
    assert run.naming.tags == {"a": "b"}
    facts = found[0].facts.loop
    assert facts
    assert facts.command == f"dpbench watch {file} x 16 --name z"
    line = next(
        at for at, text in enumerate(file.read_text().splitlines(), 1) if "loss.item()" in text
    )
    assert facts.reads == {f"train.py:{line} item": sum(len(one.timed) for one in found)}
    assert found[0].case.traits.role is Role.OBSERVED
    assert found[0].case.loader == 0
    assert found[0].case.batch_size == 16
    assert sum(len(one.steps) for one in found) == 23
    assert found[0].provenance["model"]["parameter_tensors"] == 6


class Samplers:
    """Fake samplers without a process: each millisecond, they read the host and two GPUs."""

    pid: int | None = 1

    def __init__(self) -> None:
        self.started: list[tuple[list[int], int]] = []
        self.ended = 0

    @contextmanager
    def sampling(
        self, devices: list[int], output: Path, interval_s: float, root_pid: int
    ) -> Iterator[Samplers]:
        self.started.append((devices, root_pid))
        self.began_s = time.perf_counter()
        yield self
        self.ended += 1

    def cut(self, start_s: float, end_s: float) -> tuple[Sample, ...]:
        assert self.began_s < start_s < end_s
        times = [start_s + at * 1e-3 for at in range(int((end_s - start_s) * 1e3) + 1)]
        return tuple(
            Sample(at, device, "load_1m", device) for at in times for device in (HOST, 0, 1)
        )


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> Samplers:
    """Replace the samplers, so that watching in this process starts none."""
    found = Samplers()
    monkeypatch.setattr(watching.samplers, "sampling", found.sampling)
    return found


def block(path: Path) -> watching.WatchResult:
    """Train in a block of code that is watched; return the result."""
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dpbench.watch(path, name="block") as result:
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    assert not net._forward_pre_hooks
    return result


def test_samples_lie_in_the_steps_and_have_the_devices_of_the_loop(
    path: Path, beside: Samplers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(seams, "MOVES", ())  # a CPU build has no copies to watch
    visible = [{"index": 0, "uuid": "GPU-9b"}, {"index": 1, "uuid": "GPU-e4"}]
    describing = SimpleNamespace(describe=lambda: {"gpus": visible}, same_gpu=nvml.same_gpu)
    monkeypatch.setattr(watching, "nvml", describing)
    monkeypatch.setattr(trials, "gpus", lambda rank, seen: ((0, "e4"),))
    result = block(path)
    assert beside.started == [([0, 1], os.getpid())]
    assert beside.ended == 1
    with Store.read(path) as opened:
        found = opened.trials(result.run_id)
    samples = [sample for trial in found for sample in trial.samples]
    assert {(sample.device, sample.value) for sample in samples} == {
        (HOST, -1.0),
        (0, 1.0),
    }, "GPU 1 is device 0"
    for trial in found:
        assert all(
            trial.steps[0].start_s <= one.time_s <= trial.steps[-1].end_s for one in trial.samples
        )


def test_only_rank_0_samples_and_the_ranks_of_its_machine_are_no_foreign_load(
    tmp_path: Path, beside: Samplers
) -> None:
    def started(**environ: str) -> str:
        with ExitStack() as stack:
            return watching._sampling(
                stack, trials.WatchedRank.of(tmp_path / "s.db", environ)
            ).problem

    assert started(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2") == ""
    assert beside.started == []
    assert started(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2") == ""
    assert beside.started == [([], os.getppid())]
    for local in ({"LOCAL_WORLD_SIZE": "1"}, {}):
        assert "several machines" in started(RANK="0", WORLD_SIZE="2", **local)
    assert len(beside.started) == 1


def test_samplers_that_do_not_start_are_named_and_the_loop_is_stored(
    path: Path, beside: Samplers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no space left")

    beside.pid = None
    first = block(path)
    monkeypatch.setattr(watching.samplers, "sampling", refused)
    second = block(path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(seams, "MOVES", ())
    describing = SimpleNamespace(
        describe=mock.Mock(side_effect=LookupError("the order is unknown"))
    )
    monkeypatch.setattr(watching, "nvml", describing)
    monkeypatch.setattr(watching.samplers, "sampling", beside.sampling)
    beside.pid = 1
    third = block(path)
    with Store.read(path) as opened:
        for result, said in (
            (first, "because the samplers did not start"),
            (second, "no space left"),
            (third, "the order is unknown"),
        ):
            facts = opened.trials(result.run_id)[0].facts.loop
            assert facts
            assert [(one.steps, said in one.problem) for one in facts.unknown[-1:]] == [(0, True)]


def test_a_block_of_code_is_watched(path: Path) -> None:
    result = block(path)
    with Store.read(path) as opened:
        assert opened.runs()[0].id == result.run_id
        assert sum(len(one.steps) for one in opened.trials(result.run_id)) == 19


def test_processes_without_a_process_group_are_no_ranks_of_one_step(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank in "10":
        monkeypatch.setenv("RANK", rank)
        result = block(path)
        assert not path.with_name(f"{path.name}.ranks").exists()
    with Store.read(path) as opened:
        trials = opened.trials(result.run_id)
    case = trials[0].case
    assert (case.devices, case.batch_size, case.traits.parallelism) == (1, 2, Parallelism.NONE)
    facts = trials[0].facts.loop
    assert facts
    (told,) = (one for one in facts.unknown if "torch.distributed" in one.problem)
    assert (amounts(told.problem), told.steps) == (["2", "0"], 0)


def test_ranks_are_joined_by_their_updates_and_missing_ones_are_named(tmp_path: Path) -> None:
    recorder = Recorder()
    for _ in range(6):
        with recorder.mark(Phase.FORWARD, 0):
            pass
        recorder.update(1, "SGD")
    found = [loop.of(recorder, first=rank) for rank in (0, 1)]
    environ = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": "1"}
    seats = [trials.WatchedRank.of(tmp_path / "s.db", {**environ, "RANK": rank}) for rank in "01"]
    held = [
        (Held(rank=rank, gpu=0, uuid="GPU-1a6f", held_bytes=2**29 + rank, own=rank == 0),)
        for rank in (0, 1)
    ]
    short = replace(found[1], steps=found[1].steps[:3], numbers=found[1].numbers[:3])
    seats[1].write(trials.RankRecord(loop=short, held=held[1]))
    part, ranks = seats[0].joined(trials.RankRecord(loop=found[0], held=held[0]), deadline_s=0.1)
    whole = part.loop
    assert ranks == 2
    assert part.held == (*held[0], *held[1])
    assert len(whole.steps) == 3
    assert {span.device for span in whole.spans} == {HOST, 0, 1}
    silent, short_of = whole.unknown[-2:]
    assert amounts(silent.problem) == ["2", "0.1 s"], "the rank, and how long it was waited for"
    assert amounts(short_of.problem) == ["2", "0"], "its steps that are left out, and the rank"
    assert not [*tmp_path.iterdir()]


def test_the_gpus_of_a_rank_are_told_from_others_on_which_its_process_holds_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = recorded("h100_x4")
    first, _, third, _ = library.recording["uuids"]
    library.nvmlDeviceGetComputeRunningProcesses_v3 = lambda handle: [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory={first: 2**29, third: 2**33}.get(handle))
    ]
    # torch prints UUIDs without a prefix, and numbers the GPUs that CUDA_VISIBLE_DEVICES=2,0 shows
    # by their place in it
    monkeypatch.setattr(
        trials, "gpu_uuids", lambda ids: [[third, first][one].removeprefix("GPU-") for one in ids]
    )
    assert trials.held(1, Seen(device_ids=(0,)), library) == (
        Held(rank=1, gpu=0, uuid=first, held_bytes=2**29, own=False),
        Held(rank=1, gpu=2, uuid=third, held_bytes=2**33, own=True),
    )


def test_the_seams_are_those_of_the_tested_torch() -> None:
    where = f"the seams are tested with torch {seams.TESTED}, this is {torch.__version__}"
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"\ntorch=={seams.TESTED}." in constraints, "look at the seams of the new torch"
    assert hasattr(dataloader._BaseDataLoaderIter, "__next__"), where
    assert isinstance(iter(DataLoader([1])), dataloader._BaseDataLoaderIter), where
    assert hasattr(iter(DataLoader([1])), "_dataset"), where
    assert all(hasattr(torch.nn.functional, name) for name in seams.LOSSES), where
    assert all(hasattr(torch.Tensor, name) for name in (*seams.READS, *seams.MOVES)), where


LAUNCHED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind, result = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
if kind == "fsdp":
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
elif kind in ("ddp", "compiled"):
    net = nn.parallel.DistributedDataParallel(net)
    net = torch.compile(net, backend="eager") if kind == "compiled" else net
data = TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for x, y in DataLoader(data, batch_size=32, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
weights = [p.to_local() if kind == "fsdp" else p.detach() for p in net.parameters()]
torch.save([losses, weights, torch.get_rng_state()], f"{result}.{dist.get_rank()}")
dist.destroy_process_group()
"""


WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp": "FullyShardedDataParallel",
    "compiled": "",
    "none": "",
}
ALL = """
import os
import runpy
import sys

kinds, ports = (text.split(",") for text in sys.argv[1:])
for kind in kinds:
    for how in ("alone", "watched"):
        train = ["train.py", kind, f"{kind}-{how}"]
        watch = ["dpbench", "watch", "--store", f"{kind}.db", *train]
        sys.argv = train if how == "alone" else watch
        try:
            if how == "alone":
                runpy.run_path("train.py", run_name="__main__")
            else:
                runpy.run_module("dpbench", run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
        # torchrun's own store serves one group of ranks
        os.environ |= {"MASTER_PORT": ports.pop(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
"""
"""A rank that runs and watches every script, because each new process would load torch again."""


def test_the_ranks_of_torchrun_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED)
    (tmp_path / "all.py").write_text(ALL)
    with ExitStack() as stack:  # all at once, so that the ports differ
        free = [stack.enter_context(socket.socket()) for _ in range(2 * len(WRAPPERS))]
        for one in free:
            one.bind(("127.0.0.1", 0))
        ports = [str(one.getsockname()[1]) for one in free]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    subprocess.run(
        [*command, "all.py", ",".join(WRAPPERS), ",".join(ports)],
        check=True,
        timeout=patience(120),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(dpbench.__file__).parents[1])},
    )
    for kind, wrapper in WRAPPERS.items():
        for rank in range(2):
            alone, result = (
                torch.load(tmp_path / f"{kind}-{how}.{rank}") for how in ("alone", "watched")
            )
            assert [*map(torch.equal, tree_leaves(alone), tree_leaves(result))] == [True] * (
                16 + 4 + 1
            )
        with Store.read(tmp_path / f"{kind}.db") as opened:
            (run,) = opened.runs()
            found = opened.trials(run.id)
        assert sum(len(one.steps) for one in found) == 15
        assert found[0].case.devices == 2
        assert found[0].case.batch_size == 64
        assert found[0].case.traits.ranks
        spans = found[0].spans
        assert {span.device for span in spans if span.phase is Phase.BACKWARD} == {0, 1}
        assert ({span.device for span in spans if span.phase is Phase.REDUCE} == {0, 1}) == (
            kind == "ddp"
        )
        # the phases cover a step in which no other process held up the ranks
        assert (
            min(row[UNATTRIBUTED] / sum(row.values()) for row in found[0].ledger.phases[3:]) < 0.05
        )
        facts = found[0].facts.loop
        assert facts is not None
        assert facts.wrapper == wrapper
        # without a wrapper, it may be that nobody adds the gradients
        assert any("FSDP" in one.problem for one in facts.unknown) == (kind == "none")
