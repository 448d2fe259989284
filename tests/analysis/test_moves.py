"""The bytes that a step must move, compared with torch's copies between emulated devices."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench import models
from dpbench.analysis.moves import of_step
from dpbench.hardware.devices import _wrapper, open_devices
from dpbench.measure.worker.facts import of_model
from dpbench.records import HOST, Case, Phase, registry
from dpbench.records.work import Move, Shapes, Sizes, received, sent

SHAPES = Shapes(
    parameter_tensors=6,
    parameter_bytes=1200,
    trainable_bytes=1000,
    buffer_bytes=40,
    input_bytes=10,
    target_bytes=8,
    output_bytes=6,
)
DP = Case(
    model="mlp", strategy="dp", schedule="reference", batch_size=10, devices=2, device_kind="cuda"
)
Key = tuple[str, int, int]


def by_way(found: list[Move]) -> dict[Key, float]:
    total: Counter[Key] = Counter()
    for move in found:
        total[move.phase.value, move.source, move.target] += move.bytes  # type: ignore[assignment]
    return dict(total)


# ---------------------------------------------------------------- against torch's own copies


class Copies:
    """Counts torch's copies between emulated devices and from the host, by the open phase."""

    def __init__(self) -> None:
        self.bytes: Counter[Key] = Counter()
        self._here = threading.local()
        self._lock = threading.Lock()

    @contextmanager
    def mark(self, phase: Phase, device: int) -> Iterator[None]:
        before, self._here.phase = self._phase(), phase.value
        yield
        self._here.phase = before

    def _phase(self) -> str:
        """Return the phase that is open in this thread."""
        return getattr(self._here, "phase", "none")

    def add(self, source: torch.device, target: torch.device, size: int) -> None:
        """Count a copy; one within a device crosses no link."""
        ends = tuple(device.index if device.type == "lazy" else HOST for device in (source, target))
        if ends[0] != ends[1] and ends[1] != HOST:
            with self._lock:
                self.bytes[self._phase(), ends[0], ends[1]] += size


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Watch the one place through which every copy of an emulated tensor goes."""
    seen, dispatch = Copies(), _wrapper._dispatch
    aten = torch.ops.aten

    def watched(func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            size = (
                torch.empty((), dtype=kwargs.get("dtype") or args[0].dtype).itemsize
                * args[0].numel()
            )
            seen.add(args[0].device, target, size)
        elif func is aten.copy_.default:
            seen.add(args[1].device, args[0].device, args[1].nbytes)
        elif func.name().startswith("aten::_foreach_copy"):
            for into, source in zip(args[0], args[1], strict=True):
                seen.add(source.device, into.device, source.nbytes)
        return dispatch(func, args, kwargs)

    monkeypatch.setattr(_wrapper, "_dispatch", watched)
    return seen


def really_moved(case: Case, copies: Copies) -> tuple[dict[Key, int], Shapes]:
    """Take two steps on emulated devices; return what the second one copied."""
    model = models.load(case.model, case.size, 0)
    batch = model.batch(case.batch_size, 0)
    shapes = Shapes.of(Sizes(**of_model(model, batch)))
    assert shapes is not None
    devices = open_devices("emulated", case.devices)
    with registry.strategy(case.strategy).start(case, model, devices, copies.mark) as step:
        step(*batch)
        copies.bytes.clear()
        step(*batch)
        return dict(copies.bytes), shapes  # leaving the context brings gradients home


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        ("single", ""),
        ("dp", "reference"),
        ("dp", "cached"),
    ],
)
@pytest.mark.parametrize(("devices", "batch"), [(1, 12), (2, 12), (3, 11)])
@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_computed_bytes_are_those_that_torch_copies(
    copies: Copies, strategy: str, schedule: str, devices: int, batch: int, model: str
) -> None:
    if strategy == "single" and devices > 1:
        devices = 1
    case = Case(
        model=model,
        strategy=strategy,
        schedule=schedule,
        devices=devices,
        batch_size=batch,
        device_kind="emulated",
    )
    real, shapes = really_moved(case, copies)
    assert by_way(of_step(case, shapes)) == real


@pytest.mark.parametrize("schedule", ["local", "allreduce"])
@pytest.mark.parametrize(("devices", "batch"), [(3, 12), (4, 3)])
def test_replicas_that_persist_move_targets_instead_of_outputs_and_a_few_scalars(
    copies: Copies, schedule: str, devices: int, batch: int
) -> None:
    """A device without rows of the batch receives the gradients that it needs."""
    case = Case(
        model="resnet18",
        strategy="dp",
        schedule=schedule,
        devices=devices,
        batch_size=batch,
        device_kind="emulated",
    )
    real, shapes = really_moved(case, copies)
    computed = by_way(of_step(case, shapes))
    scalars = {key: size for key, size in real.items() if key not in computed}
    assert {key: size for key, size in real.items() if key in computed} == computed
    assert {phase for phase, _, _ in scalars} <= {"loss", "backward", "none"}
    assert max(scalars.values(), default=0) <= 16


# ---------------------------------------------------------------- on paper


def test_gpus_that_all_update_are_a_ring() -> None:
    case = replace(DP, schedule="allreduce", devices=4, batch_size=8)
    found = by_way(of_step(case, SHAPES))
    expected = {("reduce", i, (i + 1) % 4): 1500.0 for i in range(4)}
    assert {key: size for key, size in found.items() if key[0] == "reduce"} == expected


def test_sharded_updates_move_a_part_to_and_from_each_device() -> None:
    found = by_way(of_step(replace(DP, schedule="sharded", devices=4, batch_size=8), SHAPES))
    pairs = {(a, b) for a in range(4) for b in range(4) if a != b}
    assert {key: size for key, size in found.items() if key[0] == "reduce"} == {
        ("reduce", a, b): 250.0 for a, b in pairs
    }
    assert {key: size for key, size in found.items() if key[0] == "replicate"} == {
        ("replicate", a, b): 250.0 + (0 if a else 40) for a, b in pairs
    }


def test_reference_on_gpus() -> None:
    assert by_way(of_step(DP, SHAPES)) == {
        ("scatter", HOST, 0): 5 * 10 + 10 * 8,
        ("scatter", HOST, 1): 50,
        ("replicate", 0, 1): 1240,
        ("gather", 1, 0): 30,
        ("backward", 0, 1): 30,
        ("reduce", 1, 0): 1000,
    }


def test_logical_cpu_devices_read_the_hosts_target() -> None:
    found = by_way(of_step(replace(DP, device_kind="cpu"), SHAPES))
    assert found["scatter", HOST, 0] == 50


def test_torch_reduces_inside_backward() -> None:
    found = by_way(of_step(replace(DP, strategy="torch_dp", schedule=""), SHAPES))
    assert found["backward", 1, 0] == 1000
    assert not [key for key in found if key[0] == "reduce"]


def test_ddp_is_a_ring_and_rank_0s_buffers() -> None:
    found = by_way(
        of_step(replace(DP, strategy="ddp", schedule="", devices=4, batch_size=8), SHAPES)
    )
    assert {key: size for key, size in found.items() if key[0] == "reduce"} == {
        ("reduce", rank, (rank + 1) % 4): 1500.0 for rank in range(4)
    }
    assert found["forward", 0, 3] == 40
    assert found["scatter", HOST, 3] == 2 * 18
    alone = by_way(of_step(replace(DP, strategy="ddp", schedule="", devices=1), SHAPES))
    assert set(alone) == {("scatter", HOST, 0)}


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 64))
def test_what_is_sent_is_received(devices: int, batch: int) -> None:
    for strategy, schedule in [
        ("dp", "reference"),
        ("dp", "sharded"),
        ("dp", "allreduce"),
        ("ddp", ""),
    ]:
        case = replace(DP, strategy=strategy, schedule=schedule, devices=devices, batch_size=batch)
        found = of_step(case, SHAPES)
        used = [HOST, *range(devices if schedule in ("sharded", "allreduce") else len(case.rows))]
        assert sum(sent(found, d) for d in used) == pytest.approx(
            sum(received(found, d) for d in used)
        )
        assert {move.source for move in found} | {move.target for move in found} <= set(used)


def test_what_is_not_known_moves_nothing() -> None:
    assert of_step(replace(DP, placement="colocated"), SHAPES) == []
    assert of_step(replace(DP, schedule="fastest"), SHAPES) == []
    assert of_step(replace(DP, strategy="mine"), SHAPES) == []
    assert Shapes.of(None) is None
    assert Shapes.of(Sizes(parameter_bytes=4)) is None
