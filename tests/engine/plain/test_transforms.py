"""Compilers, torch.func, conversions and nested tensors meet the wrapper on every schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.engine.errors import Refused
from tests.engine.conformance import (
    SWAP,
    Place,
    close,
    every_schedule,
    gradients,
    known_fault,
    place,
)

__all__ = ["place"]

pytestmark = every_schedule

UNTRACEABLE = "torch.compile cannot trace their tensors"
NO_NESTED = "torch cuts nested tensors into pieces whose offsets stay on the first of them"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


def compare(
    place: Place, single: nn.Module, wrapped: Callable[..., Tensor], weights: nn.Module, x: Tensor
) -> None:
    """Call both twice, and compare outputs and accumulated gradients with those of `single`."""
    for _ in range(2):
        expected, found = single(x), wrapped(place.put(x))
        close(found, expected)
        expected.sum().backward()
        found.sum().backward()
    close(gradients(weights), gradients(single))


# ---------------------------------------------------------------- torch.compile


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Forget what other tests compiled: torch limits how often a function recompiles."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
def test_a_module_compiled_in_place_trains(place: Place) -> None:
    place.not_on("emulated", UNTRACEABLE)
    single = Net()
    module = copy.deepcopy(single).to(place.device())
    module.compile(backend="aot_eager")  # needs no C++ compiler
    compare(place, single, place.wrap(module), module, torch.randn(6, 4))


@pytest.mark.usefixtures("dynamo")
def test_a_module_that_torch_compile_wraps_is_refused_and_stays_whole(place: Place) -> None:
    """Torch's own DataParallel takes the module apart."""
    place.not_on("emulated", UNTRACEABLE)
    module = nn.Linear(4, 4).to(place.device())
    names = list(module._parameters)
    with pytest.raises(Refused, match=r"module\.compile\(\)"):
        place.wrap(torch.compile(module, backend="eager"))(place.put(torch.randn(6, 4)))
    assert list(module._parameters) == names


# ---------------------------------------------------------------- torch.func


def test_functional_call_takes_other_weights(place: Place) -> None:
    """Torch's own DataParallel refuses it; the module's parameters get no gradients."""
    single = Net()
    wrapped, x = place.wrap(copy.deepcopy(single).to(place.device())), torch.randn(6, 4)
    for factor in (2.0, 3.0):
        weights = {
            name: (p * factor).detach().requires_grad_() for name, p in single.named_parameters()
        }
        placed = {f"module.{name}": place.put(p) for name, p in weights.items()}
        expected = torch.func.functional_call(single, weights, (x,))
        found = torch.func.functional_call(wrapped, placed, (place.put(x),))
        close(found, expected)
        expected.sum().backward()
        found.sum().backward()
        close([p.grad for p in placed.values()], [p.grad for p in weights.values()])
    assert all(p.grad is None for p in wrapped.parameters())


# ---------------------------------------------------------------- conversions


def test_a_module_may_swap_its_parameters_after_a_call(
    place: Place, request: pytest.FixtureRequest
) -> None:
    wrapped = place.wrap(Net().to(place.device()))
    known_fault(request, RuntimeError, SWAP, when=wrapped.schedule == "cached")
    x = place.put(torch.randn(6, 4))
    before = wrapped(x).detach()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        wrapped.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    close(wrapped(x.double()).float(), before)


# ---------------------------------------------------------------- nested tensors


class Pooled(nn.Module):
    """Sums over the rows of each sequence, so that its output is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([sequence.sum(0) for sequence in self.linear(x).unbind()])


def jagged(**options: Any) -> Tensor:
    return torch.nested.nested_tensor(
        [torch.randn(i + 1, 4) for i in range(5)], layout=torch.jagged, **options
    )


def test_jagged_inputs_are_cut_between_sequences(place: Place) -> None:
    place.not_on("emulated", NO_NESTED)
    single = Pooled()
    module = copy.deepcopy(single).to(place.device())
    compare(place, single, place.wrap(module), module, jagged())


def test_jagged_inputs_that_want_gradients_are_refused(place: Place) -> None:
    place.not_on("emulated", NO_NESTED)
    with pytest.raises(TypeError, match="cannot scatter a nested tensor that requires gradients"):
        place.wrap(Pooled().to(place.device()))(jagged(requires_grad=True))


def test_jagged_outputs_are_refused_as_nested(place: Place) -> None:
    place.not_on("emulated", NO_NESTED)
    wrapped, x = place.wrap(nn.Linear(4, 3).to(place.device())), jagged()
    with pytest.raises(TypeError, match="nested"):
        wrapped(x)
