"""Own: users' model objects, models of installed libraries, and the forms of batches and losses.

An object is given as `file.py:name` or `package.module:name`, and a model of a library as
`library:name`, such as `transformers:gpt2`. The models of libraries have random weights; nothing is
downloaded.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dpbench.records import registry, session
from dpbench.records.errors import UnknownName
from dpbench.records.spelling import dashed

IMAGE = 224
"""The side in pixels of the images for which torchvision's and timm's models were published."""
TOKENS = {"small": 32, "full": 512}
"""The length of a sequence in tokens, by size."""
_GPT2 = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_BERT = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 256,
}
_CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "bert-base-uncased": ("BertConfig", "BertForMaskedLM", _BERT),
}
"""By model: its configuration, its class with a loss, and the settings of the small size."""
VERBS = ("build", "batch")


@dataclass(frozen=True)
class Library:
    """A library whose models are given as `library:name`.

    `known` has names of models to show in messages. `make(imported library, name)` returns the
    model object, or None for an unknown name.
    """

    known: tuple[str, ...]
    make: Callable[[Any, str], Any]


def of_library(library: str, name: str) -> Any:
    """Return the model object of the model `name` of a library.

    Raises ImportError if the library is absent or does not work with the installed torch, and
    LookupError for an unknown name.
    """
    form = FORMS[library]
    try:
        imported = importlib.import_module(library)
    except ImportError as error:
        raise ImportError(
            f"{_given(f'{library}:{name}')} needs {library}, which cannot be imported ({error}): "
            f"pip install 'torch-dpbench[{registry.LIBRARIES[library]}]'"
        ) from error
    except Exception as error:
        # torchvision registers operators at import and raises RuntimeError without them
        raise ImportError(
            f"{_given(f'{library}:{name}')}: the installed {library} does not work with torch"
            f" {torch.__version__} ({type(error).__name__}: {error}); install torch and {library}"
            " from the same index"
        ) from error
    model = form.make(imported, name)
    if model is None:
        raise UnknownName(
            f"{_given(f'{library}:{name}')}: dpbench finds no model of {library} with this name;"
            f" give, for example, {' or '.join(form.known)}"
        )
    return model


def _transformers(library: Any, name: str) -> Any:
    if name not in _CONFIGURATIONS:
        return None
    config, kind, small = _CONFIGURATIONS[name]

    def build(size: str) -> nn.Module:
        settings = {"vocab_size": 1000, **small} if size == "small" else {}
        module: nn.Module = getattr(library, kind)(getattr(library, config)(**settings))
        return module.train()

    def batch(n: int, seed: int, size: str) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1000, (n, TOKENS[size]), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return SimpleNamespace(build=build, batch=batch, loss=None)


def _images(build: Callable[[str], nn.Module]) -> Any:
    def batch(n: int, seed: int, size: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(n, 3, IMAGE, IMAGE, generator=generator)
        return images, torch.randint(1000, (n,), generator=generator)

    return SimpleNamespace(build=build, batch=batch, loss=nn.functional.cross_entropy)


def _torchvision(library: Any, name: str) -> Any:
    models = importlib.import_module("torchvision.models")
    return (
        _images(lambda size: models.get_model(name, weights=None))
        if name in models.list_models()
        else None
    )


def _timm(library: Any, name: str) -> Any:
    known = library.is_model(name)
    return _images(lambda size: library.create_model(name, pretrained=False)) if known else None


FORMS = {
    "transformers": Library(tuple(_CONFIGURATIONS), _transformers),
    "torchvision": Library(("resnet50", "vit_b_16"), _torchvision),
    "timm": Library(("vit_base_patch16_224", "resnet50"), _timm),
}
"""The libraries, by import name."""


def plug(name: str) -> Any:
    """Import and return the user's model object `name`, or the object of a library's model.

    The current directory is searched first. Raises TypeError if the object is not a model object.
    """
    place, _, attribute = name.partition(":")
    if place in FORMS:
        return of_library(place, attribute)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    model = _found(name, place, attribute)
    if callable(model) and not hasattr(model, "build"):
        raise TypeError(
            f"{_given(name)}: this {type(model).__name__} is not a model object; give an object"
            " with build(size), batch(n, seed, size) and loss(output, target); `dpbench init"
            " model.py` writes an example"
        )
    missing = [verb for verb in VERBS if not callable(getattr(model, verb, None))]
    if not callable(getattr(model, "loss", None)) and (
        not hasattr(model, "loss") or model.loss is not None
    ):
        missing.append("loss")
    if missing:
        raise TypeError(
            f"{_given(name)}: this object must have the functions build(size), batch(n, seed, size)"
            " and loss(output, target), or loss = None if forward returns the loss; functions that"
            f" are missing: {', '.join(missing)}"
        )
    if isinstance(model.loss, type):
        raise TypeError(
            f"{_given(name)}: loss is the class {model.loss.__name__}: give an instance, or a"
            " function"
        )
    return model


def _found(name: str, place: str, attribute: str) -> Any:
    if session.is_of(name):
        # cloudpickle has written the file, and pickle reads it
        return pickle.loads(session.file_of(name).read_bytes())
    if place.endswith(".py"):
        return registry.outside("model", name)
    return _imported(name, place, attribute)


def _given(name: str) -> str:
    """Return a model's name after its option."""
    return dashed("models", name)


def _imported(name: str, place: str, attribute: str) -> Any:
    here = Path.cwd()
    try:
        value: Any = importlib.import_module(place)
        for part in filter(None, attribute.split(".")):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        error.add_note(
            f"raised while loading {_given(name)} as package.module:name from {here} or sys.path; "
            "to load a model from a file, give file.py:name"
        )
        raise
    return value


@dataclass(frozen=True)
class LoopParts:
    """The parts of the training loop that the user's model object has; None for a missing part.

    `optimizer(parameters)` returns an optimizer, and `scheduler(optimizer)` a learning-rate
    scheduler, which takes a step after each update. `clip_norm` is the largest norm of the
    gradient.
    """

    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_norm: float | None = None


NO_LOOP = LoopParts()


def loop(plug: Any, name: str) -> LoopParts:
    """Return the parts of the training loop of a model object.

    Raises TypeError for a part of a wrong type.
    """
    parts = LoopParts(
        *(getattr(plug, part, None) for part in ("optimizer", "scheduler", "clip_norm"))
    )
    wrong = [
        part
        for part in ("optimizer", "scheduler")
        if not callable(getattr(parts, part) or callable)
    ]
    if wrong:
        form = {"optimizer": "optimizer(parameters)", "scheduler": "scheduler(optimizer)"}[wrong[0]]
        raise TypeError(f"model {name}: {wrong[0]} must be a function of the form {form}")
    if parts.clip_norm is not None and not (
        isinstance(parts.clip_norm, int | float) and parts.clip_norm > 0
    ):
        raise TypeError(
            f"model {name}: clip_norm must be a number above 0, got {parts.clip_norm!r}"
        )
    if getattr(plug, "accumulate", 1) != 1:
        raise TypeError(
            f"model {name}: accumulate is not measured, because a step is one batch and one update:"
            " leave out accumulate, and give the number of samples per update in"
            f" {dashed('batch_sizes')}"
        )
    return parts


def with_forward(
    module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> bool:
    """Replace the forward of `module` by `make(forward of its class)`; return False if impossible.

    The module becomes an instance of a new subclass of its class, so the names of its parts stay,
    and its copies and replicas have the new forward too. The forward cannot be replaced in a
    scripted module, in a module of torch.fx (each copy of which has a separate class), or in an
    instance whose own forward hides that of the class.
    """
    if isinstance(module, torch.jit.ScriptModule | GraphModule) or "forward" in vars(module):
        return False
    kind = type(module)
    module.__class__ = type(
        kind.__name__, (kind,), {"forward": make(kind.forward), "__module__": kind.__module__}
    )
    return True


def own_loss(output: Any, target: Any) -> torch.Tensor:
    """Return the loss that forward has returned: the output, or its item or attribute `loss`.

    After a gather, this is the mean of one value per replica, as in training loops with
    DataParallel. Raises TypeError if the output has no loss.
    """
    part = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = output if isinstance(output, torch.Tensor) else part
    if not isinstance(loss, torch.Tensor) or loss.dim() > 1:
        kind = f"an object of type {type(output).__name__} without a loss"
        form = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else kind
        raise TypeError(
            f"the model has loss = None, so forward must return its loss, but it returned {form}:"
            " return a 0-dim tensor or a structure with `loss` from forward, or write loss(output,"
            " target)"
        )
    return loss.mean() if loss.dim() else loss
