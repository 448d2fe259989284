"""A stage of a pipeline: the part of a module on one rank, and the rank's training step under torch's schedule GPipe.

torch.fx records the module as a graph of calls of its layers. The graph is cut between groups of layers. Every stage
must take the output of the stage before it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from dpbench.hardware.device import Device
from dpbench.models import Model, positional
from dpbench.records import Case, Mark, Phase
from dpbench.strategies import Updates
from dpbench.strategies._layers import grouped
from dpbench.strategies.single import put_all


class PipelineStep:
    """The training step of one rank, which runs its stage on all micro-batches; `parts` is their number."""

    def __init__(self, case: Case, model: Model, device: Device, mark: Mark, parts: int) -> None:
        self._model, self._device, self._mark = model, device, mark
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        if device.torch_device.type != "cpu":
            torch.accelerator.set_device_index(device.torch_device)  # otherwise all ranks open contexts on GPU 0
        modules = stages(case, model, self._count)
        self._owner = _owners(model.module, modules)
        mine = modules[self._rank].to(device.torch_device)
        self._updates = Updates(case, model, mine.parameters())
        stage = _Stage(mine, self._rank, self._count, device.torch_device)
        stage.mark, stage.index = mark, device.index
        self._rows = 0
        self._schedule = ScheduleGPipe(stage, parts, loss_fn=self._loss, scale_grads=False)

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Train on the batch; return the loss on the rank of the last stage, or 0 on any other rank."""
        mark, i = self._mark, self._device.index
        first, last = self._rank == 0, self._rank == self._count - 1
        self._rows, losses, given = len(target), list[torch.Tensor](), dict[str, Any]()
        with mark(Phase.OPTIMIZER, i):
            self._updates.clear()
        arguments: list[Any] = []
        if first or last:
            with mark(Phase.SCATTER, i):
                arguments = put_all(positional(inputs), self._device) if first else []
                given = {"target": put_all([target], self._device)[0], "losses": losses} if last else {}
        self._schedule.step(*arguments, return_outputs=False, **given)
        with mark(Phase.OPTIMIZER, i):
            self._updates.step()
        return torch.stack(losses).sum().detach() if last else torch.zeros(())

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch times the fraction of the batch's rows that the micro-batch has."""
        with self._mark(Phase.LOSS, self._device.index):
            return self._model.loss(output, target) * (len(target) / self._rows)

    def restore(self) -> None:
        """Copy every weight, its gradient and every buffer from the rank that trained it to all other ranks."""
        module = self._model.module.to(self._device.torch_device)
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.broadcast(parameter.detach(), self._owner.get(name, 0))
            dist.broadcast(parameter.grad, self._owner.get(name, 0))
        for name, buffer in module.named_buffers():
            dist.broadcast(buffer, self._owner.get(name, 0))


class _Stage(PipelineStage):
    """torch's stage, with marks around the forward and the backward of each micro-batch."""

    mark: Mark
    index: int

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.mark(Phase.FORWARD, self.index):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.mark(Phase.BACKWARD, self.index):
            return super().backward_one_chunk(*args, **kwargs)


def stages(case: Case, model: Model, count: int) -> list[nn.Module]:
    """Return the modules of `count` stages, which use the layers of the model's module and not copies of them.

    Raises ValueError if the module has fewer layers than stages, or cannot be cut into a chain of stages.
    """
    if model.owns_loss:
        raise _no_chain(case, model, "its forward returns the loss, for which the last stage would also need the batch")
    groups = grouped(case, model, count)
    number_of = {layer: number for number, group in enumerate(groups) for layer in group}
    try:
        graph = _Tracer(number_of).trace(model.module)
    except Exception as error:  # any error of the module's code, which runs on torch.fx's placeholders
        raise _no_chain(case, model, f"torch.fx cannot record it: {type(error).__name__}: {error}") from error
    try:
        return list(_parts(graph, model.module, _numbered(graph, model.module, number_of), count))
    except _NoChainError as error:
        raise _no_chain(case, model, str(error)) from error


class _NoChainError(Exception):
    """The graph of a module cannot be cut into a chain of stages; the message says where."""


def _no_chain(case: Case, model: Model, fault: str) -> ValueError:
    return ValueError(
        f"{case.strategy} needs a module that is a chain of layers, but the model {model.name} is not: {fault}; "
        "give --strategies model_parallel, which runs any module"
    )


class _Tracer(fx.Tracer):
    """A tracer of torch.fx that records each of `layers` as one call, without the operations inside the layer."""

    def __init__(self, layers: dict[nn.Module, int]) -> None:
        super().__init__()
        self._layers = layers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._layers or super().is_leaf_module(m, module_qualified_name)


def _numbered(graph: fx.Graph, module: nn.Module, number_of: dict[nn.Module, int]) -> dict[fx.Node, int]:
    """Return the number of the stage of each node in the graph.

    The call of a layer is in the stage of the layer, a parameter in the first stage that uses it. Any other node is in
    the latest stage that computes one of its inputs. Raises _NoChainError if a layer needs an output of a later stage.
    """
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        found[node] = max([number_of.get(layer, 0) if layer else 0, *(found[one] for one in node.all_input_nodes)])
        if layer in number_of and number_of[layer] < found[node]:
            raise _NoChainError(
                f"the layer {node.target} of stage {number_of[layer]} needs an output of stage {found[node]}"
            )
    for node in graph.nodes:
        if node.op == "get_attr":
            found[node] = min([found[user] for user in node.users], default=0)
    return found


def _parts(graph: fx.Graph, module: nn.Module, stage_of: dict[fx.Node, int], count: int) -> Iterator[nn.Module]:
    """Yield the module of each stage, with one input and one output.

    Raises _NoChainError if a stage needs more than the output of the stage before it, or gives several outputs.
    """
    (output,) = (node.args[0] for node in graph.nodes if node.op == "output")
    for number in range(count):
        part, values = fx.Graph(), dict[fx.Node, fx.Node]()
        mine = [node for node in graph.nodes if stage_of[node] == number and node.op != "output"]
        taken = dict.fromkeys(one for node in mine for one in node.all_input_nodes if stage_of[one] != number)
        if number and [stage_of[one] for one in taken] != [number - 1]:
            values_taken = ", ".join(f"{one} of stage {stage_of[one]}" for one in taken) or "none"
            raise _NoChainError(f"stage {number} must take one value, from stage {number - 1}; it takes {values_taken}")
        for one in taken:
            values[one] = part.placeholder(one.name)
        for node in mine:
            values[node] = part.node_copy(node, values.__getitem__)
        sent = [node for node in mine if any(stage_of[user] > number for user in node.users)]
        last = sent[0] if sent else output
        if len(sent) > 1 or last not in values:
            given = f"gives {len(sent)} values to later stages" if sent else "does not compute the output as one value"
            raise _NoChainError(f"stage {number} {given}")
        part.output(values[last])
        yield fx.GraphModule(module, part)


def _owners(module: nn.Module, modules: Sequence[nn.Module]) -> dict[str, int]:
    """Return, for the name of each parameter and buffer of the module, the number of the stage that has it."""
    number_of = {id(t): number for number, one in enumerate(modules) for t in (*one.parameters(), *one.buffers())}
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: number_of[id(tensor)] for name, tensor in named if id(tensor) in number_of}
