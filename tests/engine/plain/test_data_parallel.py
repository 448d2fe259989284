"""The engine's laws on logical CPU devices: exact bits of results, and messages of errors."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import dpbench
from dpbench.engine import DataParallel, TrainStep
from tests.engine.chunked import Chunked
from tests.engine.law.compare import assert_same, same
from tests.engine.nets import cpus, every_count, every_net, made, mlp
from tests.garbage import COUNTED


def wave(output: Any) -> Tensor:
    """Return a loss of all output tensors whose gradient differs from element to element."""
    loss = torch.zeros(())
    for tensor in tree_leaves(output):
        weights = torch.linspace(-1, 1.7, tensor.numel()).view(tensor.shape)
        loss = loss + (tensor.abs() * weights).sum() + (tensor.abs() ** 2).mean()
    return loss


def outcome(forward: Callable[[Tensor], Any], module: nn.Module, x: Tensor) -> dict[str, Any]:
    """Run forward and backward; return the output, the gradients, and the buffers."""
    x = x.clone().requires_grad_(x.is_floating_point())
    output = forward(x)
    if any(one.requires_grad for one in tree_leaves(output)):
        wave(output).backward()
    named = [*module.named_parameters(), *module.named_buffers()]
    return {
        "output": output,
        "gradients": {name: tensor.grad for name, tensor in named},
        "gradient of the input": x.grad,
        "buffers": dict(module.named_buffers()),
    }


def equal_reference(module: nn.Module, x: Tensor, n: int) -> None:
    """Compare the wrapper with the plain reference, bit by bit."""
    plain = copy.deepcopy(module)
    expected = outcome(Chunked(plain, n), plain, x)
    assert_same(outcome(DataParallel(module, cpus(n)), module, x), expected, "")


@every_net
@every_count
@pytest.mark.parametrize("rows", [8, 7, 3])
def test_outputs_gradients_and_buffers_equal_chunked_reference(net: str, n: int, rows: int) -> None:
    equal_reference(*made(net, rows), n)


@every_count
def test_buffers_that_learn_get_gradients(n: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 12)
            self.register_buffer("scale", torch.full((12,), 1.5, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    module = Scaled()
    equal_reference(module, torch.randn(7, 12), n)
    assert module.scale.grad is not None


@every_count
def test_a_second_step_starts_from_what_the_first_left(n: int) -> None:
    module, x = made("conv", 8)
    plain = copy.deepcopy(module)
    wrapped, reference = DataParallel(module, cpus(n)), Chunked(plain, n)
    for _ in range(3):
        found, expected = outcome(wrapped, module, x), outcome(reference, plain, x)
        assert_same(found, expected, "")
        for one in (module, plain):
            for parameter in one.parameters():
                parameter.data.sub_(0.1 * parameter.grad)
            one.zero_grad()


def test_gradients_of_calls_add_up() -> None:
    module, x = made("mlp", 7)
    wrapped = DataParallel(module, cpus(3))
    wave(wrapped(x)).backward()
    once = [p.grad.clone() for p in module.parameters()]
    wave(wrapped(x)).backward()
    assert all(torch.equal(p.grad, g + g) for p, g in zip(module.parameters(), once, strict=True))


@every_net
def test_evaluation_equals_chunked_reference_and_leaves_no_graph(net: str) -> None:
    module, x = made(net, 7)
    module.eval()
    with torch.no_grad():
        output = DataParallel(module, cpus(3))(x)
        assert_same(output, Chunked(module, 3)(x), "output")
    assert not any(one.requires_grad for one in tree_leaves(output))


def test_unused_parameters_get_zeros_from_replicas_and_none_from_one_device() -> None:
    for n, expected in ((1, None), (2, 0.0)):
        module, x = made("unused", 4)
        DataParallel(module, cpus(n))(x).sum().backward()
        gradient = module.never.weight.grad
        assert gradient is None if expected is None else torch.equal(gradient, torch.zeros(5, 12))


def test_buffers_keep_what_replica_0_writes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.rows += len(x)
            return x

    module = Counting()
    wrapped = DataParallel(module, cpus(3))
    wrapped(torch.zeros(7, 1))  # pieces of 3, 3 and 1
    assert module.rows == 3
    with torch.no_grad():
        wrapped(torch.zeros(4, 1))  # 2 and 2
    assert module.rows == 5


def test_a_short_batch_uses_fewer_replicas() -> None:
    module, x = made("mlp", 2)
    calls: Counter[str] = Counter()
    module.register_forward_hook(lambda *_: calls.update(["forward"]))
    assert len(DataParallel(module, cpus(4))(x)) == 2
    assert calls["forward"] == 2


def test_functional_form_equals_the_module() -> None:
    module, x = made("mlp", 7)
    expected = DataParallel(module, cpus(3))(x)
    assert torch.equal(dpbench.data_parallel(module, x, cpus(3)), expected)
    assert torch.equal(dpbench.data_parallel(module, (x,), cpus(3)), expected)
    assert torch.equal(
        dpbench.data_parallel(module, None, cpus(3), module_kwargs={"input": x}), expected
    )
    assert torch.equal(dpbench.data_parallel(nn.Identity(), x.T, cpus(3), dim=1), x.T)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="device_ids=None means every GPU where there is one"
)
def test_without_devices_calls_pass_through() -> None:
    module, x = made("mlp", 7)
    wrapped = DataParallel(module)
    assert torch.equal(wrapped(x), module(x))
    assert all(name.startswith("module.") for name in wrapped.state_dict())
    assert torch.equal(dpbench.data_parallel(module, x), module(x))


# ---------------------------------------------------------------- errors


class Awkward(Exception):
    """An error that cannot be rebuilt from its message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"awkward {one} {two}")
        self.one, self.two = one, two


class Failing(nn.Module):
    """Fail where the first value of a chunk is listed."""

    def __init__(self, errors: dict[int, BaseException], pause_s: float = 0.0) -> None:
        super().__init__()
        self.errors, self.pause_s = errors, pause_s
        self.ended: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if error := self.errors.get(int(x[0])):
            raise error
        time.sleep(self.pause_s)
        self.ended.append(int(x[0]))
        return x


class Speaking(Exception):
    """An error that takes its text by name."""

    message = "a default"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("a"), KeyError),
        (MemoryError("none left"), MemoryError),
        (torch.OutOfMemoryError("GPU 0 has a total capacity"), torch.OutOfMemoryError),
        (Speaking(message="named"), Speaking),
        (Awkward(1, 2), RuntimeError),  # cannot be made of a message
    ],
    ids=repr,
)
def test_an_error_has_torchs_type_and_message_and_names_replica_and_device(
    error: Exception, kind: type
) -> None:
    with pytest.raises(kind) as caught:
        DataParallel(Failing({2: error}), cpus(3))(torch.arange(6))
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
    assert caught.value.__notes__ == ["in replica 1 on device cpu:1"]
    name = type(error).__name__
    assert str(caught.value).startswith(
        f"Caught {name} in replica 1 on device 1.\nOriginal Traceback (most recent call"
    )
    assert str(caught.value).rstrip().endswith(str(error))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_exit_or_interrupt_arrives_as_itself_and_names_replica_and_device(
    error: BaseException,
) -> None:
    with pytest.raises(type(error)) as caught:
        DataParallel(Failing({2: error}), cpus(3))(torch.arange(6))
    assert caught.value is error
    assert error.__notes__ == ["in replica 1 on device cpu:1"]


def test_one_device_raises_what_the_module_raised() -> None:
    error = Awkward(1, 2)
    with pytest.raises(Awkward) as caught:
        DataParallel(Failing({0: error}), cpus(1))(torch.arange(6))
    assert caught.value is error


def test_the_lowest_replicas_error_is_raised_after_all_have_ended() -> None:
    module = Failing({2: KeyError("lower"), 4: Awkward(2, 2)}, pause_s=0.05)
    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="in replica 1 on device 1"):
        DataParallel(module, cpus(4))(torch.arange(8))
    assert sorted(module.ended) == [0, 6]
    assert set(threading.enumerate()) <= before, "a thread is left"


@COUNTED
def test_steps_leave_no_threads_and_no_cycles() -> None:
    module, x = made("conv", 8)
    wrapped = DataParallel(module, cpus(3))
    step = TrainStep(
        made("conv", 8)[0],
        F.mse_loss,
        lambda p: torch.optim.SGD(p, lr=0.1),
        cpus(3),
        schedule="reference",
    )
    target = torch.randn(8, 5)

    def use() -> None:
        wrapped(x).sum().backward()
        with torch.no_grad():
            wrapped(x)
        step(x, target)

    use()
    before = set(threading.enumerate())
    gc.collect()
    gc.disable()
    try:
        use()
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert set(threading.enumerate()) <= before, "a thread is left"


@COUNTED
def test_an_error_leaves_no_cycles() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise Awkward(1, len(x))

    wrapped = DataParallel(Fails(), cpus(3))

    def use() -> None:
        with contextlib.suppress(RuntimeError):
            wrapped(torch.arange(6))

    use()
    gc.collect()
    gc.disable()
    try:
        use()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_placement_is_checked_by_the_call_and_not_by_the_constructor() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    wrapped = DataParallel(module, cpus(2))
    with pytest.raises(
        RuntimeError, match=r"device cpu \(device_ids\[0\]\).*meta.*module\.to\('cpu'\)"
    ):
        wrapped(torch.zeros(4, 2))
    module[1] = nn.Linear(2, 2)
    assert wrapped(torch.zeros(4, 2)).shape == (4, 2)


def test_uninitialised_parameters_are_refused_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"uninitialized.*dummy forward"):
        DataParallel(nn.LazyLinear(3), cpus(2))(torch.zeros(4, 2))


@pytest.mark.parametrize("ids", [["cpu", "meta"], ["meta"], ["cpu", 0]], ids=str)
def test_devices_of_other_kinds_are_refused(ids: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"device_ids.*cpu"):
        DataParallel(nn.Tanh(), ids)


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"cuda:1.*no GPU.*'cpu'"):
        DataParallel(nn.Tanh(), [1])


def test_unknown_schedules_list_the_known() -> None:
    for make in (
        lambda: DataParallel(nn.Tanh(), cpus(2), schedule="refrence"),
        lambda: TrainStep(
            mlp(), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), cpus(2), "refrence"
        ),
    ):
        with pytest.raises(ValueError, match=r"'refrence'.*reference"):
            make()


def test_missing_attributes_point_at_the_module() -> None:
    class Simple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(1, 1)

    wrapped = DataParallel(Simple(), cpus(2))
    with pytest.raises(
        AttributeError, match=r"'DataParallel' object has no attribute 'fc1'.*\.module\.fc1"
    ):
        _ = wrapped.fc1
    assert not hasattr(wrapped, "fc1")
    with pytest.raises(AttributeError) as caught:
        _ = wrapped.fc9
    assert "hint" not in str(caught.value)


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("strict", [True, False])
def test_a_prefix_that_does_not_fit_is_refused_both_ways(strict: bool) -> None:
    plain, wrapped = mlp(), DataParallel(mlp(), cpus(2))
    with pytest.raises(RuntimeError, match=r"lack the prefix.*\.module"):
        wrapped.load_state_dict(plain.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=r"once too often.*strip"):
        wrapped.load_state_dict(
            {f"module.{k}": v for k, v in wrapped.state_dict().items()}, strict=strict
        )
    with pytest.raises(RuntimeError):
        wrapped.load_state_dict({"other": torch.zeros(1)}, strict=strict)
    step = TrainStep(
        mlp(), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), cpus(2), schedule="reference"
    )
    with pytest.raises(RuntimeError, match=r"once too often.*strip"):
        step.load_state_dict({**step.state_dict(), "module": wrapped.state_dict()})


def test_state_goes_through_torchs_own_wrapper_and_back() -> None:
    source = DataParallel(mlp(), cpus(2))
    theirs = nn.DataParallel(mlp())
    theirs.load_state_dict(source.state_dict())
    target = DataParallel(mlp(), cpus(3))
    assert not target.load_state_dict(theirs.state_dict()).missing_keys
    assert same(target.module.state_dict(), source.module.state_dict())
    partial = {k: v for k, v in source.state_dict().items() if "0." in k}
    assert len(target.load_state_dict(partial, strict=False).missing_keys) == 4


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
    ids=["deepcopy", "pickle"],
)
def test_wrappers_can_be_copied_and_pickled(copied: Callable[[Any], Any]) -> None:
    module, x = made("mlp", 7)
    wrapped = DataParallel(module, cpus(3))
    other = copied(wrapped)
    assert torch.equal(other(x), wrapped(x))
    assert other.module is not module
    other(x).sum().backward()
    assert module[0].weight.grad is None
