"""Memory: the allocator's rules, and the replay against emulated devices' ledger, to the byte."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench import models, strategies
from dpbench.engine import TrainStep
from dpbench.hardware.devices import open_devices
from dpbench.hardware.devices.host import EmulatedDevice
from dpbench.models import Model
from dpbench.predict import memory
from dpbench.predict.allocator import MIB, Allocator, OutOfDeviceMemory, Tape, replay
from dpbench.predict.memory import DeviceMemory, Traces, largest_batch, needed, tape_of, traces_of
from dpbench.predict.strategy_memory import EngineMemory
from dpbench.predict.work import chunks
from dpbench.records import Case, no_mark
from dpbench.strategies import bucket_sizes, optimizer_of, single
from tests.garbage import COUNTED

BATCH = 17
"""Odd, so that shards differ."""

# ---------------------------------------------------------------- the allocator


def test_small_blocks_share_a_segment_of_two_mib() -> None:
    allocator = Allocator()
    allocator.take(1)
    allocator.take(513)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512 + 1024, 2 * MIB)


def test_segments_are_two_twenty_or_their_own() -> None:
    for size, segment in (
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ):
        allocator = Allocator()
        allocator.take(size)
        assert allocator.reserved_bytes == segment, size


def test_large_blocks_are_split_only_if_more_than_one_mib_is_left() -> None:
    allocator = Allocator()
    big = allocator.take(12 * MIB)
    allocator.give(big)
    whole = allocator.take(11 * MIB)
    assert allocator.allocated_bytes == 12 * MIB, "the rest of 1 MiB stays with the block"
    allocator.give(whole)
    allocator.take(11 * MIB - 512)
    assert allocator.allocated_bytes == 11 * MIB - 512


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = Allocator()
    blocks = [allocator.take(size * 2 * MIB) for size in (10, 6, 8)]
    for block in blocks:
        allocator.give(block)
    allocator.take(13 * MIB)
    assert allocator.reserved_bytes == 48 * MIB
    assert [block.size for block in allocator._free[False]] == [3 * MIB, 12 * MIB, 20 * MIB]


def test_freed_neighbours_are_joined() -> None:
    allocator = Allocator()
    blocks = [allocator.take(4 * MIB) for _ in range(5)]
    for i in (1, 3, 2, 0, 4):
        allocator.give(blocks[i])
    assert [block.size for block in allocator._free[False]] == [20 * MIB]
    allocator.take(19 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_full_device_gives_free_segments_back_before_it_fails() -> None:
    allocator = Allocator(capacity_bytes=40 * MIB)
    allocator.give(allocator.take(30 * MIB))
    allocator.take(32 * MIB)
    assert allocator.reserved_bytes == 32 * MIB
    with pytest.raises(OutOfDeviceMemory, match=f"cannot allocate {20 * MIB} bytes"):
        allocator.take(20 * MIB)


def test_nothing_is_no_block() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        Allocator().take(0)


# ---------------------------------------------------------------- against the ledger


def measured(case: Case) -> list[int]:
    """Return what a strategy really holds at most on each emulated device in three steps."""
    devices = [EmulatedDevice(i) for i in range(case.devices)]
    gc.collect()
    before = [device.allocated() for device in devices]
    model = models.load(case.model, case.size, case.seed)
    model.module.to("lazy:0")
    for device in devices:
        device.reset_memory()
    with (
        TrainStep(model.module, model.loss, optimizer_of(case), devices, case.schedule)
        if case.strategy == "dp"
        else strategies.load(case.strategy).start(case, model, devices, no_mark)
    ) as step:
        for seed in range(3):
            step(*model.batch(case.batch_size, seed))
        return [
            device.take_peaks()["allocated"] - held
            for device, held in zip(devices, before, strict=True)
        ]


def replayed(case: Case, traces: Traces) -> list[int]:
    tape = tape_of(case, traces)
    return [
        replay(tape, device, rounding_bytes=1).allocated_bytes for device in range(len(case.rows))
    ]


@functools.cache
def traced(model: str, optimizer: str) -> Traces:
    """Return a model's traces on emulated devices, for all schedules and numbers of devices."""
    return traces_of(emulated(model, 1, optimizer))


def emulated(model: str, devices: int, optimizer: str, schedule: str = "reference") -> Case:
    return Case(
        model=model,
        strategy="dp",
        schedule=schedule,
        batch_size=BATCH,
        devices=devices,
        device_kind="emulated",
        optimizer=optimizer,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("mlp", "sgd"), ("mlp", "adam"), ("resnet18", "adam"), ("transformer", "sgd")],
)
def test_the_reference_is_right_to_the_byte(model: str, optimizer: str) -> None:
    traces = traced(model, optimizer)
    for devices in (1, 2, 3) if model == "mlp" else (3,):
        case = emulated(model, devices, optimizer)
        assert replayed(case, traces) == measured(case), f"{devices} devices"


@pytest.mark.parametrize(
    ("strategy", "devices", "optimizer"),
    [("single", 1, "sgd"), ("single", 1, "adam"), ("torch_dp", 1, "sgd"), ("torch_dp", 2, "sgd")],
)
@pytest.mark.parametrize("zero_grad", ["none", "zero"])
def test_loops_without_the_engine_are_right_to_the_byte_also_if_they_keep_gradients(
    strategy: str, devices: int, optimizer: str, zero_grad: str
) -> None:
    case = Case(
        model="mlp",
        strategy=strategy,
        batch_size=BATCH,
        devices=devices,
        device_kind="emulated",
        optimizer=optimizer,
        zero_grad=zero_grad,
    )
    assert replayed(case, traces_of(case)) == measured(case)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pool", "cached"])
@pytest.mark.parametrize(("optimizer", "devices"), [("sgd", 2), ("adam", 3)])
def test_schedules_are_right_to_the_byte(schedule: str, optimizer: str, devices: int) -> None:
    case = emulated("mlp", devices, optimizer, schedule)
    assert replayed(case, traced("mlp", optimizer)) == measured(case)


@COUNTED
@pytest.mark.parametrize("schedule", ["local", "allreduce"])
def test_local_losses_are_right_but_for_their_scalars(schedule: str) -> None:
    """Left out: each device's int64 weight and quotient, and on the first the others' copies."""
    case = emulated("mlp", 2, "adam", schedule)
    found, right = replayed(case, traced("mlp", "adam")), measured(case)
    for device, (mine, real) in enumerate(zip(found, right, strict=True)):
        assert 0 <= real - mine <= (32 if device == 0 else 12)


def test_a_fault_in_the_splice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: if the replicas do not keep their gradients for the sum, bytes differ."""

    def sum_of_none(self: EngineMemory, replica_gradients: list[int]) -> None:
        self._tape.give(replica_gradients)
        summed(self, [])

    summed = EngineMemory._sum
    monkeypatch.setattr(EngineMemory, "_sum", sum_of_none)
    case = emulated("mlp", 2, "sgd")
    assert replayed(case, traced("mlp", "sgd"))[0] < measured(case)[0]


# ---------------------------------------------------------------- GPU 0, closed forms, verdicts


class Bert(nn.Module):
    """BERT-base's shape: 12 layers of width 768, 30,522 words, 512 positions and 2 segments."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.segments = (
            nn.Embedding(30_522, 768),
            nn.Embedding(512, 768),
            nn.Embedding(2, 768),
        )
        self.norm = nn.LayerNorm(768)
        layer = nn.TransformerEncoderLayer(
            768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.pool, self.head = nn.Linear(768, 768), nn.Linear(768, 2)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.size(1), device=words.device)
        x = self.norm(self.words(words) + self.places(places) + self.segments.weight[0])
        logits: Tensor = self.head(torch.tanh(self.pool(self.layers(x)[:, 0])))
        return logits


def bert_batch(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, 128, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)


def multi_tensor_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, foreach=True)


@pytest.fixture(scope="module")
def bert() -> Traces:
    return Traces(lambda: Model("bert", Bert(), bert_batch, F.cross_entropy), multi_tensor_adam)


def cuda(devices: int, batch_size: int, strategy: str = "dp") -> Case:
    return Case(
        model="bert",
        strategy=strategy,
        devices=devices,
        batch_size=batch_size,
        device_kind="cuda",
        optimizer="adam",
    )


def excess_bytes(devices: list[DeviceMemory]) -> int:
    """Return the allocated peak of device 0 minus the highest of the others."""
    return devices[0].peak.allocated_bytes - max(one.peak.allocated_bytes for one in devices[1:])


@pytest.mark.slow
def test_gpu_0_has_three_more_sizes_of_a_bert(bert: Traces) -> None:
    """Where weights are the peak, the excess is Adam's averages and the sum of the gradients."""
    devices = needed(cuda(2, 4), bert)
    sizes = sum(bert.of(4).parameter_bytes)
    assert 109e6 < sizes / 4 < 111e6
    assert excess_bytes(devices) == pytest.approx(3 * sizes, rel=0.01)
    assert devices[0].peak.allocated_bytes == pytest.approx(5 * sizes, rel=0.02)
    assert devices[1].peak.allocated_bytes == pytest.approx(2 * sizes, rel=0.04), (
        "one coalesced buffer more"
    )


@pytest.mark.slow
def test_torchs_other_gpus_let_weights_go_while_they_go_backward(bert: Traces) -> None:
    """Replicas die when forward returns: no other GPU has all weights and gradients at once."""
    ours, theirs = needed(cuda(2, 4), bert), needed(cuda(2, 4, "torch_dp"), bert)
    sizes = sum(bert.of(4).parameter_bytes)
    assert theirs[0].peak.allocated_bytes == pytest.approx(ours[0].peak.allocated_bytes, rel=0.01)
    assert ours[1].peak.allocated_bytes > 2 * sizes
    assert theirs[1].peak.allocated_bytes < 1.5 * sizes


@pytest.mark.slow
def test_large_batches_move_the_peak_to_backward(bert: Traces) -> None:
    """Then both have activations, and device 0's excess is Adam's averages alone."""
    devices = needed(cuda(4, 64), bert)
    assert excess_bytes(devices) == pytest.approx(2 * sum(bert.of(4).parameter_bytes), rel=0.01)


@pytest.mark.slow
def test_ddp_has_no_excess_and_one_bucket_copy(bert: Traces) -> None:
    devices = needed(cuda(2, 8, "ddp"), bert)
    sizes = sum(bert.of(4).parameter_bytes)
    assert excess_bytes(devices) == 0
    assert devices[0].peak.allocated_bytes == pytest.approx(6 * sizes, rel=0.02), (
        "Adam's root makes the peak"
    )


@pytest.mark.slow
def test_what_the_driver_shows_is_more_than_the_segments(bert: Traces) -> None:
    one, two = needed(cuda(1, 4, "single"), bert)[0], needed(cuda(2, 4), bert)[0]
    assert one.process_bytes == one.peak.reserved_bytes + memory.CONTEXT_BYTES
    assert two.process_bytes == two.peak.reserved_bytes + memory.CONTEXT_BYTES + memory.NCCL_BYTES
    assert one.peak.allocated_bytes <= one.peak.reserved_bytes


@pytest.mark.slow
def test_out_of_memory_says_what_takes_it(bert: Traces) -> None:
    with pytest.raises(OutOfDeviceMemory, match="are already reserved"):
        needed(cuda(2, 4), bert, capacity_bytes=memory.CONTEXT_BYTES + memory.NCCL_BYTES + 2**30)
    with pytest.raises(OutOfDeviceMemory, match="context and NCCL alone"):
        needed(cuda(2, 4), bert, capacity_bytes=memory.CONTEXT_BYTES + memory.NCCL_BYTES - 1)


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    case = Case(model="mlp", strategy="dp", devices=2, batch_size=1, device_kind="cuda")
    traces = traces_of(case)
    capacity = memory.CONTEXT_BYTES + memory.NCCL_BYTES + 64 * MIB
    found = largest_batch(case, traces, capacity)
    fits, above = (replace(case, batch_size=batch) for batch in (found, found + 1))
    held = needed(fits, traces, capacity_bytes=capacity)
    assert max(one.process_bytes for one in held) <= capacity
    with pytest.raises(OutOfDeviceMemory):
        needed(above, traces, capacity_bytes=capacity)
    assert found > 1000
    assert largest_batch(case, traces, memory.CONTEXT_BYTES) == 0


def test_a_strategy_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="magic"):
        tape_of(
            Case(model="mlp", strategy="magic", batch_size=2), traces_of(emulated("mlp", 1, "sgd"))
        )


def test_flat_buffers_are_cut_as_torch_cuts_them() -> None:
    from torch._utils import _take_tensors

    sizes = [4, 3 * MIB, 3 * MIB, 12 * MIB, 40, 6 * MIB, MIB, MIB, 8 * MIB, 2 * MIB, 4]
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    assert chunks(sizes, 10 * MIB) == [
        [t.numel() for t in chunk] for chunk in _take_tensors(tensors, 10 * MIB)
    ]


def test_buckets_are_cut_as_ddp_cuts_them() -> None:
    import torch.distributed as dist

    sizes = [4, 3 * MIB, 3 * MIB, 12 * MIB, 40, 16 * MIB, MIB, 30 * MIB, MIB]
    tensors = [torch.empty(size // 4, device="meta") for size in sizes]
    found, _ = dist._compute_bucket_assignment_by_size(
        tensors, [MIB, 25 * MIB], [False] * len(sizes)
    )
    assert bucket_sizes(sizes) == [[sizes[i] for i in bucket] for bucket in found]


def test_a_tape_remembers_what_is_held() -> None:
    tape = Tape()
    first = tape.take(0, 100)
    tape.give(tape.take(0, 50))
    tape.give(first)
    tape.give(first)
    found = [(change.size_bytes, change.taken) for change in tape.changes]
    assert found == [(100, True), (50, True), (50, False), (100, False)]
    assert replay(tape, 0, rounding_bytes=1).allocated_bytes == 150


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["mlp", "resnet18", "transformer"])
def test_a_gpus_allocator_is_replayed(model: str) -> None:
    """Libraries' workspaces are not traced: they are let in as what the replay may lack."""
    case = Case(
        model=model, strategy="single", batch_size=256, device_kind="cuda", optimizer="adam"
    )
    found = needed(case)[0].peak
    devices = open_devices("cuda", 1)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    loaded = models.load(model, "small", 0)
    with single.strategy.start(case, loaded, devices, no_mark) as step:
        for seed in range(3):
            step(*loaded.batch(256, seed))
        torch.cuda.synchronize()
    allocated = torch.cuda.max_memory_allocated() - before
    reserved = torch.cuda.max_memory_reserved() - kept
    workspaces = 40 * MIB
    assert 0.9 * found.allocated_bytes <= allocated <= 1.1 * found.allocated_bytes + workspaces
    # what tests before have reserved and not given back serves this case, too
    assert 0.8 * found.reserved_bytes - kept <= reserved
    assert reserved <= 1.2 * found.reserved_bytes + 2 * workspaces
