"""How much code a step runs through, beside that of torch.nn.DataParallel.

The counts are those of the third step on two devices. Comprehensions are no functions of their own.
A hop is a function between the call of the step and what it reaches, both in the calling thread and
in the thread of a replica.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import dpbench
from dpbench.hardware.device import Device
from tests.engine.oracle.torch_parallel import oracle, theirs

OURS, TORCHS = Path(dpbench.__file__).parent, Path(nn.parallel.__file__).parent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@dataclass
class Traversed:
    """The functions below `root` that a call runs through, and the hops to some others."""

    root: str
    marks: dict[CodeType, str]
    functions: set[CodeType] = field(default_factory=set)
    calls: int = 0
    hops: dict[str, int] = field(default_factory=dict)
    starts: dict[threading.Thread, int] = field(default_factory=dict)

    def of(self, call: Callable[[], object]) -> Traversed:
        """Count what `call` runs through, in all threads that it starts, and in autograd's."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            call()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return self

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code is threading.Thread.start.__code__:
            self.starts[frame.f_locals["self"]] = self._depth(frame)
        if code in self.marks:
            before = self.starts.get(threading.current_thread(), 0)
            name = self.marks[code]
            self.hops[name] = max(self.hops.get(name, 0), before + self._depth(frame))
        if code.co_filename.startswith(self.root):
            self.calls += 1
            if not code.co_name.startswith("<"):
                self.functions.add(code)

    def _depth(self, frame: FrameType | None) -> int:
        depth = 0
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(self.root)
            frame = frame.f_back
        return depth

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}

    def __str__(self) -> str:
        return (
            f"{len(self.files)} files, {len(self.functions)} functions, {self.calls} calls,"
            f" hops {self.hops}"
        )


def third(call: Callable[[], object], root: Path = OURS) -> Traversed:
    call()
    call()
    marks = {Net.forward.__code__: "module", Device.clone.__code__: "copy of a weight"}
    return Traversed(str(root), marks).of(call)


def test_few_functions_stand_between_a_step_and_what_it_does() -> None:
    inputs, target = torch.randn(8, 8), torch.arange(8) % 3
    loss = nn.functional.cross_entropy
    ids = ["cpu", "cpu"]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    train_step = dpbench.TrainStep(Net(), loss, sgd, ids, "reference")
    step = third(lambda: train_step(inputs, target))
    ours = dpbench.DataParallel(Net(), ids)
    wrapper = third(lambda: loss(ours(inputs), target).backward())
    with oracle():
        module, where = Net().to("lazy:0"), target.to("lazy:0")
        wrapped = theirs(module, [0, 1])
        torchs = third(lambda: loss(wrapped(inputs), where).backward(), TORCHS)
    for name, found in (("TrainStep", step), ("DataParallel", wrapper), ("torch", torchs)):
        print(f"{name}: {found}")
    # two of them, `Calls.make` and `Team.do`, let an interrupt end a step at any place
    assert step.hops["module"] <= 8
    assert wrapper.hops["module"] <= 8
    assert step.hops["copy of a weight"] <= 7
    # of these, two files and six functions watch what forwards write
    assert len(step.files) <= 18
    assert len(step.functions) <= 77
    assert len(wrapper.files) <= 14
    assert len(wrapper.functions) <= 73
