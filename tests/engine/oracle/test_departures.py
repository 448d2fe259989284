"""Cases in which torch.nn.DataParallel is wrong or fails, and the engine is right or refuses.

A refusal gives the reason.

Each case of `DEPARTURES` runs with torch's own code and with the engine, both on emulated devices.
The tables of docs/contract.md have the same cases.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.nets import Call
from tests.engine.oracle.torch_parallel import device, oracle, ours, theirs

ROOT = Path(__file__).parents[3]
Wrap = Callable[..., nn.Module]


@dataclass(frozen=True)
class Departure:
    """A case in which torch is wrong: `why`, and the outcomes in torch and in the engine.

    `run(wrap)` wraps a module and calls it. Its outcome is what it returns, or the type of its
    error.
    """

    why: str
    run: Callable[[Wrap], Any]
    torch: Any
    engine: Any


def rows(n: int = 8) -> Tensor:
    return torch.arange(4.0 * n).view(n, 4)


def call(wrap: Wrap, forward: Callable[..., Any], *args: Any, count: int = 2, **kwargs: Any) -> Any:
    """Call a wrapper of the module that `forward` defines, on `count` devices."""
    net = Call(lambda _, *inputs, **named: forward(*inputs, **named), linear=nn.Linear(4, 4))
    return wrap(net.to(device(0)), range(count))(*args, **kwargs)


def returns(forward: Callable[[Tensor], Any]) -> Callable[[Wrap], Any]:
    """Return a case: the output that two replicas with this forward give.

    A tensor counts as its rows.
    """

    def run(wrap: Wrap) -> Any:
        return counted(call(wrap, forward, rows()))

    return run


def counted(value: Any) -> Any:
    """Return an output with row counts in place of tensors, and no addresses in its texts."""
    if isinstance(value, Tensor):
        return len(value)
    if isinstance(value, dict):
        return {key: counted(part) for key, part in value.items()}
    if isinstance(value, Batch):
        return counted(value.x)
    return value.split(" at ")[0] if isinstance(value, str) else value


@dataclass
class Batch:
    """A batch in an object that torch does not know."""

    x: Tensor


def rows_of_a_dataclass(wrap: Wrap) -> set[int]:
    seen: set[int] = set()
    call(wrap, lambda x, batch: seen.add(len(batch.x)) or x, rows(), Batch(rows()))
    return seen


def seen_in_replicas(
    enter: Callable[[], AbstractContextManager[Any]], read: Callable[[], Any]
) -> Callable[[Wrap], set[Any]]:
    """Return a case: what `read` returns in the replicas if the caller has entered `enter()`."""

    def run(wrap: Wrap) -> set[Any]:
        seen: set[Any] = set()
        net = Call(lambda _, x: seen.add(read()) or x, linear=nn.Linear(4, 4)).to(device(0))
        wrapped, x = wrap(net, range(2)), rows()
        with enter():
            wrapped(x)
        return seen

    return run


@contextmanager
def bf16_autocast() -> Iterator[None]:
    """Turn autocast on for CUDA with another dtype than its default.

    The emulated devices take CUDA's place.
    """
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


class Passing(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def hooks() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def fails_in_replica_1(x: Tensor) -> Tensor:
    if x.get_device():
        raise SystemExit(3)
    return x


def nested(wrap: Wrap) -> int:
    return len(wrap(nn.Sequential(wrap(nn.Linear(4, 4).to(device(0)), range(2))), range(2))(rows()))


DEPARTURES: dict[str, Departure] = {
    "pass inputs of unequal length": Departure(
        "torch drops the rows of the longer input without a word",
        lambda wrap: len(call(wrap, lambda x, y: x, rows(8), rows(2), count=4)),
        4,
        ValueError,
    ),
    "pass nested inputs of unequal length": Departure(
        "torch drops the rows of the longer input without a word",
        lambda wrap: len(
            call(wrap, lambda given: given["x"], {"x": rows(8), "y": [rows(2)]}, count=4)
        ),
        4,
        ValueError,
    ),
    "pass inputs shorter than keywords": Departure(
        "torch runs replicas without inputs",
        lambda wrap: call(wrap, lambda x, d=None: x, rows(2), d=rows(8), count=4),
        TypeError,
        ValueError,
    ),
    "pass keywords shorter than inputs": Departure(
        "torch's error does not name the lengths",
        lambda wrap: call(wrap, lambda x, d=None: x, rows(8), d=rows(2), count=4),
        AssertionError,
        ValueError,
    ),
    "pass a dataclass instance with tensors": Departure(
        "in torch every replica gets the whole batch",
        rows_of_a_dataclass,
        {8},
        {4},
    ),
    "pass a defaultdict": Departure(
        "torch cannot build it again",
        lambda wrap: len(call(wrap, lambda given: given["x"], defaultdict(list, x=rows()))),
        TypeError,
        8,
    ),
    "return a text": Departure(
        "torch returns an iterator of its parts",
        returns(lambda x: "text"),
        "<map object",
        TypeError,
    ),
    "return a text inside the output": Departure(
        "torch returns an iterator of its parts",
        returns(lambda x: {"a": x, "b": "text"}),
        {"a": 8, "b": "<map object"},
        TypeError,
    ),
    "return None from replica 0 alone": Departure(
        "torch drops the other replicas' outputs",
        returns(lambda x: x if x.get_device() else None),
        None,
        ValueError,
    ),
    "return other keys in each replica": Departure(
        "torch's error is a bare key",
        returns(lambda x: {"a": x} if x.get_device() else {"b": x}),
        KeyError,
        ValueError,
    ),
    "return a dataclass instance": Departure(
        "torch cannot gather it",
        returns(Batch),
        TypeError,
        8,
    ),
    "return an output left on the host": Departure(
        "torch's error does not say which output",
        returns(lambda x: x.cpu()),
        AssertionError,
        TypeError,
    ),
    "set the dtype of autocast": Departure(
        "in torch bf16 becomes fp16 in the replicas",
        seen_in_replicas(bf16_autocast, lambda: torch.get_autocast_dtype("cuda")),
        {torch.float16},
        {torch.bfloat16},
    ),
    "use autocast of the CPU": Departure(
        "it is off in torch's replicas",
        seen_in_replicas(lambda: torch.autocast("cpu"), lambda: torch.is_autocast_enabled("cpu")),
        {False},
        {True},
    ),
    "use inference mode": Departure(
        "torch's replicas run under no_grad",
        seen_in_replicas(torch.inference_mode, torch.is_inference_mode_enabled),
        {False},
        {True},
    ),
    "set the default device": Departure(
        "torch's replicas lose it",
        seen_in_replicas(lambda: torch.device("meta"), lambda: torch.get_default_device().type),
        {"cpu"},
        {"meta"},
    ),
    "use hooks on saved tensors": Departure(
        "torch's replicas lose them",
        seen_in_replicas(hooks, has_hooks),
        {False},
        {True},
    ),
    "use function and dispatch modes": Departure(
        "torch's replicas lose them",
        seen_in_replicas(
            Passing, lambda: torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        ),
        {False},
        {True},
    ),
    "run backward in one thread": Departure(
        "torch's replicas lose the setting",
        seen_in_replicas(
            lambda: torch.autograd.set_multithreading_enabled(False),
            torch._C._is_multithreading_enabled,
        ),
        {True},
        {False},
    ),
    "exit in a replica": Departure(
        "torch loses it and raises KeyError: 1",
        returns(fails_in_replica_1),
        KeyError,
        SystemExit,
    ),
    "wrap a wrapper inside a wrapped module": Departure(
        "torch cuts the replica's rows again, for devices on which its weights are not",
        nested,
        RuntimeError,
        8,
    ),
}


@pytest.mark.parametrize("name", DEPARTURES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_torch_is_wrong_and_the_engine_is_right(name: str) -> None:
    departure = DEPARTURES[name]
    with oracle():
        assert outcome(departure, theirs) == departure.torch, departure.why
        assert outcome(departure, ours) == departure.engine


def outcome(departure: Departure, wrap: Wrap) -> Any:
    """Return what a case returns, or the type of its error."""
    try:
        return departure.run(wrap)
    except BaseException as error:
        return type(error)


def test_the_contract_has_these_cases() -> None:
    here = test_torch_is_wrong_and_the_engine_is_right.__name__
    tests = tomllib.loads((ROOT / "tests" / "project" / "contract.toml").read_text())
    text = (ROOT / "docs" / "contract.md").read_text()
    entries = re.findall(r"^\| (\w+) \| (.*?) \|", text, re.M)
    cases = [case for entry, case in entries if here in tests.get(entry, ())]
    assert sorted(cases) == sorted(DEPARTURES)
