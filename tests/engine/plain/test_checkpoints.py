"""Checkpoints move between wrapped and plain modules, whichever of them has saved the weights."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dpbench

Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "plain": lambda module: module,
    "torch": nn.DataParallel,
    "dpbench": lambda module: dpbench.DataParallel(module, ["cpu", "cpu"]),
    "torch twice": lambda module: nn.DataParallel(nn.DataParallel(module)),
}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize("target", WRAPS)
@pytest.mark.parametrize("source", WRAPS)
def test_weights_are_loaded_whoever_has_saved_them(source: str, target: str) -> None:
    saved = WRAPS[source](net(1)).state_dict()
    before, inner = copy.deepcopy(saved), net(2)
    wrapped = WRAPS[target](inner)
    result = dpbench.load_state_dict(wrapped, saved)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert all(map(torch.equal, weights(inner), weights(net(1))))
    assert list(saved) == list(before), "the checkpoint itself is unchanged"
    assert saved._metadata == before._metadata


@pytest.mark.parametrize("source", ["plain", "torch"])
@pytest.mark.parametrize("target", ["plain", "torch"])
def test_the_versions_of_layers_are_moved_too(source: str, target: str) -> None:
    """BatchNorm of version 1 had no counter of batches; torch adds it by the version alone."""
    saved = WRAPS[source](net(1)).state_dict()
    for name in [name for name in saved if name.endswith("num_batches_tracked")]:
        del saved[name]
    for facts in saved._metadata.values():
        facts["version"] = 1
    result = dpbench.load_state_dict(WRAPS[target](net(2)), saved)
    assert result.missing_keys == []


def test_a_part_of_the_names_is_left_to_torch() -> None:
    saved = nn.DataParallel(net(1)).state_dict()
    del saved["module.0.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.bias"'):
        dpbench.load_state_dict(net(2), saved)
    assert dpbench.load_state_dict(net(2), saved, strict=False).missing_keys == ["0.bias"]


@pytest.mark.parametrize(
    "given", [{"other.weight": torch.ones(1)}, {"module.other": torch.ones(1)}]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_of_another_module_is_refused(given: dict[str, Any], strict: bool) -> None:
    with pytest.raises(RuntimeError, match="none of the names in the state dict"):
        dpbench.load_state_dict(net(1), given, strict=strict)


def test_a_module_that_is_called_module_keeps_its_name() -> None:
    inner = nn.Module()
    inner.module = nn.Linear(2, 2)
    saved = OrderedDict(
        (name, torch.full_like(value, 3.0)) for name, value in inner.state_dict().items()
    )
    dpbench.load_state_dict(inner, saved)
    assert torch.equal(inner.module.weight, torch.full((2, 2), 3.0))


def test_assign_uses_the_tensors_of_the_checkpoint() -> None:
    saved = nn.DataParallel(net(1)).state_dict()
    module = net(2)
    dpbench.load_state_dict(module, saved, assign=True)
    assert module[0].weight.data_ptr() == saved["module.0.weight"].data_ptr()  # type: ignore[index]


def test_nothing_is_loaded_into_a_module_without_weights() -> None:
    assert dpbench.load_state_dict(nn.ReLU(), {}).missing_keys == []
