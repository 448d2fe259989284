"""Models: the reference models in two sizes (plain torch, seeded, dropout 0), and a loader for users' models.

A plug is a file (or, given as `package.module:name`, an object) with three functions:

    build(size) -> Module
    batch(n, seed, size) -> (inputs, target)      inputs: a tensor, or a tuple of positional arguments
    loss(output, target) -> 0-dim tensor          one of torch's own losses makes loss=local possible
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from dpbench.records import Profile, registry

SIZES = ("small", "full")


@dataclass(frozen=True)
class Model:
    """A built module with its batches and its loss."""

    name: str
    module: nn.Module
    make_batch: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[..., torch.Tensor]

    def batch(self, n: int, seed: int) -> tuple[Any, Any]:
        """Return `n` samples of synthetic inputs and targets, the same for the same seed.

        Raises ValueError when the first dimension of any tensor in the inputs or the target is not `n`: the timed step
        would then do other work than its case describes.
        """
        inputs, target = self.make_batch(n, seed)
        wrong = [f"{where} has {_shape(one)}" for where, one in _tensors((inputs, target)) if one.shape[:1] != (n,)]
        if wrong:
            raise ValueError(
                f"model {self.name}: batch({n}, ...) must return {n} rows, but {', '.join(wrong)}; in every tensor of "
                "the inputs and the target, the first dimension must have the size that batch() gets as its first "
                f"argument (here {n})"
            )
        return inputs, target


def _tensors(batch: tuple[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (location as text, tensor) for each tensor of a batch, at any depth of nesting."""
    for name, part in zip(("inputs", "target"), batch, strict=True):
        for path, leaf in tree_flatten_with_path(part)[0]:
            if isinstance(leaf, torch.Tensor):
                yield f"{name}{keystr(path)}", leaf


def _shape(tensor: torch.Tensor) -> str:
    """Describe a tensor's number of rows and its shape, as text."""
    return f"{len(tensor)} (shape {tuple(tensor.shape)})" if tensor.dim() else "no dimension"


def load(name: str, size: str, seed: int) -> Model:
    """Build the model `name` (a plug, or `package.module:object`) with weights drawn from `seed`.

    The state of the random generator is restored, so that building one model does not change the next one. Raises
    ValueError for an unknown size, and TypeError for an object that is not a model.
    """
    if size not in SIZES:
        raise ValueError(registry.unknown("size", size, list(SIZES)))
    plug = _own(name) if ":" in name else registry.load("models", name)
    with torch.random.fork_rng(devices=[]):  # build() runs on the CPU; forking CUDA's generator would initialise CUDA
        torch.manual_seed(seed)
        module = plug.build(size)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name}: build({size!r}) must return a torch.nn.Module, not {type(module).__name__}")
    return Model(name, module, lambda n, batch_seed: plug.batch(n, batch_seed, size), plug.loss)


def _own(name: str) -> Any:
    """Import a user's model object, from the current directory first, as `python -m` does."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        plug = importlib.import_module(module_name)
        for part in filter(None, attribute.split(".")):
            plug = getattr(plug, part)
    except (ImportError, AttributeError) as error:
        error.add_note(f"while loading --model {name} (package.module:name) from {here} and sys.path")
        raise
    missing = [verb for verb in ("build", "batch", "loss") if not callable(getattr(plug, verb, None))]
    if missing:
        raise TypeError(
            f"--model {name}: needs the functions build(size), batch(n, seed, size) and loss(output, target); "
            f"missing: {', '.join(missing)}"
        )
    return plug


def profile(model: Model, samples: int = 2) -> Profile:
    """Return the model's profile, from a batch of `samples` rows: FLOP counted by torch, bytes computed from shapes."""
    from torch.utils.flop_counter import FlopCounterMode

    inputs, target = model.batch(samples, 0)
    module = copy.deepcopy(model.module)  # a forward changes the statistics of BatchNorm
    parameters, buffers = list(module.parameters()), list(module.buffers())
    with FlopCounterMode(display=False) as forward:
        output = module(*positional(inputs))
    with FlopCounterMode(display=False) as backward:
        model.loss(output, target).backward()
    return Profile(
        model=model.name,
        parameter_tensors=len(parameters),
        parameter_bytes=sum(p.nbytes for p in parameters),
        buffer_bytes=sum(b.nbytes for b in buffers),
        input_bytes=sum(a.nbytes for a in positional(inputs) if isinstance(a, torch.Tensor)) / samples,
        output_bytes=output.nbytes / samples,
        forward_flop=forward.get_total_flops() / samples,
        backward_flop=backward.get_total_flops() / samples,
    )


def positional(inputs: Any) -> tuple[Any, ...]:
    """Return a batch's inputs as the positional arguments of the module."""
    return inputs if isinstance(inputs, tuple) else (inputs,)
