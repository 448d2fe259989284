"""The verbs and the engine on GPUs, where they differ from the host: sparse tensors and NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpbench
from dpbench.engine import TrainStep

pytestmark = pytest.mark.gpu

every_placement = pytest.mark.parametrize(
    "ids",
    [
        pytest.param([0, 0], id="colocated"),
        pytest.param([0, 1], marks=pytest.mark.multi_gpu, id="spread"),
    ],
)


class Words(nn.Module):
    """A model whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, sparse=True)
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.embedding(x))  # type: ignore[no-any-return]


@every_placement
@pytest.mark.parametrize("schedule", ["reference", "pool", "cached", "flat_storage"])
def test_a_training_step_has_sparse_gradients(ids: list[int], schedule: str) -> None:
    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]

    module = Words().cuda()
    before = module.embedding.weight.detach().cpu()
    with TrainStep(module, F.cross_entropy, sgd, ids, schedule) as step:
        step(torch.randint(50, (8,)), torch.randint(3, (8,)))
        assert module.embedding.weight.grad is not None
        assert module.embedding.weight.grad.is_sparse
    assert module.embedding.weight.shape == before.shape


@every_placement
def test_a_wrapper_has_sparse_gradients(ids: list[int]) -> None:
    module = Words().cuda()
    dpbench.DataParallel(module, ids)(torch.randint(50, (8,), device="cuda")).sum().backward()
    assert module.embedding.weight.grad is not None
    assert module.embedding.weight.grad.is_sparse


@every_placement
@pytest.mark.parametrize("grad_mode", [True, False])
def test_sparse_gradients_are_reduced(ids: list[int], grad_mode: bool) -> None:
    gradients = [[torch.eye(4).to_sparse_coo().cuda(i)] for i in ids]
    with torch.set_grad_enabled(grad_mode):
        (total,) = dpbench.reduce(gradients, ids)
    assert (total.layout, total.device) == (torch.sparse_coo, torch.device("cuda:0"))
