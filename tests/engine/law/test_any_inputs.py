"""Random calls, held bit by bit against the chunked reference: one deep copy per chunk.

Inputs, rows, devices and schedules are drawn. `call`, and `train` of test_any_training.py, are the
engine's side and the only places that know of schedules;
`expect` and `expect_training` are the reference, which owes nothing to the engine: it runs copy
after copy on the host and adds the gradients in replica order.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import dpbench
from dpbench.records.schedule import SWITCHES, Schedule
from tests.engine.conformance import Place

WIDTH = 5
ALL = [
    Schedule(**dict(zip(SWITCHES, positions, strict=True)))
    for positions in itertools.product(*SWITCHES.values())
]
STEPPED = [one for one in ALL if not one.missing()]
WRAPPED = [one for one in ALL if not one.missing(train_step=False)]
"""The schedules that TrainStep and the wrapper can have without a GPU, those that round
included.
"""


# ---------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Leaf:
    """The description of a tensor: floats that may require gradients, or indices."""

    seed: int
    kind: str  # "float", "learning" or "index"

    def made(self, rows: int, call: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 10 * call)
        if self.kind == "index":
            return torch.randint(7, (rows,), generator=generator)
        return torch.randn(rows, WIDTH, generator=generator).requires_grad_(self.kind == "learning")


class Pair(NamedTuple):
    left: Any
    right: Any


class Tag:
    """An object that only its identity distinguishes from others."""


@dataclass(frozen=True)
class Case:
    """One batch: arguments with leaves for tensors, rows, devices, and their rows where given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    devices: int
    sizes: tuple[int, ...] | None = None
    at_home: bool = True  # the inputs come from the host; else from device 0

    @property
    def pieces(self) -> list[int]:
        """Return the rows of each replica that runs; without tensors there is nothing to cut."""
        if self.sizes is not None:
            return list(self.sizes)
        if any(True for _ in leaves((self.args, self.kwargs))):
            return [len(piece) for piece in torch.empty(self.rows).chunk(self.devices)]
        return [0] * (self.devices if self.args or self.kwargs else 1)


def build(value: Any, change: Callable[[Leaf], Any]) -> Any:
    """Return a nested value with its leaves changed and other non-containers the same objects."""
    if isinstance(value, Leaf):
        return change(value)
    if isinstance(value, dict):
        return {key: build(part, change) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [build(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def leaves(value: Any, kind: type = Leaf) -> Iterator[Any]:
    """Yield the objects of one kind in a nested value, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part, kind)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part, kind)


TARGET = Leaf(9, "float")
TENSORS = st.builds(Leaf, st.integers(0, 5), st.sampled_from(["float", "learning", "index"]))
SHARED = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.floats(-2, 2, width=16),
    st.text("ab", max_size=2),
    st.builds(Tag),
    st.sampled_from([(), [], {}]),
)
NESTED = st.recursive(
    TENSORS | SHARED,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=5,
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a batch for the wrapper, which may be empty, or nothing at all."""
    args = tuple(draw(st.lists(NESTED, max_size=3)))
    kwargs = draw(st.dictionaries(st.sampled_from(["x", "y"]), NESTED, max_size=2))
    return Case(
        args, kwargs, draw(st.integers(0, 9)), draw(st.integers(1, 4)), at_home=draw(st.booleans())
    )


# ---------------------------------------------------------------- the net


class Net(nn.Module):
    """Layers shared by all tensors, a frozen and an idle one, and buffers that a forward moves."""

    def __init__(self, *, idle: bool = True) -> None:
        super().__init__()
        torch.default_generator.manual_seed(1)
        self.table = nn.Embedding(7, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, 3)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(2, 2) if idle else None
        self.bias = nn.Parameter(torch.randn(3))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        tensors = list(leaves((args, kwargs), Tensor))
        scale = 1.0 + sum(leaves((args, kwargs), float))
        whole = self.bias.expand(len(tensors[0]) if tensors else 1, 3) * scale
        parts = []
        for tensor in tensors:
            hidden = torch.tanh(
                self.first(tensor if tensor.is_floating_point() else self.table(tensor))
            )
            parts.append(self.second(hidden + self.frozen(hidden)))
            whole = whole + torch.sin(parts[-1])
            self.rows += len(tensor)
            self.total.mul_(0.5).add_(parts[-1].detach().sum(0))
        return {"whole": whole, "parts": (parts, Pair(whole.exp(), None))}


# ---------------------------------------------------------------- both sides


@dataclass(frozen=True)
class Result:
    """The results and the state after a step, on the host."""

    outputs: dict[str, Any]
    gradients: dict[str, Tensor | None]
    of_inputs: list[Tensor | None]
    buffers: dict[str, Tensor]


def slopes(outputs: list[Tensor]) -> list[Tensor]:
    """Return a loss's gradient for each output: another one for each element."""
    return [
        torch.linspace(-1, 1.7, output.numel()).view(output.shape) + output.detach().cpu()
        for output in outputs
    ]


def call(case: Case, module: nn.Module, wrapped: nn.Module, place: Place) -> Result:
    """Run forward and backward by the wrapper, once."""
    inputs: list[Tensor] = []

    def placed(leaf: Leaf) -> Tensor:
        inputs.append(at(leaf.made(case.rows), case, place))
        return inputs[-1]

    args, kwargs = build((case.args, case.kwargs), placed)
    outputs = wrapped(*args, **kwargs)
    tensors = list(leaves(outputs, Tensor))
    torch.autograd.backward(tensors, [slope.to(place.device()) for slope in slopes(tensors)])
    return Result(
        outputs,
        {name: parameter.grad for name, parameter in module.named_parameters()},
        [tensor.grad for tensor in inputs],
        dict(module.named_buffers()),
    )


def at(tensor: Tensor, case: Case, place: Place) -> Tensor:
    """Return an input, copied to the device of `place` unless the case keeps its inputs at home."""
    return tensor if case.at_home else place.put(tensor)


def expect(
    case: Case,
    module: nn.Module,
    schedule: Schedule,
    call: int = 0,
    pull: Callable[[list[Tensor]], list[Tensor]] = slopes,
) -> Result:
    """Return what forward and backward must leave, from one module copy per chunk, run in turn.

    `pull` gives the gradients of the whole outputs. Of the schedule only the dtype matters that
    gradients are sent in.
    """
    sizes = case.pieces
    cut: list[list[Tensor]] = []

    def chunked(leaf: Leaf) -> Leaf:
        whole = leaf.made(case.rows, call)
        pieces = whole.detach().split(sizes)
        cut.append([piece.clone().requires_grad_(whole.requires_grad) for piece in pieces])
        return leaf

    build((case.args, case.kwargs), chunked)
    copies = [copy.deepcopy(module) for _ in sizes]
    results = []
    for i, one in enumerate(copies):
        pieces = iter([column[i] for column in cut])
        args, kwargs = build((case.args, case.kwargs), lambda _, pieces=pieces: next(pieces))
        results.append(list(leaves(one(*args, **kwargs), Tensor)))
    wholes = [
        torch.cat([part.detach() for part in column]) for column in zip(*results, strict=True)
    ]
    lengths = [len(result[0]) for result in results]
    pulls = pull(wholes)
    for i, result in enumerate(results):
        torch.autograd.backward(result, [slope.split(lengths)[i].clone() for slope in pulls])
    *parts, exponential = wholes[1:]
    return Result(
        {"whole": wholes[0], "parts": (parts, Pair(exponential, None))},
        {
            name: added(case, [one.get_parameter(name) for one in copies], schedule)
            for name, _ in module.named_parameters()
        },
        [
            torch.cat([piece.grad for piece in column]) if column[0].requires_grad else None
            for column in cut
        ],
        dict(copies[0].named_buffers()),
    )


def added(case: Case, parameters: list[nn.Parameter], schedule: Schedule) -> Tensor | None:
    """Add gradients in replica order; with several devices, one that no replica uses gets zeros."""
    total = None
    for parameter in parameters:
        part = parameter.grad
        if part is None and case.devices > 1 and parameter.requires_grad:
            part = torch.zeros_like(parameter)
        total = part if total is None or part is None else total + part
    return total


def assert_same(ours: Any, expected: Any, what: str) -> None:
    """Compare nested values bit by bit, and the types of containers."""
    assert isinstance(ours, type(expected)), what
    if isinstance(expected, Tensor):
        ours = ours.detach().cpu()
        assert ours.dtype == expected.dtype, what
        assert torch.equal(ours, expected.detach()), what
    elif isinstance(expected, dict):
        assert list(ours) == list(expected), what
        for key, part in expected.items():
            assert_same(ours[key], part, f"{what}, {key}")
    elif isinstance(expected, tuple | list):
        assert len(ours) == len(expected), what
        for i, (mine, part) in enumerate(zip(ours, expected, strict=True)):
            assert_same(mine, part, f"{what}, {i}")
    else:
        assert ours == expected, what


def check(case: Case, kind: str, schedule: Schedule) -> None:
    """Hold two calls of a wrapper, so also one with kept state, against the reference."""
    place = Place(kind)
    ids = place.ids(*range(case.devices))
    dpbench.engine.resolve(ids)
    reference, module = Net(), Net()
    wrapped = dpbench.DataParallel(module.to(place.device()), ids, schedule=schedule)
    for _ in range(2):
        expected, ours = expect(case, reference, schedule), call(case, module, wrapped, place)
        assert_same(ours.outputs, expected.outputs, "outputs")
        assert_same(ours.gradients, expected.gradients, "gradients")
        assert_same(ours.of_inputs, expected.of_inputs, "gradients of inputs")
        assert_same(ours.buffers, expected.buffers, "buffers")
        reference.load_state_dict(expected.buffers, strict=False)
        module.zero_grad()


# ---------------------------------------------------------------- the laws

every_kind = pytest.mark.parametrize("kind", ["cpu", "emulated"])


def on_kind(schedule: Schedule, kind: str) -> Schedule:
    """Return the schedule as this kind can have it: emulated devices have no flat buffers."""
    return (
        schedule
        if kind == "cpu"
        else replace(schedule, storage="separate", optimizer="per_parameter")
    )


@pytest.mark.slow
@every_kind
@settings(derandomize=True, max_examples=60, deadline=None)
@given(case=cases(), schedule=st.sampled_from(WRAPPED))
def test_any_inputs_equal_the_chunked_reference_on_any_schedule(
    kind: str, case: Case, schedule: Schedule
) -> None:
    check(case, kind, on_kind(schedule, kind))


@every_kind
@settings(derandomize=True, max_examples=60, deadline=None)
@given(case=cases())
def test_what_is_no_tensor_arrives_as_the_same_object(kind: str, case: Case) -> None:
    place = Place(kind)
    ids = place.ids(*range(case.devices))
    given = build((case.args, case.kwargs), lambda leaf: leaf.made(case.rows).detach())
    pieces = dpbench.scatter(given, ids)
    assert len(pieces) >= 1
    for piece in pieces:
        assert type(piece[0]) is type(given[0])
        for ours, theirs in zip(leaves(piece, Tag), leaves(given, Tag), strict=True):
            assert ours is theirs
