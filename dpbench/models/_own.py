"""Own: the user's model objects, models of installed libraries, and the forms of their batches and losses.

An object is given as `file.py:name` or `package.module:name`, and a model of a library as `library:name`, such as
`transformers:gpt2`. The inputs of a batch may be a dict, whose items are the keyword arguments of forward. A model
whose object has `loss = None` returns its own loss.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dpbench.models import _libraries
from dpbench.records import registry

VERBS = ("build", "batch")


def plug(name: str) -> Any:
    """Import and return the user's model object `name`, or the object of a library's model.

    The current directory is searched first, as by `python -m`. Raises TypeError if the object is not a model object.
    """
    place, _, attribute = name.partition(":")
    if place in _libraries.FORMS:
        return _libraries.plug(place, attribute)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found = registry.outside("model", name) if place.endswith(".py") else _imported(name, place, attribute)
    if callable(found) and not hasattr(found, "build"):
        raise TypeError(
            f"--model {name}: this {type(found).__name__} is not a model object; give an object with build(size), "
            "batch(n, seed, size) and loss(output, target); `dpbench init model.py` writes an example"
        )
    missing = [verb for verb in VERBS if not callable(getattr(found, verb, None))]
    if not callable(getattr(found, "loss", None)) and (not hasattr(found, "loss") or found.loss is not None):
        missing.append("loss")
    if missing:
        raise TypeError(
            f"--model {name}: this object must have the functions build(size), batch(n, seed, size) and "
            "loss(output, target), or loss = None if forward returns the loss; functions that are missing: "
            f"{', '.join(missing)}"
        )
    if isinstance(found.loss, type):
        raise TypeError(f"--model {name}: loss is the class {found.loss.__name__}: give an instance, or a function")
    return found


def _imported(name: str, place: str, attribute: str) -> Any:
    here = Path.cwd()
    try:
        found: Any = importlib.import_module(place)
        for part in filter(None, attribute.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        error.add_note(
            f"while loading --model {name} from {here} or sys.path (dpbench reads it as package.module:name)"
        )
        raise
    return found


@dataclass(frozen=True)
class Loop:
    """The parts of the user's training loop that the model's object has; None for a part that is missing.

    `optimizer(parameters)` returns an optimizer. `scheduler(optimizer)` returns a scheduler of the learning rate, which
    takes a step after each update. `clip_norm` is the largest norm of the gradient.
    """

    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_norm: float | None = None


NO_LOOP = Loop()


def loop(plug: Any, name: str) -> Loop:
    """Return the parts of the training loop of a model object. Raises TypeError for a part of a wrong type."""
    found = Loop(*(getattr(plug, part, None) for part in ("optimizer", "scheduler", "clip_norm")))
    wrong = [part for part in ("optimizer", "scheduler") if not callable(getattr(found, part) or callable)]
    if wrong:
        form = {"optimizer": "optimizer(parameters)", "scheduler": "scheduler(optimizer)"}[wrong[0]]
        raise TypeError(f"model {name}: {wrong[0]} must be a function of the form {form}")
    if found.clip_norm is not None and not (isinstance(found.clip_norm, int | float) and found.clip_norm > 0):
        raise TypeError(f"model {name}: clip_norm must be a number above 0, got {found.clip_norm!r}")
    if getattr(plug, "accumulate", 1) != 1:
        raise TypeError(
            f"model {name}: accumulate is not measured, because a step is one batch and one update: leave out "
            "accumulate, and give the rows of one update in --batch-sizes"
        )
    return found


def take_keywords(module: nn.Module) -> None:
    """Let the forward of `module` take a dict of keyword arguments as its only positional argument.

    A strategy then treats keyword arguments as one structure of tensors. A dict whose keys are not parameters of
    forward is passed unchanged. A scripted module keeps its forward. A new forward costs a call in each step, and
    torch.fx cannot record it: only models whose batches have keyword arguments get one. Raises TypeError if the module
    cannot have another forward; see `with_forward`.
    """

    def taking(original: Callable[..., Any]) -> Callable[..., Any]:
        fits = _keywords(original)

        def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
            if len(inputs) == 1 and not named and type(inputs[0]) is dict and fits(inputs[0].keys()):
                return original(self, **inputs[0])
            return original(self, *inputs, **named)

        return forward

    if not (isinstance(module, torch.jit.ScriptModule) or with_forward(module, taking)):
        raise TypeError(
            f"the batch has keyword arguments, and the forward of this {type(module).__name__} does not come from its "
            "class (the module is from torch.fx, or build() has set forward on the instance): return a tuple of inputs "
            "from batch(), or define forward in the class"
        )


def with_forward(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace the forward of `module` by `make(forward of its class)`, and return whether this is possible.

    The module becomes an instance of a new subclass of its class. The names of its parts therefore stay, and its copies
    and replicas have the new forward too. The replacement is impossible for scripted modules, for modules of torch.fx
    (their copies get a separate class), and if a forward set on the instance hides the forward of the class.
    """
    if isinstance(module, torch.jit.ScriptModule | GraphModule) or "forward" in vars(module):
        return False
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": make(kind.forward), "__module__": kind.__module__})
    return True


def _keywords(forward: Callable[..., Any]) -> Callable[[Set[str]], bool]:
    """Return a function that returns whether `forward` can be called with exactly the given names as keyword arguments.

    The signature is read once, because binding it in each step would cost tens of microseconds.
    """
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in parameters if p.name in known and p.default is p.empty}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return lambda names: needed <= names and (any_name or names <= known)


def own_loss(output: Any, target: Any) -> torch.Tensor:
    """Return the loss that a model's forward has returned: the output, or its item or attribute `loss`.

    After a gather, the loss has one value per replica; return the mean of these values, as training loops with
    DataParallel do. Raises TypeError if the output has no loss.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = output if isinstance(output, torch.Tensor) else found
    if not isinstance(loss, torch.Tensor) or loss.dim() > 1:
        kind = f"an object of type {type(output).__name__} without a loss"
        told = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else kind
        raise TypeError(
            f"the model has loss = None, so forward must return its loss, but it returned {told}: return a 0-dim "
            "tensor or a structure with `loss` from forward, or write loss(output, target)"
        )
    return loss.mean() if loss.dim() else loss
