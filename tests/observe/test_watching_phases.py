"""Watching: work outside the calls of modules, losses and optimizers.

Such work gets its phase, or is named with its place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.records import UNATTRIBUTED, Phase
from tests.amounts import amounts
from tests.observe.watched_scripts import phases_of, problems, watched


def test_torchs_average_of_the_weights_belongs_to_the_optimizer(tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        """
from torch.optim.swa_utils import AveragedModel


def mean(averages, values, number):
    time.sleep(0.002)
    torch._foreach_lerp_(averages, values, 0.1)


average = AveragedModel(net, multi_avg_fn=mean)
average.update_parameters(net)  # the first call only copies
for x, y in batches(12):
    step(x, y)
    average.update_parameters(net)
""",
    )
    rows = phases_of(found)
    assert len(rows) == 11
    assert all(0.002 < row[Phase.OPTIMIZER] < 0.0021 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


def test_an_average_of_the_weights_by_hand_is_in_no_phase_and_named_with_its_place(
    tmp_path: Path,
) -> None:
    found, _ = watched(
        tmp_path,
        """
average = [p.detach().clone() for p in net.parameters()]
for x, y in batches(12):
    step(x, y)
    with torch.no_grad():
        time.sleep(0.002)
        for e, p in zip(average, net.parameters()):
            e.mul_(0.9).add_(p, alpha=0.1)
""",
    )
    rows = phases_of(found)
    assert len(rows) == 11
    assert all(row[UNATTRIBUTED] > 0.002 and row[Phase.OPTIMIZER] < 0.1e-3 for row in rows)
    assert "last step and before data" in problems(found)


def test_steps_that_include_a_batch_that_the_script_skips_are_counted(tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        """
for i, (x, y) in enumerate(batches(24)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x * (float("nan") if i % 8 == 4 else 1.0)), y)
    if not torch.isfinite(loss):
        continue
    loss.backward()
    optimizer.step()
""",
    )
    assert len(found.steps) == 24 - 3 - 1
    (skipped,) = found.unknown
    assert (amounts(skipped.problem), skipped.steps) == (["3"], 0)


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
def test_batches_that_a_loop_without_a_loader_makes_within_a_step_are_data(
    kind: str, tmp_path: Path
) -> None:
    source, batches = UNLOADED[kind]
    found, _ = watched(
        tmp_path,
        f"""
def batch():
    time.sleep(0.002)
    return torch.ones(4, 8), torch.ones(4).long()

{source}""",
    )
    rows = phases_of(found)
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
    ((unknown,), none) = named
    assert (amounts(unknown.problem), unknown.steps, none) == (["5%"], 4, ())
    assert unknown.problem.endswith("after data and before optimizer")


OWN_CLIPPING = {
    "outside a block": (
        """
for x, y in batches(12):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        time.sleep(0.001)
        p.grad = p.grad.clamp(-1, 1)
    optimizer.step()
"""
    ),
    "gradients": (
        """
for x, y in batches(12):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        time.sleep(0.002)
        for p in net.parameters():
            p.grad.clamp_(-1, 1)
    optimizer.step()
"""
    ),
    "gradients and a step": (
        """
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
"""
    ),
}


@pytest.mark.parametrize("kind", OWN_CLIPPING)
def test_clipping_by_the_scripts_own_code_is_in_no_phase_and_named_with_its_place(
    kind: str, tmp_path: Path
) -> None:
    found, _ = watched(tmp_path, OWN_CLIPPING[kind])
    rows = phases_of(found)
    assert len(rows) == 11
    assert all(0.002 < row[UNATTRIBUTED] < 0.0021 for row in rows)
    assert "after backward and before optimizer" in problems(found)
