"""Ours refuses the calls that torch's DataParallel refuses, in its words.

Each row also runs torch's own code; see torch_parallel.py. test_departures.py has the cases in
which torch is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpbench.engine
from tests.engine import rungs
from tests.engine.conformance import SCHEDULES
from tests.engine.oracle.torch_parallel import device, difference, error_of, oracle, ours, theirs

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _oracle() -> Iterator[None]:
    with oracle():
        yield


class Net(nn.Module):
    """A module out of a function of its inputs."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.linear = nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def rows(n: int = 8) -> Tensor:
    return torch.arange(4.0 * n).view(n, 4)


def call(wrap: Run, run: Run, *args: Any, ids: tuple[int, ...] = (0, 1), **kwargs: Any) -> Any:
    return wrap(Net(run).to(device(ids[0])), ids)(*args, **kwargs)


def raising(error: Callable[[], BaseException], *replicas: int) -> Run:
    def run(x: Tensor) -> Tensor:
        if x.get_device() in replicas:
            raise error()
        return x

    return run


# ---------------------------------------------------------------- errors of a replica


class Needy(Exception):
    """An exception that no message alone can build."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Named(Exception):
    """An exception that takes its message by name."""

    message = "given by name"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


REPLICA_ERRORS: dict[str, Run] = {
    "value error": raising(lambda: ValueError("too bad"), 0, 1),
    "key error": raising(lambda: KeyError("missing"), 0),
    "not in replica 0": raising(lambda: IndexError("later"), 1),
    "several arguments": raising(lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "why"), 1),
    "no message alone": raising(lambda: Needy("code", 3), 0),
    "by name": raising(lambda: Named("mine"), 1),
    "assertion": raising(AssertionError, 1),
    "stop iteration": raising(StopIteration, 0),
    "of a tensor on another device": lambda x: x + torch.ones(4, device="lazy:0"),
}


@pytest.mark.parametrize("schedule", rungs.params(SCHEDULES))
@pytest.mark.parametrize("name", REPLICA_ERRORS)
def test_errors_of_a_replica_are_torchs(name: str, schedule: str) -> None:
    mine = partial(ours, schedule=schedule)
    expected, found = (
        error_of(lambda w=w: call(w, REPLICA_ERRORS[name], rows())) for w in (theirs, mine)
    )  # type: ignore[misc]
    assert expected is not None
    assert found is not None
    assert found[0] is expected[0]
    heads, ends = zip(*(_head_and_end(message) for _, message in (expected, found)), strict=True)
    assert heads[0] == heads[1]
    assert heads[0].startswith("Caught ")
    assert ends[0] == ends[1]


def _head_and_end(message: str) -> tuple[str, str]:
    """Return a message's first two lines and its last one; between them are the frames."""
    lines = message.rstrip().splitlines()
    return "\n".join(lines[:2]), lines[-1]


def test_a_batch_norm_with_one_row_fails_alike() -> None:
    def run(wrap: Run) -> Any:
        return error_of(lambda: wrap(nn.BatchNorm1d(4).to("lazy:0"), (0, 1, 2))(rows(7)))

    expected, found = run(theirs), run(ours)
    assert found[0] is expected[0] is ValueError
    assert _head_and_end(found[1]) == _head_and_end(expected[1])
    assert "in replica 2 on device 2" in found[1]
    assert "Expected more than 1 value per channel when training" in found[1]


class Holder(nn.Module):
    """Children that a replica finds by a list or a bound method are those of replica 0."""

    def __init__(self, by_list: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept: Any = [self.linear] if by_list else self.method

    def method(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept[0](x) if isinstance(self.kept, list) else self.kept(x)


@pytest.mark.parametrize("by_list", [True, False])
def test_modules_in_lists_and_bound_methods_stay_on_the_first_device(by_list: bool) -> None:
    for wrap in (theirs, ours):
        found = error_of(lambda wrap=wrap: wrap(Holder(by_list).to("lazy:0"), (0, 1))(rows()))  # type: ignore[misc]
        assert found is not None
        assert found[0] is RuntimeError
        assert found[1].startswith("Caught RuntimeError in replica 1 on device 1.")
        assert "Expected all tensors to be on the same device" in found[1]


@pytest.mark.parametrize("schedule", rungs.params(SCHEDULES))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exit_in_a_replica_is_lost_by_torch_alone(schedule: str) -> None:
    run = raising(lambda: SystemExit(3), 1)
    assert error_of(lambda: call(theirs, run, rows())) == (KeyError, "1")
    assert error_of(lambda: call(partial(ours, schedule=schedule), run, rows())) == (
        SystemExit,
        "3",
    )


# ---------------------------------------------------------------- errors of the call


def misplaced(wrap: Run) -> Any:
    return wrap(nn.Linear(4, 4).to("lazy:1"), (0, 1))(rows())


def misplaced_buffer(wrap: Run) -> Any:
    net = nn.BatchNorm1d(4).to("lazy:0")
    net.running_var = net.running_var.to("lazy:1")  # type: ignore[union-attr]
    return wrap(net, (0, 1))(rows())


def transformed(transform: Run) -> Run:
    """Return a call under a torch.func transform, which autograd's own functions do not take."""
    return lambda wrap: transform(wrap(nn.Linear(4, 4).to("lazy:0"), (0, 1)))


def uninitialised(wrap: Run) -> Any:
    return wrap(nn.LazyLinear(4, device="lazy:0"), (0, 1))(rows())


SAME_ERROR: dict[str, Run] = {
    "module elsewhere": misplaced,
    "buffer elsewhere": misplaced_buffer,
    "no shapes yet": uninitialised,
    "torch.func.grad": transformed(
        lambda wrapped: torch.func.grad(lambda x: wrapped(x).sum())(rows())
    ),
    "torch.func.vmap": transformed(
        lambda wrapped: torch.func.vmap(wrapped)(torch.stack([rows(), rows()]))
    ),
    "torch.func.jvp": transformed(lambda wrapped: torch.func.jvp(wrapped, (rows(),), (rows(),))),
    "0-dim tensor": lambda wrap: call(wrap, lambda x: x, torch.tensor(1.0)),
    "dicts of unlike lengths": lambda wrap: call(
        wrap, lambda x: {"a": x} if x.get_device() else {"a": x, "b": x}, rows()
    ),
    "shapes that do not fit": lambda wrap: call(wrap, lambda x: x[:, : x.get_device() + 1], rows()),
    "a number": lambda wrap: call(wrap, lambda x: 1.5, rows()),
    "an object": lambda wrap: call(wrap, lambda x: object(), rows()),
}


@pytest.mark.parametrize("schedule", rungs.params(SCHEDULES))
@pytest.mark.parametrize("name", SAME_ERROR)
def test_errors_of_a_call_are_torchs(name: str, schedule: str) -> None:
    mine = partial(ours, schedule=schedule)
    expected, found = (error_of(lambda w=w: SAME_ERROR[name](w)) for w in (theirs, mine))  # type: ignore[misc]
    assert expected is not None
    assert found is not None
    assert found[0] is expected[0], f"{found} where torch has {expected}"
    if name not in ("a number", "an object"):  # torch: "'float' object is not iterable"
        assert expected[1].split("\n")[0] in found[1]


def test_a_wrapper_inside_a_plain_module() -> None:
    def outcome(wrap: Run) -> Any:
        torch.manual_seed(0)
        body, head = nn.Linear(4, 4).to("lazy:0"), nn.Linear(4, 2).to("lazy:0")
        net = nn.Sequential(wrap(body, (0, 1, 2)), head)
        output = net(rows(7))
        output.sum().backward()
        return [output, dict(net.state_dict()), [p.grad for p in net.parameters()]]

    assert difference(outcome(theirs), outcome(ours)) == ""


def test_gather_to_the_host() -> None:
    def outcome(wrap: Run, output_device: Any) -> Any:
        with pytest.warns(FutureWarning, match="-1"):
            return wrap(nn.Identity(), (0, 1), output_device=output_device)(rows())

    def mine(module: nn.Module, ids: Any, **options: Any) -> nn.Module:
        return dpbench.engine.DataParallel(module, [device(i) for i in ids], **options)

    expected = outcome(theirs, -1)
    assert expected.device.type == "cpu"
    assert difference(expected, outcome(mine, -1)) == ""
