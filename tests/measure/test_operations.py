"""The operations of a sample, against formulas and published numbers: 2 for each multiply-add."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import models
from dpbench.hardware.devices import open_devices
from dpbench.measure.merging import merge
from dpbench.measure.worker import facts
from dpbench.measure.worker.facts import operations, with_operations
from dpbench.models import Model, mlp, resnet18, transformer
from dpbench.records import Case, Trial, data_sheets
from dpbench.records.facts import stated
from dpbench.records.work import Operations
from tests.trials import trial_of

IMAGENET_MACS = 1.814e9
"""The multiply-adds of resnet18 for an image of 224 x 224: torchvision's page of its weights."""


def counted(model: Model, rows: int = 4) -> Operations:
    found = operations(model, model.batch(rows, 0))
    assert isinstance(found, Operations), found
    return found


@pytest.mark.parametrize("size", ["small", "full"])
def test_those_of_mlp_are_those_of_its_three_products(size: str) -> None:
    features, first, second, classes = mlp.WIDTHS[size]
    forward = 2 * (features * first + first * second + second * classes)
    found = counted(models.load("mlp", size, 0))
    assert found.forward == forward
    # the gradients of weights and inputs, but none of the batch
    assert found.backward == 2 * forward - 2 * features * first
    assert (found.forward_convolutions, found.backward_convolutions) == (0, 0)
    assert found.dtype == "float32"


@pytest.mark.parametrize("size", ["small", "full"])
def test_those_of_resnet18_are_those_of_its_convolutions(size: str) -> None:
    dims = resnet18.DIMS[size]
    side = dims.pixels // 2 if dims.large_stem else dims.pixels
    first = 2 * (7 if dims.large_stem else 3) ** 2 * 3 * dims.width * side**2
    side = side // 2 if dims.large_stem else side
    total, inputs = first, dims.width
    for stage in range(4):
        width = dims.width * 2**stage
        side = side // 2 if stage else side
        total += 2 * 9 * (inputs * width + 3 * width * width) * side**2
        total += 2 * inputs * width * side**2 if stage else 0  # the projection
        inputs = width
    head = 2 * inputs * dims.classes
    found = counted(models.load("resnet18", size, 0))
    assert found.forward_convolutions == total
    assert found.forward == total + head
    assert found.backward_convolutions == 2 * total - first
    assert found.backward == 2 * (total + head) - first


def test_those_of_resnet18_are_the_published_ones() -> None:
    found = counted(models.load("resnet18", "full", 0))
    assert found.forward == pytest.approx(2 * IMAGENET_MACS, rel=0.01)


@pytest.mark.parametrize("size", ["small", "full"])
def test_those_of_a_transformer_are_those_of_its_products_and_its_attention(size: str) -> None:
    dims = transformer.DIMS[size]
    of_token = dims.layers * 2 * (4 * dims.width**2 + 2 * dims.width * dims.hidden)
    of_scores = dims.layers * 2 * 2 * dims.tokens**2 * dims.width
    head = 2 * dims.width * dims.classes
    found = counted(models.load("transformer", size, 0))
    assert found.forward == dims.tokens * of_token + of_scores + head
    # the tokens' embeddings have gradients, too
    assert found.backward == 2 * found.forward
    assert found.forward_convolutions == 0


A100 = "NVIDIA A100-SXM4-40GB"


class Net(nn.Module):
    """Two products, the second of which has a context and a type of its own."""

    def __init__(self, context: Any = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, dtype=dtype)
        self.context, self.dtype = context or nullcontext, dtype

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with self.context():
            return self.second(x.to(self.dtype))


def own(module: nn.Module) -> Model:
    return replace(models.load("mlp", "small", 0), module=module)


BATCH = torch.randn(4, 8), torch.zeros(4)


def test_several_types_of_factors_have_no_type_together() -> None:
    both = operations(own(Net(dtype=torch.bfloat16)), BATCH)
    assert isinstance(both, Operations)
    assert both.dtype == ""
    autocast = operations(own(Net(lambda: torch.autocast("cpu", torch.bfloat16))), BATCH)
    assert isinstance(autocast, Operations)
    assert autocast.dtype == "", "its second product is in bfloat16"
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    half = operations(own(layer), (BATCH[0].bfloat16(), BATCH[1]))
    assert isinstance(half, Operations)
    assert half.dtype == "bfloat16"


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("of the user")


def test_a_model_that_cannot_be_counted_leaves_the_reason() -> None:
    timed = trial_of(Case(model="mlp", strategy="single", batch_size=4), [1.0])
    found = with_operations(timed, own(Failing()), BATCH, open_devices("cpu", 1))
    assert found.facts.operations is None
    assert found.provenance["no_operations"].endswith(": KeyError: 'of the user'")
    for layer in (nn.Flatten(), nn.LayerNorm(8)):
        assert isinstance(operations(own(layer), BATCH), str), "it has no products"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
def test_a_compiled_forward_has_the_operations_of_the_original() -> None:
    timed = trial_of(Case(model="mlp", strategy="single", batch_size=4, compile=True), [1.0])
    model = models.load("mlp", "small", 0)
    expected = counted(model)
    models.compile_forward(model.module)
    found = with_operations(timed, model, model.batch(4, 0), open_devices("cpu", 1))
    assert found.facts.operations is not None
    assert replace(found.facts.operations, peak_per_s=0.0) == expected


def test_counting_changes_neither_weights_nor_buffers_nor_random_numbers() -> None:
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8)
    model = own(nn.Sequential(*layers))
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    generator = torch.get_rng_state()
    assert isinstance(operations(model, BATCH), Operations)
    assert torch.equal(torch.get_rng_state(), generator)
    after = model.module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(parameter.grad is None for parameter in model.module.parameters())


def gpu(name: str, memory_mib: int) -> SimpleNamespace:
    return SimpleNamespace(name=name, total_memory=memory_mib * 2**20)


@pytest.mark.parametrize(
    ("gpus", "known"),
    [
        ([gpu(A100, 40536)] * 2, True),
        ([gpu(A100, 40536), gpu("NVIDIA A100-SXM4-80GB", 81251)], False),
        ([gpu(A100, 40536), gpu(f"{A100} MIG 1g.5gb", 4864)], False),
        ([gpu("Fake GPU", 40536)] * 2, False),
    ],
)
def test_gpus_have_a_data_sheet_if_it_is_that_of_all(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Any], known: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpus[number])
    devices: Any = [SimpleNamespace(torch_device=number) for number in range(len(gpus))]
    case = Case(model="mlp", strategy="dp", batch_size=4, devices=2, device_kind="cuda")
    found = facts.data_sheet(case, devices)
    expected = data_sheets.of_gpu(A100, 40536 * 2**20)
    assert trial_of(case, [1.0], provenance=found).facts.data_sheet == (expected if known else None)
    assert facts.data_sheet(replace(case, device_kind="cpu"), devices) == {}


def test_ranks_have_a_data_sheet_together_if_it_is_that_of_each() -> None:
    case = Case(model="mlp", strategy="ddp", batch_size=4, devices=2, device_kind="cuda")
    first, other = (
        data_sheets.of_gpu(name, 40 * 2**30) for name in (A100, "NVIDIA A100-PCIE-40GB")
    )

    def part(sheet: data_sheets.DataSheet | None) -> Trial:
        return trial_of(case, [1.0], provenance=stated(data_sheet=sheet))

    assert merge([part(first), part(first)]).facts.data_sheet == first
    assert merge([part(first), part(other)]).facts.data_sheet is None
    assert merge([part(first), part(None)]).facts.data_sheet is None
