"""The engine's laws on logical CPU devices: what a step computes, bit by bit, and what it says when it cannot.

The reference here is this file's own: deep copies of the module, one per chunk, run one after the other.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpbench
from dpbench.engine import DataParallel, TrainStep, gather, parallel_apply, reduce, replicate, resolve, scatter
from dpbench.records import Phase

ROWS = (8, 7, 3)


def cpus(n: int) -> list[str]:
    return ["cpu"] * n


# ---------------------------------------------------------------- nets


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 1))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 3, 3, groups=1), nn.BatchNorm2d(3), nn.Flatten()
    )


class Tied(nn.Module):
    """One weight under three names: twice as a parameter, once inside a shared child."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Frozen(nn.Module):
    """A layer that does not learn before, and one between, layers that do; a buffer that wants gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)
        self.register_buffer("scale", torch.full((12,), 1.5, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


class Unused(nn.Module):
    """A parameter that no replica uses, and one that only the replica with the first row uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.seldom = nn.Linear(12, 5), nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + (self.seldom(x) if x[0, 0] > 50 else 0.0)


class Normed(nn.Module):
    """Parametrizations, old and new: weights that are computed in the forward, with buffers that move."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.utils.parametrizations.weight_norm(nn.Linear(12, 9))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(9, 9))
        self.list = nn.ParameterList([nn.Parameter(torch.randn(9)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.spectral(torch.relu(self.weight(x))) * self.list[0] + self.list[1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(x.size(0), 2, 6))[0]


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (12,)),
    "conv": (conv, (3, 7, 7)),
    "tied": (Tied, (12,)),
    "frozen": (Frozen, (12,)),
    "unused": (Unused, (12,)),
    "normed": (Normed, (12,)),
    "lstm": (Recurrent, (12,)),
    "attention": (lambda: nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0, batch_first=True), (4, 12)),
    "no_parameters": (nn.Tanh, (12,)),
}
every_net = pytest.mark.parametrize("net", NETS)
every_count = pytest.mark.parametrize("n", [1, 2, 3, 4])


def made(net: str, rows: int) -> tuple[nn.Module, Tensor]:
    build, shape = NETS[net]
    torch.manual_seed(1)
    x = torch.randn(rows, *shape)
    x.view(rows, -1)[0, 0] = 100.0
    return build(), x


# ---------------------------------------------------------------- the reference


def chunked(module: nn.Module, x: Tensor, n: int) -> tuple[Tensor, list[nn.Module], list[Tensor], list[Tensor]]:
    """Run chunk after chunk through copies; return the whole output, copies, chunks and their outputs."""
    pieces = [piece.clone().requires_grad_(torch.is_grad_enabled()) for piece in x.detach().chunk(n)]
    copies = [copy.deepcopy(module) for _ in pieces]
    outputs = [one(piece) for one, piece in zip(copies, pieces, strict=True)]
    return torch.cat([output.detach() for output in outputs]), copies, pieces, outputs


def chunked_gradients(
    module: nn.Module, x: Tensor, n: int, loss: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor | None], Tensor | None, dict[str, Tensor]]:
    """Return output, each parameter's gradient added in replica order, the input's gradient, and the buffers."""
    whole, copies, pieces, outputs = chunked(module, x, n)
    whole.requires_grad_()
    loss(whole).backward()
    at = 0
    for output in outputs:
        if output.requires_grad:
            output.backward(whole.grad[at : at + len(output)].clone())
        at += len(output)
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        total = None
        for one in copies:
            part = dict([*one.named_parameters(), *one.named_buffers()])[name].grad
            part = torch.zeros_like(parameter) if part is None and n > 1 else part
            if part is not None:
                total = part.clone() if total is None else total + part
        gradients[name] = total if parameter.requires_grad else None
    whole_x = torch.cat([piece.grad for piece in pieces]) if pieces[0].grad is not None else None
    return whole.detach(), gradients, whole_x, {name: b.detach() for name, b in copies[0].named_buffers()}


def wave(output: Tensor) -> Tensor:
    """Be a loss whose gradient differs from element to element."""
    weights = torch.linspace(-1, 1.7, output.numel()).view(output.shape)
    return (output * weights).sum() + output.square().mean()


def assert_same(ours: Tensor | None, theirs: Tensor | None, what: str) -> None:
    if theirs is None or ours is None:
        assert ours is theirs, what
    else:
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), what


@every_net
@every_count
@pytest.mark.parametrize("rows", ROWS)
def test_outputs_gradients_and_buffers_equal_chunked_reference(net: str, n: int, rows: int) -> None:
    module, x = made(net, rows)
    output, gradients, of_x, buffers = chunked_gradients(module, x, n, wave)
    x.requires_grad_()
    ours = DataParallel(module, cpus(n))(x)
    wave(ours).backward()
    assert_same(ours.detach(), output, "output")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert_same(tensor.grad, gradients[name], f"gradient of {name}")
    assert_same(x.grad, of_x, "gradient of the input")
    for name, buffer in module.named_buffers():
        assert_same(buffer.detach(), buffers[name], name)


@every_count
def test_a_second_step_starts_from_what_the_first_left(n: int) -> None:
    module, x = made("conv", 8)
    wrapped = DataParallel(module, cpus(n))
    for _ in range(3):
        _, gradients, _, buffers = chunked_gradients(copy.deepcopy(module), x, n, wave)
        module.zero_grad()
        wave(wrapped(x)).backward()
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad, gradients[name])
            parameter.data.sub_(0.1 * parameter.grad)
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, buffers[name])


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
    wrapped = DataParallel(module, cpus(3))
    copies = [copy.deepcopy(module) for _ in range(3)]
    for one in copies[1:]:  # as in torch: replica 0 has the parameters themselves, the others plain copies
        one.requires_grad_(False)  # which matters, since matmul folds by requires_grad, even without a graph
    with torch.no_grad():
        output = wrapped(x)
        expected = [one(piece.clone()) for one, piece in zip(copies, x.chunk(3), strict=True)]
    assert torch.equal(output, torch.cat(expected))
    assert not output.requires_grad


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
    assert torch.equal(dpbench.data_parallel(module, None, cpus(3), module_kwargs={"input": x}), expected)
    assert torch.equal(dpbench.data_parallel(nn.Identity(), x.T, cpus(3), dim=1), x.T)


@pytest.mark.skipif(torch.cuda.is_available(), reason="device_ids=None means every GPU where there is one")
def test_without_devices_calls_pass_through() -> None:
    module, x = made("mlp", 7)
    wrapped = DataParallel(module)
    assert torch.equal(wrapped(x), module(x))
    assert all(name.startswith("module.") for name in wrapped.state_dict())
    assert torch.equal(dpbench.data_parallel(module, x), module(x))


# ---------------------------------------------------------------- structures


class Pair(NamedTuple):
    left: Any
    right: Any


class Echo(nn.Module):
    """Return what came in, and remember it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return args, kwargs


def same(left: Any, right: Any) -> bool:
    """Compare structures by type and tensors by value."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def tensors(rows: int) -> st.SearchStrategy[Tensor]:
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    shapes = st.lists(st.integers(0, 3), max_size=2)
    return st.builds(
        lambda dtype, shape: torch.arange(rows * max(1, torch.Size(shape).numel())).view(rows, -1)[
            :, : torch.Size(shape).numel()
        ].reshape(rows, *shape).to(dtype),
        dtypes,
        shapes,
    )  # fmt: skip


def structures(rows: int) -> st.SearchStrategy[Any]:
    leaves = st.none() | tensors(rows)
    keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=1))
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=3)
            | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )


@hypothesis.given(data=st.data(), rows=st.integers(1, 9), n=st.integers(1, 4))
def test_what_is_scattered_gathers_to_itself(data: st.DataObject, rows: int, n: int) -> None:
    devices = resolve(cpus(n))
    value = data.draw(structures(rows))
    pieces = scatter(value, devices)
    assert len(pieces) in (n, len(torch.empty(rows).chunk(n)))
    assert same(gather(pieces, devices[0], devices[: len(pieces)]), value)


@hypothesis.given(rows=st.integers(0, 9), other=st.integers(0, 4), dim=st.sampled_from([0, 1, -1]), n=st.integers(1, 5))
def test_scatter_cuts_as_torch_chunk_and_owns_its_pieces(rows: int, other: int, dim: int, n: int) -> None:
    value = torch.randn((rows, other) if dim == 0 else (other, rows))
    pieces = scatter(value, resolve(cpus(n)), dim)
    assert same(pieces, list(value.chunk(n, dim)))
    for piece in pieces:
        assert piece.data_ptr() % 64 == 0
        assert piece.numel() == 0 or piece.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def test_scatter_shares_what_is_no_tensor() -> None:
    thing, numbers = object(), {1, 2}
    pieces = scatter((torch.zeros(4), thing, "text", 2.5, numbers, None, ()), resolve(cpus(2)))
    for piece in pieces:
        assert piece[1] is thing
        assert piece[4] is numbers
        assert piece[2:4] == ("text", 2.5)
        assert piece[5:] == (None, ())


def test_nested_inputs_and_keywords_reach_every_replica_in_pieces() -> None:
    module, x = Echo(), torch.arange(7.0)
    args, kwargs = DataParallel(module, cpus(3))(
        Pair(x, [x + 1, None]), {"a": (x, {"b": x})}, third=OrderedDict(c=x), none=None
    )
    expected = ((Pair(x, [x + 1, None]), {"a": (x, {"b": x})}), {"third": OrderedDict(c=x), "none": None})
    assert same((args, kwargs), expected)
    assert sorted(len(seen[0][0].left) for seen in module.seen) == [1, 3, 3]


def test_keywords_alone_are_scattered() -> None:
    class Scaled(nn.Module):
        def forward(self, *, x: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale

    x = torch.randn(5, 2)
    assert torch.equal(DataParallel(Scaled(), cpus(2))(x=x, scale=2.0), x * 2)


def test_a_module_without_inputs_runs_once() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            calls.update([threading.current_thread().name])
            return self.weight * 2

    calls: Counter[str] = Counter()
    module = Constant()
    output = DataParallel(module, cpus(3))()
    output.sum().backward()
    assert sum(calls.values()) == 1
    assert torch.equal(output, torch.full((3,), 2.0))
    assert torch.equal(module.weight.grad, torch.full((3,), 2.0))


def test_scalar_outputs_become_a_vector_with_torchs_warning() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    x = torch.arange(6.0, requires_grad=True)
    with pytest.warns(UserWarning, match="all input tensors were scalars; will instead unsqueeze and return a vector"):
        output = DataParallel(Mean(), cpus(3))(x)
    assert torch.equal(output, torch.tensor([0.5, 2.5, 4.5]))
    (output * torch.tensor([2.0, 4.0, 6.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 3.0]))


@pytest.mark.parametrize("value", [1.5, "text", {1}], ids=["number", "text", "set"])
def test_outputs_that_cannot_be_gathered_are_refused(value: Any) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, value

    with pytest.raises(TypeError, match=f"{type(value).__name__}.*tensors"):
        DataParallel(Odd(), cpus(2))(torch.zeros(4))


def test_outputs_of_different_shape_are_refused() -> None:
    class Uneven(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"a": x, **({"b": x} if x[0] == 0 else {})}

    with pytest.raises(ValueError, match="same number of keys"):
        DataParallel(Uneven(), cpus(2))(torch.arange(4.0))


def test_ragged_inputs_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"(?s)2.*8.*") as caught:
        DataParallel(Echo(), cpus(4))(torch.zeros(8), y=torch.zeros(2))
    assert "4 devices" in str(caught.value)
    assert "; give" in str(caught.value)


def test_a_tensor_without_dimensions_is_refused_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"at least a 1-dimensional tensor.*(number|expand)"):
        DataParallel(Echo(), cpus(2))(torch.zeros(4), torch.tensor(1.0))


# ---------------------------------------------------------------- the verbs alone


def test_verbs_compose_to_the_whole() -> None:
    module, x = made("mlp", 7)
    devices = resolve(cpus(3))
    expected = DataParallel(module, cpus(3))(x)
    pieces = scatter((x,), devices)
    outputs = parallel_apply(replicate(module, devices), pieces, None, devices)
    assert torch.equal(gather(outputs, devices[0], devices), expected)


def test_replica_0_shares_storage_and_the_others_own_aligned_copies() -> None:
    module, _ = made("conv", 1)
    first, second, third = replicate(module, resolve(cpus(3)))
    for mine, theirs, last in zip(first.buffers(), second.buffers(), third.buffers(), strict=True):
        assert len({mine.data_ptr(), theirs.data_ptr(), last.data_ptr()}) == 3
    assert [b.data_ptr() for b in first.buffers()] == [b.data_ptr() for b in module.buffers()]
    assert first[0].weight.data_ptr() == module[0].weight.data_ptr()
    assert second[0].weight.data_ptr() % 64 == 0
    assert not list(second.parameters())
    assert isinstance(second[0].weight.grad_fn, type(first[0].weight.grad_fn))


def test_gradients_arrive_at_every_replica_in_memory_of_its_own() -> None:
    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            output = x * 2
            output.register_hook(arrived.append)
            return output

    arrived: list[Tensor] = []
    DataParallel(Watched(), cpus(3))(torch.randn(7, 5, requires_grad=True)).square().sum().backward()
    assert [gradient.data_ptr() % 64 for gradient in arrived] == [0, 0, 0]
    assert len({gradient.untyped_storage().data_ptr() for gradient in arrived}) == 3


def test_tied_weights_stay_tied_inside_a_replica() -> None:
    for replica in replicate(Tied(), resolve(cpus(2))):
        assert replica.first.weight is replica.second.weight
        assert replica.again is replica.first


@hypothesis.given(n=st.integers(1, 5), seed=st.integers(0, 99))
def test_reduce_adds_in_replica_order_and_spares_its_inputs(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [[torch.randn(9, generator=generator), torch.randn(2, 2, generator=generator)] for _ in range(n)]
    before = copy.deepcopy(gradients)
    sums = reduce(gradients, resolve(cpus(n)))
    for i, total in enumerate(sums):
        expected = gradients[0][i]
        for one in gradients[1:]:
            expected = expected + one[i]
        assert torch.equal(total, expected)
    assert same(gradients, before)


def test_parallel_apply_refuses_unequal_lengths_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"2 modules, 1 inputs.*2 devices"):
        parallel_apply([nn.Tanh(), nn.Tanh()], [torch.zeros(1)], None, resolve(cpus(2)))


# ---------------------------------------------------------------- thread settings


class Probe(nn.Module):
    """Remember the torch settings that each replica ran under."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
                torch.is_autocast_cache_enabled(),
            )
        )
        return self.layer(x)


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("enter", "grad", "inference", "dtype"),
    [
        (nothing, True, False, None),
        (torch.no_grad, False, False, None),
        (torch.inference_mode, False, True, None),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), True, False, torch.bfloat16),
        (lambda: torch.autocast("cpu", dtype=torch.float16), True, False, torch.float16),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=False), True, False, None),
    ],
    ids=["plain", "no_grad", "inference", "bf16", "fp16", "disabled"],
)
@pytest.mark.parametrize("n", [1, 3])
def test_replicas_run_under_the_callers_settings(enter: Any, grad: bool, inference: bool, dtype: Any, n: int) -> None:
    module = Probe()
    with enter():
        output = DataParallel(module, cpus(n))(torch.randn(6, 4))
    assert module.seen == [(grad, inference, dtype is not None, dtype, True)] * n
    assert output.dtype == (dtype or torch.float32)
    assert output.is_inference() == inference
    assert output.requires_grad == grad


def test_autocast_cache_setting_reaches_the_replicas() -> None:
    module = Probe()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        DataParallel(module, cpus(2))(torch.randn(6, 4))
    assert [seen[-1] for seen in module.seen] == [False, False]


def test_bf16_gradients_equal_chunked_reference() -> None:
    module, x = made("mlp", 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, gradients, _, _ = chunked_gradients(module, x, 2, lambda o: wave(o.float()))
        output = DataParallel(module, cpus(2))(x)
    wave(output.float()).backward()
    assert torch.equal(output, expected)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name


# ---------------------------------------------------------------- autograd


def penalised(forward: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the gradients of a loss that contains gradients by input and by weights."""
    output = forward(x)
    weights = list(module.parameters())
    inner = torch.autograd.grad(output.square().sum(), [x, *weights], create_graph=True)
    loss = output.sum() + sum(g.square().sum() for g in inner)
    return list(torch.autograd.grad(loss, weights))


@pytest.mark.parametrize("n", [2, 3])
def test_double_backward_equals_single(n: int) -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    for ours, theirs in zip(
        penalised(DataParallel(module, cpus(n)), module, x), penalised(module, module, x), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_hooks_run_once_per_replica_and_parameter_hooks_once() -> None:
    module, x = made("mlp", 6)
    calls: Counter[str] = Counter()
    module.register_forward_pre_hook(lambda *_: calls.update(["pre"]))
    module[0].register_forward_hook(lambda *_: calls.update(["forward"]))
    module[2].register_full_backward_hook(lambda *_: calls.update(["backward"]))
    whole: list[Tensor] = []
    module[0].weight.register_hook(lambda g: whole.append(g.clone()))
    DataParallel(module, cpus(3))(x).sum().backward()
    assert calls == {"pre": 3, "forward": 3, "backward": 3}
    assert len(whole) == 1
    assert torch.equal(whole[0], module[0].weight.grad)


def test_a_wrapper_inside_a_module_takes_part() -> None:
    head, x = nn.Linear(1, 2), torch.randn(6, 12)
    body = mlp()
    _, gradients, _, _ = chunked_gradients(body, x, 2, lambda out: wave(head(out)))
    wave(nn.Sequential(DataParallel(body, cpus(2)), head)(x)).backward()
    assert all(torch.equal(p.grad, gradients[name]) for name, p in body.named_parameters())


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
def test_an_error_has_torchs_type_and_message_and_names_replica_and_device(error: Exception, kind: type) -> None:
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
def test_an_exit_or_interrupt_arrives_as_itself_and_names_replica_and_device(error: BaseException) -> None:
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
    before = threading.active_count()
    with pytest.raises(KeyError, match="in replica 1 on device 1"):
        DataParallel(module, cpus(4))(torch.arange(8))
    assert sorted(module.ended) == [0, 6]
    assert threading.active_count() == before


def test_steps_leave_no_threads_and_no_cycles() -> None:
    module, x = made("conv", 8)
    wrapped = DataParallel(module, cpus(3))
    step = TrainStep(
        made("conv", 8)[0], F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), cpus(3), schedule="reference"
    )
    target = torch.randn(8, 27)

    def use() -> None:
        wrapped(x).sum().backward()
        with torch.no_grad():
            wrapped(x)
        step(x, target)

    use()
    before = threading.active_count()
    gc.collect()
    gc.disable()
    try:
        use()
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert threading.active_count() == before


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
    with pytest.raises(RuntimeError, match=r"device cpu \(device_ids\[0\]\).*meta.*module\.to\('cpu'\)"):
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
        lambda: TrainStep(mlp(), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), cpus(2), "refrence"),
    ):
        with pytest.raises(ValueError, match=r"'refrence'.*reference"):
            make()


def test_missing_attributes_point_at_the_module() -> None:
    class Simple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(1, 1)

    wrapped = DataParallel(Simple(), cpus(2))
    with pytest.raises(AttributeError, match=r"'DataParallel' object has no attribute 'fc1'.*\.module\.fc1"):
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
        wrapped.load_state_dict({f"module.{k}": v for k, v in wrapped.state_dict().items()}, strict=strict)
    with pytest.raises(RuntimeError):
        wrapped.load_state_dict({"other": torch.zeros(1)}, strict=strict)
    step = TrainStep(mlp(), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), cpus(2), schedule="reference")
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
    "copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"]
)
def test_wrappers_can_be_copied_and_pickled(copied: Callable[[Any], Any]) -> None:
    module, x = made("mlp", 7)
    wrapped = DataParallel(module, cpus(3))
    other = copied(wrapped)
    assert torch.equal(other(x), wrapped(x))
    assert other.module is not module
    other(x).sum().backward()
    assert module[0].weight.grad is None


# ---------------------------------------------------------------- TrainStep

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
}


def batches(net: str, count: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches and targets of a net's shape."""
    module, _ = made(net, rows)
    xs = [torch.randn(rows, *NETS[net][1]) for _ in range(count)]
    with torch.no_grad():
        return [(x, torch.randn_like(module(x))) for x in xs]


def by_hand(
    module: nn.Module,
    make: Any,
    data: Any,
    n: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    decay: float = 1.0,
) -> tuple[list[float], torch.optim.Optimizer]:
    """Train as TrainStep should, on the chunked reference; return losses and optimizer."""
    optimizer = make(module.parameters())
    losses = []
    for number, (x, y) in enumerate(data, 1):
        if (number - 1) % accumulate == 0:
            optimizer.zero_grad()
        whole, gradients, _, buffers = chunked_gradients(
            copy.deepcopy(module), x, n, lambda out, y=y: F.mse_loss(out, y) / accumulate
        )
        losses.append(F.mse_loss(whole, y).item())
        for name, parameter in module.named_parameters():
            if gradients[name] is not None:
                parameter.grad = gradients[name] if parameter.grad is None else parameter.grad + gradients[name]
        for name, buffer in module.named_buffers():
            buffer.data.copy_(buffers[name])
        if number % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= decay
    return losses, optimizer


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("net", ["mlp", "conv", "tied", "unused", "normed"])
@every_count
def test_training_equals_a_loop_by_hand(net: str, n: int, make: Any) -> None:
    ours, _ = made(net, 7)
    theirs = copy.deepcopy(ours)
    data = batches(net, 5, 7)
    losses, _ = by_hand(theirs, make, data, n)
    with TrainStep(ours, F.mse_loss, make, cpus(n), schedule="reference") as step:
        assert [step(x, y).item() for x, y in data] == losses
    assert same(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize(("accumulate", "clip"), [(2, None), (3, 0.1), (1, 0.05)])
def test_accumulation_and_clipping_equal_a_loop_by_hand(accumulate: int, clip: float | None) -> None:
    ours, _ = made("mlp", 6)
    theirs = copy.deepcopy(ours)
    data = batches("mlp", 7, 6)
    by_hand(theirs, OPTIMIZERS["sgd"], data, 2, accumulate=accumulate, clip=clip)
    step = TrainStep(
        ours, F.mse_loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference", accumulate=accumulate, clip_norm=clip
    )
    for x, y in data:
        step(x, y)
    assert same(ours.state_dict(), theirs.state_dict())


def test_schedulers_attach_to_the_optimizer() -> None:
    ours, _ = made("mlp", 6)
    theirs = copy.deepcopy(ours)
    data = batches("mlp", 5, 6)
    by_hand(theirs, OPTIMIZERS["adam"], data, 3, decay=0.5)
    step = TrainStep(ours, F.mse_loss, OPTIMIZERS["adam"], cpus(3), schedule="reference")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
    for x, y in data:
        step(x, y)
        scheduler.step()
    assert same(ours.state_dict(), theirs.state_dict())


def test_a_scaler_changes_nothing_but_steps_that_overflow() -> None:
    ours, _ = made("mlp", 6)
    theirs = copy.deepcopy(ours)
    data = batches("mlp", 4, 6)
    by_hand(theirs, OPTIMIZERS["sgd"], data, 2, clip=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = TrainStep(ours, F.mse_loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference", clip_norm=0.5, scaler=scaler)
    for x, y in data:
        step(x, y)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)
    before = copy.deepcopy(ours.state_dict())
    step(torch.full((6, 12), float("inf")), data[0][1])
    assert same(ours.state_dict(), before)
    assert scaler.get_scale() == 2.0**9


def test_state_round_trips_through_another_count_of_devices() -> None:
    data = batches("conv", 6, 8)
    straight, _ = made("conv", 8)
    step = TrainStep(straight, F.mse_loss, OPTIMIZERS["adam"], cpus(2), schedule="reference")
    for x, y in data[:3]:
        step(x, y)
    saved = pickle.loads(pickle.dumps(step.state_dict()))
    assert not any(name.startswith("module.") for name in saved["module"])
    for x, y in data[3:]:
        step(x, y)
    resumed = TrainStep(conv(), F.mse_loss, OPTIMIZERS["adam"], cpus(2), schedule="reference")
    resumed.load_state_dict(saved)
    for x, y in data[3:]:
        resumed(x, y)
    assert same(resumed.module.state_dict(), straight.state_dict())


def test_loading_a_state_begins_a_new_accumulation() -> None:
    data = batches("mlp", 5, 6)
    ours, _ = made("mlp", 6)
    step = TrainStep(ours, F.mse_loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference", accumulate=2)
    saved = copy.deepcopy(step.state_dict())
    step(*data[0])
    step.load_state_dict(saved)
    for x, y in data[1:]:
        step(x, y)
    theirs, _ = made("mlp", 6)
    by_hand(theirs, OPTIMIZERS["sgd"], data[1:], 2, accumulate=2)
    assert same(ours.state_dict(), theirs.state_dict())


def test_inputs_that_are_a_tuple_are_positional_arguments() -> None:
    module = nn.Bilinear(3, 4, 2)
    left, right, target = torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 2)
    loss = TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference")((left, right), target)
    assert loss.shape == ()
    assert not loss.requires_grad


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (t, t), lambda t: {"y": t}], ids=["tensor", "tuple", "dict"])
def test_a_target_elsewhere_is_refused_naming_both_devices(wrap: Any) -> None:
    step = TrainStep(mlp(), lambda out, _: out.sum(), OPTIMIZERS["sgd"], cpus(2), schedule="reference")
    with pytest.raises(RuntimeError, match=r"target.*meta.*cpu.*\.to\('cpu'\)"):
        step(torch.randn(4, 12), wrap(torch.zeros(4, 1, device="meta")))


def test_accumulate_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 1.*0"):
        TrainStep(mlp(), F.mse_loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference", accumulate=0)


# ---------------------------------------------------------------- the mark seam


class Recorder:
    """A mark that writes down what opens and closes."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Phase, int]] = []

    @contextlib.contextmanager
    def __call__(self, phase: Phase, device: int) -> Iterator[None]:
        self.events.append(("open", phase, device))
        try:
            yield
        finally:
            self.events.append(("close", phase, device))

    def opened(self) -> list[tuple[str, int]]:
        return [(phase.value, device) for kind, phase, device in self.events if kind == "open"]

    def still_open(self) -> Counter[tuple[Phase, int]]:
        count: Counter[tuple[Phase, int]] = Counter()
        for kind, phase, device in self.events:
            count[phase, device] += 1 if kind == "open" else -1
        return +count + Counter({key: -value for key, value in count.items() if value < 0})


def test_marks_name_every_phase_on_its_device_in_order() -> None:
    mark = Recorder()
    module, x = made("conv", 7)
    TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], cpus(3), schedule="reference", mark=mark)(x, torch.randn(7, 27))
    first = [one for one in dict.fromkeys(mark.opened()) if one != ("forward", -1)]  # the host starts threads
    expected = [
        *[("optimizer", 0)],
        *[("scatter", i) for i in range(3)],
        *[("replicate", i) for i in range(3)],
        *[("forward", i) for i in range(3)],
        *[("gather", 0), ("loss", 0)],
        *[("backward", i) for i in range(3)],
        *[("reduce", 0)],
    ]
    threads = slice(7, 10)  # whichever starts first
    assert sorted(first[threads]) == expected[threads]
    assert [e for e in first if e[0] != "forward"] == [e for e in expected if e[0] != "forward"]
    assert mark.opened()[-1] == ("optimizer", 0)
    assert mark.still_open() == {}


def closed_before_reduce(mark: Recorder) -> bool:
    """Tell whether every backward span is closed where the reduction opens."""
    opened = Counter()
    for kind, phase, _ in mark.events:
        if phase is Phase.BACKWARD:
            opened["backward"] += 1 if kind == "open" else -1
        if phase is Phase.REDUCE and kind == "open" and opened["backward"]:
            return False
    return True


@pytest.mark.parametrize("n", [2, 4])
def test_backward_ends_where_reduce_begins(n: int) -> None:
    mark = Recorder()
    module, x = made("mlp", 7)
    step = TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], cpus(n), schedule="reference", mark=mark)
    for _ in range(3):
        step(x, torch.randn(7, 1))
    assert mark.opened().count(("reduce", 0)) == 3
    assert closed_before_reduce(mark)
    assert mark.still_open() == {}


def test_one_device_has_no_replicas_to_join() -> None:
    mark = Recorder()
    module, x = made("mlp", 7)
    TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], cpus(1), schedule="reference", mark=mark)(x, torch.randn(7, 1))
    assert mark.opened() == [(p, 0) for p in ("optimizer", "scatter", "forward", "loss", "backward", "optimizer")]


@pytest.mark.parametrize("where", ["forward", "loss", "hook", "parameter hook"])
def test_marks_are_closed_when_something_raises_and_the_next_step_is_whole(where: str) -> None:
    mark, armed = Recorder(), [True]

    def fail(*_: Any) -> None:
        if armed[0]:
            raise Awkward(1, 2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            fail()
        return F.mse_loss(output, target)

    module, x = made("mlp", 7)
    pristine = copy.deepcopy(module)
    if where == "forward":
        module[2].register_forward_hook(fail)
    elif where == "hook":
        module[2].register_full_backward_hook(fail)
    elif where == "parameter hook":
        module[2].weight.register_hook(fail)
    step = TrainStep(module, loss, OPTIMIZERS["sgd"], cpus(3), schedule="reference", mark=mark)
    target = torch.randn(7, 1)
    with pytest.raises(RuntimeError if where == "forward" else Awkward):  # a replica's error is made anew
        step(x, target)
    assert mark.still_open() == {}
    assert closed_before_reduce(mark)
    assert (("reduce", 0) in mark.opened()) == (where == "parameter hook")
    armed[0] = False
    step(x, target)
    by_hand(pristine, OPTIMIZERS["sgd"], [(x, target)], 3)
    assert same(module.state_dict(), pristine.state_dict())


def test_a_gradient_inside_the_loss_keeps_the_phases_apart() -> None:
    mark = Recorder()
    module, x = made("mlp", 6)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(output.sum(), [module[0].weight], create_graph=True)
        return F.mse_loss(output, target) + inner.square().sum()

    TrainStep(module, loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference", mark=mark)(x, torch.randn(6, 1))
    assert mark.still_open() == {}
    assert closed_before_reduce(mark)


# ---------------------------------------------------------------- verbs by ids


def test_verbs_take_ids_as_they_take_devices() -> None:
    module, x = made("mlp", 6)
    ids = ["cpu", "cpu"]
    pieces = dpbench.scatter(x, ids)
    replicas = dpbench.replicate(module, ids)
    outputs = dpbench.parallel_apply(replicas, pieces, None, ids)
    whole = dpbench.gather(outputs, "cpu", ids)
    assert torch.equal(whole, dpbench.data_parallel(module, x, ids))
    ones = [[torch.ones(2)], [torch.ones(2)]]
    assert torch.equal(dpbench.reduce(ones, ids)[0], torch.full((2,), 2.0))


def test_inputs_of_unlike_length_are_refused_even_where_they_make_as_many_pieces() -> None:
    with pytest.raises(ValueError, match=r"\[6, 8\]"):
        dpbench.scatter((torch.zeros(8), torch.zeros(6)), ["cpu", "cpu"])
    one_row_a_piece = dpbench.scatter((torch.zeros(8), torch.arange(2)), ["cpu", "cpu"])
    assert [int(numbers) for _, numbers in one_row_a_piece] == [0, 1]


def test_ids_that_are_no_list_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"must be a list, such as \['cpu'\]"):
        dpbench.DataParallel(nn.Linear(1, 1), "cpu")
