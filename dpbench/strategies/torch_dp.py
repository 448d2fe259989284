"""torch.nn.DataParallel itself, marked at the four methods that it lets a subclass replace.

Its reduction happens inside autograd, out of reach of any mark: the phase backward contains it, and comparisons
add backward and reduce on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from dpbench.devices import Device
from dpbench.models import Model, positional
from dpbench.records import Case, Mark, Phase, Profile, Task
from dpbench.strategies import Step, dp, optimizer_of, precision_of, single

SHARED_STREAM = True


def skip(case: Case) -> str:
    """Refuse what torch.nn.DataParallel does not do: run on the CPU, or in bf16 on several devices."""
    if case.device_kind == "cuda" and case.precision == "bf16" and case.devices > 1:
        return "torch.nn.DataParallel's threads do not take over autocast's dtype: bf16 would run as fp16"
    if case.device_kind == "cuda":
        return ""
    if case.device_kind == "emulated":
        return (
            "torch.nn.DataParallel knows no emulated devices: it runs on them only under the patches of dpbench's tests"
        )
    return "torch.nn.DataParallel needs an accelerator; on the CPU it passes its input through to the module"


def compares_buffers(case: Case) -> bool:
    """Leave buffers out where replicas share a GPU: torch's replicas then alias them, and race."""
    return case.placement != "colocated"


class _Marked(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel whose four verbs are marked on every device they serve."""

    def __init__(self, module: nn.Module, ids: list[int], mark: Mark) -> None:
        super().__init__(module, ids)
        self._mark = mark
        if len(ids) == 1:  # torch then calls the module past parallel_apply
            inner = module.forward

            def forward(*inputs: Any, **kwargs: Any) -> Any:
                with mark(Phase.FORWARD, 0):
                    return inner(*inputs, **kwargs)

            module.forward = forward

    @contextmanager
    def _on(self, phase: Phase, count: int) -> Iterator[None]:
        with ExitStack() as stack:
            for device in range(count):
                stack.enter_context(self._mark(phase, device))
            yield

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        with self._on(Phase.SCATTER, len(device_ids)):
            return super().scatter(inputs, kwargs, device_ids)

    def replicate(self, module: Any, device_ids: Any) -> Any:
        with self._on(Phase.REPLICATE, len(device_ids)):
            return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        with self._on(Phase.FORWARD, len(replicas)):
            return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        with self._on(Phase.GATHER, 1):
            return super().gather(outputs, output_device)


@contextmanager
def start(case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
    """Yield the training loop of the tutorials around torch.nn.DataParallel."""
    root = devices[0]
    model.module.to(root.torch_device)
    wrapped = _Marked(model.module, [device.torch_device.index for device in devices], mark)
    optimizer = optimizer_of(case)(model.module.parameters())
    used = range(len(case.rows))

    def step(inputs: Any, target: Any) -> torch.Tensor:
        with mark(Phase.OPTIMIZER, 0):
            optimizer.zero_grad(set_to_none=True)
        with mark(Phase.SCATTER, 0):
            target = root.put(target)
        with precision_of(case):
            output = wrapped(*positional(inputs))
            with mark(Phase.LOSS, 0):
                loss = model.loss(output, target)
        with ExitStack() as stack:
            for device in used:
                stack.enter_context(mark(Phase.BACKWARD, device))
            loss.backward()
        with mark(Phase.OPTIMIZER, 0):
            optimizer.step()
        return loss.detach()

    yield step


def tasks(case: Case, profile: Profile) -> list[Task]:
    """Return the tasks of the reference engine, whose reduction is here part of backward on device 0."""
    if case.devices == 1:
        return single.tasks(case, profile)
    graph = dp.chain(case, profile, threads=False)
    reduction = next(i for i, task in enumerate(graph) if task.phase is Phase.REDUCE)
    root = next(i for i, task in enumerate(graph) if task.phase is Phase.BACKWARD and task.device == 0)
    others = tuple(i for i in graph[reduction].after if i != root)
    graph[reduction] = Task(Phase.BACKWARD, 0, "device:0", graph[reduction].amount, "bytes", (root,), others)
    return graph
