"""Watching: steps in which an exception is raised are left out, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.amounts import amounts
from tests.observe.watched_scripts import phases_of, problems, watched

FAILS = """
class Fault(RuntimeError):
    pass


def fault(place):
    if place == PLACE and i % 6 == 4:
        time.sleep(0.05)
        raise Fault


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        fault("backward")
        return g


class Faulty(Net):
    def forward(self, x):
        fault("forward")
        return Backward.apply(super().forward(x))


class Loss(nn.CrossEntropyLoss):
    def forward(self, x, y):
        fault("loss")
        return super().forward(x, y)


class Descent(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        fault("optimizer")
        return super().step()


class Items(Rows):
    def __getitem__(self, at):
        if at % 4 == 0:
            fault("data")
        return super().__getitem__(at)


net, criterion = Faulty(), Loss()
optimizer = Descent(net.parameters(), lr=0.1)
i, batches = -1, iter(DataLoader(Items(96), batch_size=4))
while True:
    i += 1
    try:
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()
    except Fault:
        pass
    except StopIteration:
        break
"""


@pytest.mark.parametrize("place", ["data", "forward", "loss", "backward", "optimizer"])
def test_an_iteration_that_fails_and_is_caught_belongs_to_no_step(
    place: str, tmp_path: Path
) -> None:
    found, recorder = watched(tmp_path, f"PLACE = {place!r}\n{FAILS}")
    assert not recorder.open
    assert len(found.steps) == 24 - 4 - 1
    assert max(one.seconds for one in found.steps) < 1e-3
    rows = phases_of(found)
    assert {*map(frozenset, rows)} == {frozenset(rows[0])}, "each step has each phase"
    (ended,) = (one for one in found.unknown if "exception" in one.problem)
    assert amounts(ended.problem) == ["4"]
    assert "skipped" not in problems(found)
    assert all(one.steps == 0 for one in found.unknown)


@pytest.mark.parametrize("fresh", [False, True])
def test_an_optimizer_whose_first_step_fails_does_not_hide_the_steps_after_it(
    fresh: bool, tmp_path: Path
) -> None:
    found, recorder = watched(
        tmp_path,
        f"""
class Descent(torch.optim.SGD):
    def step(self, closure=None):
        if not seen:
            seen.append(1)
            raise RuntimeError
        return super().step()


seen = []
optimizer = Descent(net.parameters(), lr=0.1)
for x, y in batches(12):
    try:
        step(x, y)
    except RuntimeError:
        time.sleep(0.05)
        if {fresh}:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
""",
    )
    assert not recorder.open
    assert len(found.steps) == 10
    assert max(one.seconds for one in found.steps) < 1e-3


def test_steps_of_which_a_part_came_before_an_exception_are_left_out_and_counted(
    tmp_path: Path,
) -> None:
    found, _ = watched(
        tmp_path,
        """
class Faulty(Net):
    def forward(self, x):
        if i in (9, 21) and len(x) > 2:
            time.sleep(0.05)
            raise RuntimeError
        return super().forward(x)


net = Faulty()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for i, (x, y) in enumerate(batches(36)):
    try:
        nn.functional.cross_entropy(net(x), y).backward()
    except RuntimeError:  # the second batch of a step again, in halves
        nn.functional.cross_entropy(net(x[:2]), y[:2]).backward()
        nn.functional.cross_entropy(net(x[2:]), y[2:]).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    )
    assert len(found.steps) == 9 - 1 - 2
    assert found.numbers == (
        4,
        6,
        7,
        9,
        10,
        11,
    )  # until the first step, each backward may be an update by hand
    assert max(one.seconds for one in found.steps) < 1e-3
    (ended,) = (one for one in found.unknown if "exception" in one.problem)
    assert amounts(ended.problem) == ["2"]


def test_exceptions_in_most_steps_are_a_part_of_the_loop_that_is_not_understood(
    tmp_path: Path,
) -> None:
    found, _ = watched(
        tmp_path,
        """
class Enough(Exception):
    pass


class Features(Net):
    def forward(self, x):
        time.sleep(0.002)
        raise Enough


features = Features()
for x, y in batches(12):
    try:
        features(x)
    except Enough:
        pass
    step(x, y)
""",
    )
    assert len(found.steps) == 11
    assert min(one.seconds for one in found.steps) > 0.002
    assert [one.steps for one in found.unknown if "exception ends" in one.problem] == [11]
