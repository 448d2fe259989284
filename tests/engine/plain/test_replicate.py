"""The contract on replicas: their parts, and the caller's settings in their threads."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench.engine import DataParallel, reduce, replicate
from dpbench.engine.settings import capture
from tests.engine.nets import TWO, Call, returning

# ---------------------------------------------------------------- replicate


def test_replicas_share_what_is_no_tensor_and_no_child() -> None:
    inner = nn.Linear(2, 2)
    module = Call(lambda m, x: x, listed=[inner], inner=inner)
    module.method = inner.forward
    for replica in replicate(module, TWO):
        assert replica.listed is module.listed  # still the originals
        assert replica.inner is not inner
        assert replica.method.__self__ is inner


def hook(*_: Any, **__: Any) -> None:
    """Do nothing."""


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(hook, with_kwargs=True, always_call=True),
    "before forward": lambda m: m.register_forward_pre_hook(hook, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(hook),
    "before backward": lambda m: m.register_full_backward_pre_hook(hook),
    "state dict": lambda m: m.register_state_dict_post_hook(hook),
    "before state dict": lambda m: m.register_state_dict_pre_hook(hook),
    "loading": lambda m: m.register_load_state_dict_post_hook(hook),
    "before loading": lambda m: m.register_load_state_dict_pre_hook(hook),
}


def hooks_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return all hooks of a module by the dict that holds them."""
    return {name: dict(value) for name, value in vars(module).items() if "_hooks" in name}


@pytest.mark.parametrize("kind", HOOKS)
def test_replicas_have_the_modules_hooks_in_dicts_of_their_own(kind: str) -> None:
    module = nn.Linear(2, 2)
    HOOKS[kind](module)
    before = hooks_of(module)
    first, second = replicate(module, TWO)
    assert hooks_of(first) == hooks_of(second) == before
    HOOKS[kind](first)
    assert hooks_of(first) != before
    assert hooks_of(second) == hooks_of(module) == before


def test_a_buffer_that_a_replica_registers_leaves_no_trace_in_the_module() -> None:
    module = nn.Linear(2, 2)
    replicate(module, TWO)[1].register_buffer("mask", torch.ones(2), persistent=False)
    assert not module._non_persistent_buffers_set


def test_the_handle_of_a_hook_that_forward_adds_removes_it() -> None:
    def tapped(m: Any, x: Tensor) -> Tensor:
        handle = m.layer.register_forward_hook(lambda module, args, out: out + 1)
        once = m.layer(x)
        handle.remove()
        out: Tensor = m.layer(x) - once
        return out

    module = Call(tapped, layer=nn.Linear(2, 2))
    assert torch.allclose(DataParallel(module, TWO)(torch.ones(4, 2)), -torch.ones(4, 2))
    assert not module.layer._forward_hooks


def test_weights_of_replicas_are_no_parameters() -> None:
    module = nn.Linear(2, 2)
    module.weight.custom = "lost"
    for replica in replicate(module, TWO):
        assert not list(replica.parameters())
        assert replica.weight.grad_fn is not None
        assert not isinstance(replica.weight, nn.Parameter)
        assert not hasattr(replica.weight, "custom")
    with torch.no_grad():
        first, second = replicate(module, TWO, detach=True)
    assert first.weight is module.weight
    assert not second.weight.requires_grad
    assert not list(second.parameters())


def test_zero_grad_of_a_replica_warns_as_torch() -> None:
    with pytest.warns(
        UserWarning,
        match=r"zero_grad\(\) from a module created with nn.DataParallel\(\) has no effect",
    ):
        replicate(nn.Linear(2, 2), TWO)[1].zero_grad()


def test_rebinding_in_a_replica_is_lost_and_mutating_a_shared_list_is_not() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.count += 1
        m.running = m.running + 1
        m.shared.append(len(x))
        return x

    module = Call(run, count=0, shared=[])
    module.register_buffer("running", torch.zeros(()))
    DataParallel(module, TWO)(torch.zeros(5))
    assert module.count == 0
    assert module.running == 0
    assert sorted(module.shared) == [2, 3]


def test_copies_have_version_counters_of_their_own() -> None:
    module = nn.BatchNorm1d(2)
    first, second = replicate(module, TWO)
    before = second.running_mean._version
    first.running_mean.add_(1)
    assert second.running_mean._version == before
    assert torch.equal(module.running_mean, torch.ones(2))
    assert torch.equal(second.running_mean, torch.zeros(2))


def test_buffers_may_be_tied_and_may_want_gradients() -> None:
    module = Call(lambda m, x: x * m.a + m.wants)
    module.register_buffer("a", torch.ones(2))
    module.register_buffer("b", module.a)
    module.register_buffer("wants", torch.zeros(2, requires_grad=True))
    for replica in replicate(module, TWO):
        assert replica.a is replica.b
    DataParallel(module, TWO)(torch.ones(5, 2)).sum().backward()
    assert module.wants.grad.tolist() == [5.0, 5.0]


class Looking(nn.Module):
    """An embedding with sparse gradients, also read densely for rows that begin with `dense`."""

    def __init__(self, dense: int = -1) -> None:
        super().__init__()
        self.table, self.dense = nn.Embedding(6, 2, sparse=True), dense

    def forward(self, x: Tensor) -> Tensor:
        return self.table.weight[x] if x[0] == self.dense else self.table(x)


@pytest.mark.parametrize(
    ("dense", "layout"), [(-1, torch.sparse_coo), (0, torch.strided), (2, torch.strided)]
)
def test_sparse_gradients_stay_sparse_where_all_are(dense: int, layout: torch.layout) -> None:
    torch.manual_seed(0)
    module, x = Looking(dense), torch.tensor([0, 1, 2, 2, 4, 0])
    DataParallel(module, ["cpu"] * 3)(x).square().sum().backward()
    alone = copy.deepcopy(module)
    alone.zero_grad()
    alone.table.weight[x].square().sum().backward()
    gradient = module.table.weight.grad
    assert gradient.layout == layout
    assert torch.equal(gradient.to_dense(), alone.table.weight.grad)


def test_reduce_adds_sparse_and_dense_in_any_order() -> None:
    dense = torch.arange(4.0).view(2, 2)
    sparse = torch.eye(2).to_sparse()
    for parts in ([sparse, dense, sparse], [dense, sparse, sparse], [sparse, sparse, dense]):
        (total,) = reduce([[part] for part in parts], ["cpu"] * 3)
        assert torch.equal(total, sum(part.to_dense() for part in parts))
    assert torch.equal(dense, torch.arange(4.0).view(2, 2))


def test_complex_parameters_are_trained() -> None:
    module = nn.Linear(3, 2, dtype=torch.complex64)
    x = torch.randn(5, 3, dtype=torch.complex64)
    DataParallel(module, TWO)(x).abs().square().sum().backward()
    gradient = module.weight.grad.clone()
    module.zero_grad()
    module(x).abs().square().sum().backward()
    assert gradient.dtype == torch.complex64
    assert torch.allclose(gradient, module.weight.grad, atol=1e-5)


class Plain(nn.Module):
    """Everything a scripted or traced module may own: a parameter, a buffer that moves, a child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return self.child(x) * self.scale


COMPILED: dict[str, Callable[[], nn.Module]] = {
    "script": lambda: torch.jit.script(Plain()),
    "trace": lambda: torch.jit.trace(Plain(), torch.zeros(1, 2)),
    "script in python": lambda: nn.Sequential(torch.jit.script(Plain()), nn.Tanh()),
    "fx": lambda: torch.fx.symbolic_trace(Plain()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("kind", COMPILED)
def test_script_and_graph_modules_are_replicated(kind: str) -> None:
    module, x = COMPILED[kind](), torch.randn(5, 2)
    before = [buffer.item() for buffer in module.buffers()]
    output = DataParallel(module, TWO)(x)
    output.square().sum().backward()
    assert [buffer.item() - b for buffer, b in zip(module.buffers(), before, strict=True)] == [
        1.0
    ] * len(before)
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    alone = module(x)
    alone.square().sum().backward()
    assert torch.allclose(output, alone, atol=1e-6)
    for gradient, parameter in zip(gradients, module.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_torch_refuses_python_children_of_script_modules_itself() -> None:
    with pytest.raises(RuntimeError, match="non-scripted module"):
        torch.jit.script(Plain()).other = nn.Linear(1, 1)


def test_rnn_replicas_have_flat_weights_of_their_own() -> None:
    module = nn.GRU(2, 3)
    for replica in replicate(module, TWO):
        assert all(
            map(
                operator.is_,
                replica._flat_weights,
                (getattr(replica, n) for n in module._flat_weights_names),
            )
        )
    x = torch.randn(4, 6, 2)  # time first: the batch is dim 1, and so is the state's
    output, state = DataParallel(module, TWO, dim=1)(x)
    expected, last = module(x)
    assert torch.allclose(output, expected, atol=1e-6)
    assert torch.allclose(state, last, atol=1e-6)


def test_parameter_lists_and_dicts_are_replicated() -> None:
    module = Call(
        lambda m, x: x * m.listed[1] + sum(m.listed) + m.named["a"],
        listed=nn.ParameterList([torch.ones(2), torch.full((2,), 2.0)]),
        named=nn.ParameterDict({"a": torch.ones(2)}),
    )
    DataParallel(module, TWO)(torch.ones(5, 2)).sum().backward()
    assert [p.grad[0].item() for p in module.parameters()] == [5.0, 10.0, 5.0]


def test_replicas_can_be_saved() -> None:
    for detach in (False, True):
        for replica in replicate(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), TWO, detach=detach
        ):
            torch.save(replica, io.BytesIO())


# ---------------------------------------------------------------- parallel_apply


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class Recording(TorchDispatchMode):
    """A mode that lists operators: threads may append to a list at once, not count in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def settings() -> dict[str, Any]:
    """Return what torch keeps for this thread."""
    autograd = torch._C._autograd
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k))
            for k in ("cpu", "xpu", "mtia")
        ],
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.get_default_device(),
        "hooks": autograd._top_saved_tensors_default_hooks(False),
        "no hooks": autograd._saved_tensors_hooks_get_disabled_error_message(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "dispatch modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "multithreading": torch._C._is_multithreading_enabled(),
    }


@contextlib.contextmanager
def several() -> Iterator[None]:
    with (
        torch.autocast("cpu", torch.float16, cache_enabled=False),
        torch.device("meta"),
        Doubling(),
        Recording(),
    ):
        yield


@contextlib.contextmanager
def autocast_of_xpu() -> Iterator[None]:
    torch.set_autocast_dtype("xpu", torch.bfloat16)
    torch.set_autocast_enabled("xpu", True)
    yield
    torch.set_autocast_enabled("xpu", False)
    torch.set_autocast_dtype("xpu", torch.float16)


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast of another kind": autocast_of_xpu,
    "device": lambda: torch.device("meta"),
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "no saved tensors": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "function mode": Doubling,
    "dispatch mode": Recording,
    "mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "serial backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "several": several,
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("where", ["a new thread", "the same thread"])
def test_the_callers_settings_reach_a_thread_and_leave_it(name: str, where: str) -> None:
    seen: list[Any] = []

    def work() -> None:
        before = settings()
        with enter():
            seen.append(settings())
            with enter():  # twice, as a device's guard may do
                seen.append(settings())
        assert settings() == before
        seen.append("done")

    with SETTINGS[name]():
        expected, enter = settings(), capture()
        if where == "the same thread":
            work()
        else:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert settings() == expected
    assert seen == [expected, expected, "done"]


def test_default_device_hooks_and_modes_act_in_every_replica() -> None:
    x = torch.randn(6, 2)
    with torch.device("meta"):
        output = returning(lambda x: torch.zeros(len(x)) if x.device.type == "cpu" else x)
        with pytest.raises((TypeError, RuntimeError, NotImplementedError), match="meta"):
            output(x).tolist()
    with Doubling():
        assert torch.equal(returning(torch.sin)(x), torch.sin(x))
    recording = Recording()
    with recording:
        returning(torch.cos)(x)
    assert recording.seen.count("cos") == 2
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        returning(lambda x: x.exp())(x.requires_grad_()).sum().backward()
    assert len(packed) == 2


def test_a_default_device_set_for_good_reaches_the_replicas() -> None:
    devices: list[torch.device] = []
    torch.set_default_device("meta")
    try:
        returning(lambda x: (devices.append(torch.empty(1).device), x)[1])(
            torch.zeros(4, device="cpu")
        )
    finally:
        torch.set_default_device(None)
    assert devices == [torch.device("meta")] * 2


def test_capturing_the_settings_leaves_no_cycles() -> None:
    gc.collect()
    gc.disable()
    try:
        with several(), capture()():
            pass
        assert gc.collect() == 0
    finally:
        gc.enable()
