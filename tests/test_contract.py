"""The rows of docs/contract.md that tests/test_engine.py does not hold: corners of torch.nn.DataParallel's behaviour.

On logical CPU devices; beside torch's own code, on emulated ones, where `compat` promises torch's faults too.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import operator
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dpbench
from dpbench.engine import DataParallel, gather, parallel_apply, reduce, replicate, resolve, scatter
from dpbench.engine.thread_settings import capture
from tests.oracle import error_of, oracle, ours, theirs, torch_faults_and_all
from tests.oracle_nets import Net as Call

TWO = ["cpu", "cpu"]


def returning(run: Callable[[Tensor], Any], **options: Any) -> Callable[[Tensor], Any]:
    """Return a wrapper on two devices whose replicas return what `run` makes of their rows."""
    return DataParallel(Call(lambda _, x: run(x)), TWO, **options)


@pytest.fixture
def beside_torch() -> Iterator[None]:
    with oracle():
        yield


def errors(run: Callable[..., Any], *args: Any, ids: Sequence[int] = (0, 1), **kwargs: Any) -> list[Any]:
    """Return type and message of what torch's wrapper raises, ours with `compat`, and ours."""
    wrapped = [wrap(Call(lambda _, *a, **k: run(*a, **k)), ids) for wrap in (theirs, torch_faults_and_all, ours)]
    return [error_of(lambda one=one: one(*args, **kwargs)) for one in wrapped]


# ---------------------------------------------------------------- the constructor


def test_a_single_device_has_the_module_moved_there() -> None:
    module = nn.Linear(2, 2)
    DataParallel(module, ["emulated:1"])
    assert module.weight.device == torch.device("lazy:1")
    other = nn.Linear(2, 2)
    DataParallel(other, ["emulated:0", "emulated:1"])
    assert other.weight.device == torch.device("cpu")


def test_attributes_are_those_that_users_of_torchs_wrapper_read() -> None:
    wrapped = DataParallel(nn.Linear(2, 2), ["emulated:1", "emulated:0"], output_device="emulated:0", dim=1)
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
    """What users of torch's wrapper override, with torch's signatures."""

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
    """A wrapper for lists of samples: it cuts the list itself, and uses the other methods as they are."""

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


# ---------------------------------------------------------------- scatter


class Pair(NamedTuple):
    left: Any
    right: Any


class Output(OrderedDict):
    """A dict with attributes besides its items, built in a way of its own, as model outputs of libraries are."""

    def __init__(self, *, note: str, **items: Any) -> None:
        super().__init__()
        self.note = note
        for key, item in items.items():
            self[key] = item

    def __reduce__(self) -> Any:
        return _output, (self.note, list(self.items()))


def _output(note: str, items: Any) -> Output:
    return Output(note=note, **dict(items))


@dataclass(frozen=True)
class Batch:
    """Data, a setting, and something computed from the data."""

    x: Tensor
    scale: float = 2.0
    rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", len(self.x))


@dataclass
class Options:
    verbose: bool = True


def test_containers_keep_their_kind() -> None:
    x = torch.arange(4.0)
    with_default: Any = defaultdict(list, a=x)
    value = (
        Pair(x, None),
        [x],
        {"a": x},
        OrderedDict(b=x, a=1),
        with_default,
        Output(note="kept", a=x),
        Counter("aab"),
    )
    for number, piece in enumerate(scatter(value, TWO)):
        assert [type(part) for part in piece] == [type(part) for part in value]
        rows = x[2 * number : 2 * number + 2]
        for part in (piece[0].left, piece[1][0], piece[2]["a"], piece[3]["b"], piece[4]["a"], piece[5]["a"]):
            assert torch.equal(part, rows)
        assert list(piece[3]) == ["b", "a"]
        assert piece[4]["missing"] == []
        assert piece[5].note == "kept"
        assert piece[6] == Counter("aab")


def test_empty_containers_are_shared() -> None:
    empties: Any = ([], {}, (), set())
    for piece in scatter((torch.zeros(2), *empties), TWO):
        assert all(map(operator.is_, piece[1:], empties))


def test_dataclass_instances_with_tensors_are_cut_and_others_are_shared() -> None:
    batch, options = Batch(torch.arange(5.0)), Options()
    first, second = scatter((batch, options), TWO)
    assert (first[0].rows, second[0].rows) == (3, 2)
    assert torch.equal(second[0].x, torch.tensor([3.0, 4.0]))
    assert second[0].scale == 2.0
    assert first[1] is second[1] is options
    for piece in scatter((batch, torch.arange(5.0)), TWO, compat=True):
        assert piece[0] is batch


def test_objects_that_hold_tensors_are_shared() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x = torch.zeros(7, 2)

    graph = Graph()
    array = torch.zeros(3).numpy()
    for piece in scatter((torch.zeros(4), graph, array), TWO):
        assert piece[1] is graph
        assert piece[2] is array


def test_packed_sequences_and_sparse_tensors_are_refused_with_the_way_out() -> None:
    packed = pack_padded_sequence(torch.randn(4, 3, 2), torch.tensor([3, 2, 2, 1]), batch_first=True)
    with pytest.raises(TypeError, match=r"PackedSequence.*padded batch and the lengths.*total_length"):
        scatter((packed,), TWO)
    with pytest.raises(TypeError, match=r"sparse_coo; pass it dense"):
        scatter(torch.eye(4).to_sparse(), TWO)


def test_packing_inside_forward_pads_to_the_whole_length() -> None:
    lstm = nn.LSTM(2, 3, batch_first=True)

    def run(_: Any, x: Tensor, lengths: Tensor, whole: bool) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        assert isinstance(packed, PackedSequence)
        return pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=x.size(1) if whole else None)[0]

    x, lengths = torch.randn(4, 5, 2), torch.tensor([5, 4, 2, 1])
    wrapped = DataParallel(Call(run), TWO)
    assert torch.allclose(wrapped(x, lengths, True), run(None, x, lengths, True), atol=1e-6)
    with pytest.raises(
        RuntimeError, match=r"index 1 has invalid shape \[2, 2, 3\], but expected \[2, 5, 3\].*total_len"
    ):
        wrapped(x, lengths, False)


def test_chunk_sizes_cut_as_told() -> None:
    x = torch.arange(12.0).view(6, 2).requires_grad_()
    pieces = scatter((x, "shared", {"y": x}), ["cpu"] * 3, chunk_sizes=(1, 3, 2))
    assert [len(piece[0]) for piece in pieces] == [1, 3, 2]
    assert [len(piece[2]["y"]) for piece in pieces] == [1, 3, 2]
    sum((i + 1) * piece[0].sum() for i, piece in enumerate(pieces)).backward()
    assert x.grad[:, 0].tolist() == [1, 2, 2, 2, 3, 3]
    assert len(scatter((x, "shared"), ["cpu"] * 3, chunk_sizes=[5, 1])) == 2
    assert [piece.shape for piece in scatter(x, TWO, 1, chunk_sizes=[1, 1])] == [(6, 1), (6, 1)]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([4, 1], r"\[4, 1\] sum to 5, but .* length \[6\] along dim 0"),
        ([6, 0], r"positive.*\[6, 0\]"),
        ([2, 2, 2], r"at most one for each of the 2 devices.*\[2, 2, 2\]"),
        ([], r"positive.*\[\]"),
        ([3.0, 3.0], r"positive integers.*\[3\.0, 3\.0\]"),
    ],
)
def test_chunk_sizes_that_do_not_fit_are_refused_with_the_numbers(sizes: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        scatter(torch.zeros(6, 2), TWO, chunk_sizes=sizes)
    with pytest.raises(ValueError, match=r"length \[2, 6\]"):
        scatter((torch.zeros(6), torch.zeros(2)), TWO, chunk_sizes=[3, 3])


def test_scatter_is_differentiable_and_keeps_complex_numbers() -> None:
    x = torch.randn(5, 2, dtype=torch.complex64, requires_grad=True)
    pieces = scatter(x, ["cpu"] * 3)
    assert [(piece.dtype, piece.shape) for piece in pieces] == [(x.dtype, s) for s in ((2, 2), (2, 2), (1, 2))]
    sum((piece.abs() ** 2).sum() for piece in pieces).backward()
    assert torch.allclose(x.grad, 2 * x.detach())


def test_compat_truncates_unlike_inputs_as_torch(beside_torch: None) -> None:
    outputs, shapes = [], []
    for wrap in (theirs, torch_faults_and_all):
        seen: list[Any] = []
        net = Call(lambda _, x, y, seen=seen: (seen.append((x.shape, y.shape)), x)[1])
        outputs.append(wrap(net, range(4))(torch.arange(8.0), torch.zeros(2)).cpu())
        shapes.append(sorted(seen))
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[0].tolist() == [0, 1, 2, 3]  # four of eight rows
    assert shapes[0] == shapes[1]


def test_compat_fills_up_and_fails_as_torch_where_keywords_are_shorter(beside_torch: None) -> None:
    whole, part = torch.arange(8.0), torch.zeros(2)
    torchs, compat, mine = errors(lambda x, **_: x, whole, d=part, ids=range(4))
    assert torchs == compat
    assert "number of kwargs_tup 2" in torchs[1]
    assert mine[0] is ValueError
    torchs, compat, mine = errors(lambda *x, **_: x, part, d=whole, ids=range(4))  # the rest get no inputs
    assert torchs[0] is compat[0]
    assert torchs[1].partition("\n")[0] == compat[1].partition("\n")[0]
    assert mine[0] is ValueError


def test_compat_shares_dataclasses_and_fails_on_defaultdicts_as_torch(beside_torch: None) -> None:
    x = torch.arange(4.0)
    for wrap, rows in ((theirs, [4, 4]), (torch_faults_and_all, [4, 4]), (ours, [2, 2])):
        seen: list[int] = []
        wrap(Call(lambda _, x, batch, seen=seen: (seen.append(len(batch.x)), x)[1]), (0, 1))(x, Batch(x))
        assert seen == rows
    torchs, compat, mine = errors(lambda x, d: d["a"], x, defaultdict(list, a=x))
    assert torchs == compat == (TypeError, "first argument must be callable or None")
    assert mine is None


def test_a_tensor_without_dimensions_begins_as_torchs_message(beside_torch: None) -> None:
    torchs, _, mine = errors(lambda x, y: x, torch.zeros(4), torch.tensor(1.0))
    assert torchs[0] is mine[0]
    assert mine[1].startswith(torchs[1])


# ---------------------------------------------------------------- replicate


def test_replicas_share_what_is_no_tensor_and_no_child() -> None:
    inner = nn.Linear(2, 2)
    module = Call(lambda m, x: x, listed=[inner], inner=inner)
    module.method = inner.forward
    module.register_forward_hook(lambda *_: None)
    for replica in replicate(module, TWO):
        assert replica.listed is module.listed  # still the originals
        assert replica.inner is not inner
        assert replica.method.__self__ is inner
        assert replica._forward_hooks is module._forward_hooks


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
    with pytest.warns(UserWarning, match=r"zero_grad\(\) from a module created with nn.DataParallel\(\) has no effect"):
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
    """An embedding with sparse gradients, whose weight is also read densely for rows that begin with `dense`."""

    def __init__(self, dense: int = -1) -> None:
        super().__init__()
        self.table, self.dense = nn.Embedding(6, 2, sparse=True), dense

    def forward(self, x: Tensor) -> Tensor:
        return self.table.weight[x] if x[0] == self.dense else self.table(x)


@pytest.mark.parametrize(("dense", "layout"), [(-1, torch.sparse_coo), (0, torch.strided), (2, torch.strided)])
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", COMPILED)
def test_script_and_graph_modules_are_replicated(kind: str) -> None:
    module, x = COMPILED[kind](), torch.randn(5, 2)
    before = [buffer.item() for buffer in module.buffers()]
    output = DataParallel(module, TWO)(x)
    output.square().sum().backward()
    assert [buffer.item() - b for buffer, b in zip(module.buffers(), before, strict=True)] == [1.0] * len(before)
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    alone = module(x)
    alone.square().sum().backward()
    assert torch.allclose(output, alone, atol=1e-6)
    for gradient, parameter in zip(gradients, module.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_refuses_python_children_of_script_modules_itself() -> None:
    with pytest.raises(RuntimeError, match="non-scripted module"):
        torch.jit.script(Plain()).other = nn.Linear(1, 1)


def test_rnn_replicas_have_flat_weights_of_their_own() -> None:
    module = nn.GRU(2, 3)
    for replica in replicate(module, TWO):
        assert all(map(operator.is_, replica._flat_weights, (getattr(replica, n) for n in module._flat_weights_names)))
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
        for replica in replicate(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), TWO, detach=detach):
            torch.save(replica, io.BytesIO())


# ---------------------------------------------------------------- parallel_apply


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def settings() -> dict[str, Any]:
    """Return what torch keeps for this thread."""
    autograd = torch._C._autograd
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "xpu", "mtia")
        ],
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.get_default_device(),
        "hooks": autograd._top_saved_tensors_default_hooks(False),
        "no hooks": autograd._saved_tensors_hooks_get_disabled_error_message(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "dispatch modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "multithreading": torch._C._is_multithreading_enabled(),
    }  # fmt: skip


@contextlib.contextmanager
def several() -> Iterator[None]:
    with torch.autocast("cpu", torch.float16, cache_enabled=False), torch.device("meta"), Doubling(), Counting():
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
    "dispatch mode": Counting,
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
    counting = Counting()
    with counting:
        returning(torch.cos)(x)
    assert counting.calls["cos"] == 2
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        returning(lambda x: x.exp())(x.requires_grad_()).sum().backward()
    assert len(packed) == 2


def test_a_default_device_set_for_good_reaches_the_replicas() -> None:
    devices: list[torch.device] = []
    torch.set_default_device("meta")
    try:
        returning(lambda x: (devices.append(torch.empty(1).device), x)[1])(torch.zeros(4, device="cpu"))
    finally:
        torch.set_default_device(None)
    assert devices == [torch.device("meta")] * 2


@pytest.mark.parametrize(
    ("name", "reaches"),
    [("no_grad", {"grad"}), ("inference_mode", {"grad"}), ("autocast", set()), ("device", set()), ("several", set())],
)
def test_compat_forwards_what_torch_forwards(name: str, reaches: set[str]) -> None:
    seen: list[dict[str, Any]] = []
    module = Call(lambda _, x: (seen.append(settings()), x)[1])
    with SETTINGS[name]():
        caller = settings()
        DataParallel(module, TWO, compat=True)(torch.zeros(4, device="cpu"))
    fresh = settings()
    for one in seen:
        if caller["autocast"] != fresh["autocast"]:  # that it is on arrives, its dtype does not
            assert one.pop("autocast")[0] == (True, torch.bfloat16)
        assert {key for key, value in one.items() if value != fresh[key]} == reaches
        assert all(one[key] == caller[key] for key in reaches)


def test_capturing_the_settings_leaves_no_cycles() -> None:
    gc.collect()
    gc.disable()
    try:
        with several(), capture()():
            pass
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_verbs_find_the_devices_themselves() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    x = torch.randn(3, 2)
    outputs = parallel_apply(modules, [x, (x,)])
    assert torch.equal(gather(outputs, "cpu"), torch.cat([modules[0](x), modules[1](x)]))
    placed = [torch.ones(2, device="lazy:1"), torch.ones(2, device="lazy:0")]
    assert gather(parallel_apply([nn.Identity()] * 2, placed), "emulated:1").device == torch.device("lazy:1")
    assert parallel_apply([lambda: torch.zeros(1)] * 2, [(), ()])[1].tolist() == [0.0]


# ---------------------------------------------------------------- gather


def test_outputs_of_every_container_are_gathered_part_by_part() -> None:
    x = torch.arange(5.0)

    def run(x: Tensor) -> Any:
        return Pair(x, None), defaultdict(list, a=x), OrderedDict(b=x, a=x), Output(note="kept", a=x), Whole(x, [x])

    outputs: Any = returning(run)(x)
    pair, with_default, ordered, noted, whole = outputs
    assert (type(pair), pair.right) == (Pair, None)
    assert with_default["missing"] == []
    assert list(ordered) == ["b", "a"]
    assert (type(noted), noted.note) == (Output, "kept")
    assert type(whole) is Whole
    for tensor in (pair.left, with_default["a"], ordered["a"], noted["a"], whole.x, whole.more[0]):
        assert torch.equal(tensor, x)
    assert returning(lambda x: ([], x, (), {}))(x)[0] == []


@dataclass
class Whole:
    x: Tensor
    more: list[Tensor]


@pytest.mark.parametrize("value", [1.5, 3, "text", {1}, object()], ids=["float", "int", "text", "set", "object"])
def test_outputs_that_are_no_tensors_are_refused_with_where_they_are(value: Any) -> None:
    told = rf"the output\['a'\]\[1\] of type {type(value).__name__}.*return numbers as tensors"
    with pytest.raises(TypeError, match=told):
        returning(lambda x: {"a": [x, value]})(torch.zeros(4))


UNLIKE: dict[str, tuple[Any, Any, str]] = {
    "kinds": ((1,), [1], r"the output has type tuple on replica 0, but list on replica 1"),
    "nothing": (None, torch.zeros(1), r"type NoneType on replica 0, but Tensor on replica 1"),
    "lengths": ([None], [None, None], r"same number of keys.*\[0\] on replica 0, but \[0, 1\] on replica 1"),
    "keys": ({"a": None}, {"b": None}, r"same keys: the output has \['a'\].*\['b'\]"),
    "deep": ({"a": [None]}, {"a": [torch.zeros(1)]}, r"the output\['a'\]\[0\] has type NoneType"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_replicas_that_return_unlike_structures_are_refused_with_where(name: str) -> None:
    first, second, told = UNLIKE[name]
    with pytest.raises(ValueError, match=told):
        returning(lambda x: first if x[0] == 0 else second)(torch.arange(4))


def test_tensors_that_do_not_fit_are_refused_with_torchs_message(beside_torch: None) -> None:
    torchs, compat, mine = errors(lambda x: x.new_zeros(2, 3 if x.get_device() else 2), torch.zeros(4))
    assert torchs[0] is compat[0] is mine[0] is RuntimeError
    assert mine[1].startswith(torchs[1])
    assert "the output may differ between replicas along dim 0 only" in mine[1]


def test_outputs_left_on_the_host_are_refused(beside_torch: None) -> None:
    torchs, compat, mine = errors(lambda x: torch.zeros(2), torch.zeros(4))
    assert torchs == compat == (AssertionError, "Gather function not implemented for CPU tensors")
    assert mine[0] is TypeError
    assert mine[1].startswith(torchs[1])


def test_compat_gathers_what_is_no_tensor_as_torch(beside_torch: None) -> None:
    torchs, compat, mine = errors(lambda x: 1.5, torch.zeros(4))
    assert torchs == compat == (TypeError, "'float' object is not iterable")
    torchs, compat, mine = errors(lambda x: Whole(x, []), torch.zeros(4))
    assert torchs == compat == (TypeError, "'Whole' object is not iterable")
    assert mine is None
    torchs, compat, mine = errors(lambda x: {"a": x} if x.get_device() else {"a": x, "b": x}, torch.zeros(4))
    assert torchs == compat == (ValueError, "All dicts must have the same number of keys")
    assert mine[1].startswith(torchs[1])
    for wrap in (theirs, torch_faults_and_all):
        assert wrap(Call(lambda _, x: "text"), (0, 1))(torch.zeros(4)).startswith("<map object at 0x")
        assert wrap(Call(lambda _, x: x if x.get_device() else None), (0, 1))(torch.zeros(4)) is None


def test_scalars_are_a_vector_along_the_first_dimension_only() -> None:
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        assert returning(lambda x: x.sum())(torch.ones(4, 2)).shape == (2,)
    for dim in (1, -1):
        with pytest.raises(IndexError, match=f"Dimension specified as {dim} but tensor has no dimensions"):
            returning(lambda x: x.sum(), dim=dim)(torch.ones(4, 2))


def test_channels_last_is_kept_where_all_have_it() -> None:
    x = torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert returning(lambda x: x * 1)(x).is_contiguous(memory_format=torch.channels_last)
    assert returning(lambda x: x.contiguous())(x).is_contiguous()


@pytest.mark.parametrize("output_device", ["cpu", -1])
def test_outputs_may_be_gathered_on_the_host(output_device: Any) -> None:
    module = nn.Linear(2, 2).to("lazy:0")
    with pytest.warns(FutureWarning, match='use "cpu"') if output_device == -1 else contextlib.nullcontext():
        wrapped = DataParallel(module, ["emulated:0", "emulated:1"], output_device=output_device)
    output = wrapped(torch.ones(4, 2))
    assert output.device == torch.device("cpu")
    output.sum().backward()
    assert torch.equal(module.bias.grad.cpu(), torch.full((2,), 4.0))
    assert wrapped.output_device == torch.device("cpu")


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
    assert torch.equal(DataParallel(DataParallel(module, ids), ids)(x), DataParallel(module, ids)(x))


def test_a_module_without_parameters_and_an_order_of_devices() -> None:
    x = torch.arange(5.0)
    assert torch.equal(DataParallel(nn.Tanh(), TWO)(x), x.tanh())
    module = nn.Linear(1, 1).to("lazy:1")
    output = DataParallel(module, ["emulated:1", "emulated:0"], output_device="emulated:0")(x.view(5, 1))
    assert output.device == torch.device("lazy:0")


def test_replicas_and_wrappers_leave_no_cycles_whatever_comes_out() -> None:
    wrapped = returning(lambda x: {"a": [x, Batch(x)]})
    refused = returning(lambda x: 1.5)
    truncating = returning(lambda x: (x, "text"), compat=True)
    x = torch.zeros(4)

    def use() -> None:
        with contextlib.suppress(TypeError, ValueError):
            wrapped({"a": Batch(x)})
        with contextlib.suppress(TypeError):
            refused(x)
        truncating(x)

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
        RuntimeError, match=r"on device lazy:0 \(device_ids\[0\]\) but found one of them on device: cpu"
    ):
        wrapped(numbers)
    model.rnn = DataParallel(model.rnn, ["emulated:0", "emulated:1"])
    assert model(numbers).device == torch.device("lazy:0")


def test_no_warning_is_given_where_nothing_is_odd() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataParallel(nn.Linear(2, 2), TWO)(torch.zeros(4, 2))
        assert len(resolve(TWO)) == 2
