"""DataParallel on one block, a plain module's largest child; the rest runs on device 0.

dpbench.DataParallel wraps the child with the most bytes of parameters, as in torch's tutorial on
model parallelism. The block marks its own phases; `backward` includes the addition of the replicas'
gradients.

The reference runs the whole batch in one pass, so that a block with batch normalisation, which each
replica computes from its own rows, is refused by verification.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dpbench import DataParallel
from dpbench.hardware.device import Device
from dpbench.models import Model
from dpbench.records import Case, Mark, Phase
from dpbench.records.arguments import call
from dpbench.strategies import (
    Reduction,
    Split,
    StepFunction,
    Strategy,
    Traits,
    Updates,
    precision_of,
    put_all,
)

from .layers import Flow


class DataParallelBlock(Strategy):
    """DataParallel on one block, a plain module's largest child; the rest runs on device 0."""

    traits = Traits(reduction=Reduction.IN_BACKWARD)

    def skip(self, case: Case) -> str:
        """Return why this strategy cannot run a case (for example, a compiled one), or ""."""
        if case.compile:
            return (
                "torch.compile would compile only the layers around the block: leave out --compile"
            )
        return super().skip(case)

    def split(self, case: Case, module: nn.Module) -> Split:
        """Return the whole batch as one part, because only the block's inputs are split."""
        return Split((case.batch_size,), replays=False)

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[StepFunction]:
        """Wrap the block and yield the training step; on exit, put the unwrapped block back."""
        root, flow = devices[0], Flow(devices, mark)
        module = model.module.to(root.torch_device)
        updates = Updates(case, model, module.parameters())

        def step(inputs: Any, target: Any) -> torch.Tensor:
            with mark(Phase.OPTIMIZER, root.index):
                updates.clear()
            with mark(Phase.SCATTER, root.index):
                inputs, target = put_all([inputs, target], root)
            with precision_of(case):
                with flow.during(Phase.FORWARD, root):
                    output = call(module, inputs)
                with mark(Phase.LOSS, root.index):
                    loss = model.loss(output, target)
            with flow.during(Phase.BACKWARD, *devices[: len(case.rows)]):
                updates.scaled(loss).backward()
            with mark(Phase.OPTIMIZER, root.index):
                updates.step()
            return loss.detach()

        name = largest(module)
        block = module.get_submodule(name)
        wrapped = DataParallel(block, list(devices), mark=mark)
        wrapped.register_forward_pre_hook(lambda *_: flow.leave())
        wrapped.register_forward_hook(lambda *_: flow.enter(Phase.FORWARD, root))
        module.set_submodule(name, wrapped)
        try:
            yield step
        finally:
            module.set_submodule(name, block)


def largest(module: nn.Module) -> str:
    """Return the name of the block: the child with the most bytes of parameters.

    If this child has all parameters of the module, its own largest child is considered, and so on.
    Raises ValueError if every child that is considered has either all parameters or none.
    """
    inside, path = module, list[str]()
    while children := dict(inside.named_children()):
        name = max(children, key=lambda name: size_bytes(children[name]))
        path, inside = [*path, name], children[name]
        if 0 < size_bytes(inside) < size_bytes(module):
            return ".".join(path)
    raise ValueError(
        f"this {type(module).__name__} has no child with a part of its parameters: give"
        " --strategies dp, which runs the whole module on all devices"
    )


def size_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters of a module."""
    return sum(parameter.nbytes for parameter in module.parameters())


strategy = DataParallelBlock()
