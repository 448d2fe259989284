"""The verbs and the structures that they cut and join: scatter, replicate, reduce, gather."""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

import dpbench
from dpbench.engine import DataParallel, gather, parallel_apply, reduce, replicate, resolve, scatter
from tests.engine.law.compare import same
from tests.engine.nets import Tied, cpus, made

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


def tensors(rows: int) -> st.SearchStrategy[Tensor]:
    dtypes = st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    )
    shapes = st.lists(st.integers(0, 3), max_size=2)
    return st.builds(
        lambda dtype, shape: (
            torch.arange(rows * max(1, torch.Size(shape).numel()))
            .view(rows, -1)[:, : torch.Size(shape).numel()]
            .reshape(rows, *shape)
            .to(dtype)
        ),
        dtypes,
        shapes,
    )


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


@hypothesis.given(
    rows=st.integers(0, 9),
    other=st.integers(0, 4),
    dim=st.sampled_from([0, 1, -1]),
    n=st.integers(1, 5),
)
def test_scatter_cuts_as_torch_chunk_and_owns_its_pieces(
    rows: int, other: int, dim: int, n: int
) -> None:
    value = torch.randn((rows, other) if dim == 0 else (other, rows))
    pieces = scatter(value, resolve(cpus(n)), dim)
    assert same(pieces, list(value.chunk(n, dim)))
    for piece in pieces:
        assert piece.data_ptr() % 64 == 0
        assert (
            piece.numel() == 0
            or piece.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
        )


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
    expected = (
        (Pair(x, [x + 1, None]), {"a": (x, {"b": x})}),
        {"third": OrderedDict(c=x), "none": None},
    )
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
    with pytest.warns(
        UserWarning,
        match="all input tensors were scalars; will instead unsqueeze and return a vector",
    ):
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
    DataParallel(Watched(), cpus(3))(
        torch.randn(7, 5, requires_grad=True)
    ).square().sum().backward()
    assert [gradient.data_ptr() % 64 for gradient in arrived] == [0, 0, 0]
    assert len({gradient.untyped_storage().data_ptr() for gradient in arrived}) == 3


def test_tied_weights_stay_tied_inside_a_replica() -> None:
    for replica in replicate(Tied(), resolve(cpus(2))):
        assert replica.first.weight is replica.second.weight
        assert replica.again is replica.first


@hypothesis.given(n=st.integers(1, 5), seed=st.integers(0, 99))
def test_reduce_adds_in_replica_order_and_spares_its_inputs(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [
        [torch.randn(9, generator=generator), torch.randn(2, 2, generator=generator)]
        for _ in range(n)
    ]
    before = copy.deepcopy(gradients)
    sums = reduce(gradients, resolve(cpus(n)))
    for i, total in enumerate(sums):
        expected = gradients[0][i]
        for one in gradients[1:]:
            expected = expected + one[i]
        assert torch.equal(total, expected)
    assert same(gradients, before)


def test_parallel_apply_refuses_unequal_lengths_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"2 \(modules\), 1 \(inputs\).*2 \(devices\)"):
        parallel_apply([nn.Tanh(), nn.Tanh()], [torch.zeros(1)], None, resolve(cpus(2)))


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
    with pytest.warns(UserWarning, match="one row"):
        one_row_a_piece = dpbench.scatter((torch.zeros(8), torch.arange(2)), ["cpu", "cpu"])
    assert [int(numbers) for _, numbers in one_row_a_piece] == [0, 1]


def test_ids_that_are_no_list_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"must be a list of ids, but is 'cpu'; give \['cpu'\]"):
        dpbench.DataParallel(nn.Linear(1, 1), "cpu")


def test_the_replicas_of_a_module_compiled_in_place_have_their_own_weights() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.sum()

    module = Sum()
    module.compile(backend="eager")
    first, second = replicate(module, ["cpu", "cpu"])
    second.weight.data.fill_(7.0)
    x = torch.ones(1)
    assert (module(x).item(), first(x).item(), second(x).item()) == (2.0, 2.0, 14.0)
