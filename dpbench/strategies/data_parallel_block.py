"""DataParallel on one block of a plain module: the module's largest child runs on all devices, the rest on device 0.

dpbench.DataParallel wraps the child with the most bytes of parameters, as in torch's tutorial on model parallelism. A
child that has all parameters of the module is replaced by its own children. The rest of the module runs on device 0, on
the whole batch. The phases `replicate`, `gather` and `reduce` have only transfers of the block. The phase `scatter` has
the copy of the batch to device 0 and the copies of the block's inputs to its replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase
from dpbench.strategies import Split, Step, Strategy, Traits, Updates, precision_of
from dpbench.strategies.single import put_all

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dpbench.models import Model


class DataParallelBlock(Strategy):
    """DataParallel on one block of a plain module: its largest child runs on all devices, the rest on device 0."""

    traits = Traits()

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case (for example, a compiled case), or "" if it can."""
        if case.compile:
            return (
                "torch.compile stops at the replicas of the block, and would compile only the rest: leave out --compile"
            )
        return super().skip(case)

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
        """Wrap the block and yield the training step; on exit, put the unwrapped block back.

        Raises ValueError if the module has no child that can be the block; see `largest`.
        """
        from dpbench.models import positional
        from dpbench.strategies._layers import Block, Flow

        module, root = model.module.to(devices[0].torch_device), devices[0]
        name, flow = largest(module), Flow(devices, mark)
        block, updates = module.get_submodule(name), Updates(case, model, module.parameters())

        def step(inputs: Any, target: Any) -> torch.Tensor:
            with mark(Phase.OPTIMIZER, root.index):
                updates.clear()
            with mark(Phase.SCATTER, root.index):
                *arguments, target = put_all([*positional(inputs), target], root)
            with precision_of(case):
                with flow.during(Phase.FORWARD, root):
                    output = module(*arguments)
                with mark(Phase.LOSS, root.index):
                    loss = model.loss(output, target)
            with flow.during(Phase.BACKWARD, root):
                updates.scaled(loss).backward()
            with mark(Phase.OPTIMIZER, root.index):
                updates.step()
            return loss.detach()

        module.set_submodule(name, Block(block, devices, flow, mark))
        try:
            yield step
        finally:
            module.set_submodule(name, block)

    def split(self, case: Case, module: nn.Module) -> Split:
        """Return the rows of each replica of the block, and the block's name."""
        return Split(case.rows, largest(module))


def largest(module: nn.Module) -> str:
    """Return the name of the block: the child with the most bytes of parameters.

    If this child has all parameters of the module, its own largest child is considered, and so on. Raises ValueError if
    every child that is considered has either all parameters or none.
    """
    inside, path = module, list[str]()
    while children := dict(inside.named_children()):
        name = max(children, key=lambda name: _size(children[name]))
        path, inside = [*path, name], children[name]
        if 0 < _size(inside) < _size(module):
            return ".".join(path)
    raise ValueError(
        f"data_parallel_block needs a child that has a part of the module's parameters, but this "
        f"{type(module).__name__} has none: give --strategies dp, which runs the whole module on all devices"
    )


def _size(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


STRATEGIES = {"data_parallel_block": DataParallelBlock()}
