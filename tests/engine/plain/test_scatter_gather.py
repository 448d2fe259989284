"""The contract on scatter and gather: which containers and tensors they cut and join, and how."""

from __future__ import annotations

import contextlib
import operator
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpbench.engine import DataParallel, gather, parallel_apply, scatter
from dpbench.hardware.devices.host import install
from tests.engine.nets import TWO, Call, returning

install()  # some tests put tensors on "lazy:0" before any emulated device exists

# ---------------------------------------------------------------- scatter


class Pair(NamedTuple):
    left: Any
    right: Any


class Output(OrderedDict):
    """A dict with attributes and a special constructor, like the model outputs of libraries."""

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
    """Data, a setting, and what the constructor makes of the data: fields and plain attributes."""

    x: Tensor
    scale: float | None = 2.0
    doubled: Tensor = field(init=False)
    made: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x + 1)
        object.__setattr__(self, "doubled", self.x * 2)
        object.__setattr__(self, "mask", self.x > 2)
        object.__setattr__(self, "name", "kept")
        self.made.append(1)


@dataclass(frozen=True, slots=True)
class Slotted:
    """A batch without a `__dict__`, whose constructor needs an argument that is no field."""

    x: Tensor
    factor: InitVar[float]

    def __post_init__(self, factor: float) -> None:
        object.__setattr__(self, "x", self.x * factor)


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
        for part in (
            piece[0].left,
            piece[1][0],
            piece[2]["a"],
            piece[3]["b"],
            piece[4]["a"],
            piece[5]["a"],
        ):
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
    assert first[1] is second[1] is options


def test_pieces_of_a_dataclass_instance_are_copies_whose_constructor_does_not_run() -> None:
    batch = Batch(torch.arange(5.0))
    for piece, rows in zip(scatter(batch, TWO), (slice(0, 3), slice(3, 5)), strict=True):
        assert type(piece) is Batch
        for name in ("x", "doubled", "mask"):
            assert torch.equal(getattr(piece, name), getattr(batch, name)[rows]), name
        assert (piece.scale, vars(piece)["name"]) == (2.0, "kept")
        assert piece.made is batch.made
    assert batch.made == [1]
    assert torch.equal(batch.x, torch.arange(1.0, 6.0))


def test_a_dataclass_instance_with_slots_is_cut_without_its_constructor() -> None:
    first, second = scatter(Slotted(torch.arange(4.0), 2.0), TWO)
    assert torch.equal(first.x, torch.tensor([0.0, 2.0]))
    assert torch.equal(second.x, torch.tensor([4.0, 6.0]))


def test_gathered_dataclass_instances_are_copies_whose_constructor_does_not_run() -> None:
    batch = gather(scatter(Batch(torch.arange(5.0), scale=None), TWO), "cpu")
    assert torch.equal(batch.x, torch.arange(1.0, 6.0))
    assert torch.equal(batch.doubled, batch.x * 2)
    assert torch.equal(vars(batch)["mask"], batch.x > 2)
    assert (batch.made, vars(batch)["name"]) == ([1], "kept")


class Encoding(UserDict[str, Any]):
    """What a tokenizer returns: a dict with other attributes, whose keys are attributes too."""

    def __init__(self, data: dict[str, Any], origin: str) -> None:
        super().__init__(data)
        self.origin = origin

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: str) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def test_a_user_dict_is_cut_and_gathered_as_a_dict() -> None:
    whole = Encoding({"x": torch.arange(5.0), "name": "a"}, "here")
    pieces = scatter(whole, TWO)
    for piece, rows in zip(pieces, (slice(0, 3), slice(3, 5)), strict=True):
        assert (type(piece), piece.origin, piece["name"]) == (Encoding, "here", "a")
        assert torch.equal(piece.x, torch.arange(5.0)[rows])
    assert torch.equal(whole.x, torch.arange(5.0))
    del whole.data["name"], pieces[0].data["name"], pieces[1].data["name"]
    assert torch.equal(gather(pieces, "cpu").to("cpu").x, whole.x)


class Graph:
    """A batch whose tensors no container leads to."""

    def __init__(self, nested: bool = False) -> None:
        self.store = Graph() if nested else {"x": torch.zeros(7, 2)}


class InSlots:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = torch.zeros(7)


UNREACHABLE = {
    "an object": Graph(),
    "an object in an object": Graph(nested=True),
    "an object with slots": InSlots(),
    "a list of samples": [Graph(), Graph()],
    "an array": torch.zeros(3).numpy(),
    "a mapping": types.MappingProxyType({"x": torch.zeros(7)}),
    "a deque": deque([torch.zeros(7)]),
}


@pytest.mark.parametrize("batch", UNREACHABLE.values(), ids=UNREACHABLE)
def test_a_batch_whose_tensors_cannot_be_reached_is_refused(batch: Any) -> None:
    kind = type(batch[0] if isinstance(batch, list) else batch).__name__
    for value in (batch, (batch, 3), {"batch": batch}):
        with pytest.raises(TypeError, match=rf"{kind}.*rows.*lists or dicts"):
            scatter(value, TWO)
    for piece in scatter((0, batch), ["cpu"]) + scatter((torch.zeros(4), batch), TWO):
        wholes, parts = (batch, piece[1]) if isinstance(batch, list) else ([batch], [piece[1]])
        assert all(map(operator.is_, parts, wholes))


def test_arguments_without_rows_are_shared() -> None:
    values: Any = (3, "text", {1, 2}, Options(), nn.Linear(2, 2), Graph, len, np.float32(1), [None])
    for piece in scatter(values, TWO):
        assert all(map(operator.is_, piece[:8], values[:8]))


def test_a_tensor_with_one_row_per_device_among_others_is_cut_and_said() -> None:
    said: list[str] = []
    (first, _) = scatter((torch.zeros(4), torch.tensor([5.0, 6.0])), TWO, say=said.append)
    assert first[1].tolist() == [5.0]
    assert "2" in said[0]
    assert "4" in said[0]
    scatter((torch.zeros(2), torch.zeros(2)), TWO, say=said.append)
    scatter((torch.zeros(4), torch.zeros(4)), TWO, say=said.append)
    assert len(said) == 1
    with pytest.warns(UserWarning, match="one row"):
        scatter((torch.zeros(4), torch.zeros(2)), TWO)


def test_objects_that_hold_tensors_are_shared_beside_a_batch() -> None:
    graph = Graph()
    array = torch.zeros(3).numpy()
    for piece in scatter((torch.zeros(4), graph, array), TWO):
        assert piece[1] is graph
        assert piece[2] is array


def test_packed_sequences_and_sparse_tensors_are_refused_with_the_way_out() -> None:
    packed = pack_padded_sequence(
        torch.randn(4, 3, 2), torch.tensor([3, 2, 2, 1]), batch_first=True
    )
    with pytest.raises(
        TypeError, match=r"PackedSequence.*padded batch and the lengths.*total_length"
    ):
        scatter((packed,), TWO)
    with pytest.raises(TypeError, match=r"sparse_coo; pass a dense tensor"):
        scatter(torch.eye(4).to_sparse(), TWO)


def test_packing_inside_forward_pads_to_the_whole_length() -> None:
    lstm = nn.LSTM(2, 3, batch_first=True)

    def run(_: Any, x: Tensor, lengths: Tensor, whole: bool) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        assert isinstance(packed, PackedSequence)
        return pad_packed_sequence(
            lstm(packed)[0], batch_first=True, total_length=x.size(1) if whole else None
        )[0]

    x, lengths = torch.randn(4, 5, 2), torch.tensor([5, 4, 2, 1])
    wrapped = DataParallel(Call(run), TWO)
    assert torch.allclose(wrapped(x, lengths, True), run(None, x, lengths, True), atol=1e-6)
    with pytest.raises(
        RuntimeError,
        match=r"index 1 has invalid shape \[2, 2, 3\], but expected \[2, 5, 3\].*total_len",
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
        ([4, 1], r"\[4, 1\] sum to 5, but .* lengths \[6\] along dim 0"),
        ([6, 0], r"positive.*\[6, 0\]"),
        ([2, 2, 2], r"at most one per device, for 2 devices.*\[2, 2, 2\]"),
        ([], r"positive.*\[\]"),
        ([3.0, 3.0], r"positive integers.*\[3\.0, 3\.0\]"),
    ],
)
def test_chunk_sizes_that_do_not_fit_are_refused_with_the_numbers(sizes: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        scatter(torch.zeros(6, 2), TWO, chunk_sizes=sizes)
    with pytest.raises(ValueError, match=r"lengths \[2, 6\]"):
        scatter((torch.zeros(6), torch.zeros(2)), TWO, chunk_sizes=[3, 3])


def test_scatter_is_differentiable_and_keeps_complex_numbers() -> None:
    x = torch.randn(5, 2, dtype=torch.complex64, requires_grad=True)
    pieces = scatter(x, ["cpu"] * 3)
    assert [(piece.dtype, piece.shape) for piece in pieces] == [
        (x.dtype, s) for s in ((2, 2), (2, 2), (1, 2))
    ]
    sum((piece.abs() ** 2).sum() for piece in pieces).backward()
    assert torch.allclose(x.grad, 2 * x.detach())


def test_verbs_find_the_devices_themselves() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    x = torch.randn(3, 2)
    outputs = parallel_apply(modules, [x, (x,)])
    assert torch.equal(gather(outputs, "cpu"), torch.cat([modules[0](x), modules[1](x)]))
    placed = [torch.ones(2, device="lazy:1"), torch.ones(2, device="lazy:0")]
    assert gather(parallel_apply([nn.Identity()] * 2, placed), "emulated:1").device == torch.device(
        "lazy:1"
    )
    assert parallel_apply([lambda: torch.zeros(1)] * 2, [(), ()])[1].tolist() == [0.0]


# ---------------------------------------------------------------- gather


def test_outputs_of_every_container_are_gathered_part_by_part() -> None:
    x = torch.arange(5.0)

    def run(x: Tensor) -> Any:
        return (
            Pair(x, None),
            defaultdict(list, a=x),
            OrderedDict(b=x, a=x),
            Output(note="kept", a=x),
            Whole(x, [x]),
        )

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


@pytest.mark.parametrize(
    "value", [1.5, 3, "text", {1}, object()], ids=["float", "int", "text", "set", "object"]
)
def test_outputs_that_are_no_tensors_are_refused_with_where_they_are(value: Any) -> None:
    told = rf"the output\['a'\]\[1\] of type {type(value).__name__}.*return numbers as tensors"
    with pytest.raises(TypeError, match=told):
        returning(lambda x: {"a": [x, value]})(torch.zeros(4))


UNLIKE: dict[str, tuple[Any, Any, str]] = {
    "kinds": ((1,), [1], r"the output has type tuple on replica 0, but list on replica 1"),
    "nothing": (None, torch.zeros(1), r"type NoneType on replica 0, but Tensor on replica 1"),
    "lengths": (
        [None],
        [None, None],
        r"same number of keys.*\[0\] on replica 0, but \[0, 1\] on replica 1",
    ),
    "keys": ({"a": None}, {"b": None}, r"same keys: the output has \['a'\].*\['b'\]"),
    "deep": ({"a": [None]}, {"a": [torch.zeros(1)]}, r"the output\['a'\]\[0\] has type NoneType"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_replicas_that_return_unlike_structures_are_refused_with_where(name: str) -> None:
    first, second, told = UNLIKE[name]
    with pytest.raises(ValueError, match=told):
        returning(lambda x: first if x[0] == 0 else second)(torch.arange(4))


def test_scalars_are_a_vector_along_the_first_dimension_only() -> None:
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        assert returning(lambda x: x.sum())(torch.ones(4, 2)).shape == (2,)
    for dim in (1, -1):
        with pytest.raises(
            IndexError, match=f"Dimension specified as {dim} but tensor has no dimensions"
        ):
            returning(lambda x: x.sum(), dim=dim)(torch.ones(4, 2))


def test_channels_last_is_kept_where_all_have_it() -> None:
    x = torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert returning(lambda x: x * 1)(x).is_contiguous(memory_format=torch.channels_last)
    assert returning(lambda x: x.contiguous())(x).is_contiguous()


@pytest.mark.parametrize("output_device", ["cpu", -1])
def test_outputs_may_be_gathered_on_the_host(output_device: Any) -> None:
    module = nn.Linear(2, 2).to("lazy:0")
    with (
        pytest.warns(FutureWarning, match='use "cpu"')
        if output_device == -1
        else contextlib.nullcontext()
    ):
        wrapped = DataParallel(module, ["emulated:0", "emulated:1"], output_device=output_device)
    output = wrapped(torch.ones(4, 2))
    assert output.device == torch.device("cpu")
    output.sum().backward()
    assert torch.equal(module.bias.grad.cpu(), torch.full((2,), 4.0))
    assert wrapped.output_device == torch.device("cpu")
