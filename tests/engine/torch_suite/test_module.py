"""PyTorch's tests of the module DataParallel, rewritten for ours.

`tests/engine/conformance.py` names the sources.
"""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpbench
from tests.engine.conformance import (
    Place,
    check_gradients,
    close,
    every_schedule,
    gradients,
    on,
    place,
    young_garbage,
)
from tests.garbage import COUNTED

__all__ = ["place"]

pytestmark = every_schedule

DTYPES = pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.half], ids=str)
PRECISION = {torch.float: 1e-5, torch.double: 1e-5, torch.half: 1e-2}


# ---------------------------------------------------------------- inputs by keyword


class ByKeyword(nn.Module):
    """A layer whose input is a tensor, or a dict with the tensor and an unused value."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Any) -> Tensor:
        return self.layer(given["data"] if isinstance(given, dict) else given)


def check_keyword(place: Place, dtype: torch.dtype, **unused: Any) -> None:
    """Pass the input by keyword, in a dict with `unused` if there is any.

    Compare with the bare layer.
    """
    layer = nn.Linear(10, 5, dtype=dtype)
    x = torch.randn(20, 10, dtype=dtype)
    expected = layer(x)
    wrapped = place.wrap(ByKeyword(layer).to(place.device()))
    data = place.put(x)
    output = wrapped(given={"data": data, **unused} if unused else data)
    assert on(output, place.device(0))
    close(output, expected, atol=PRECISION[dtype], rtol=0.0)


@DTYPES
def test_data_parallel_module(place: Place, dtype: torch.dtype) -> None:
    """Mirror A, test_data_parallel_module: a positional input.

    The output is the layer's, on device 0.
    """
    layer = nn.Linear(10, 5, dtype=dtype)
    x = torch.randn(20, 10, dtype=dtype)
    expected = layer(x)
    output = place.wrap(layer.to(place.device()))(place.put(x))
    assert on(output, place.device(0))
    close(output, expected, atol=PRECISION[dtype], rtol=0.0)


@DTYPES
def test_data_parallel_module_kwargs_only(place: Place, dtype: torch.dtype) -> None:
    """Mirror A, test_data_parallel_module_kwargs_only: no positional input at all."""
    check_keyword(place, dtype)


@DTYPES
def test_data_parallel_module_kwargs_only_empty_list(place: Place, dtype: torch.dtype) -> None:
    """Mirror A, test_data_parallel_module_kwargs_only_empty_list: an empty list with the data."""
    check_keyword(place, dtype, unused=[])


@DTYPES
def test_data_parallel_module_kwargs_only_empty_dict(place: Place, dtype: torch.dtype) -> None:
    """Mirror A, test_data_parallel_module_kwargs_only_empty_dict: an empty dict with the data."""
    check_keyword(place, dtype, unused={})


@DTYPES
def test_data_parallel_module_kwargs_only_empty_tuple(place: Place, dtype: torch.dtype) -> None:
    """Mirror A, test_data_parallel_module_kwargs_only_empty_tuple: an empty tuple with the data."""
    check_keyword(place, dtype, unused=())


# ---------------------------------------------------------------- inputs of several kinds, or none


class Combined(nn.Module):
    """Two tensors, a number and an optional tensor by keyword."""

    def forward(
        self, var1: Tensor, var2: Tensor, float1: float, var3: Tensor | None = None
    ) -> Tensor:
        product = var1 * var2
        return float1 * (product if var3 is None else product + var3)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,)], ids=str)
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "module_kwargs"])
@pytest.mark.parametrize("form", ["function", "module"])
def test_data_parallel_multiple_input(
    place: Place, order: tuple[int, ...], keyword: bool, form: str
) -> None:
    """Mirror A, test_data_parallel_multiple_input: tensors, a number and a keyword.

    Outputs and input gradients.
    """
    var1, var2 = (torch.randn(5, 5, requires_grad=True) for _ in range(2))
    kwargs = {"var3": torch.randn(5, 5)} if keyword else {}
    number = torch.randn(1).item()
    module = Combined()
    expected = module(var1, var2, number, **kwargs)
    expected_gradients = torch.autograd.grad(expected.sum(), (var1, var2))
    if form == "function":
        output = dpbench.data_parallel(
            module, (var1, var2, number), place.ids(*order), module_kwargs=kwargs or None
        )
    else:
        output = place.wrap(module, *order)(var1, var2, number, **kwargs)
    output.sum().backward()
    assert on(output, place.device(order[0]))
    close(output, expected)
    close([var1.grad, var2.grad], expected_gradients)
    assert var1.grad is not None
    assert var1.grad.device == var1.device


def test_data_parallel_module_zero_inputs(place: Place) -> None:
    """Mirror A, test_data_parallel_module_zero_inputs: the only replica is on device 0."""

    class Ones(nn.Module):
        def forward(self) -> Tensor:
            eye = torch.eye(2, 3, device=place.device(0))
            return eye + (1 - eye)

    module = Ones()
    outputs = [
        place.wrap(module, 0)(),
        place.wrap(module, 0, 1)(),
        dpbench.data_parallel(module, None, place.ids(0)),
        dpbench.data_parallel(module, (), place.ids(0, 1)),
        dpbench.data_parallel(module, None, place.ids(0, 1)),
    ]
    for output in outputs:
        assert on(output, place.device(0))
        close(output, torch.ones(2, 3))


# ---------------------------------------------------------------- parameters and buffers


def test_data_parallel_buffers_requiring_grad(place: Place) -> None:
    """Mirror A, test_data_parallel_buffers_requiring_grad: such a buffer gets its gradient."""

    class Scaled(nn.Module):
        def __init__(self, scale: Tensor) -> None:
            super().__init__()
            self.register_buffer("scale", scale)
            self.register_buffer("shift", scale.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.shift

    module = Scaled(place.put(torch.randn(20, dtype=torch.double, requires_grad=True)))
    assert module.scale.requires_grad
    wrapped = place.wrap(module)
    x = place.put(torch.randn(2, 20, dtype=torch.double))
    check_gradients(lambda _: wrapped(x), [module.scale])


def test_data_parallel_rnn(place: Place) -> None:
    """Mirror A, test_data_parallel_rnn: an LSTM steps as on one device.

    Without gradients it runs (issue 21108).
    """

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(30, 16, 1, batch_first=True, bidirectional=True, dtype=torch.double)

        def forward(self, x: Tensor) -> Any:
            self.rnn.flatten_parameters()
            return self.rnn(x)

    def step(module: nn.Module, x: Tensor) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=10)
        # only the sequence: the final state has its batch in dimension 1, and gather joins along 0
        output = module(x)[0]
        F.mse_loss(output, torch.zeros_like(output)).backward()
        optimizer.step()

    single = Recurrent()
    module = copy.deepcopy(single).to(place.device())
    wrapped = place.wrap(module)
    with torch.no_grad():
        wrapped(place.put(torch.rand(2, 4, 30, dtype=torch.double)))
    ones = torch.ones(4, 4, 30, dtype=torch.double)
    step(single, ones)
    step(wrapped, place.put(ones))
    close(list(wrapped.parameters()), list(single.parameters()))


def test_data_parallel_lazy_linear(place: Place, request: pytest.FixtureRequest) -> None:
    """Mirror A and A', test_data_parallel_lazy_linear: uninitialised parameters are refused."""
    module = nn.LazyLinear(10).to(place.device())
    wrapped = place.wrap(module)
    with pytest.raises(RuntimeError, match="Modules with uninitialized parameters"):
        wrapped(place.put(torch.rand(10, 10)))


def test_parameter_list_dict_replica(place: Place) -> None:
    """Mirror A, test_parameter_list_dict_replica: entries are copies within the graph."""
    first, second = (nn.Parameter(torch.rand(10)) for _ in range(2))
    runs = []

    class Holder(nn.Module):
        def __init__(self, data: nn.Module, keys: tuple[Any, Any]) -> None:
            super().__init__()
            self.data, self.keys = data, keys

        def forward(self, x: Tensor) -> Tensor:
            for key, expected in zip(self.keys, (first, second), strict=True):
                entry = self.data[key]
                close(entry, expected)
                assert entry.device == x.device
                assert entry.requires_grad
                assert entry.grad_fn is not None
            runs.append(x)
            return x

    holders = [
        Holder(nn.ParameterList([first, second]), (0, 1)),
        Holder(nn.ParameterDict({"0": first, "1": second}), ("0", "1")),
    ]
    for holder in holders:
        module = copy.deepcopy(holder).to(place.device())
        place.wrap(module)(place.put(torch.randn(8, 8)))
    assert len(runs) == 2 * place.replicas


def test_zero_grad(place: Place) -> None:
    """Mirror A, test_zero_grad: a replica's zero_grad warns that it has no effect."""
    one_at_a_time = threading.Lock()  # the list of warnings is the process's
    runs = []

    class Zeroes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            told = (
                r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel\(\) has no"
                r" effect\."
            )
            with one_at_a_time, pytest.warns(UserWarning, match=told):
                self.zero_grad()
            runs.append(x)
            return x

    place.wrap(Zeroes().to(place.device()))(place.put(torch.rand(4, 3, 6, 5)))
    assert len(runs) == place.replicas


@COUNTED
def test_data_parallel_model_no_refcycles(place: Place) -> None:
    """Mirror A, test_data_parallel_model_no_refcycles: a forward leaves no garbage cycles."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    batches = [place.put(torch.randn(shape)) for shape in ((1,), (4, 1))]
    with young_garbage():
        wrapped = place.wrap(Net().to(place.device()))
        for batch in batches:
            wrapped(batch)
            assert gc.collect() == 0


def test_data_parallel_function_deletion(place: Place) -> None:
    """Mirror A, test_data_parallel_function_deletion: a gradient penalty has exact gradients.

    pytorch issue 16532.
    """
    module = nn.Linear(4, 1).to(place.device())
    wrapped = place.wrap(module)
    x = place.put(torch.ones(2, 4, requires_grad=True))
    wrapped.zero_grad()
    output = wrapped(x)
    (gradient,) = torch.autograd.grad(
        output, x, grad_outputs=torch.ones_like(output), create_graph=True, retain_graph=True
    )
    gradient.mean().backward()
    close(gradients(module), [torch.full((1, 4), 0.25), torch.zeros(1)])


# ---------------------------------------------------------------- complex numbers, precision,
# layout


def test_data_parallel_complex(place: Place) -> None:
    """Mirror A, test_data_parallel_complex: complex stays complex.

    The original expects torch's old extra dim.
    """

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1, 10, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    wrapped = place.wrap(Shifted().to(place.device()))
    for rows in (1, 3):
        x = torch.rand(rows, 10, dtype=torch.cfloat)
        output = wrapped(place.put(x))
        assert output.size() == x.size()
        close(output, x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, dtype=torch.cfloat)
        self.second = nn.Linear(16, 8, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y * torch.exp(1j * y.real))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.complex = Complex()

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.real(x), self.complex(z)


def train_beside_single(place: Place, module: nn.Module, dtypes: tuple[torch.dtype, ...]) -> None:
    """Train a module and its wrapped copy for five steps.

    Compare outputs, gradients and weights in each.
    """
    single, ours = module, copy.deepcopy(module).to(place.device())
    wrapped = place.wrap(ours)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (single, ours)]
    for epoch in range(5):
        batch = [torch.randn(8, 8, dtype=dtype) for dtype in dtypes]
        tolerance = {"atol": 1e-5 * 10**epoch, "rtol": 1e-5}  # rounding grows with the steps
        results = [single(*batch), wrapped(*(place.put(x) for x in batch))]
        outputs = [result if isinstance(result, tuple) else (result,) for result in results]
        assert [output.dtype for output in outputs[1]] == list(dtypes)
        close(outputs[1], outputs[0], **tolerance)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            sum(part.abs().sum() if part.is_complex() else part.sum() for part in output).backward()
        for (name, parameter), other in zip(
            ours.named_parameters(), single.parameters(), strict=True
        ):
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == parameter.dtype, name
            close(parameter.grad, other.grad, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
        close(list(ours.parameters()), list(single.parameters()), **tolerance)


def test_data_parallel_complex_parameters(place: Place) -> None:
    """Mirror A', test_data_parallel_complex_parameters: five epochs train as on one device."""
    train_beside_single(place, Complex(), (torch.cfloat,))


def test_data_parallel_complex_mixed_parameters(place: Place) -> None:
    """Mirror A', test_data_parallel_complex_mixed_parameters: real and complex weights train."""
    train_beside_single(place, Mixed(), (torch.float, torch.cfloat))


def test_autocast(place: Place) -> None:
    """Mirror A, test_autocast: a forward decorated with autocast computes in its dtype."""
    place.not_on("emulated", "autocast has no rules for them")

    class Net(nn.Linear):
        @torch.autocast(place.type)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    wrapped = place.wrap(Net(8, 8).to(place.device()))
    output = wrapped(place.put(torch.randn(8, 8)))
    assert output.dtype is (torch.float16 if place.is_gpu else torch.bfloat16)


class Convolutions(nn.Module):
    """Four convolutions with the given layouts and dtypes."""

    def __init__(
        self, layouts: tuple[torch.memory_format, ...], dtypes: tuple[torch.dtype, ...]
    ) -> None:
        super().__init__()
        self.dtypes = dtypes
        widths = (8, 16, 32, 16, 8)
        self.layers = nn.ModuleList(
            nn.Conv2d(widths[i], widths[i + 1], 2).to(memory_format=layouts[i], dtype=dtypes[i])
            for i in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = layer(x.to(dtype))
        return x


ROWS, LAST = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize(
    "layouts", [(ROWS,) * 4, (LAST, LAST, ROWS, ROWS), (LAST,) * 4], ids=["rows", "mix", "last"]
)
@pytest.mark.parametrize("halves", [0, 2, 4])
def test_strided_grad_layout(
    place: Place, layouts: tuple[torch.memory_format, ...], halves: int
) -> None:
    """Mirror A, test_strided_grad_layout: gradients keep their weight's layout.

    That holds with and without a gradient there before.
    """
    dtypes = (torch.float,) * (4 - halves) + (torch.half,) * halves
    single = Convolutions(layouts, dtypes).to(place.device() if place.is_gpu else "cpu")
    ours = copy.deepcopy(single).to(place.device())
    wrapped = place.wrap(ours)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (single, ours)]
    x, target = torch.randn(16, 8, 8, 8), torch.randn(16, 8, 4, 4)
    tolerance = 3e-3 if halves else 1e-5
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False):
        for _ in range(2):  # the first step makes the gradients, the second finds none
            on_one = single.layers[0].weight.device
            F.mse_loss(single(x.to(on_one)).float(), target.to(on_one)).backward()
            F.mse_loss(wrapped(place.put(x)).float(), place.put(target)).backward()
            for layer, other, layout in zip(ours.layers, single.layers, layouts, strict=True):
                assert other.weight.grad.is_contiguous(memory_format=layout)
                assert layer.weight.grad.is_contiguous(memory_format=layout)
                for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
                    close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
