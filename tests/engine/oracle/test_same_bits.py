"""Row by row, torch's DataParallel and ours leave the same bits on the same emulated devices."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpbench.engine
from dpbench.engine import TrainStep
from tests.engine import rungs
from tests.engine.conformance import SCHEDULES
from tests.engine.nets import NETS, Call, Case, mlp, rows
from tests.engine.oracle.torch_parallel import (
    device,
    difference,
    observe,
    oracle,
    ours,
    theirs,
)

SPLITS = [((0,), 8), ((0, 1), 8), ((0, 1, 2), 7), ((0, 1, 2, 3), 9), ((0, 1, 2, 3), 2)]


@pytest.fixture(autouse=True)
def _oracle() -> Iterator[None]:
    with oracle():
        yield


@pytest.mark.parametrize(("ids", "length"), SPLITS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_forward_and_backward(name: str, ids: tuple[int, ...], length: int) -> None:
    make, batch = NETS[name]
    x = batch(length)
    if name == "old weight norm" and len(ids) == 1:
        pytest.skip(
            "a wrapper with one device moves its module, and torch cannot swap tensors that have a"
            " history"
        )
    expected = observe(theirs, make, [x], ids=ids)
    assert difference(expected, observe(ours, make, [x], ids=ids)) == ""


@pytest.fixture(scope="module", autouse=True)
def _forget_tensors_on_devices() -> Iterator[None]:
    """Let no tensor of `two_calls` stay on an emulated device, whose bytes other tests count."""
    yield
    two_calls.cache_clear()


@functools.cache
def two_calls(name: str) -> tuple[Tensor, dict[str, Any]]:
    """Return a batch of a net, and the state after two calls of torch's wrapper."""
    torch.manual_seed(0)
    make, batch = NETS[name]
    x = batch(7)
    return x, observe(theirs, make, [x], calls=2)


@pytest.mark.parametrize("schedule", rungs.params(SCHEDULES[1:]))
@pytest.mark.parametrize("name", NETS)
def test_two_calls_on_every_schedule(name: str, schedule: str) -> None:
    x, expected = two_calls(name)
    assert difference(expected, observe(ours, NETS[name][0], [x], calls=2, schedule=schedule)) == ""


@pytest.mark.parametrize("home", ["lazy:0", "lazy:2"])
def test_inputs_come_from_anywhere(home: str) -> None:
    x = rows(7)
    assert (
        difference(observe(theirs, mlp, [x], home=home), observe(ours, mlp, [x], home=home)) == ""
    )


@pytest.mark.parametrize("ids", [(1, 0), (2, 0, 3), (1,)], ids=str)
def test_devices_in_any_order(ids: tuple[int, ...]) -> None:
    x = rows(7)
    assert difference(observe(theirs, mlp, [x], ids=ids), observe(ours, mlp, [x], ids=ids)) == ""


@pytest.mark.parametrize("output_device", [0, 1, 3])
def test_output_device(output_device: int) -> None:
    x, options = rows(7), {"output_device": output_device}
    expected = observe(theirs, mlp, [x], **options)
    assert expected["output"].device == device(output_device)
    assert difference(expected, observe(ours, mlp, [x], **options)) == ""


def test_split_along_another_dimension() -> None:
    def make() -> nn.Module:
        return Call(lambda m, x, y: m.a(x.t()).t() + y, a=nn.Linear(3, 4))

    inputs = [torch.randn(3, 7, requires_grad=True), torch.randn(1, 7)]
    assert (
        difference(observe(theirs, make, inputs, dim=1), observe(ours, make, inputs, dim=1)) == ""
    )


# ---------------------------------------------------------------- what goes in and comes out


class Pair(NamedTuple):
    left: Any
    right: Any


OUTPUTS: dict[str, Callable[..., Any]] = {
    "tuple": lambda m, x: (x, x * 2),
    "list": lambda m, x: [x, [x + 1]],
    "dict": lambda m, x: {"a": x, "b": [x * 2, (x,)]},
    "ordered dict": lambda m, x: OrderedDict(b=x, a=x * 2),
    "named tuple": lambda m, x: Pair(x, Pair(x * 2, None)),
    "none": lambda m, x: None,
    "nothing inside": lambda m, x: (x, None, [], {}, ()),
    "scalar": lambda m, x: x.sum(),
    "scalars": lambda m, x: {"a": x.sum(), "b": [x.mean(), x]},
    "integers": lambda m, x: (x.sum(1).long(), x > 0),
    "complex": lambda m, x: torch.complex(x, x),
    "empty": lambda m, x: x[:0],
    "the input": lambda m, x: x,
    "more rows than came in": lambda m, x: torch.cat([x, x]),
    "as many rows as the replica's number": lambda m, x: x[: x.get_device() + 1],
}


@pytest.mark.parametrize(("ids", "length"), SPLITS, ids=str)
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str, ids: tuple[int, ...], length: int) -> None:
    x, make = rows(length), lambda: Call(OUTPUTS[name])
    expected = observe(theirs, make, [x], ids=ids)
    assert difference(expected, observe(ours, make, [x], ids=ids)) == ""


def test_scalars_are_gathered_with_torchs_warning() -> None:
    found = observe(ours, lambda: Call(OUTPUTS["scalar"]), [rows(6)])
    assert found["output"].shape == (3,)
    assert [category for category, _ in found["warnings"]] == [UserWarning]


def deep(n: int) -> dict[str, Any]:
    return {
        "a": (rows(n), [rows(n)]),
        "b": Pair(rows(n), "text"),
        "c": 3,
        "d": None,
        "e": {},
        "f": {1, 2},
    }


@pytest.mark.parametrize(("ids", "length"), SPLITS, ids=str)
def test_inputs_of_every_kind(ids: tuple[int, ...], length: int) -> None:
    def run(m: Any, d: Any, *rest: Any, k: Tensor, flag: bool) -> Tensor:
        assert d["b"].right == "text"
        assert [d[key] for key in "cdef"] == [3, None, {}, {1, 2}]
        assert type(d["b"]) is Pair
        assert type(d["a"][1]) is list
        assert flag
        return m.a(d["a"][0] + d["a"][1][0] * d["b"].left) + k * rest[0]

    inputs, kwargs = (
        [deep(length), rows(length)[:, :1].detach()],
        {"k": rows(length)[:, :5].detach(), "flag": True},
    )
    make = lambda: Call(run, a=nn.Linear(12, 5))  # noqa: E731
    expected = observe(theirs, make, inputs, kwargs, ids=ids)
    assert difference(expected, observe(ours, make, inputs, kwargs, ids=ids)) == ""


@pytest.mark.parametrize("ids", [(0,), (0, 1, 2)], ids=str)
def test_a_call_without_inputs_runs_one_replica(ids: tuple[int, ...]) -> None:
    calls: list[Any] = []
    make = lambda: Call(lambda m: (calls.append(1), m.w * 2)[1], w=nn.Parameter(torch.ones(3)))  # noqa: E731
    assert difference(observe(theirs, make, [], ids=ids), observe(ours, make, [], ids=ids)) == ""
    assert len(calls) == 2


def test_keywords_alone() -> None:
    make, kwargs = lambda: Call(lambda m, *, x: m.a(x), a=nn.Linear(12, 5)), {"x": rows(7)}
    assert difference(observe(theirs, make, [], kwargs), observe(ours, make, [], kwargs)) == ""


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize(
    "name", ["mlp", "conv", "lstm", "transformer", "buffers", "old spectral norm"]
)
@pytest.mark.parametrize("mode", ["eval", "no_grad", "eval no_grad", "eval inference"])
def test_modes(name: str, mode: str) -> None:
    check_modes(name, mode)


@pytest.mark.parametrize("schedule", rungs.params(SCHEDULES[1:]))
@pytest.mark.parametrize("name", ["conv", "buffers"])
@pytest.mark.parametrize("mode", ["eval", "no_grad", "eval no_grad"])
def test_modes_on_every_schedule(name: str, mode: str, schedule: str) -> None:
    check_modes(name, mode, schedule)


def check_modes(name: str, mode: str, schedule: str = "reference") -> None:
    if mode == "eval inference" and name not in ("mlp", "conv"):
        pytest.skip(
            "torch's replicas run in no_grad instead, where torch multiplies in another order"
        )
    make, batch = NETS[name]
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    during = modes.get(mode.rsplit(maxsplit=1)[-1], contextlib.nullcontext)
    made = (lambda: make().eval()) if "eval" in mode else make
    x = batch(7).detach()
    expected = observe(theirs, made, [x], during=during)
    assert difference(expected, observe(ours, made, [x], during=during, schedule=schedule)) == ""


@pytest.mark.parametrize("schedule", rungs.params(SCHEDULES))
def test_second_derivatives(schedule: str) -> None:
    def run(wrap: Callable[..., nn.Module]) -> list[Tensor | None]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 2)).to("lazy:0")
        x = torch.randn(7, 12, device="lazy:0", requires_grad=True)
        (slope,) = torch.autograd.grad(wrap(net, (0, 1, 2))(x).pow(2).sum(), x, create_graph=True)
        slopes = torch.autograd.grad(
            wrap(net, (0, 1, 2))(x).pow(2).sum(), list(net.parameters()), create_graph=True
        )
        (slope.pow(2).sum() + sum(s.pow(2).sum() for s in slopes)).backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    assert difference(run(theirs), run(partial(ours, schedule=schedule))) == ""


def test_the_functional_form() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 12)
    for no_grad in (False, True):
        found = []
        for verb in (nn.parallel.data_parallel, dpbench.engine.data_parallel):
            torch.manual_seed(0)
            net = conv_free().to("lazy:0")
            ids: list[Any] = (
                [0, 1, 2] if verb is nn.parallel.data_parallel else [device(i) for i in range(3)]
            )
            at: Any = 1 if verb is nn.parallel.data_parallel else device(1)
            with torch.set_grad_enabled(not no_grad):
                output = verb(net, x, ids, at, 0, {"y": x})
            if not no_grad:
                output.sum().backward()
            found.append([output, [p.grad for p in net.parameters()]])
        assert difference(*found) == ""


def conv_free() -> nn.Module:
    return Call(lambda m, x, y: m.a(x) + m.b(y), a=nn.Linear(12, 5), b=nn.Linear(12, 5))


# ---------------------------------------------------------------- replicas


@pytest.mark.parametrize("schedule", rungs.params(SCHEDULES))
def test_hooks_run_as_often_and_where(schedule: str) -> None:
    def run(wrap: Callable[..., nn.Module]) -> Counter[Any]:
        counts: Counter[Any] = Counter()
        lock = threading.Lock()

        def count(*key: Any) -> None:
            with lock:
                counts[key] += 1

        net = mlp().to("lazy:0")
        net[0].register_forward_pre_hook(lambda m, i: count("before", i[0].device))
        net[0].register_forward_hook(lambda m, i, o: count("after", o.device))
        net[2].register_full_backward_hook(lambda m, i, o: count("backward", o[0].device))
        net[0].weight.register_hook(lambda g: count("gradient", g.device))
        net[0].weight.register_post_accumulate_grad_hook(lambda p: count("accumulated", p.device))
        wrap(net, (0, 1, 2))(torch.randn(7, 12)).sum().backward()
        return counts

    counts = run(partial(ours, schedule=schedule))
    assert counts == run(theirs)
    assert len(counts) == 11


@pytest.mark.parametrize("schedule", rungs.params(SCHEDULES))
def test_what_a_replica_sees_of_itself(schedule: str) -> None:
    def run(wrap: Callable[..., nn.Module], grad: bool) -> dict[int, Any]:
        seen: dict[int, Any] = {}

        def look(m: Any, x: Tensor) -> Tensor:
            weight = m.a.weight
            seen[x.get_device()] = [
                len(list(m.parameters())),
                [n for n, _ in m.named_buffers()],
                isinstance(weight, nn.Parameter),
                weight.is_leaf,
                weight.requires_grad,
                hasattr(weight, "tag"),
                list(m.a._former_parameters),
                m._is_replica,
                m.training,
                weight is m.b.weight,
                weight.device,
                m.bn.running_mean.device,
                not spawned or threading.current_thread() is threading.main_thread(),
                torch.is_grad_enabled(),
            ]
            m.count += 1
            m.log.append(1)
            m.added = x
            return m.bn(m.b(m.a(x)))

        net = Call(
            look, a=nn.Linear(12, 12), b=nn.Linear(12, 12), bn=nn.BatchNorm1d(12), count=0, log=[]
        )
        net.b.weight = net.a.weight
        net.to("lazy:0")
        net.a.weight.tag = "lost"
        with torch.set_grad_enabled(grad):
            wrap(net, (0, 1, 2))(torch.randn(9, 12))
        return {**seen, 9: [net.count, len(net.log), hasattr(net, "added")]}

    # others run replica 0 in the caller's thread
    spawned = schedule == "reference"
    for grad in (True, False):
        assert run(partial(ours, schedule=schedule), grad) == run(theirs, grad)


def test_objects_are_shared_and_unknown_ones_too() -> None:
    def run(wrap: Callable[..., nn.Module]) -> list[Any]:
        seen: list[Any] = []
        thing, net = object(), Call(lambda m, x, *others: seen.append([id(o) for o in others]) or x)
        others = (thing, "text", {1}, None, (), [], {}, 1.5)
        wrap(net, (0, 1))(torch.randn(4, 2), *others)
        return [[a == id(o) for a, o in zip(one, others, strict=True)] for one in seen]

    assert run(ours) == run(theirs) == [[True] * 8] * 2


# ---------------------------------------------------------------- training

TRAINED: dict[str, Case] = {n: NETS[n] for n in ("mlp", "conv", "lstm", "transformer")}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}


def batches(
    case: Case, ids: Sequence[int], where: str = "lazy:0"
) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(5):
        n = 3 * len(ids) - 2
        yield case[1](n).detach(), torch.randint(5, (n,)).to(where)


def train(
    wrap: Callable[..., nn.Module],
    case: Case,
    optimizer: str,
    ids: Sequence[int],
    where: str = "lazy:0",
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = case[0]().to(where)
    stepper, wrapped = OPTIMIZERS[optimizer](net.parameters()), wrap(net, ids)
    for x, y in batches(case, ids, where):
        stepper.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        stepper.step()
    return dict(net.state_dict())


def train_step(case: Case, optimizer: str, ids: Sequence[int]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = case[0]().to("lazy:0")
    with TrainStep(
        net, F.cross_entropy, OPTIMIZERS[optimizer], [device(i) for i in ids], "reference"
    ) as step:
        for x, y in batches(case, ids):
            step(x, y)
    return dict(net.state_dict())


RECIPES = [
    *itertools.product(("mlp", "conv"), OPTIMIZERS, [(0, 1), (0, 1, 2, 3)]),
    ("lstm", "sgd", (0, 1)),  # emulated recurrent nets take seconds
    ("transformer", "adam", (0, 1, 2, 3)),
]


@pytest.mark.parametrize(("name", "optimizer", "ids"), RECIPES, ids=str)
def test_five_steps_give_the_same_bits(name: str, optimizer: str, ids: tuple[int, ...]) -> None:
    case = TRAINED[name]
    expected = train(theirs, case, optimizer, ids)
    assert difference(expected, train(ours, case, optimizer, ids)) == ""
    assert difference(expected, train_step(case, optimizer, ids)) == ""


def test_the_comparison_sees_gradients_added_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("dpbench.engine.replicate")
    add = module.reduce
    monkeypatch.setattr(
        module, "reduce", lambda given, **others: add([given[0], *given[:0:-1]], **others)
    )
    assert "by " in difference(
        *(train(wrap, TRAINED["mlp"], "sgd", (0, 1, 2, 3)) for wrap in (theirs, ours))
    )


def test_the_comparison_sees_statistics_of_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    replicate = dpbench.engine.DataParallel.replicate

    def swapped(*args: Any) -> list[nn.Module]:
        replicas = replicate(*args)
        for first, second in zip(replicas[0].modules(), replicas[1].modules(), strict=True):
            kept = {
                name: buffer.clone()
                for name, buffer in first._buffers.items()
                if buffer is not None
            }
            first._buffers, second._buffers = kept, second._buffers
        return replicas

    make, batch = NETS["conv"]
    x = batch(7)
    expected = observe(theirs, make, [x])
    monkeypatch.setattr(dpbench.engine.DataParallel, "replicate", swapped)
    assert difference(expected, observe(ours, make, [x])).startswith(
        ".state.module.1.running_mean: by "
    )


def test_the_oracle_leaves_no_trace() -> None:
    from torch.nn.parallel import comm

    assert comm.torch is not torch
    threads = threading.active_count()
    with oracle():
        pass
    assert threading.active_count() == threads
    assert not hasattr(torch._C, "_scatter") or torch.version.cuda
