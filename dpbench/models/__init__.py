"""Models: the reference models in two sizes (seeded, dropout 0), and a loader for users' models.

A model is a file of this folder, or a user's object (see `_own`). It has three functions:

    build(size) -> Module
    batch(n, seed, size) -> (inputs, target)
    loss(output, target) -> 0-dim tensor

`inputs` is a tensor, a tuple of positional arguments, or a dict of keyword arguments; a tuple with
one dict passes the dict itself. A dict alone is a batch without a target. The schedules from
`local` up need a loss function of torch. If forward returns the loss, or a structure with `loss`,
the model has `loss = None`.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from dpbench.models import _own
from dpbench.models._own import with_forward as with_forward
from dpbench.records import registry
from dpbench.records.arguments import check_names
from dpbench.records.errors import UsageError
from dpbench.records.options import SIZES
from dpbench.records.words import without_rows

_FEW = 2
"""The rows of the batch that shows whether forward accepts the names of its inputs."""
RECOMPILE_LIMIT = 64
"""The number of times that torch may compile the same code, once per device and chunk shape.

Above this limit, torch runs the code uncompiled.
"""


@dataclass(frozen=True)
class Model:
    """A model of one size; `make_batch(n, seed)` returns (inputs, target).

    `owns_loss` is True if the output contains the loss; the function `loss` then returns this loss.
    `loop` has the parts of the user's training loop, for cases with the optimizer "own".
    """

    name: str
    module: nn.Module
    make_batch: Callable[[int, int], Any]
    loss: Callable[..., torch.Tensor]
    owns_loss: bool = False
    loop: _own.LoopParts = _own.NO_LOOP

    def batch(self, n: int, seed: int) -> tuple[Any, Any]:
        """Return (inputs, target) of `n` synthetic samples, the same for the same `seed`.

        Raises ValueError if the first dimension of a tensor is not `n`, because the work of the
        timed step would then differ from the work that the case describes.
        """
        inputs, target = self._pair(self.make_batch(n, seed))
        wrong = [
            f"{where} has {_shape(tensor)}"
            for where, tensor in _tensors((inputs, target))
            if tensor.shape[:1] != (n,)
        ]
        if wrong:
            raise UsageError(
                f"model {self.name}: batch({n}, ...) must return {n} rows, but {', '.join(wrong)};"
                " set the first dimension of every tensor in the inputs and the target to the"
                f" first argument of batch(), here {n}"
            )
        return inputs, target

    def _pair(self, made: Any) -> tuple[Any, Any]:
        """For a dict alone, the target is None.

        Raises TypeError if `made` is neither a pair nor a dict, if it contains an object whose rows
        cannot be split, or if the inputs contain no tensor.
        """
        if isinstance(made, Mapping):
            made = (made, None)
        if not isinstance(made, tuple | list) or len(made) != 2:
            kind = type(made).__name__
            form = (
                f"a {kind} of length {len(made)}"
                if isinstance(made, tuple | list)
                else f"an object of type {kind}"
            )
            raise TypeError(
                f"model {self.name}: batch(n, seed, size) must return (inputs, target), or a dict"
                f" of keyword arguments, but it returned {form}; put several inputs into a tuple or"
                " a dict"
            )
        inputs, target = made
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        for leaf in tree_leaves((inputs, target)):
            if not isinstance(leaf, torch.Tensor | int | float | str | bytes | None):
                raise TypeError(
                    f"model {self.name}: batch(n, seed, size) returned a"
                    f" {without_rows(type(leaf).__name__)}"
                )
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(inputs)):
            raise TypeError(
                f"model {self.name}: the inputs that batch(n, seed, size) returned contain no"
                " tensor; return at least one tensor with n rows"
            )
        return inputs, target


def rows_in(batch: Any) -> int:
    """Return the number of rows of a batch, the length of its first tensor."""
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def bytes_in(structure: Any) -> int:
    """Return the bytes of all tensors in a nested structure."""
    return sum(leaf.nbytes for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor))


def _tensors(batch: tuple[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (location, tensor) for each tensor; a location is text such as "inputs[0]"."""
    for name, part in zip(("inputs", "target"), batch, strict=True):
        for path, leaf in tree_flatten_with_path(part)[0]:
            if isinstance(leaf, torch.Tensor):
                yield f"{name}{keystr(path)}", leaf


def _shape(tensor: torch.Tensor) -> str:
    return f"{len(tensor)} (shape {tuple(tensor.shape)})" if tensor.dim() else "no dimension"


def load(name: str, size: str, seed: int) -> Model:
    """Build the model `name` in the size "small" or "full", with random weights drawn from `seed`.

    The state of the random generator is restored, so that building one model does not change the
    next one. Raises ValueError for an unknown size, and TypeError for an object that is not a
    model.
    """
    if size not in SIZES:
        raise UsageError(registry.unknown("size", size, list(SIZES)))
    plug = _own.plug(name) if ":" in name else registry.load("models", name)
    # build() runs on the CPU; forking CUDA's generator would initialise CUDA
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _inside(f"build({size!r})", name):
            module = plug.build(size)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"model {name}: build({size!r}) must return a torch.nn.Module, not"
            f" {type(module).__name__}"
        )
    with torch.random.fork_rng(devices=[]), _inside(f"batch({_FEW}, {seed}, {size!r})", name):
        if ":" in name:
            check_names(module, _inputs_of(plug.batch(_FEW, seed, size)))
    owns_loss = plug.loss is None
    loss = _own.own_loss if owns_loss else plug.loss
    return Model(
        name,
        module,
        lambda n, batch_seed: plug.batch(n, batch_seed, size),
        loss,
        owns_loss,
        _own.loop(plug, name),
    )


@contextmanager
def _inside(call: str, name: str) -> Iterator[None]:
    """Add a note to an error that names the failing `call` and the model."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised in {call} of {name}")
        raise


def _inputs_of(made: Any) -> Any:
    """`Model.batch` reports a batch of a wrong form."""
    inputs = made[0] if isinstance(made, tuple | list) and made else made
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy of `module`.

    Attributes that are results of autograd, such as the weight that weight_norm computes before
    each forward, are copied without their history, because torch refuses to copy them with it.
    """
    results = [
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    return copy.deepcopy(module, {id(value): value.detach().clone() for value in results})


def compile_forward(module: nn.Module) -> None:
    """Compile the forward of `module` in place with torch.compile; see `with_forward`.

    Each replica runs the compiled forward with its own weights; after `module.compile()`, every
    replica would call the original module.
    """
    # no process of the compiler outlives a trial
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # isolated: where modules of one class share their graphs, two threads that look for theirs at
    # the same time make torch compile again, though both graphs exist
    options: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    known = inspect.signature(torch.compile).parameters  # older versions of torch lack some
    options = {name: value for name, value in options.items() if name in known}
    with_forward(module, lambda forward: torch.compile(forward, **options))


def forget_sizes() -> None:
    """Forget the sizes that torch.compile has seen in this process, but not its graphs.

    A forward whose class has been compiled for other sizes would get a graph for all sizes, which
    another module of this class, measured alone, does not get.
    """
    from torch._dynamo.pgo import reset_code_state

    reset_code_state()


def compilations() -> Counter[str]:
    """Return how many graphs and graph breaks torch.compile has made in this process so far."""
    from torch._dynamo.utils import counters

    return Counter(
        graphs=counters["stats"]["unique_graphs"], graph_breaks=counters["graph_break"].total()
    )
