"""Random calls, compared bit by bit with the plain reference of tests/engine/chunked.py.

Inputs, rows, devices and schedules are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import dpbench
from tests.engine import rungs
from tests.engine.chunked import Chunked, sizes_of
from tests.engine.conformance import Place
from tests.engine.law.compare import assert_same

WIDTH = 5
WRAPPED = rungs.WRAPPED


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
            return sizes_of(self.rows, self.devices)
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


def outcome(case: Case, module: nn.Module, forward: Callable[..., Any], place: Place) -> Result:
    """Run forward and backward once."""
    inputs: list[Tensor] = []

    def placed(leaf: Leaf) -> Tensor:
        inputs.append(at(leaf.made(case.rows), case, place))
        return inputs[-1]

    args, kwargs = build((case.args, case.kwargs), placed)
    outputs = forward(*args, **kwargs)
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


def check(case: Case, kind: str, schedule: str) -> None:
    """Compare two calls of a wrapper with the reference: the second one finds what is kept."""
    place = Place(kind)
    ids = place.ids(*range(case.devices))
    dpbench.engine.resolve(ids)
    plain, module = Net(), Net()
    wrapped = dpbench.DataParallel(module.to(place.device()), ids, schedule=schedule)
    chunked = Chunked(plain, case.devices)
    for _ in range(2):
        expected = outcome(case, plain, chunked, Place("cpu"))
        ours = outcome(case, module, wrapped, place)
        assert_same(ours.outputs, expected.outputs, "outputs")
        assert_same(ours.gradients, expected.gradients, "gradients")
        assert_same(ours.of_inputs, expected.of_inputs, "gradients of inputs")
        assert_same(ours.buffers, expected.buffers, "buffers")
        plain.zero_grad()
        module.zero_grad()


# ---------------------------------------------------------------- the laws

every_kind = pytest.mark.parametrize("kind", ["cpu", "emulated"])


@pytest.mark.slow
@every_kind
@settings(derandomize=True, max_examples=60, deadline=None)
@given(case=cases(), schedule=st.sampled_from(WRAPPED))
def test_any_inputs_equal_the_chunked_reference_on_any_schedule(
    kind: str, case: Case, schedule: str
) -> None:
    check(case, kind, schedule)


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
