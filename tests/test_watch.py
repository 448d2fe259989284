"""Watching: scripts in the styles that people use keep their results, and their delays appear in the right phase."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.observe import loop, script, seams
from dpbench.observe.recorder import Recorder
from dpbench.records import UNATTRIBUTED, ledger

HEAD = '''
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PLANT, WIDTH, STEPS = sys.argv[1], int(sys.argv[2]), 24
SLEPT = []


def plant(name):
    """Sleep in every second step if this is the place of the planted delay; note the step and the seconds."""
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
RESULT = [losses, [p.detach().clone() for p in net.parameters()], torch.get_rng_state(), random.getstate()]
"""
SCRIPTS = {
    "plain": """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in batches():
    opt.zero_grad()
    loss = criterion(net(x), y)
    loss.backward()
    plant("clip-before")
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    losses.append(loss.item())
""",
    "scaler": """
opt, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cpu", init_scale=16.0)
for i, (x, y) in enumerate(batches(2 * STEPS)):
    with torch.autocast("cpu", torch.bfloat16):
        loss = criterion(net(x), y) / 2
    scaler.scale(loss * (float("inf") if i == 21 else 1.0)).backward()
    if i % 2:
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
""",
    "gan": """
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
""",
    "lbfgs": """
opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
for x, y in batches():
    def closure():
        opt.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        return loss
    losses.append(opt.step(closure).item())
""",
    "hand": """
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
""",
    "hand-loader": """
for x, y in batches():
    loss = criterion(net(x), y)
    grads = torch.autograd.grad(loss, list(net.parameters()))
    for p, g in zip(net.parameters(), grads):
        p.data.add_(g, alpha=-0.1)
    plant("update")
    losses.append(float(loss.detach()))
""",
    "evaluated": """
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
""",
    "graph": """
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
""",
}
PHASES = {
    "dataset": "data", "collate": "data", "forward": "forward", "loss": "loss", "backward": "backward",
    "clip-before": "clip", "update": "optimizer", "forward-between": UNATTRIBUTED,
}  # fmt: skip
PLANTS = {
    "plain": ("dataset", "collate", "forward", "loss", "backward", "clip-before"), "scaler": ("loss",),
    "gan": ("forward", "forward-between"), "lbfgs": ("forward", "loss", "backward"), "hand": ("update", "loss"),
    "hand-loader": ("update", "collate"), "graph": ("backward",),
}  # fmt: skip


def ran(folder: Path, name: str, plant: str = "", width: int = 16) -> dict[str, Any]:
    """Run a script, and return its variables."""
    file = folder / f"{name}.py"
    file.write_text(HEAD + SCRIPTS[name] + TAIL + "sys.modules['left'] = sys.modules['__main__']\n")
    assert script.run(str(file), [plant, str(width)]) == 0
    return vars(sys.modules.pop("left"))


def watched(folder: Path, name: str, plant: str = "", width: int = 16) -> tuple[loop.Loop, Recorder, dict[str, Any]]:
    """Run a script under the seams; return its loop, the recorder, and the variables of the script."""
    recorder = Recorder()
    with seams.installed(recorder):
        variables = ran(folder, name, plant, width)
    recorder.stop()
    return loop.of(recorder), recorder, variables


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run the scripts with one thread of torch, as their steps are too small for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_watched_script_has_the_same_results_and_covered_steps(name: str, tmp_path: Path) -> None:
    found, recorder, variables = watched(tmp_path, name, width=1024)
    expected = ran(tmp_path, name, width=1024)
    losses, weights, *states = variables["RESULT"]
    losses_alone, weights_alone, *states_alone = expected["RESULT"]
    assert losses == losses_alone
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_alone, strict=True))
    assert torch.equal(states[0], states_alone[0])
    assert states[1] == states_alone[1]
    rows = ledger.Ledger(found.steps, found.spans).phases[3:]
    assert len(found.steps) == (22 if name == "hand" else 23)
    # the lower quartile, because other processes may use the cores
    assert statistics.quantiles(row[UNATTRIBUTED] / sum(row.values()) for row in rows)[0] < 0.05
    assert found.updates == {"scaler": 2, "gan": 3, "lbfgs": 3}.get(name, 1)
    assert recorder.seen.skipped == (name == "scaler")
    assert found.loader_workers == (-1 if name in ("hand", "graph") else 0)
    assert (found.evaluation_s > 0.05) == (name in ("evaluated", "graph"))
    assert (found.checkpoint_s > 0) == (name == "evaluated")
    assert not torch.nn.Module.__call__.__qualname__.startswith("Outermost")
    assert "item" not in vars(torch.Tensor)


@pytest.mark.parametrize(("name", "place"), [(n, p) for n, places in PLANTS.items() for p in places])
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
