"""Training steps of the engine on simulated GPUs, and the places where it orders streams.

A place is a call of a method that orders streams or keeps memory (`wait`, `borrow`, ...), named by
its module, function and text. `without` leaves out one of them, so that a test can show that the
detector reports it.
"""

from __future__ import annotations

import ast
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dpbench
from dpbench.engine.collectives import Exchange, reduce
from dpbench.engine.data_parallel import DataParallel
from dpbench.engine.gather import gather
from dpbench.engine.parallel_apply import parallel_apply
from dpbench.engine.replicate import replicate
from dpbench.engine.scatter import scatter
from dpbench.engine.train_step import TrainStep
from dpbench.engine.workers import Context, Job, Serial
from dpbench.hardware.devices import _cuda
from dpbench.hardware.devices.cuda import CudaDevice, Nccl
from dpbench.records.schedule import Schedule
from tests.races import machine
from tests.races.clocks import Stream
from tests.races.machine import Detector, detect

ROOT = Path(dpbench.__file__).parent
FOLDERS = (ROOT / "engine", ROOT / "strategies")
FILES = [
    *(file for folder in FOLDERS for file in sorted(folder.glob("*.py"))),
    *(ROOT / "hardware" / "devices" / name for name in ("cuda.py", "__init__.py")),
]
ORDERING = {
    CudaDevice: ("wait", "borrow", "_follow", "hold"),
    Nccl: ("follow", "lead"),
    Exchange: ("wait", "lead"),
    Stream: ("wait_stream",),
    Tensor: ("record_stream",),
}
"""The methods that order streams or keep memory, by class."""
OTHERS = ("meeting.wait()",)
"""Calls of such names that are not in question: a barrier of threads."""


RECORD = machine._record_stream


class Net(nn.Module):
    """Two layers, and a buffer that every forward reads and writes.

    With `partly`, replicas on cuda:1 do not scale.
    """

    total: Tensor

    def __init__(self, *, partly: bool) -> None:
        super().__init__()
        self.partly = partly
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("total", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.total.add_(hidden.detach().mean(0))
        output = self.second(hidden + self.total * 0.1)
        return output if self.partly and x.device == torch.device("cuda:1") else output * self.scale


def _fail(_: Tensor) -> None:
    raise RuntimeError("this backward fails on purpose")


class InTurn(Serial):
    """Workers that run each job in a new thread, one after the other, in order or backwards.

    A wait covers the work that is queued before it, so a fixed order of the jobs makes the runs
    repeatable. Jobs that interleave are not simulated.
    """

    def __init__(self, *, backwards: bool) -> None:
        self._backwards = backwards

    def run(self, job: Job, count: int, starting: Context | None = None) -> None:
        """Run job i in a new thread, for each i below `count`."""
        for i in reversed(range(count)) if self._backwards else range(count):
            thread = threading.Thread(target=job, args=(i,))
            thread.start()
            thread.join()


def _with_weight(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss that also reads a weight of the module."""
    return lambda output, target: nn.functional.cross_entropy(output, target) + weight.sum()


@dataclass(frozen=True)
class Run:
    """A few training steps: their schedule, the GPU of each replica, and the loop around the steps.

    With `side`, the steps run on streams of the user; with `backwards`, the last replica runs
    first. `kind` is "step" for TrainStep, "host" for inputs on the host, "whole" and "host whole"
    for the same with accumulated gradients, "host partly whole" for the last with a parameter that
    the replicas on cuda:1 do not use, "short" with a last batch that is too short for all devices,
    "written" with weights that the loop writes between steps, "unusual" with a loss that reads a
    weight, "failed" with a backward that raises, "wrapper" for DataParallel, and "verbs" for the
    functions that it calls. Without `nccl`, torch has no NCCL.
    """

    schedule: Schedule
    ordinals: tuple[int, ...]
    side: bool = True
    backwards: bool = False
    nccl: bool = True
    kind: str = "step"

    def __call__(self) -> Detector:
        """Run the steps on simulated GPUs; return the detector."""
        choose = mock.patch(
            "dpbench.engine.train_step.choose", return_value=InTurn(backwards=self.backwards)
        )
        other = mock.patch(
            "dpbench.engine.data_parallel.choose", return_value=InTurn(backwards=self.backwards)
        )
        with detect(has_nccl=self.nccl) as found, choose, other, ExitStack() as streams:
            torch.manual_seed(0)
            for ordinal in sorted(set(self.ordinals), reverse=True) if self.side else ():
                streams.enter_context(torch.cuda.stream(torch.cuda.Stream(ordinal)))
            net = Net(partly="partly" in self.kind).to("cuda:0")
            x, y = torch.randn(8, 4).to("cuda:0"), torch.randint(3, (8,)).to("cuda:0")
            if self.kind.startswith("host"):
                x, y = torch.randn(8, 4), torch.randn(8, 3)
            waits = found.machine.waits
            with torch.no_grad():
                for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
                    found.recorder.name(tensor, name)
                    tensor.mul_(1.0)  # work that is still queued when the first step begins
            kinds = {"wrapper": self._wrapped, "verbs": self._verbs}
            # several buckets, although the net is small
            with mock.patch("dpbench.engine.collectives.BUCKET_BYTES", 64):
                kinds.get(self.kind, self._stepped)(net, x, y)
            assert found.machine.waits == waits, (
                "the host waited for a device, which orders everything"
            )
            return found

    def _wrapped(self, net: Net, x: Tensor, y: Tensor) -> None:
        wrapper = DataParallel(net, _cuda(self.ordinals, own_streams=True), schedule=self.schedule)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapper(x), y).backward()
            optimizer.step()
            self._use_memory()

    def _use_memory(self) -> None:
        """Allocate memory on each GPU's current stream, as a loop may do between two steps."""
        for ordinal in set(self.ordinals):
            torch.ones(3, device=f"cuda:{ordinal}")

    def _verbs(self, net: Net, x: Tensor, y: Tensor) -> None:
        """Use the verbs alone: replicas run again and free their results, without a new scatter."""
        devices, workers = _cuda(self.ordinals, own_streams=True), InTurn(backwards=self.backwards)
        with torch.no_grad():
            pieces = scatter((x * 1,), devices)
            torch.ones_like(x)  # may get the memory of the product
            replicas = replicate(net, devices, detach=True)
            for _ in range(2):
                outputs = parallel_apply(replicas, pieces, None, devices, workers=workers)
                gather(outputs, devices[0], devices)
                del outputs
                sums = parallel_apply(replicas, pieces, None, devices, workers=workers)
                reduce([[one] for one in sums], devices)
                del sums

    def _stepped(self, net: Net, x: Tensor, y: Tensor) -> None:
        loss: Any = nn.MSELoss() if self.kind.startswith("host") else nn.CrossEntropyLoss()
        if self.kind == "unusual":
            loss = _with_weight(net.first.weight)
        options: dict[str, Any] = {"accumulate": 2} if self.kind.endswith("whole") else {}
        with TrainStep(
            net,
            loss,
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            _cuda(self.ordinals, own_streams=True),
            self.schedule,
            **options,
        ) as step:
            step(x, y)
            if self.kind == "written":
                with torch.no_grad():
                    net.first.weight.mul_(0.5)
            self._use_memory()
            step(x, y)
            if self.kind == "short":
                step(x[:1], y[:1])
            if self.kind == "failed":
                hook = step._replicas._weights.parameters[-1][0].register_post_accumulate_grad_hook(
                    _fail
                )
                with pytest.raises(RuntimeError, match="fails on purpose"):
                    step(x, y)
                hook.remove()
            step(x, y)


@dataclass(frozen=True)
class Place:
    """A call that orders streams or keeps memory: its line, and the name that tests know it by."""

    file: str
    line: int
    name: str


@functools.cache
def places() -> dict[str, Place]:
    """Return all such calls of the engine and of CudaDevice, by name.

    Equal calls in a function are numbered.
    """
    methods, found = {name for names in ORDERING.values() for name in names}, dict[str, Place]()
    for file in FILES:
        tree = ast.parse(file.read_text())
        owners = {
            call: function
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
        }
        for call, function in sorted(owners.items(), key=lambda pair: pair[0].lineno):
            if (
                isinstance(call.func, ast.Attribute)
                and call.func.attr in methods
                and ast.unparse(call) not in OTHERS
            ):
                name = f"{file.stem}.{function.name}: {ast.unparse(call)}"
                while name in found:
                    name += " again"
                found[name] = Place(str(file), call.lineno, name)
    return found


@contextmanager
def without(place: Place) -> Iterator[Callable[[], int]]:
    """Leave out the call at `place` inside the context.

    Yield a function that returns how often it was left out.
    """
    left: list[Place] = []

    def skipping(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if caller.f_lineno == place.line and caller.f_code.co_filename == place.file:
                left.append(place)
                return nullcontext()
            return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, names in ORDERING.items():
            for name in () if owner is Tensor else names:
                stack.enter_context(mock.patch.object(owner, name, skipping(getattr(owner, name))))
        # `detect` puts its own record_stream in the place of torch's, so this one is passed through
        # it
        stack.enter_context(
            mock.patch.object(machine, "_record_stream", lambda d: skipping(RECORD(d)))
        )
        yield lambda: len(left)
