"""PyTorch's tests of torch.cuda.comm, rewritten for our verbs.

`tests/engine/conformance.py` names the sources.

Features without a counterpart in ours are left out: `out=`, `buffer_size=`, the current device as a
default, and the messages about them.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import dpbench
from dpbench.engine import resolve
from dpbench.engine.replicate import copies_of
from dpbench.records import no_mark
from tests.engine.conformance import Place, close, every_kind, host, on, place, share

__all__ = ["place"]

pytestmark = every_kind


# ---------------------------------------------------------------- broadcast


def broadcast(place: Place, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return device 0's tensors and device 1's: what replicate does with parameters and buffers."""
    return copies_of(tensors, resolve(place.ids()), no_mark)


def sparse(shape: tuple[int, ...], entries: int, dtype: torch.dtype = torch.double) -> Tensor:
    """Return a sparse matrix whose entries may fall on the same place twice."""
    indices = torch.stack([torch.randint(extent, (entries,)) for extent in shape])
    values = (torch.randn(entries) * 9).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


DENSE = (
    lambda: torch.arange(5),
    lambda: torch.randn(5),
    lambda: torch.arange(5, 10),
    lambda: torch.arange(10, dtype=torch.int),
    lambda: torch.randn(5, dtype=torch.double),
    lambda: torch.randn(5),
)
SPARSE = (
    lambda: sparse((2, 3), 1),
    lambda: sparse((2, 3), 10),
    lambda: sparse((3, 3), 7, torch.long),
    lambda: sparse((2, 3), 2, torch.float),
    lambda: sparse((2, 7), 3, torch.long),
)
EMPTY = (
    lambda: torch.tensor([], dtype=torch.uint8),
    lambda: torch.randn(5),
    lambda: torch.randn(5).double(),
)


def made(place: Place, makers: Sequence[Any]) -> list[Tensor]:
    return [place.put(make()) for make in makers]


def dense(tensor: Tensor) -> Tensor:
    return host(tensor).coalesce().to_dense() if tensor.is_sparse else host(tensor)


def changes_alone(tensors: Sequence[Tensor]) -> None:
    """Check that a write moves one tensor's version, and no other's."""
    versions = [tensor._version for tensor in tensors]
    for version, tensor in zip(versions, tensors, strict=True):
        assert tensor._version == version
        tensor.zero_()
        assert tensor._version == version + 1


def test_broadcast_cpu(place: Place) -> None:
    """Mirror B, test_broadcast_cpu: a tensor of the host, copied to each device."""
    x = torch.randn(5, 5)
    for i, device in enumerate(resolve(place.ids())):
        (copy,) = device.clone([x])
        assert on(copy, place.device(i))
        assert not share(copy, x)
        assert torch.equal(host(copy), x)


def test_broadcast_gpu(place: Place) -> None:
    """Mirror B, test_broadcast_gpu: a tensor of device 0: itself there, a copy on device 1."""
    x = place.put(torch.randn(5, 5))
    (first,), (second,) = broadcast(place, [x])
    assert first is x
    assert on(second, place.device(1))
    assert not share(second, x)  # ours, also where both devices are one: torch would share
    assert torch.equal(host(second), host(x))


def check_coalesced(place: Place, tensors: list[Tensor]) -> None:
    """Broadcast many tensors at once: equal to one by one, unchanged on device 0.

    Each copy on device 1 has a version of its own.
    """
    one_by_one = [broadcast(place, [tensor])[1][0] for tensor in tensors]
    first, second = broadcast(place, tensors)
    assert all(ours is tensor for ours, tensor in zip(first, tensors, strict=True))
    for copy, other, tensor in zip(second, one_by_one, tensors, strict=True):
        assert (copy.dtype, copy.layout, type(copy)) == (tensor.dtype, tensor.layout, type(tensor))
        assert on(copy, place.device(1))
        assert torch.equal(dense(copy), dense(tensor))
        assert torch.equal(dense(other), dense(tensor))
    changes_alone(second)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11
def test_broadcast_coalesced(place: Place) -> None:
    """Mirror B, test_broadcast_coalesced: dense and sparse tensors of several dtypes."""
    check_coalesced(place, made(place, [*SPARSE, *DENSE]))


def test_broadcast_coalesced_dense_only(place: Place) -> None:
    """Mirror B, test_broadcast_coalesced_dense_only: dense tensors of several dtypes."""
    check_coalesced(place, made(place, DENSE))


def test_broadcast_coalesced_empty_tensors(place: Place) -> None:
    """Mirror B, test_broadcast_coalesced_empty_tensors: one without elements among them."""
    check_coalesced(place, made(place, EMPTY))


# ---------------------------------------------------------------- reduce


def test_reduce_add(place: Place) -> None:
    """Mirror B, test_reduce_add: the sum of a tensor per device, on device 0."""
    x, y = torch.randn(5, 5), torch.randn(5, 5)
    (total,) = dpbench.reduce([[place.put(x, 0)], [place.put(y, 1)]], place.ids())
    assert on(total, place.device(0))
    assert torch.equal(host(total), x + y)


def check_reduced(place: Place, makers: Sequence[Any]) -> None:
    """Reduce many tensors at once: equal to one by one, of the same kind, and new.

    Each total has a version of its own.
    """
    tensors = made(place, makers)
    each = [tensors, [place.put(tensor.cpu(), 1) for tensor in tensors]]
    one_by_one = [
        dpbench.reduce([[parts[0]], [parts[1]]], place.ids())[0]
        for parts in zip(*each, strict=True)
    ]
    totals = dpbench.reduce(each, place.ids())
    for total, other, tensor in zip(totals, one_by_one, tensors, strict=True):
        assert (total.dtype, total.layout, type(total)) == (
            tensor.dtype,
            tensor.layout,
            type(tensor),
        )
        assert on(total, place.device(0))
        assert torch.equal(dense(total), dense(tensor) * 2)
        assert torch.equal(dense(other), dense(total))
    before = [dense(tensor) for tensor in tensors]
    changes_alone(totals)
    assert all(
        torch.equal(dense(tensor), kept) for tensor, kept in zip(tensors, before, strict=True)
    )


def test_reduce_add_coalesced(place: Place) -> None:
    """Mirror B, test_reduce_add_coalesced: dense and sparse tensors of several dtypes."""
    check_reduced(place, [*SPARSE, *DENSE])


def test_reduce_add_coalesced_dense_only(place: Place) -> None:
    """Mirror B, test_reduce_add_coalesced_dense_only: dense tensors of several dtypes."""
    check_reduced(place, DENSE)


# ---------------------------------------------------------------- scatter


def check_scatter(
    place: Place, x: Tensor, dim: int = 0, sizes: tuple[int, int] | None = None
) -> None:
    """Compare pieces with slices.

    Pieces own their memory (in ours), and values that cannot be cut are refused.
    """
    given = {} if sizes is None else {"chunk_sizes": sizes}
    pieces = dpbench.scatter(x, place.ids(), dim, **given)
    expected = x.split(sizes or (x.size(dim) // 2,) * 2, dim)
    assert len(pieces) == 2
    for i, (piece, part) in enumerate(zip(pieces, expected, strict=True)):
        assert on(piece, place.device(i))
        assert torch.equal(host(piece), host(part))
        assert not share(piece, x)
    # ours takes fewer sizes than devices, torch does not
    for wrong in ((2, 2, 2), (2, 3)) if sizes else ():
        with pytest.raises(ValueError, match="chunk_sizes"):
            dpbench.scatter(x, place.ids(), dim, chunk_sizes=wrong)


def test_scatter_without_devices(place: Place) -> None:
    """Mirror B, _test_scatter, its check of the devices: no device at all is refused in words."""
    with pytest.raises((RuntimeError, ValueError), match="at least one device"):
        dpbench.scatter(place.put(torch.randn(4, 4)), [])


def test_scatter_cpu(place: Place) -> None:
    """Mirror B, test_scatter_cpu: rows of a tensor of the host."""
    check_scatter(place, torch.randn(4, 4))


def test_scatter_cpu_dim(place: Place) -> None:
    """Mirror B, test_scatter_cpu_dim: columns of a tensor of the host."""
    check_scatter(place, torch.randn(4, 4), 1)


def test_scatter_cpu_neg_dim(place: Place) -> None:
    """Mirror B, test_scatter_cpu_neg_dim: a dimension counted from the end."""
    check_scatter(place, torch.randn(4, 4), -2)


def test_scatter_cpu_sizes(place: Place) -> None:
    """Mirror B, test_scatter_cpu_sizes: pieces of given sizes."""
    check_scatter(place, torch.randn(6, 4), sizes=(2, 4))


def test_scatter_gpu(place: Place) -> None:
    """Mirror B, test_scatter_gpu: rows of a tensor of device 0."""
    check_scatter(place, place.put(torch.randn(4, 4)))


def test_scatter_gpu_dim(place: Place) -> None:
    """Mirror B, test_scatter_gpu_dim: columns of a tensor of device 0."""
    check_scatter(place, place.put(torch.randn(4, 4)), 1)


def test_scatter_gpu_neg_dim(place: Place) -> None:
    """Mirror B, test_scatter_gpu_neg_dim: a dimension counted from the end."""
    check_scatter(place, place.put(torch.randn(4, 4)), -2)


def test_scatter_gpu_sizes(place: Place) -> None:
    """Mirror B, test_scatter_gpu_sizes: pieces of given sizes."""
    check_scatter(place, place.put(torch.randn(6, 4)), sizes=(2, 4))


# ---------------------------------------------------------------- gather


def check_gather(place: Place, dim: int) -> None:
    """Gather onto each device and the host.

    Shapes that do not match are refused with the index of the wrong one.
    """
    parts = [torch.randn(2, 5) for _ in range(2)]
    x, y = (place.put(part, i) for i, part in enumerate(parts))
    targets = [
        (place.ids()[0], place.device(0)),
        (place.ids()[1], place.device(1)),
        ("cpu", torch.device("cpu")),
    ]
    for target, device in targets:
        whole = dpbench.gather((x, y), target, dim=dim)
        assert on(whole, device)
        assert torch.equal(host(whole), torch.cat(parts, dim))
    shorter = y[:, 1:] if dim % 2 == 0 else y[1:]
    for odd in (shorter, y.unsqueeze(0)):
        with pytest.raises(RuntimeError, match="Input tensor at index 1 has invalid shape"):
            dpbench.gather((x, odd), place.ids()[0], dim=dim)
    if place.kind != "cpu":
        with pytest.raises(TypeError, match="not implemented for CPU tensors"):
            dpbench.gather((x.cpu(), y), place.ids()[0], place.ids(), dim)


def test_gather(place: Place) -> None:
    """Mirror B, test_gather: along the rows."""
    check_gather(place, 0)


def test_gather_dim(place: Place) -> None:
    """Mirror B, test_gather_dim: along the columns."""
    check_gather(place, 1)


def test_gather_neg_dim(place: Place) -> None:
    """Mirror B, test_gather_neg_dim: along the columns, counted from the end."""
    check_gather(place, -1)


def test_gather_of_nothing(place: Place) -> None:
    """Mirror B, _test_gather, its check of the inputs: nothing to gather is refused in words."""
    with pytest.raises((RuntimeError, ValueError), match="at least one"):
        dpbench.gather((), place.ids()[0])


def test_memory_format_scatter_gather(place: Place) -> None:
    """Mirror B, test_memory_format_scatter_gather: channels_last survives both."""
    whole = torch.randn(10, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    pieces = dpbench.scatter(whole, place.ids())
    for piece in pieces:
        assert not piece.is_contiguous()
        assert piece.is_contiguous(memory_format=torch.channels_last)
    again = dpbench.gather(pieces, place.ids()[0])
    assert again.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(host(again), whole)


# ---------------------------------------------------------------- namedtuples


Plain = namedtuple("Plain", ("a", "b"))


class Typed(NamedTuple):
    a: Tensor
    b: Tensor


every_spelling = pytest.mark.parametrize("kind", [Plain, Typed])


@every_spelling
def test_scatter_namedtuple(place: Place, kind: type) -> None:
    """Mirror B, test_scatter_namedtuple: each piece is such a tuple, of its fields' pieces."""
    whole = kind(*(torch.rand(4) for _ in range(2)))
    pieces = dpbench.scatter(kind(*(place.put(tensor) for tensor in whole)), place.ids())
    assert len(pieces) == 2
    for i, piece in enumerate(pieces):
        assert type(piece) is kind
        assert piece._fields == ("a", "b")
        close(list(piece), [tensor[2 * i : 2 * i + 2] for tensor in whole])
        assert all(on(tensor, place.device(i)) for tensor in piece)


@every_spelling
@pytest.mark.parametrize("target", ["cpu", "first"])
def test_gather_namedtuple(place: Place, kind: type, target: str) -> None:
    """Mirror B, test_gather_namedtuple: one tuple of wholes, also of tensors on other devices."""
    parts = [kind(*(torch.rand(4) for _ in range(2))) for _ in range(2)]
    outputs = [
        kind(place.put(parts[0].a, 0), place.put(parts[0].b, 1)),
        kind(place.put(parts[1].a, 1), place.put(parts[1].b, 0)),
    ]
    for output in outputs:
        for tensor in output:
            tensor.requires_grad_()
    to, device = (
        ("cpu", torch.device("cpu")) if target == "cpu" else (place.ids()[0], place.device(0))
    )
    whole = dpbench.gather(outputs, to)
    assert type(whole) is kind
    for i, tensor in enumerate(whole):
        assert on(tensor, device)
        assert torch.equal(host(tensor), torch.cat([part[i] for part in parts]))
    sum(
        tensor.sum() for tensor in whole
    ).backward()  # not in the original: the way back leads home too
    for output in outputs:
        for tensor in output:
            assert tensor.grad is not None
            assert tensor.grad.device == tensor.device
            close(tensor.grad, torch.ones(4))
