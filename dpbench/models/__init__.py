"""Models: the reference models in two sizes (plain torch, seeded, dropout 0), and a loader for users' models.

A model is a file of this folder, or a user's object given as `package.module:name`. It has three functions:

    build(size) -> Module
    batch(n, seed, size) -> (inputs, target)      inputs: a tensor, or a tuple of positional arguments
    loss(output, target) -> 0-dim tensor          must be a loss function of torch if schedules use loss=local
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from dpbench.records import Profile, registry

SIZES = ("small", "full")
RECOMPILE_LIMIT = 64
"""How often torch compiles the same code before it runs the code uncompiled: for each device and shape of a chunk."""


@dataclass(frozen=True)
class Model:
    """A model of one size: its module, its loss function, and `make_batch(n, seed)`, which returns (inputs, target)."""

    name: str
    module: nn.Module
    make_batch: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[..., torch.Tensor]

    def batch(self, n: int, seed: int) -> tuple[Any, Any]:
        """Return (inputs, target) of `n` synthetic samples; the same `seed` always gives the same values.

        Raises ValueError if the first dimension of any tensor in the inputs or the target is not `n`, because the work
        of the timed step would then differ from the work that the case describes.
        """
        inputs, target = self.make_batch(n, seed)
        wrong = [f"{where} has {_shape(one)}" for where, one in _tensors((inputs, target)) if one.shape[:1] != (n,)]
        if wrong:
            raise ValueError(
                f"model {self.name}: batch({n}, ...) must return {n} rows, but {', '.join(wrong)}; set the first "
                f"dimension of every tensor in the inputs and the target to the first argument of batch(), here {n}"
            )
        return inputs, target


def _tensors(batch: tuple[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (location, tensor) for each tensor of a batch, at any depth; a location is text such as "inputs[0]"."""
    for name, part in zip(("inputs", "target"), batch, strict=True):
        for path, leaf in tree_flatten_with_path(part)[0]:
            if isinstance(leaf, torch.Tensor):
                yield f"{name}{keystr(path)}", leaf


def _shape(tensor: torch.Tensor) -> str:
    """Return text with the number of rows and the shape of a tensor, such as "4 (shape (4, 10))".

    The text is "no dimension" for a 0-dim tensor.
    """
    return f"{len(tensor)} (shape {tuple(tensor.shape)})" if tensor.dim() else "no dimension"


def load(name: str, size: str, seed: int) -> Model:
    """Build the model `name` in the size "small" or "full", with random weights drawn from `seed`.

    `name` is the name of a file of this folder, or `package.module:object`. The state of the random generator is
    restored, so that building one model does not change the next one. Raises ValueError for an unknown size, and
    TypeError for an object that is not a model.
    """
    if size not in SIZES:
        raise ValueError(registry.unknown("size", size, list(SIZES)))
    plug = _own(name) if ":" in name else registry.load("models", name)
    with torch.random.fork_rng(devices=[]):  # build() runs on the CPU; forking CUDA's generator would initialise CUDA
        torch.manual_seed(seed)
        module = plug.build(size)
    if not isinstance(module, nn.Module):
        raise TypeError(f"model {name}: build({size!r}) must return a torch.nn.Module, not {type(module).__name__}")
    return Model(name, module, lambda n, batch_seed: plug.batch(n, batch_seed, size), plug.loss)


def _own(name: str) -> Any:
    """Import and return the user's model object `name`, given as `package.module:object`.

    The current directory is searched first, as by `python -m`. Raises TypeError if the object lacks a function.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        plug = importlib.import_module(module_name)
        for part in filter(None, attribute.split(".")):
            plug = getattr(plug, part)
    except (ImportError, AttributeError) as error:
        error.add_note(f"while loading --model {name} from {here} or sys.path (it was read as package.module:name)")
        raise
    missing = [verb for verb in ("build", "batch", "loss") if not callable(getattr(plug, verb, None))]
    if missing:
        raise TypeError(
            f"--model {name}: this object must have the functions build(size), batch(n, seed, size) and "
            f"loss(output, target); functions that are missing: {', '.join(missing)}"
        )
    return plug


def profile(model: Model, samples: int = 2) -> Profile:
    """Return the profile of a model: the sizes of its tensors, and the FLOP of forward and backward.

    torch counts the FLOP on a batch of `samples` rows. FLOP, input bytes and output bytes are per sample.
    """
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


def compile_forward(module: nn.Module) -> None:
    """Compile the forward of `module` in place with torch.compile, as the forward of a new subclass of its class.

    A replica of the module is of the same class, and runs the compiled forward with its own weights; `module.compile()`
    would call the original module in every replica.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no process of the compiler outlives a trial
    kind = type(module)
    known = "recompile_limit" in inspect.signature(torch.compile).parameters  # not in older versions of torch
    limit: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT} if known else {}
    forward = torch.compile(kind.forward, **limit)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def compilations() -> Counter[str]:
    """Return the numbers of graphs and of graph breaks that torch.compile has made in this process so far."""
    from torch._dynamo.utils import counters

    return Counter(graphs=counters["stats"]["unique_graphs"], graph_breaks=counters["graph_break"].total())


def positional(inputs: Any) -> tuple[Any, ...]:
    """Return the inputs of a batch as a tuple of the positional arguments of the module."""
    return inputs if isinstance(inputs, tuple) else (inputs,)
