"""Model parallelism: the module's layers are spread over the devices, and the whole batch passes through all of them.

The layers are the module's children that have parameters or buffers. A child that is an `nn.Sequential` is replaced by
its children. The layers are divided, in order, into contiguous groups with about equal bytes of parameters, one group
per device. Children without parameters and buffers compute where their inputs are, and parameters of the module itself
are on device 0. A hook of each layer copies the layer's inputs to the layer's device. Activations therefore move
between two devices in the `forward` phase, and their gradients move back in `backward`. The loss is computed on the
device of the last layer, to which the target is copied. Only one device computes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase, Profile, Task
from dpbench.strategies import Parallelism, Step, Strategy, Traits, optimizer_of, precision_of
from dpbench.strategies._tasks import Graph
from dpbench.strategies.single import put_all

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dpbench.models import Model


class ModelParallel(Strategy):
    """The strategy that trains in one process, with contiguous groups of the module's layers on several devices."""

    traits = Traits(parallelism=Parallelism.LAYERS)

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
        """Place the layers on the devices and yield the training step; on exit, remove the hooks from the module.

        Raises ValueError if the module has fewer layers than devices.
        """
        from dpbench.models import positional

        module, root = model.module, devices[0]
        children = list(dict.fromkeys(_children(module)))
        layers = [child for child in children if any(True for _ in (*child.parameters(), *child.buffers()))]
        if len(layers) < len(devices):
            raise ValueError(
                f"model_parallel needs at least one layer per device, but the model {model.name} has {len(layers)} "
                f"layer(s) for {len(devices)} devices: give --devices {len(layers)} or fewer"
            )
        module.to(root.torch_device)
        placed = assign([sum(p.nbytes for p in layer.parameters()) for layer in layers], len(devices))
        last = devices[-1]
        flow = _Flow(mark)
        with ExitStack() as hooks:
            device_of = dict(zip(layers, (devices[number] for number in placed), strict=True))
            for child in children:
                _hook(child, device_of.get(child), flow, hooks)
            optimizer = optimizer_of(case)(module.parameters())

            def step(inputs: Any, target: Any) -> torch.Tensor:
                with mark(Phase.OPTIMIZER, 0):
                    optimizer.zero_grad(set_to_none=True)
                with mark(Phase.SCATTER, 0):
                    arguments, (target,) = put_all(positional(inputs), root), put_all([target], last)
                flow.device = 0
                with precision_of(case):
                    output = module(*arguments)
                    with mark(Phase.LOSS, last.index):
                        loss = model.loss(output.to(last.torch_device), target)
                flow.enter(Phase.BACKWARD, flow.device)
                try:
                    loss.backward()
                finally:
                    flow.leave()
                with ExitStack() as stack:
                    for device in devices:
                        stack.enter_context(mark(Phase.OPTIMIZER, device.index))
                    optimizer.step()
                return loss.detach()

            yield step

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of one step, in which one device after the other does an equal part of the work.

        A profile does not have the sizes of activations. Each copy between two devices is assumed to be as large as the
        output.
        """
        graph, count, rows = Graph(), case.devices, case.batch_size
        moved = rows * profile.output_bytes
        at = graph.add(Phase.SCATTER, 0, "copy:host:0", rows * profile.input_bytes, "bytes")
        for phase, flop, launches, order in (
            (Phase.FORWARD, profile.forward_flop, profile.forward_launches, range(count)),
            (Phase.BACKWARD, profile.backward_flop, profile.backward_launches, range(count - 1, -1, -1)),
        ):
            for step, i in enumerate(order):
                if step:
                    at = graph.add(phase, i, f"copy:{order[step - 1]}:{i}", moved, "bytes", [at])
                work = (rows * flop / count, "flop")
                at = graph.launch(phase, i, "host", launches / count, work, [at])
            if phase is Phase.FORWARD:
                at = graph.add(Phase.LOSS, count - 1, f"device:{count - 1}", moved, "bytes", [at])
        for i in range(count):
            graph.update(case, profile, i, "host", [at], share=1 / count)
        return graph.tasks


def assign(sizes: Sequence[int], count: int) -> list[int]:
    """Return the device number of each layer, given the layers' sizes: each device gets a contiguous group of layers.

    The sums of the groups' sizes are about equal. All `count` devices get a layer if there are enough layers.
    """
    total, before = sum(sizes) or 1, 0.0
    found: list[int] = []
    for position, size in enumerate(sizes):
        middle = (before + size / 2) / total * count
        least = found[-1] if found else 0
        # each later device must still get one of the remaining sizes
        left = len(sizes) - position
        number = min(max(int(middle), least, count - left), least + 1 if found else 0, count - 1)
        found.append(number)
        before += size
    return found


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module's children in order; each nn.Sequential is replaced by its children."""
    from torch import nn

    for child in module.children():
        if type(child) is nn.Sequential:
            yield from _children(child)
        else:
            yield child


class _Flow:
    """The progress of a step through the devices: the current device, and the open mark, if any."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._open: AbstractContextManager[Any] | None = None
        self.device = 0

    def enter(self, phase: Phase, device: int) -> None:
        """Close the open mark, if any, and open a mark of `phase` on the device with the index `device`."""
        self.leave()
        self._open = self._mark(phase, device)
        self._open.__enter__()

    def leave(self) -> None:
        """Close the open mark, if any."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)


def _hook(child: nn.Module, device: Device | None, flow: _Flow, hooks: ExitStack) -> None:
    """Move a child module to `device`, and register hooks that copy its inputs there and mark forward and backward.

    If `device` is None, the child computes where its inputs are. Closing `hooks` removes the hooks.
    """
    import torch
    from torch.nn.utils.rnn import PackedSequence
    from torch.utils._pytree import tree_map_only

    if device is not None:
        child.to(device.torch_device)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        flow.enter(Phase.FORWARD, flow.device if device is None else device.index)
        if device is None:
            return args, kwargs
        before, flow.device = flow.device, device.index

        def moved(value: Any) -> Any:
            copy = value.to(device.torch_device)
            tensor = copy.data if isinstance(copy, PackedSequence) else copy
            if before != device.index and tensor.requires_grad:  # its gradient is the end of backward on this device
                tensor.register_hook(lambda gradient: flow.enter(Phase.BACKWARD, before))
            return copy

        return tree_map_only(
            (torch.Tensor, PackedSequence), moved, (args, kwargs),
            is_leaf=lambda value: isinstance(value, PackedSequence),
        )  # fmt: skip

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        flow.leave()

    for handle in (
        child.register_forward_pre_hook(enter, with_kwargs=True),
        child.register_forward_hook(leave, always_call=True),
    ):
        hooks.callback(handle.remove)


STRATEGY = ModelParallel()
