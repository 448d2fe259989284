"""The engine's reference: a module that runs chunk after chunk on copies of itself.

It uses torch only, and shares no code with the engine. The gradients of each parameter are added in
the order of the chunks, and autograd accumulates the sum in the module's own parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name]
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
SUMS_IN_GRAD_DTYPE = (2, 10) <= _VERSION < (2, 14)
"""Whether the first replica's weights, views of the parameters, have their `grad_dtype` in torch.

Gradients are then added in this type, and else in that of the weights.
"""


def sizes_of(rows: int, devices: int) -> list[int]:
    """Return the rows of each chunk that torch.nn.DataParallel makes of a batch."""
    return [len(piece) for piece in torch.empty(rows).chunk(devices)]


class Chunked:
    """A module over several devices: a copy of it runs on each chunk, one after the other.

    `sizes` are the rows of the chunks; by default, they are those of torch.nn.DataParallel. Copy 0
    has the module's own buffers. One device runs the module itself.
    """

    def __init__(self, module: nn.Module, devices: int, sizes: Sequence[int] | None = None) -> None:
        self.module, self._devices, self._sizes = module, devices, sizes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of all chunks, joined; their backward adds the gradients."""
        if self._devices == 1:
            return self.module(*args, **kwargs)
        values, tree = tree_flatten((args, kwargs))
        cut = [value.split(self._rows(values)) for value in values if isinstance(value, Tensor)]
        # without tensors, there is nothing to cut: each device gets the same arguments
        count = len(cut[0]) if cut else self._devices if args or kwargs else 1
        pieces = [[column[i] for column in cut] for i in range(count)]
        learned = [
            t for t in (*self.module.parameters(), *self.module.buffers()) if t.requires_grad
        ]
        copies = [twin(self.module, first=i == 0) for i in range(count)]
        inputs = [
            [one.detach().clone().requires_grad_(one.requires_grad) for one in piece]
            for piece in pieces
        ]
        results, errors = [], []
        for (module, _), own in zip(copies, inputs, strict=True):
            remaining = iter(own)
            given = [next(remaining) if isinstance(v, Tensor) else v for v in values]
            chunk_args, chunk_kwargs = tree_unflatten(given, tree)
            try:
                results.append(tree_flatten(module(*chunk_args, **chunk_kwargs)))
            except BaseException as error:  # the other chunks run all the same
                errors.append(error)
        if errors:
            raise errors[0]
        outputs = [[one for one in flat if isinstance(one, Tensor)] for flat, _ in results]
        leaves = [
            [*(table[id(t)] for t in learned), *own]
            for (_, table), own in zip(copies, inputs, strict=True)
        ]
        joined = iter(
            Joined.apply(
                outputs, leaves, len(learned), *learned, *(p for own in pieces for p in own)
            )
        )
        flat, out_tree = results[0]
        return tree_unflatten(
            [next(joined) if isinstance(one, Tensor) else one for one in flat], out_tree
        )

    def _rows(self, values: list[Any]) -> list[int]:
        if self._sizes is not None:
            return list(self._sizes)
        return sizes_of(next(len(v) for v in values if isinstance(v, Tensor)), self._devices)


def twin(module: nn.Module, *, first: bool) -> tuple[nn.Module, dict[int, Tensor]]:
    """Return a copy of the tree of modules, and its tensors by the id of the module's own.

    The copy's parameters are leaves. Those of the first copy have the module's memory, and its
    buffers are the module's. The copies have the module's hooks, in dicts of their own. All other
    attributes are the same objects.
    """
    table: dict[int, Tensor] = {id(p): leaf(p, first=first) for p in module.parameters()}
    for buffer in module.buffers():
        if buffer.requires_grad:
            table[id(buffer)] = buffer.detach().clone().requires_grad_()
        else:
            table[id(buffer)] = buffer if first else buffer.clone()
    copies = {id(m): m.__new__(type(m)) for m in module.modules()}

    def copied(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: None if t is None else table[id(t)] for name, t in tensors.items()}

    for m in module.modules():
        children = {name: None if c is None else copies[id(c)] for name, c in m._modules.items()}
        own = {
            "_parameters": copied(m._parameters),
            "_buffers": copied(m._buffers),
            "_modules": children,
        }
        if isinstance(m, nn.RNNBase):
            own["_flat_weights"] = [table[id(m.get_parameter(n))] for n in m._flat_weights_names]
        hooks = {n: value.copy() for n, value in m.__dict__.items() if n in HOOKS}
        copies[id(m)].__dict__ = {**m.__dict__, **own, **hooks}
    return copies[id(module)], table


def leaf(parameter: nn.Parameter, *, first: bool) -> nn.Parameter:
    """Return a parameter with the same values, in own memory unless `first`.

    Without gradients, torch's replicas other than the first have plain copies.
    """
    values = parameter.detach() if first else parameter.detach().clone()
    new = nn.Parameter(values, parameter.requires_grad and (first or torch.is_grad_enabled()))
    if SUMS_IN_GRAD_DTYPE:
        new.grad_dtype = parameter.grad_dtype
    return new


class Joined(torch.autograd.Function):
    """Chunks' outputs as whole tensors, whose backward sums each parameter's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: list[list[Tensor]],
        leaves: list[list[Tensor]],
        parameters: int,
        *whole: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the outputs in order.

        `leaves` are, for each chunk, the tensors that may get gradients: its copies of the
        parameters, whose number is `parameters`, then its inputs. `whole` are the parameters, then
        the inputs of all chunks.
        """
        ctx.outputs, ctx.leaves, ctx.parameters = outputs, leaves, parameters
        joined = tuple(
            torch.cat([o.detach() for o in column]) for column in zip(*outputs, strict=True)
        )
        ctx.mark_non_differentiable(
            *(t for t, o in zip(joined, outputs[0], strict=True) if not o.requires_grad)
        )
        return joined

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        """Return the sums, in chunk order; a chunk that does not use a parameter adds zeros."""
        lengths = [[len(one) for one in column] for column in zip(*ctx.outputs, strict=True)]
        cut = [slope.split(rows) for slope, rows in zip(slopes, lengths, strict=True)]
        parts = []
        for i, (outputs, own) in enumerate(zip(ctx.outputs, ctx.leaves, strict=True)):
            used = [n for n, one in enumerate(outputs) if one.requires_grad]
            wanted = [one for one in own if one.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [outputs[n] for n in used],
                    wanted,
                    [cut[n][i].clone() for n in used],
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
            parts.append([next(found) if one.requires_grad else None for one in own])
        of_parameters = [part[: ctx.parameters] for part in parts]
        sums = [functools.reduce(torch.add, column) for column in zip(*of_parameters, strict=True)]
        return None, None, None, *sums, *(one for part in parts for one in part[ctx.parameters :])


class PlainStep:
    """A training step in torch alone, with the options of TrainStep."""

    def __init__(
        self,
        module: nn.Module,
        criterion: Any,
        optimizer: Any,
        devices: int,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.module, self.criterion, self.optimizer = module, criterion, optimizer
        self._forward = Chunked(module, devices, sizes)
        self._accumulate, self._clip_norm, self._calls = accumulate, clip_norm, 0

    def step(self, inputs: tuple[Any, ...], target: Any) -> Tensor:
        """Take one step; return the loss."""
        if self.updated:
            self.optimizer.zero_grad()
        loss: Tensor = self.criterion(self._forward(*inputs), target)
        (loss / self._accumulate if self._accumulate > 1 else loss).backward()
        self._calls += 1
        if self.updated:
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(self.module.parameters(), self._clip_norm)
            self.optimizer.step()
        return loss.detach()

    @property
    def updated(self) -> bool:
        """Return whether the last call made an update."""
        return self._calls % self._accumulate == 0
