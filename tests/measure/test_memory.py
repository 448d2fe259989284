"""Memory by phase, bounds of emulated devices, and who ran out first: bytes known from shapes."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpbench import models
from dpbench.engine.errors import in_replica
from dpbench.hardware.devices import open_devices, resolve
from dpbench.hardware.devices._byte_count import DeviceFull
from dpbench.hardware.devices.host import EmulatedDevice, bounded, bytes_only
from dpbench.measure.failures import of_error, of_rank
from dpbench.measure.merging import merge
from dpbench.measure.worker import memory
from dpbench.measure.worker.facts import of_model
from dpbench.measure.worker.memory import Peaks
from dpbench.measure.worker.trial import run
from dpbench.records import UNATTRIBUTED, Case, Effort, Memory, Phase, Status, Trial, Verified
from dpbench.records.arguments import arguments_of
from dpbench.records.work import Shapes, Sizes

TINY = Effort(budget_s=0.0, warmup_steps=2, min_steps=2, max_steps=2, block_steps=2)
DP = Case(model="mlp", strategy="dp", schedule="reference", batch_size=16, devices=2)
MLP = 4 * (128 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10)
"""Bytes of the small mlp's parameters."""


class Fake:
    """A device that reports the memory that the test sets."""

    def __init__(self, index: int) -> None:
        self.index, self.now, self.peak = index, 0, 0

    def hold(self, size: int) -> None:
        self.now = size
        self.peak = max(self.peak, size)

    def take_peaks(self) -> dict[str, int]:
        peak, self.peak = self.peak, self.now
        return {"allocated": peak, "reserved": peak + 1}


def figures(found: tuple[Memory, ...], kind: str = "allocated") -> dict[tuple[int, str], int]:
    return {(m.device, m.phase): m.peak_bytes for m in found if m.kind == kind}


# ---------------------------------------------------------------- peaks


def test_a_peak_is_of_the_phase_that_is_open_on_any_device() -> None:
    first, second = Fake(0), Fake(1)
    peaks = Peaks([first, second])  # type: ignore[list-item]
    first.hold(1000)
    first.hold(10)  # before the step
    with peaks.step():
        with peaks.mark(Phase.REPLICATE, 1):
            second.hold(50)
        first.hold(70)
        first.hold(20)
        with peaks.mark(Phase.BACKWARD, 0), peaks.mark(Phase.BACKWARD, 1):
            second.hold(80)
            second.hold(30)
            with peaks.mark(Phase.REDUCE, 0):
                first.hold(90)
                first.hold(20)
    first.hold(5000)  # after it
    found = peaks.memory("ledger")
    assert figures(found) == {
        (0, ""): 90,
        (0, "replicate"): 10,
        (0, "backward"): 90,
        (0, "reduce"): 90,
        (0, UNATTRIBUTED): 70,
        (1, ""): 80,
        (1, "replicate"): 50,
        (1, "backward"): 80,
        (1, "reduce"): 30,
        (1, UNATTRIBUTED): 50,
    }
    assert figures(found, "reserved")[0, ""] == 91
    assert {m.source for m in found} == {"ledger"}


def test_threads_lose_no_peak() -> None:
    device = EmulatedDevice(0)
    peaks = Peaks([device])  # type: ignore[list-item]
    held = [torch.zeros(1, device="lazy:0")]

    def work(size: int) -> None:
        for _ in range(50):
            with peaks.mark(Phase.FORWARD, 0):
                torch.zeros(size, device="lazy:0")

    with peaks.step():
        threads = [threading.Thread(target=work, args=(size,)) for size in (10, 1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    del held
    found = figures(peaks.memory("ledger"))
    assert found[0, "forward"] in (4 * 1001, 4 * 1011)


# ---------------------------------------------------------------- bounds


def test_a_bounded_device_raises_what_a_gpu_raises_and_names_itself() -> None:
    with bounded(2, 4000):
        kept = torch.zeros(600, device="lazy:1")
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"emulated device 1 has a total capacity of 4000 bytes, of ",
        ):
            torch.zeros(500, device="lazy:1")
        assert EmulatedDevice(1).allocated() == 2400  # what was refused is not counted
        other = torch.zeros(1000, device="lazy:0")  # and the bound is each device's own
        exact = torch.zeros(400, device="lazy:1")
    unbounded = torch.zeros(10_000, device="lazy:1")
    del kept, other, exact, unbounded


def test_a_refused_tensor_leaves_nothing_behind() -> None:
    gc.collect()
    device = EmulatedDevice(0)
    before = device.allocated()
    with bounded(1, before + 100):
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                torch.zeros(26, device="lazy:0")
        fits = torch.zeros(25, device="lazy:0")
        assert device.allocated() == before + 100
    del fits
    assert device.allocated() == before


# ---------------------------------------------------------------- a trial's memory


def test_a_cpu_trial_tells_each_devices_peaks_from_the_ledger(tmp_path: Path) -> None:
    trial = run(DP, TINY, tmp_path)
    assert (trial.status, trial.verified) == (Status.OK, Verified.BITWISE)
    found = figures(tuple(m for m in trial.memory if m.source == "ledger"))
    assert {device for device, _ in found} == {0, 1}
    # weights, gradients and momentum of device 0, the sum of the replicas' gradients in the making
    # beside them
    assert found[0, "reduce"] > 4 * MLP > found[1, "reduce"] > 2 * MLP
    assert found[0, ""] == max(size for (device, _), size in found.items() if device == 0)
    assert 3 * MLP <= found[0, "optimizer"] < 3 * MLP + 1000  # the loss and the outputs are small
    assert found[1, "optimizer"] == 0  # replicas are gone by then
    assert [m.device for m in trial.memory if m.source == "rss"] == [-1]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_bytes_do_not_depend_on_whether_there_are_numbers(tmp_path: Path, model: str) -> None:
    on_host, emulated = (
        run(replace(DP, model=model, device_kind=k), TINY, tmp_path) for k in ("cpu", "emulated")
    )
    without, real = (
        {at: size for at, size in figures(t.memory).items() if at[0] >= 0 and at[1]}
        for t in (on_host, emulated)
    )
    assert len(without) > 10
    assert without == real


@pytest.mark.slow
def test_a_model_that_needs_numbers_gets_them(tmp_path: Path) -> None:
    model = models.load("lstm", "small", 0)
    open_devices("emulated", 1)
    with bytes_only():
        module = model.module.to("lazy:0")
        inputs = [part.to("lazy:0") for part in arguments_of(model.batch(4, 0)[0])[0]]
        with pytest.raises(RuntimeError, match="meta"):  # torch has no RNN without numbers
            module(*inputs)
    trial = run(replace(DP, model="lstm"), TINY, tmp_path)
    assert "no_memory_by_phase" not in trial.provenance
    assert figures(trial.memory)[1, "backward"] > 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schedule": "sharded"}, "the schedule sharded needs CPU or CUDA"),
        ({"precision": "bf16"}, "do not support bf16"),
    ],
)
def test_memory_by_phase_is_absent_and_said_where_it_cannot_be(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    trial = run(replace(DP, **changed), TINY, tmp_path)
    assert trial.status is Status.OK
    assert [m.source for m in trial.memory] == ["rss"]
    assert said in trial.provenance["no_memory_by_phase"]


def test_what_fails_after_timing_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise ArithmeticError("planted\nwith a second line")

    monkeypatch.setattr(memory, "_watch", refuse)
    trial = run(DP, TINY, tmp_path)
    assert trial.status is Status.OK
    assert trial.provenance["no_memory_by_phase"] == "ArithmeticError: planted"


def test_an_emulated_trial_has_whole_steps_from_the_timed_ones(tmp_path: Path) -> None:
    trial = run(replace(DP, device_kind="emulated"), TINY, tmp_path)
    whole = [m for m in trial.memory if not m.phase and m.device >= 0]
    assert [(m.device, m.source) for m in whole] == [(0, "ledger"), (1, "ledger")]
    by_phase = figures(trial.memory)
    loss_bytes = 4  # the loss of the step before in the same block
    assert by_phase[0, ""] - loss_bytes == by_phase[0, "reduce"]
    assert by_phase[1, ""] == by_phase[1, "backward"]


def test_ranks_memory_is_joined_by_device_phase_and_kind() -> None:
    def part(rank: int) -> Trial:
        peaks = (
            Memory(rank, 5, "allocator"),
            Memory(rank, 3, "allocator", "forward"),
            Memory(-1, 10, "rss"),
        )
        return Trial(case=DP, memory=peaks)

    joined = merge([part(0), part(1)])
    assert joined.memory == (*part(0).memory[:2], *part(1).memory[:2], Memory(-1, 20, "rss"))


# ---------------------------------------------------------------- shapes


def test_a_trial_tells_its_models_shapes(tmp_path: Path) -> None:
    shapes = Shapes.of(run(DP, TINY, tmp_path).facts.model)
    assert shapes == Shapes(
        parameter_tensors=6,
        parameter_bytes=MLP,
        trainable_bytes=MLP,
        buffer_bytes=0,
        input_bytes=128 * 4,
        target_bytes=8,
        output_bytes=10 * 4,
    )


def test_shapes_move_neither_statistics_nor_random_numbers() -> None:
    model = models.load("resnet18", "small", 0)
    before = [b.clone() for b in model.module.buffers()]
    state = torch.get_rng_state()
    found = of_model(model, model.batch(4, 0))
    assert found["output_bytes"] == 40
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    module = torch.nn.Linear(3, 3)
    batch = (torch.zeros(4, 3), torch.zeros(4))
    odd: Any = SimpleNamespace(module=module)
    module.forward = lambda x: (x, x)  # type: ignore[method-assign,assignment]
    assert of_model(odd, batch)["output_bytes"] == 24
    module.forward = lambda x: x.absent  # type: ignore[method-assign,assignment]
    assert Shapes.of(Sizes(**of_model(odd, batch))) is None


# ---------------------------------------------------------------- out of memory


@pytest.mark.parametrize(
    ("size", "device"),
    [
        (600_000, 0),  # the model and its momentum do not fit on device 0
        (1_200_000, 0),
    ],
)
def test_a_trial_out_of_memory_names_the_device_that_failed_first(
    tmp_path: Path, size: int, device: int
) -> None:
    trial = run(replace(DP, device_kind="emulated", device_memory_bytes=size), TINY, tmp_path)
    assert (trial.status, trial.failed_device) == (Status.OOM, device)
    assert f"emulated device {device} has a total capacity of {size} bytes" in trial.reason


@pytest.mark.parametrize(
    ("message", "ids", "device"),
    [
        (
            (
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of"
                " 79.11 GiB of which"
            ),
            (),
            1,
        ),
        (
            (
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of"
                " 79.11 GiB of which"
            ),
            (2, 3),
            1,
        ),
        ("CUDA error: out of memory", (), None),
    ],
)
def test_a_gpu_is_read_from_torchs_own_words(
    message: str, ids: tuple[int, ...], device: int | None
) -> None:
    failure = of_error(torch.OutOfMemoryError(message), device_ids=ids)
    assert (failure.status, failure.device) == (Status.OOM, device)


def test_an_emulated_device_is_known_whatever_the_message() -> None:
    full = DeviceFull("anything")
    full.ordinal = 2
    assert of_error(full).device == 2


def test_a_rank_goes_before_a_replica_and_a_replica_before_the_ordinal() -> None:
    full = torch.OutOfMemoryError("GPU 0 has a total capacity of")
    assert of_rank(full, 1, 0.0).device == 1
    assert of_error(in_replica(full, 1, resolve(["cpu", "cpu"])[1])).device == 1
    assert of_error(MemoryError("anything")).device is None
