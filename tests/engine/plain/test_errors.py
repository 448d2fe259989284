"""Common DataParallel errors: each is provoked, its message explains it, its cure is tried.

The four of a well-known tutorial: tensors on different devices, too little memory, an attribute of
the wrapped module, and names of a checkpoint with or without "module.".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpbench
from dpbench import models
from dpbench.hardware.devices.host import install
from dpbench.measure.worker.trial import run_together
from dpbench.records import Case, Status
from tests.runs import TWO_STEPS

TWO = ["emulated:0", "emulated:1"]


def simple() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the tutorial's module, which is on the host, with a batch."""
    install()
    model = models.load("mlp", "small", 0)
    return model.module, *model.batch(6, 0)


def cure(message: str, pattern: str) -> str:
    """Return the Python that a message gives as the cure."""
    found = re.search(pattern, message, re.S)
    assert found, message
    return found.group(1)


# ---------------------------------------------------------------- Expected all tensors to be on the
# same device


def test_a_module_that_was_not_moved_is_refused_with_the_call_that_moves_it() -> None:
    module, inputs, _ = simple()
    wrapped = dpbench.DataParallel(module, TWO)
    with pytest.raises(
        RuntimeError, match=r"on device lazy:0 \(device_ids\[0\]\) but found one .* device: cpu"
    ) as told:
        wrapped(inputs)
    eval(cure(str(told.value), r"move it first: (module\.to\('lazy:0'\))"), {"module": module})
    assert wrapped(inputs).device == torch.device("lazy:0")


def test_a_batch_on_the_host_is_moved_by_the_wrapper_and_with_its_target_by_the_step() -> None:
    module, inputs, target = simple()
    wrapped = dpbench.DataParallel(module.to("lazy:0"), TWO)
    output = wrapped(inputs)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        F.cross_entropy(output, target)  # the user's own call
    expected = F.cross_entropy(output, target.to(output.device)).item()
    step = dpbench.TrainStep(
        module, F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), TWO, schedule="reference"
    )
    assert step(inputs, target).item() == pytest.approx(expected)


class Scaled(nn.Module):
    """Has a tensor that is a plain attribute, which `module.to` and replicas leave where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.scale = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.inner.scale


def stepping(module: nn.Module, schedule: str) -> Callable[[torch.Tensor], torch.Tensor]:
    step = dpbench.TrainStep(
        module, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), TWO, schedule=schedule
    )
    return lambda x: step(x, torch.zeros(4, 4))


RUNS: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "two devices": lambda module: dpbench.DataParallel(module, TWO),
    "one device": lambda module: dpbench.DataParallel(module, TWO[:1]),
    "a step": lambda module: stepping(module, "reference"),
    "a step with losses of its own": lambda module: stepping(module, "local"),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_tensor_that_was_left_behind_is_named_with_the_call_that_registers_it(run: Any) -> None:
    install()
    module = Scaled().to("lazy:0")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as told:
        run(module)(torch.ones(4, 4))
    text = "\n".join([str(told.value), *getattr(told.value, "__notes__", [])])
    assert "inner.scale is a tensor on cpu" in text
    tensor = module.inner.__dict__.pop("scale").to("lazy:0")
    eval(
        cure(text, r"(module\.register_buffer\('scale', tensor\))"),
        {"module": module.inner, "tensor": tensor},
    )
    assert run(module)(torch.ones(4, 4)).isfinite().all()


def test_an_error_without_a_tensor_left_behind_has_no_hint() -> None:
    install()
    wrapped = dpbench.DataParallel(nn.Linear(4, 4).to("lazy:0"), TWO)
    with pytest.raises(RuntimeError) as told:
        wrapped(torch.ones(4, 5))
    assert "hint" not in str(told.value)


# ---------------------------------------------------------------- out of memory


def test_too_little_memory_is_recorded_with_the_device_and_a_batch_that_fits_is_measured(
    tmp_path: Path,
) -> None:
    case = Case(
        model="mlp",
        strategy="dp",
        schedule="reference",
        devices=2,
        batch_size=2000,
        device_kind="emulated",
        device_memory_bytes=2_000_000,
    )
    (full,) = run_together([case], TWO_STEPS, tmp_path)
    assert full.status is Status.OOM
    assert full.failed_device == 0
    assert re.match(r"out of memory on .*emulated:0; ", full.reason)
    assert "a smaller batch" in full.reason
    assert "bytes" in full.reason
    (smaller,) = run_together([replace(case, batch_size=64)], TWO_STEPS, tmp_path)
    assert smaller.status is Status.OK, smaller.reason


# ---------------------------------------------------------------- no attribute 'fc1'


def test_an_attribute_of_the_wrapped_module_is_found_where_the_message_says() -> None:
    module, *_ = simple()
    wrapped = dpbench.DataParallel(module, ["cpu", "cpu"])
    with pytest.raises(
        AttributeError, match=r"'DataParallel' object has no attribute 'fc1'"
    ) as told:
        _ = wrapped.fc1
    assert (
        eval("wrapped" + cure(str(told.value), r"use (\.module\.fc1)"), {"wrapped": wrapped})
        is module.fc1
    )


# ---------------------------------------------------------------- KeyError when loading state_dict

Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "plain": lambda one: one,
    "wrapped": lambda one: dpbench.DataParallel(one, ["cpu", "cpu"]),
}


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_of_the_plain_module_is_loaded_as_the_message_says(strict: bool) -> None:
    (source, *_), (target, *_) = simple(), simple()
    nn.init.ones_(source.fc1.weight)
    wrapped, state = WRAPS["wrapped"](target), source.state_dict()
    with pytest.raises(RuntimeError, match=r'the names lack the prefix "module\."') as told:
        wrapped.load_state_dict(state, strict=strict)
    eval(
        cure(str(told.value), r"(wrapped\.module\.load_state_dict\(state\))"),
        {"wrapped": wrapped, "state": state},
    )
    assert torch.equal(target.fc1.weight, source.fc1.weight)


def test_a_checkpoint_of_the_wrapped_module_is_loaded_as_the_message_says() -> None:
    (source, *_), (target, *_) = simple(), simple()
    nn.init.ones_(source.fc1.weight)
    state: Any = {
        f"module.{name}": value for name, value in WRAPS["wrapped"](source).state_dict().items()
    }
    with pytest.raises(RuntimeError, match="once too often") as told:
        WRAPS["wrapped"](target).load_state_dict(state)
    call = cure(
        str(told.value), r"strip the prefix: torch\.nn\.modules\.utils\.(\w+\(state, 'module\.'\))"
    )
    eval(call, {**vars(nn.modules.utils), "state": state})
    WRAPS["wrapped"](target).load_state_dict(state)
    assert torch.equal(target.fc1.weight, source.fc1.weight)


@pytest.mark.parametrize("target", WRAPS)
@pytest.mark.parametrize("source", WRAPS)
def test_one_function_loads_both_kinds_of_checkpoint(source: str, target: str) -> None:
    (saved, *_), (loaded, *_) = simple(), simple()
    nn.init.ones_(saved.fc1.weight)
    dpbench.load_state_dict(WRAPS[target](loaded), WRAPS[source](saved).state_dict())
    assert torch.equal(loaded.fc1.weight, saved.fc1.weight)
