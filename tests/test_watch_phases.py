"""Watching: work outside the calls of modules, losses and optimizers gets its phase, or is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.records import UNATTRIBUTED, Phase, ledger
from tests.watched_scripts import problems, watched

AVERAGES = {
    "by hand": ("""
average = [p.detach().clone() for p in net.parameters()]


def update():
    with torch.no_grad():
        for e, p in zip(average, net.parameters()):
            e.mul_(0.9).add_(p, alpha=0.1)
        time.sleep(0.002)
""", "update()"),
    "decorated": ("""
import copy

average = copy.deepcopy(net)


@torch.no_grad()
def update():
    time.sleep(0.002)
    for e, p in zip(average.state_dict().values(), net.state_dict().values()):
        e.lerp_(p, 0.1)
""", "update()"),
    "torch": ("""
from torch.optim.swa_utils import AveragedModel


def mean(averages, values, number):
    time.sleep(0.002)
    torch._foreach_lerp_(averages, values, 0.1)


average = AveragedModel(net, multi_avg_fn=mean)
average.update_parameters(net)  # the first call only copies
""", "average.update_parameters(net)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", AVERAGES)
def test_averaging_the_weights_after_the_step_belongs_to_the_optimizer(kind: str, tmp_path: Path) -> None:
    before, after = AVERAGES[kind]
    found, _ = watched(tmp_path, f"""{before}
for x, y in batches(12):
    step(x, y)
    {after}
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert len(rows) == 11
    assert all(0.002 < row[Phase.OPTIMIZER] < 0.0021 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


def test_a_block_without_gradients_that_writes_no_weights_is_not_the_optimizers(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
hits = torch.zeros(3)  # of the shape of the bias
for x, y in batches(12):
    step(x, y)
    with torch.no_grad():
        time.sleep(0.002)
        correct = (net.layer.weight @ x.T).argmax(0) == y
        hits += 1
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert all(row[UNATTRIBUTED] > 0.002 and row[Phase.OPTIMIZER] < 0.1e-3 for row in rows)


def test_steps_that_include_a_batch_that_the_script_skips_are_counted(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
for i, (x, y) in enumerate(batches(24)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x * (float("nan") if i % 8 == 4 else 1.0)), y)
    if not torch.isfinite(loss):
        continue
    loss.backward()
    optimizer.step()
""")  # fmt: skip
    assert len(found.steps) == 24 - 3 - 1
    assert "3 steps include a batch that the script skipped before its backward" in problems(found)
    assert [one.steps for one in found.unknown] == [0]


UNLOADED = {
    "the model returns its own loss": (
        """
class Own(Net):
    def forward(self, x, y):
        return nn.functional.cross_entropy(super().forward(x), y)


net = Own()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = batch()
for i in range(24):
    loss = net(x, y) / 2
    x, y = batch()
    loss.backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
""",
        2,
    ),
    "accumulation": (
        """
for i in range(24):
    x, y = batch()
    nn.functional.cross_entropy(net(x), y).backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
""",
        2,
    ),
    "an environment": (
        """
for i in range(12):
    chosen = []
    for _ in range(3):
        x, y = batch()
        chosen.append(net(x).log_softmax(1))
        chosen[-1].argmax().item()
    optimizer.zero_grad()
    torch.cat(chosen).mean().backward()
    optimizer.step()
""",
        3,
    ),
}


@pytest.mark.parametrize("kind", UNLOADED)
def test_batches_that_a_loop_without_a_loader_makes_within_a_step_are_data(kind: str, tmp_path: Path) -> None:
    source, batches = UNLOADED[kind]
    found, _ = watched(tmp_path, f"""
def batch():
    time.sleep(0.002)
    return torch.ones(4, 8), torch.ones(4).long()

{source}""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert len(rows) == 11
    assert [row[Phase.DATA] for row in rows] == pytest.approx([0.002 * batches] * 11, abs=0.1e-3)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


def test_time_in_no_phase_is_named_with_its_steps_and_its_place(tmp_path: Path) -> None:
    source = """
for i, (x, y) in enumerate(batches(24)):
    time.sleep({} if i % 4 == 0 else 0.0)
    step(x, y)
"""
    named = [watched(tmp_path, source.format(seconds))[0].unknown for seconds in (0.002, 0.0002)]
    assert [[(one.problem, one.steps) for one in unknown] for unknown in named] == [
        [("more than 5% of the time is in no phase, most of it after data and before optimizer", 4)], []
    ]  # fmt: skip


SHARPNESS = """
class Sharpness(torch.optim.SGD):
    @torch.no_grad()
    def first_step(self):
        time.sleep(0.002)
        for p in net.parameters():
            p.add_(p.grad, alpha=0.1)


optimizer = Sharpness(net.parameters(), lr=0.1)
for x, y in batches(12):
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.first_step()
    step(x, y)
"""
BLOCKS = {
    "sharpness": (SHARPNESS, Phase.OPTIMIZER),
    "gradients": ("""
for x, y in batches(12):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        time.sleep(0.002)
        for p in net.parameters():
            p.grad.clamp_(-1, 1)
    optimizer.step()
""", Phase.CLIP),
    "gradients and a step": ("""
for i, (x, y) in enumerate(batches(12)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        time.sleep(0.002)
        for p in net.parameters():
            p.grad.clamp_(-1, 1)
        if i > 2:
            optimizer.step()
    if i <= 2:
        optimizer.step()
""", Phase.CLIP),
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_without_gradients_between_backward_and_the_step_has_a_phase(kind: str, tmp_path: Path) -> None:
    source, phase = BLOCKS[kind]
    found, _ = watched(tmp_path, source)
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert len(rows) == 11
    assert all(0.002 < row[phase] < 0.0021 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


WRITES = {
    "same": "p.grad.mul_(0.5)",
    "detached": "p.grad.detach().copy_(p.grad / 2)",
    "new": "p.grad = p.grad.clamp(-1, 1)",
    "none": "p.grad.norm()",
}


@pytest.mark.parametrize("kind", WRITES)
def test_gradients_that_the_script_writes_between_backward_and_the_step_are_clipped(kind: str, tmp_path: Path) -> None:
    found, _ = watched(tmp_path, f"""
for x, y in batches(12):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        time.sleep(0.001)
        {WRITES[kind]}
    optimizer.step()
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert len(rows) == 11
    assert all(0.002 < row[UNATTRIBUTED if kind == "none" else Phase.CLIP] < 0.0021 for row in rows)
    assert ("no phase" in problems(found)) == (kind == "none")
