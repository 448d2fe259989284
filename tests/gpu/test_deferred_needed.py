"""Every call of the engine that orders streams or keeps memory is needed: without it, a race shows.

`NEEDING` names a run for each such call. In deferred mode (see test_deferred.py), the run
gives the host's numbers in every order; without the call it gives others in some order.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.engine.data_parallel import DataParallel
from dpbench.engine.fast.local_loss import LocalLoss
from dpbench.engine.fast.losses import summed_form
from dpbench.engine.gather import gather
from dpbench.engine.parallel_apply import parallel_apply
from dpbench.engine.reduce import reduce
from dpbench.engine.replicate import replicate
from dpbench.engine.scatter import scatter
from dpbench.engine.train_step import TrainStep
from dpbench.engine.turn import AT_ONCE
from dpbench.hardware.devices import holding, open_devices
from dpbench.records import no_mark
from dpbench.records.schedule import Schedule
from tests.gpu.ordering import places, without
from tests.gpu.test_deferred import ROUNDING, own_streams, pytestmark

__all__ = ["pytestmark"]

PAIR, SHARED, MIXED = (0, 1), (0, 0), (0, 0, 1, 1)
TRIES, SOUND = 60, 3
"""Orders in which a run is tried, without one of its calls and with all of them."""


class Net(nn.Module):
    """Two layers, and a buffer that every forward reads and writes.

    With `inner`, the first layer has a stream of its own.
    """

    total: Tensor

    def __init__(self, *, inner: bool) -> None:
        super().__init__()
        self.inner = inner
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("total", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self._first(x))
        total = self.total.clone()
        self.total.add_(hidden.detach().mean(0))
        return self.second(hidden + total * 0.1)

    def _first(self, x: Tensor) -> Tensor:
        if not (self.inner and x.is_cuda):
            return self.first(x)
        current, inner = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
        inner.wait_stream(current)
        with torch.cuda.stream(inner):
            hidden = self.first(x)
        current.wait_stream(inner)
        hidden.record_stream(current)
        return hidden


Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Run:
    """A few training steps: their schedule, the GPU of each replica, and the loop around the steps.

    `kind` is "step" for TrainStep, "short" with a last batch that is too short for all devices,
    "inner wrapper" for DataParallel around a net that uses streams, "verbs" for the functions that
    it calls, and "losses" for the parts of a local loss, of which "summed losses" has no divisor.
    With "host", inputs are on the host.
    """

    schedule: Schedule
    ordinals: tuple[int, ...]
    kind: str = "step"

    def __call__(self, *, on_gpus: bool = True) -> list[Tensor]:
        """Run the steps on GPUs or on the host; return losses, weights and other results."""
        count = len(self.ordinals)
        devices = open_devices("cuda" if on_gpus else "cpu", count, ids=self.ordinals)
        home = devices[0].torch_device
        torch.manual_seed(0)
        net = Net(inner="inner" in self.kind)
        batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
        kinds = {
            "inner wrapper": self._wrapped,
            "verbs": self._verbs,
            "losses": self._losses,
            "summed losses": self._losses,
        }
        with own_streams([*self.ordinals]) if on_gpus else nullcontext():
            net.to(home)
            if "host" not in self.kind:
                batches = [(x.to(home), y.to(home)) for x, y in batches]
                for device in devices:  # garbage is no label
                    device.synchronize()
            with torch.no_grad():
                for tensor in [*net.parameters(), *net.buffers()]:
                    tensor.mul_(0.5)  # work that is still queued when the first step begins
            find = kinds.get(self.kind.removeprefix("host "), self._stepped)
            found = find(net, batches, devices)
            found += self._use_memory(devices)  # which nobody writes any more
            results = [tensor.detach() * 1 for tensor in [*found, *net.state_dict().values()]]
            return [tensor.cpu() for tensor in results]

    def _wrapped(self, net: Net, batches: Batches, devices: Any) -> list[Tensor]:
        wrapper = DataParallel(net, devices, schedule=self.schedule)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            losses.append(nn.functional.cross_entropy(wrapper(x), y))
            losses[-1].backward()
            optimizer.step()
            self._use_memory(devices)
        return losses

    def _use_memory(self, devices: Any) -> list[Tensor]:
        """Fill free memory on each GPU's current stream, as a loop may do between two steps."""
        return [one for device in devices for one in self._fill(device.torch_device)]

    def _verbs(self, net: Net, batches: Batches, devices: Any) -> list[Tensor]:
        """Use the verbs alone: replicas run again and free their results, without a new scatter."""
        found = []
        with torch.no_grad():
            replicas = replicate(net, devices, detach=True)
            for x, _ in batches:
                pieces = scatter((x if "host" in self.kind else x * 1,), devices)
                self._use_memory(devices)
                for _ in range(2):
                    outputs = parallel_apply(replicas, pieces, None, devices)
                    found.append(gather(outputs, devices[0], devices))
                    del outputs
                    sums = parallel_apply(replicas, pieces, None, devices)
                    found += reduce([[one] for one in sums], devices)
                    del sums
        return found

    def _losses(self, net: Net, batches: Batches, devices: Any) -> list[Tensor]:
        """Use the parts of the loss alone; they are freed, and their memory filled, at once."""
        reduction = "sum" if "summed" in self.kind else "mean"
        root, summed = devices[0], summed_form(nn.CrossEntropyLoss(reduction=reduction))
        assert summed is not None
        losses, replicas = [], []
        with holding(devices):
            for device in devices:
                device.wait(root)
                with device.guard():
                    replicas.append(copy.deepcopy(net).to(device.torch_device))
            for x, y in batches:
                pieces = scatter((((x,), {}), y), devices)
                parts = LocalLoss(
                    summed, pieces, replicas, devices, no_mark, scale=lambda one: one, turn=AT_ONCE
                )
                self._on_each(devices, parts.forward)
                with root.guard():
                    parts.meet()
                self._on_each(devices, parts.backward)
                losses.append(parts.loss)
                del parts
                self._on_each(devices, lambda i: self._fill(devices[i].torch_device))
            for device in devices:
                root.wait(device)
        return [*losses, *(p.grad for replica in replicas for p in replica.parameters())]

    def _on_each(self, devices: Any, work: Callable[[int], object]) -> None:
        for i, device in enumerate(devices):
            with device.guard():
                work(i)

    def _fill(self, device: Any) -> list[Tensor]:
        return [torch.full((size,), 5.0, device=device) for size in (1, 128, 256) for _ in range(4)]

    def _stepped(self, net: Net, batches: Batches, devices: Any) -> list[Tensor]:
        x, y = batches[-1]
        losses = []
        with TrainStep(
            net,
            nn.CrossEntropyLoss(),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            devices,
            self.schedule,
        ) as step:
            for batch in batches[:-1]:
                losses.append(step(*batch))
                self._use_memory(devices)
            if self.kind == "short":
                losses.append(step(x[:1], y[:1]))
            losses.append(step(x, y))
        return [*losses, *(p.grad for p in net.parameters() if p.grad is not None)]


LOCAL, ALLREDUCE, SHARDED = Schedule.LOCAL, Schedule.ALLREDUCE, Schedule.SHARDED
NEEDING = {
    "reduce.reduce: root.wait(device)": Run(Schedule.REFERENCE, SHARED, "verbs"),
    "reduce.reduce: root.borrow(one)": Run(Schedule.REFERENCE, SHARED, "verbs"),
    "exchange._together: self._collectives.follow(i)": Run(SHARDED, PAIR),
    "exchange._together: self._collectives.lead(i)": Run(SHARDED, PAIR),
    "gather.forward: target.wait(device)": Run(Schedule.REFERENCE, SHARED, "verbs"),
    "gather.forward: target.borrow(tensors)": Run(Schedule.REFERENCE, SHARED, "verbs"),
    "local_loss.meet: root.wait(device)": Run(LOCAL, SHARED),
    "local_loss.meet: root.borrow([*self._totals, *tensors])": Run(
        Schedule.REFERENCE, SHARED, "summed losses"
    ),
    "local_loss._hand_out: device.wait(root)": Run(LOCAL, SHARED),
    "local_loss._hand_out: device.borrow([self._weight])": Run(
        Schedule.REFERENCE, SHARED, "losses"
    ),
    "replica_weights.modules: root.wait(device)": Run(LOCAL, SHARED),
    "replica_weights.refresh: device.wait(root)": Run(LOCAL, SHARED, "host"),
    "replicate.copied: devices[0].wait(device)": Run(Schedule.REFERENCE, SHARED),
    "__init__.holding: device.hold()": Run(ALLREDUCE, SHARED),
    "update.collect: device.wait(other)": Run(ALLREDUCE, SHARED),
    "update.collect: device.borrow([g for g in one if g is not None])": Run(ALLREDUCE, (0, 1, 0)),
    "update.copy: device.wait(self._devices[j])": Run(SHARDED, SHARED),
    "cuda.put: self._follow([tensor])": Run(Schedule.REFERENCE, SHARED, "verbs"),
    "cuda.put: self.borrow([tensor])": Run(Schedule.REFERENCE, SHARED, "verbs"),
    "cuda._put_from_host: self.stream.wait_stream(self._background)": Run(
        Schedule.REFERENCE, PAIR, "host verbs"
    ),
    "cuda._put_from_host: self.borrow([copy])": Run(Schedule.REFERENCE, PAIR, "host"),
    "cuda.clone: self._follow(tensors)": Run(Schedule.REFERENCE, SHARED, "host"),
    "cuda.wait: self.stream.wait_stream(stream)": Run(Schedule.REFERENCE, SHARED),
    "cuda.borrow: part.record_stream(self.stream)": Run(Schedule.REFERENCE, SHARED, "verbs"),
    "cuda.reduce_add: device.wait(self)": Run(Schedule.REFERENCE, PAIR, "inner wrapper"),
    "cuda._follow: self.stream.wait_stream(source)": Run(Schedule.REFERENCE, SHARED, "verbs"),
    "cuda.follow: self._streams[i].wait_stream(torch.cuda.current_stream(self._ordinals[i]))": Run(
        ALLREDUCE, PAIR
    ),
    "cuda.lead: torch.cuda.current_stream(self._ordinals[i]).wait_stream(self._streams[i])": Run(
        ALLREDUCE, PAIR
    ),
}
"""For each call of the engine that orders streams or keeps memory, a run that needs it."""
WITHOUT_EFFECT = (
    "sharded._update_all: self._devices[0].wait(device)",
    "local.close: self._devices[0].wait(device)",
)
"""Calls on which no number depends: other replicas' late reads, whose results nobody uses.

The root already waits for the others' weights when it copies them.
"""


@functools.cache
def expected(run: Run) -> list[Tensor]:
    return run(on_gpus=False)


def is_right(run: Run) -> bool:
    found = run()
    return all(
        torch.allclose(one, other, **ROUNDING)
        for one, other in zip(found, expected(run), strict=True)
    )


@pytest.mark.parametrize("run", dict.fromkeys(NEEDING.values()), ids=str)
def test_a_run_is_right_in_every_order(run: Run) -> None:
    assert all(is_right(run) for _ in range(SOUND))


@pytest.mark.parametrize("name", NEEDING)
def test_every_call_that_orders_streams_is_needed(name: str) -> None:
    with without(places()[name]) as reached:
        wrong = any(not is_right(NEEDING[name]) for _ in range(TRIES))
    assert reached, "the run does not make the call"
    assert wrong


def test_the_table_has_every_call_that_orders_streams() -> None:
    assert {*NEEDING, *WITHOUT_EFFECT} == places().keys()
