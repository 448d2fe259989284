"""PyTorch's tests of the verbs and of data_parallel(), rewritten for ours.

`tests/engine/conformance.py` names the sources.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpbench
from tests.engine.conformance import Place, check_gradients, close, every_kind, gradients, on, place

__all__ = ["place"]

pytestmark = every_kind


# ---------------------------------------------------------------- parallel_apply


@pytest.mark.parametrize("wrapped", [True, False], ids=["tuples", "tensors"])
def test_parallel_apply(place: Place, wrapped: bool) -> None:
    """Mirror A, test_parallel_apply: unlike modules on two devices.

    An input is a tuple, or the single argument.
    """
    modules = [nn.Linear(10, 5).to(place.device(i)) for i in (0, 1)]
    inputs = [place.put(torch.randn(2, 10), i) for i in (0, 1)]
    expected = [module(x) for module, x in zip(modules, inputs, strict=True)]
    given = [(x,) for x in inputs] if wrapped else inputs
    for devices in (None, place.ids()):
        outputs = dpbench.parallel_apply(modules, given, None, devices)
        close(outputs, expected)
    assert all(on(output, place.device(i)) for i, output in enumerate(outputs))


@pytest.mark.parametrize("wrapped", [True, False], ids=["tuples", "tensors"])
def test_parallel_apply_autocast(place: Place, wrapped: bool) -> None:
    """Mirror A, test_parallel_apply_autocast: autocast holds in replicas, its dtype too (ours)."""
    place.not_on("emulated", "autocast has no rules for them")
    modules = [nn.Linear(10, 5).to(place.device(i)) for i in (0, 1)]
    inputs = [place.put(torch.randn(2, 10), i) for i in (0, 1)]
    given = [(x,) for x in inputs] if wrapped else inputs
    for settings in ({}, {"dtype": torch.bfloat16}):
        with torch.autocast(place.type, **settings):
            expected = [module(x) for module, x in zip(modules, inputs, strict=True)]
            outputs = dpbench.parallel_apply(modules, given, None, place.ids())
        assert [output.dtype for output in outputs] == [output.dtype for output in expected]
        assert outputs[0].dtype is not torch.float32
        close(outputs, expected)


def test_parallel_apply_forwards_the_dtype_of_autocast(place: Place) -> None:
    """Not in torch: its replicas autocast to the device's default dtype."""
    place.not_on("emulated", "autocast has no rules for them")
    default = torch.get_autocast_dtype(place.type)
    other = torch.bfloat16 if default is torch.float16 else torch.float16
    modules = [nn.Linear(10, 5).to(place.device(i)) for i in (0, 1)]
    inputs = [place.put(torch.randn(2, 10), i) for i in (0, 1)]
    with torch.autocast(place.type, dtype=other):
        outputs = dpbench.parallel_apply(modules, inputs, None, place.ids())
    assert [output.dtype for output in outputs] == [other] * 2


def test_parallel_apply_passes_exception(place: Place) -> None:
    """Mirror A, test_parallel_apply_passes_exception: same type; tells replica and traceback."""

    class Fails(nn.Module):
        def forward(self, *args: Any) -> Any:
            return {}["wonderful"]

    told = r"Caught KeyError in replica \d on device 0\.\nOriginal Traceback[\s\S]+wonderful"
    module = Fails()
    with pytest.raises(KeyError, match=told) as caught:
        dpbench.parallel_apply([module, module], [None, None], None, place.ids(0, 0))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("wonderful",)


# ---------------------------------------------------------------- data_parallel


def test_data_parallel_small_back(place: Place) -> None:
    """Mirror A, test_data_parallel_small_back: data_parallel of a layer equals the layer."""
    layer = nn.Linear(10, 5).to(place.device())
    x = place.put(torch.randn(20, 10))
    close(dpbench.data_parallel(layer, x, place.ids()), layer(x))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_data_parallel(place: Place, order: tuple[int, int]) -> None:
    """Mirror A, test_data_parallel: ids in either order, input on device 1.

    Output on the first, gradients equal.
    """
    layer = nn.Linear(10, 5)
    x = torch.randn(20, 10)
    expected = layer(x)
    expected.sum().backward()
    expected_gradients = gradients(layer)
    layer.zero_grad()
    layer = layer.to(place.device(order[0]))
    output = dpbench.data_parallel(layer, place.put(x, 1), place.ids(*order))
    output.sum().backward()
    assert on(output, place.device(order[0]))
    close(output, expected)
    close(gradients(layer), expected_gradients)


def test_data_parallel_without_device_ids(place: Place) -> None:
    """Mirror A, end of test_data_parallel: None takes all GPUs, and passes through without any."""
    layer = nn.Linear(10, 5)
    x = torch.randn(20, 10)
    expected = layer(x)
    layer = layer.to(place.device(0))
    close(dpbench.data_parallel(layer, place.put(x, 0)), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_data_parallel_sparse(place: Place, order: tuple[int, int]) -> None:
    """Mirror A, test_data_parallel_sparse: sparse gradients add up to the same, and stay sparse."""
    layer = nn.Embedding(10, 5, sparse=True)
    x = torch.randint(10, (20, 5))
    expected = layer(x)
    expected.sum().backward()
    (expected_gradient,) = gradients(layer)
    layer.zero_grad()
    layer = layer.to(place.device(order[0]))
    output = dpbench.data_parallel(layer, place.put(x, 1), place.ids(*order))
    output.sum().backward()
    assert on(output, place.device(order[0]))
    close(output, expected)
    (gradient,) = gradients(layer)
    assert gradient.is_sparse
    close(gradient.coalesce().to_dense(), expected_gradient.coalesce().to_dense())
    assert torch.equal(gradient.coalesce().indices().cpu(), expected_gradient.coalesce().indices())


def test_data_parallel_no_grad(place: Place) -> None:
    """Mirror A, test_data_parallel_no_grad: replicas see the caller's grad mode.

    Their own errors reach the caller.
    """

    class Asserts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            return x

    x = place.put(torch.randn(20, 10))
    with torch.no_grad():
        dpbench.data_parallel(Asserts(), x, place.ids())
    with pytest.raises(AssertionError):
        dpbench.data_parallel(Asserts(), x, place.ids())


def test_data_parallel_nested_output(place: Place) -> None:
    """Mirror A, test_data_parallel_nested_output: containers keep their types and values."""

    def nested(x: Tensor) -> list[Any]:
        return [x, (x.sin(), x.cos(), [x.add(1)]), x, OrderedDict(a=x, b=[x.sin()])]

    class Net(nn.Module):
        def forward(self, x: Tensor) -> list[Any]:
            return nested(x)

    x = torch.randn(2, 2)
    output = dpbench.data_parallel(Net(), place.put(x, 1), place.ids())
    close(output, nested(x))  # compares the types of containers too
    assert isinstance(output, list)
    assert isinstance(output[1], tuple)
    assert isinstance(output[1][2], list)
    assert isinstance(output[3], OrderedDict)
    assert list(output[3]) == ["a", "b"]
    assert isinstance(output[3]["b"], list)
    tensors = [
        output[0],
        *output[1][:2],
        output[1][2][0],
        output[2],
        output[3]["a"],
        output[3]["b"][0],
    ]
    assert all(isinstance(tensor, Tensor) and on(tensor, place.device(0)) for tensor in tensors)


def test_data_parallel_nested_input(place: Place) -> None:
    """Mirror A, test_data_parallel_nested_input: a tuple arrives as a tuple of pieces."""

    class Net(nn.Module):
        def forward(self, *inputs: Any) -> Tensor:
            assert [type(argument) for argument in inputs] == [type(x), tuple, type(x)]
            return inputs[1][0]

    x = place.put(torch.randn(20, 3), 1)
    inputs = (x.cos(), (x.sin(), x), x.sin())
    close(dpbench.data_parallel(Net(), inputs, place.ids()), inputs[1][0])


def test_data_parallel_device_args(place: Place) -> None:
    """Mirror A, test_data_parallel_device_args: ids as names, numbers or torch devices.

    Output_device as a device.
    """
    layer = nn.Linear(10, 5).to(place.device())
    x = place.put(torch.randn(20, 10, requires_grad=True))
    expected = layer(x)
    devices: list[Any] = [place.ids(), [place.device(0), place.device(1)]]
    if place.is_gpu:
        devices.append([place.device(0).index, place.device(1).index])
    for device_ids in devices:
        for output_device in {place.ids()[0], device_ids[0]}:
            close(
                dpbench.data_parallel(layer, x, device_ids=device_ids, output_device=output_device),
                expected,
            )
            output = dpbench.data_parallel(layer, x, tuple(device_ids), device_ids[1])
            assert on(output, place.device(1))
            close(output, expected)


# ---------------------------------------------------------------- scatter and gather, with their
# gradients


def scattered(place: Place, x: Tensor) -> None:
    """Check pieces, devices, gradients and second derivatives of a scattered 4 x 4 tensor."""
    x = x.requires_grad_()
    pieces = dpbench.scatter(x, place.ids())
    assert len(pieces) == 2
    for i, piece in enumerate(pieces):
        close(piece, x[2 * i : 2 * i + 2])
        assert on(piece, place.device(i))
    gradient = torch.full_like(pieces[0], 2)
    pieces[0].backward(gradient)
    assert x.grad is not None
    assert x.grad.device == x.device
    close(x.grad[:2], gradient)
    close(x.grad[2:], torch.zeros(2, 4, dtype=torch.double))
    check_gradients(lambda y: tuple(dpbench.scatter(y, place.ids())), [x], second=True)


def test_scatter_cpu(place: Place) -> None:
    """Mirror A, test_scatter_cpu: from the host."""
    scattered(place, torch.randn(4, 4, dtype=torch.double))


def test_scatter_gpu(place: Place) -> None:
    """Mirror A, test_scatter_gpu: from device 0."""
    scattered(place, place.put(torch.randn(4, 4, dtype=torch.double)))


def gathered(place: Place, target: str, device: torch.device) -> None:
    """Check values, device, first and second derivatives of two matrices, then of two scalars."""
    for shape in ((2, 4), ()):
        xs = [
            place.put(torch.randn(shape, dtype=torch.double, requires_grad=True), i) for i in (0, 1)
        ]

        def gather(*inputs: Tensor, scalar: bool = not shape) -> Tensor:
            if scalar:
                with pytest.warns(
                    UserWarning,
                    match="Was asked to gather along dimension 0, but all input tensors",
                ):
                    return dpbench.gather(inputs, target, place.ids())
            return dpbench.gather(inputs, target, place.ids())

        result = gather(*xs)
        assert result.size() == torch.Size([4, 4] if shape else [2])
        assert on(result, device)
        half = len(result) // 2
        close(result[:half].reshape(shape), xs[0])
        close(result[half:].reshape(shape), xs[1])
        gradient = torch.randn(result.shape, dtype=torch.double)
        result.backward(gradient.to(device))
        for x, part in zip(xs, gradient.chunk(2), strict=True):
            assert x.grad is not None
            assert x.grad.device == x.device
            close(x.grad, part.reshape(shape))
        check_gradients(gather, xs, second=True)


def test_gather_cpu(place: Place) -> None:
    """Mirror A, test_gather_cpu: onto the host, "cpu" or, deprecated, -1."""
    gathered(place, "cpu", torch.device("cpu"))
    xs = [place.put(torch.randn(2, 4), i) for i in (0, 1)]
    with pytest.warns(FutureWarning, match="-1"):
        whole = dpbench.gather(xs, -1)
    assert on(whole, torch.device("cpu"))


def test_gather_gpu(place: Place) -> None:
    """Mirror A, test_gather_gpu: onto device 0."""
    gathered(place, place.ids()[0], place.device(0))


def test_gather_different_len_dicts(place: Place) -> None:
    """Mirror A, test_gather_different_len_dicts: dicts of unlike length raise ValueError."""
    first = {"a": place.put(torch.randn(1, 2, requires_grad=True), 0)}
    second = {key: place.put(torch.randn(1, 2, requires_grad=True), 1) for key in ("b", "a")}
    with pytest.raises(ValueError, match="All dicts must have the same number of keys"):
        dpbench.gather((first, second), place.ids()[0], place.ids())


# ---------------------------------------------------------------- replicate


@pytest.mark.parametrize("sequence", [tuple, list])
def test_replicate(place: Place, sequence: type) -> None:
    """Mirror A, test_replicate: each replica is on its device and computes the same."""
    module = nn.Linear(10, 5)
    x = torch.randn(2, 10)
    expected = module(x)
    module = module.to(place.device())
    replicas = dpbench.replicate(module, sequence(place.ids()))
    assert len(replicas) == 2
    for i, replica in enumerate(replicas):
        assert list(replica.parameters()) == []  # they are plain attributes, being no leaves
        assert on(replica.weight, place.device(i))
        assert on(replica.bias, place.device(i))
        close(replica(place.put(x, i)), expected)


@pytest.mark.parametrize("sequence", [tuple, list])
def test_replicate_buffers(place: Place, sequence: type) -> None:
    """Mirror A, test_replicate_buffers: every buffer of replica i is on device i."""
    module = nn.Module()
    module.bn = nn.BatchNorm2d(10)
    module = module.to(place.device())
    replicas = dpbench.replicate(module, sequence(place.ids()))
    for i, replica in enumerate(replicas):
        assert {name for name, _ in replica.named_buffers()} == {
            "bn.running_mean",
            "bn.running_var",
            "bn.num_batches_tracked",
        }
        for name, buffer in replica.named_buffers():
            assert on(buffer, place.device(i)), name


@pytest.mark.parametrize("detach", [False, True])
def test_save_replica_module(place: Place, detach: bool) -> None:
    """Mirror A, test_save_replica_module: replicas can be saved (pytorch issue 37182)."""
    module = nn.Linear(8, 8).to(place.device())
    replicas = dpbench.replicate(module, place.ids(), detach=detach)
    data = io.BytesIO()
    torch.save(replicas, data)
    data.seek(0)
    for saved in torch.load(data, weights_only=False):
        close(saved.weight, module.weight)


def test_replicas_of_a_copy_leave_the_original_alone(place: Place) -> None:
    """Not in torch: a deep copy's replicas send their gradients to the copy."""
    module = nn.Linear(4, 1).to(place.device())
    other = copy.deepcopy(module)
    dpbench.data_parallel(other, place.put(torch.ones(2, 4)), place.ids()).sum().backward()
    assert module.weight.grad is None
    assert other.weight.grad is not None
