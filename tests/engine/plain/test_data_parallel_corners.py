"""Corners of torch.nn.DataParallel's behaviour: constructor, forward, composition.

docs/contract.md lists them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpbench
from dpbench.engine import DataParallel, resolve
from tests.engine.nets import TWO, Call, returning
from tests.engine.plain.test_scatter_gather import Batch
from tests.garbage import COUNTED

# ---------------------------------------------------------------- the constructor


def test_a_single_device_has_the_module_moved_there() -> None:
    module = nn.Linear(2, 2)
    DataParallel(module, ["emulated:1"])
    assert module.weight.device == torch.device("lazy:1")
    other = nn.Linear(2, 2)
    DataParallel(other, ["emulated:0", "emulated:1"])
    assert other.weight.device == torch.device("cpu")


def test_attributes_are_those_that_users_of_torchs_wrapper_read() -> None:
    wrapped = DataParallel(
        nn.Linear(2, 2), ["emulated:1", "emulated:0"], output_device="emulated:0", dim=1
    )
    assert torch.zeros(1).to(wrapped.output_device).device == torch.device("lazy:0")
    assert wrapped.device_ids == [torch.device("lazy:1"), torch.device("lazy:0")]
    assert wrapped.src_device_obj == torch.device("lazy:1")
    assert wrapped.dim == 1


@pytest.mark.gpu
def test_ids_of_gpus_are_numbers_as_in_torch() -> None:
    wrapped = DataParallel(nn.Linear(2, 2), ["cuda:0", torch.device("cuda", 0)])
    assert wrapped.device_ids == [0, 0]
    assert wrapped.output_device == 0


# ---------------------------------------------------------------- forward


def test_a_single_row_runs_a_replica_in_the_callers_thread() -> None:
    seen: list[Any] = []
    module = Call(lambda m, x: (seen.append((threading.current_thread(), m)), x * 2)[1])
    assert torch.equal(DataParallel(module, ["cpu"] * 3)(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    ((thread, replica),) = seen
    assert thread is threading.current_thread()
    assert replica is not module


class Overriding(DataParallel):
    """The methods that users of torch's wrapper override, with torch's signatures."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.calls.append("scatter")
        return super().scatter(inputs, kwargs, device_ids)

    def replicate(self, module: Any, device_ids: Any) -> Any:
        self.calls.append("replicate")
        return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        self.calls.append("parallel_apply")
        return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        self.calls.append("gather")
        return super().gather(outputs, output_device)


class OfLists(DataParallel):
    """A wrapper for lists of samples: it cuts the list itself, and inherits the other methods."""

    def forward(self, samples: list[Tensor]) -> Any:
        inputs = [(samples[i :: len(self.device_ids)],) for i in range(len(self.device_ids))]
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply(replicas, inputs, None)
        return self.gather(outputs, self.output_device)


def test_subclasses_may_override_the_four_methods() -> None:
    module, x = nn.Linear(3, 2), torch.randn(5, 3)
    wrapped = Overriding(module, TWO)
    assert torch.equal(wrapped(x), DataParallel(module, TWO)(x))
    assert wrapped.calls == ["scatter", "replicate", "parallel_apply", "gather"]
    samples = list(torch.randn(4, 1, 3))
    output = OfLists(Call(lambda m, rows: m.inner(torch.cat(rows)), inner=module), TWO)(samples)
    assert torch.equal(output, module(torch.cat([*samples[::2], *samples[1::2]])))


# ---------------------------------------------------------------- composition


def test_a_wrapper_inside_a_wrapped_module_leaves_its_replicas_whole() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(8, 3)
    nested = nn.Sequential(DataParallel(copy.deepcopy(inner), TWO), nn.Tanh())
    flat = nn.Sequential(inner, nn.Tanh())
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert torch.equal(DataParallel(nested, TWO)(x), DataParallel(flat, TWO)(x))
    DataParallel(nested, TWO)(x).sum().backward()
    DataParallel(flat, TWO)(x).sum().backward()
    for mine, other in zip(nested.parameters(), flat.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_a_nested_wrapper_works_on_devices_of_their_own_too() -> None:
    ids = ["emulated:0", "emulated:1"]
    module = nn.Linear(2, 2).to("lazy:0")
    x = torch.randn(4, 2)
    assert torch.equal(
        DataParallel(DataParallel(module, ids), ids)(x), DataParallel(module, ids)(x)
    )


def test_a_module_without_parameters_and_an_order_of_devices() -> None:
    x = torch.arange(5.0)
    assert torch.equal(DataParallel(nn.Tanh(), TWO)(x), x.tanh())
    module = nn.Linear(1, 1).to("lazy:1")
    output = DataParallel(module, ["emulated:1", "emulated:0"], output_device="emulated:0")(
        x.view(5, 1)
    )
    assert output.device == torch.device("lazy:0")


@COUNTED
def test_replicas_and_wrappers_leave_no_cycles_whatever_comes_out() -> None:
    wrapped = returning(lambda x: {"a": [x, Batch(x)]})
    refused = returning(lambda x: 1.5)
    x = torch.zeros(4)

    def use() -> None:
        with contextlib.suppress(TypeError, ValueError):
            wrapped({"a": Batch(x)})
        with contextlib.suppress(TypeError):
            refused(x)

    use()
    gc.collect()
    gc.disable()
    try:
        use()
        assert gc.collect() == 0
    finally:
        gc.enable()


class DataParallelModel(nn.Module):
    """The seed's first example; added is `super().__init__()`, changed the import."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Linear(10, 20)
        self.block2 = nn.Linear(20, 20)
        self.block2 = dpbench.DataParallel(self.block2)
        self.block3 = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(x)
        x = self.block2(x)
        return self.block3(x)


def composed(module: nn.Module, input: Tensor, device_ids: Any, output_device: Any = None) -> Any:
    """The seed's second example, a function composed of the verbs; changed is the import."""
    if not device_ids:
        return module(input)

    if output_device is None:
        output_device = device_ids[0]

    replicas = dpbench.replicate(module, device_ids)
    inputs = dpbench.scatter(input, device_ids)
    replicas = replicas[: len(inputs)]
    outputs = dpbench.parallel_apply(replicas, inputs)
    return dpbench.gather(outputs, output_device)


class DistributedModel(nn.Module):
    """The seed's third example, part on the host and part elsewhere."""

    def __init__(self, elsewhere: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 10)
        self.rnn = nn.Linear(10, 10).to(elsewhere)
        self.elsewhere = elsewhere

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x.to(self.elsewhere)
        return self.rnn(x)


def test_the_examples_of_torchs_tutorial_run_with_the_import_changed() -> None:
    x = torch.randn(5, 10)
    model = DataParallelModel()
    plain = nn.Sequential(model.block1, model.block2.module, model.block3)
    assert torch.equal(model(x), plain(x))
    model.block2 = dpbench.DataParallel(model.block2.module, TWO)
    assert torch.allclose(model(x), plain(x), atol=1e-6)
    for ids in ([], TWO, ["cpu"] * 7):
        assert torch.allclose(composed(plain, x, ids), plain(x), atol=1e-6)


def test_a_model_half_on_the_host_works_and_its_wrapper_says_what_it_needs() -> None:
    numbers = torch.tensor([1, 5, 7, 2])
    for elsewhere in ("cpu", "lazy:0"):
        model = DistributedModel(elsewhere)
        model(numbers).sum().backward()
        assert model.embedding.weight.grad is not None
    wrapped = DataParallel(model, ["emulated:0", "emulated:1"])
    with pytest.raises(
        RuntimeError,
        match=r"on device lazy:0 \(device_ids\[0\]\) but found one of them on device: cpu",
    ):
        wrapped(numbers)
    model.rnn = DataParallel(model.rnn, ["emulated:0", "emulated:1"])
    assert model(numbers).device == torch.device("lazy:0")


def test_no_warning_is_given_where_nothing_is_odd() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataParallel(nn.Linear(2, 2), TWO)(torch.zeros(4, 2))
        assert len(resolve(TWO)) == 2
