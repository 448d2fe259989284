"""torch.nn.DataParallel on emulated devices: verified, and copies the same bytes as the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dpbench.hardware.devices import _wrapper, open_devices
from dpbench.measure.worker.trial import run_together
from dpbench.models import load as load_model
from dpbench.records import Case, Verified, no_mark
from dpbench.strategies import load
from tests.runs import TWO_STEPS

aten = torch.ops.aten
OURS = Case(
    model="mlp",
    strategy="dp",
    schedule="reference",
    devices=2,
    batch_size=8,
    device_kind="emulated",
)
TORCHS = replace(OURS, strategy="torch_dp", schedule="")


@contextmanager
def copies_between_devices() -> Iterator[list[int]]:
    """Yield a list that gets the bytes of each copy between emulated devices, in any thread."""
    copied: list[int] = []
    dispatch = _wrapper._dispatch

    def counted(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = dispatch(func, args, kwargs)
        source, target = {
            aten._to_copy.default: lambda: (args[0], result),
            aten.copy_.default: lambda: (args[1], args[0]),
        }.get(func, lambda: (None, None))()
        if source is not None and source.device != target.device:
            copied.append(source.nbytes)
        if func.name().startswith("aten::_foreach_copy"):
            copied.extend(
                source.nbytes
                for copy, source in zip(*args[:2], strict=True)
                if copy.device != source.device
            )
        return result

    with mock.patch.object(_wrapper, "_dispatch", counted):
        yield copied


@pytest.mark.usefixtures("short_sequences")
@pytest.mark.parametrize(
    ("model", "devices"),
    [
        ("mlp", 1),
        ("mlp", 2),
        ("mlp", 3),
        ("resnet18", 2),
        ("transformer", 2),
        ("embedding", 2),
        ("lstm", 2),
    ],
)
def test_torchs_own_data_parallel_is_verified_and_timed_on_emulated_devices(
    model: str, devices: int, tmp_path: Path
) -> None:
    case = replace(TORCHS, model=model, devices=devices, batch_size=6)
    (done,) = run_together([case], TWO_STEPS, tmp_path)
    assert (done.status, done.reason if done.status != "ok" else "") == ("ok", "")
    assert done.verified in {Verified.BITWISE, Verified.WITHIN_TOLERANCE}
    assert {span.phase for span in done.spans} >= {"forward", "backward", "optimizer", "loss"}
    assert {memory.device for memory in done.memory} >= set(range(devices))


def test_after_a_trial_torch_is_as_it_was(tmp_path: Path) -> None:
    from torch.nn.parallel import comm, parallel_apply

    before = comm.torch, parallel_apply.__globals__["torch"]
    run_together([TORCHS], TWO_STEPS, tmp_path)
    assert (comm.torch, parallel_apply.__globals__["torch"]) == before


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_both_sides_copy_the_same_bytes(model: str) -> None:
    found = {}
    for case in (replace(OURS, model=model), replace(TORCHS, model=model)):
        loaded = load_model(model, "small", 0)
        batch = loaded.batch(8, 0)
        with load(case.strategy).start(case, loaded, open_devices("emulated", 2), no_mark) as step:
            step(*batch)
            with copies_between_devices() as copied:
                step(*batch)
        found[case.strategy] = sum(copied)
    parameters = sum(p.nbytes for p in load_model(model, "small", 0).module.parameters())
    assert found["dp"] == found["torch_dp"] > 2 * parameters, "weights go out, gradients come back"
