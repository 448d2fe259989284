"""torch.nn.DataParallel with marks in the four methods that subclasses may override."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from dpbench.records import Mark, Phase


class Marked(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel with each of its four methods marked on every device that it uses."""

    def __init__(self, module: nn.Module, ids: list[int], mark: Mark) -> None:
        super().__init__(module, ids)
        self._mark = mark
        if len(ids) == 1:  # torch then calls the module without parallel_apply
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
