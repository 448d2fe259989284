"""Libraries: models of transformers, torchvision and timm with random weights, made without downloads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dpbench.records import registry

IMAGE = 224
"""The height and width of images in pixels, at which torchvision's and timm's models are published."""
TOKENS = {"small": 32, "full": 512}
"""The length of a sequence in tokens, by size."""


@dataclass(frozen=True)
class Library:
    """A library whose models are given as `library:name`.

    `known` has names of models to show in messages. `make(library, name)` returns the model object of a name, or None
    for an unknown name; its first argument is the imported library.
    """

    known: tuple[str, ...]
    make: Callable[[Any, str], Any]


def plug(library: str, name: str) -> Any:
    """Return the model object of the model `name` of a library.

    Raises ImportError, with the remedy, if the library is absent or does not work with the installed torch. Raises
    LookupError for an unknown name.
    """
    form = FORMS[library]
    try:
        imported = importlib.import_module(library)
    except ImportError as error:
        raise ImportError(
            f"--model {library}:{name} needs {library}, which cannot be imported ({error}): "
            f"pip install 'torch-dpbench[{registry.LIBRARIES[library]}]'"
        ) from error
    except Exception as error:  # torchvision registers operators at import and raises RuntimeError without them
        raise ImportError(
            f"--model {library}:{name}: the installed {library} does not work with torch {torch.__version__} "
            f"({type(error).__name__}: {error}); install torch and {library} from the same index"
        ) from error
    found = form.make(imported, name)
    if found is None:
        raise LookupError(
            f"--model {library}:{name}: dpbench finds no model of {library} with this name; give, for example, "
            f"{' or '.join(form.known)}"
        )
    return found


_GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
_BERT = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}
_CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "bert-base-uncased": ("BertConfig", "BertForMaskedLM", _BERT),
}
"""For each model of transformers: its configuration, its class with a loss, and the settings of the small size."""


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
    """Return the model object of a classifier of images in 1000 classes."""

    def batch(n: int, seed: int, size: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(n, 3, IMAGE, IMAGE, generator=generator)
        return images, torch.randint(1000, (n,), generator=generator)

    return SimpleNamespace(build=build, batch=batch, loss=nn.functional.cross_entropy)


def _torchvision(library: Any, name: str) -> Any:
    models = importlib.import_module("torchvision.models")
    return _images(lambda size: models.get_model(name, weights=None)) if name in models.list_models() else None


def _timm(library: Any, name: str) -> Any:
    known = library.is_model(name)
    return _images(lambda size: library.create_model(name, pretrained=False)) if known else None


FORMS = {
    "transformers": Library(tuple(_CONFIGURATIONS), _transformers),
    "torchvision": Library(("resnet50", "vit_b_16"), _torchvision),
    "timm": Library(("vit_base_patch16_224", "resnet50"), _timm),
}
"""The libraries by the name with which they are imported."""
