"""The kinds of devices, and the comparisons, that the conformance tests share.

Each `test_conformance_*.py` holds our own rewriting of PyTorch's tests for DataParallel and its
parts: what they assert, of our engine, on logical CPU devices, on emulated ones, on one GPU
carrying two replicas (mark `gpu`), and on several GPUs (mark `multi_gpu`): two for the verbs, and
up to four for the wrapper. Tests of the verbs run on each kind of device (`every_kind`); tests of
the wrapper run on each kind under each of `SCHEDULES` (`every_schedule`). The first line of a
test's docstring names file and test of the original:

    A  = test/distributed/test_data_parallel.py     A' = the same, later, for any accelerator
    B  = test/test_cuda_multigpu.py, TestCudaComm   C  = test/jit/test_data_parallel.py
    D  = test/nn/test_parametrization.py, and test_spectral_norm of test/test_nn.py
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import DataParallel
from dpbench.engine import resolve
from tests.engine import rungs

SCHEDULES = tuple(map(str, rungs.WRAPPED))
"""The schedules that a wrapper can have."""


KINDS: dict[str, tuple[int, tuple[pytest.MarkDecorator, ...]]] = {
    "cpu": (0, ()),
    "emulated": (0, ()),
    "colocated": (1, (pytest.mark.gpu,)),
    "spread": (2, (pytest.mark.multi_gpu,)),
}
"""The kinds of device: how many CUDA devices each needs, and its marks."""
HERE = {
    kind: marks for kind, (needed, marks) in KINDS.items() if torch.cuda.device_count() >= needed
}
"""The kinds that this machine has.

Tests have no others: there are more than a thousand, and each skip takes time.
"""
every_kind = pytest.mark.parametrize(
    "place",
    [pytest.param((kind, "reference"), marks=marks, id=kind) for kind, marks in HERE.items()],
    indirect=True,
)
every_schedule = pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            (kind, schedule),
            marks=(*marks, *rungs.marks(schedule, SCHEDULES)),
            id=f"{kind}-{schedule}",
        )
        for (kind, marks), schedule in itertools.product(HERE.items(), SCHEDULES)
    ],
    indirect=True,
)


class Place:
    """Devices of one kind, how tensors get there, and a wrapper's schedule on them."""

    def __init__(self, kind: str, schedule: str = "reference") -> None:
        self.kind, self.schedule = kind, schedule

    def __repr__(self) -> str:
        return f"{self.kind}, {self.schedule}"

    def wrap(self, module: nn.Module, *order: int) -> DataParallel:
        """Return the module wrapped over devices in this order; the first `replicas` by default."""
        ids = self.ids(*(order or range(self.replicas)))
        return DataParallel(module, ids, schedule=self.schedule)

    @property
    def replicas(self) -> int:
        """Return how many devices a wrapper has by default: up to four distinct GPUs, or two."""
        return min(4, torch.cuda.device_count()) if self.kind == "spread" else 2

    @property
    def is_gpu(self) -> bool:
        return self.kind in ("colocated", "spread")

    @property
    def distinct(self) -> bool:
        """Return whether two devices of this kind are two torch devices."""
        return self.kind in ("emulated", "spread")

    @property
    def type(self) -> str:
        """Return what autocast and factories call the device."""
        return {"cpu": "cpu", "emulated": "lazy"}.get(self.kind, "cuda")

    def device(self, i: int = 0) -> torch.device:
        if self.kind == "cpu":
            return torch.device("cpu")
        return torch.device(self.type, i if self.distinct else 0)

    def ids(self, *order: int) -> list[str]:
        """Return device ids in this order; devices 0 and 1 by default."""
        order = order or (0, 1)
        return [f"emulated:{i}" if self.kind == "emulated" else str(self.device(i)) for i in order]

    def put(self, tensor: Tensor, i: int = 0) -> Tensor:
        """Return a leaf on device i that wants gradients if `tensor` does."""
        return tensor.detach().to(self.device(i)).requires_grad_(tensor.requires_grad)

    def needs_distinct(self, why: str) -> None:
        if not self.distinct:
            pytest.skip(f"{self.kind} devices are one torch device: {why}")

    def not_on(self, kind: str, why: str) -> None:
        if self.kind == kind:
            pytest.skip(f"not on {kind} devices: {why}")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Give each kind of device, and each schedule, in turn.

    See `every_kind` and `every_schedule`.
    """
    there = Place(*request.param)
    resolve(there.ids())  # emulated tensors can be made once their devices exist
    return there


def known_fault(
    request: pytest.FixtureRequest, error: type[Exception], reason: str, *, when: bool = True
) -> None:
    """Expect the test to fail with `error` for a known fault, and to be red once it passes."""
    if when:
        request.applymarker(pytest.mark.xfail(strict=True, raises=error, reason=reason))


SWAP = (
    "cached replicas hold tensors of the last call, so torch.utils.swap_tensors refuses the"
    " module's parameters"
)
"""A fault of the engine: after a call, what swaps a parameter's contents fails."""


def host(tensor: Tensor) -> Tensor:
    """Return a tensor on the host, out of the graph."""
    return tensor.detach().cpu()


def plain(value: Any) -> Any:
    """Return a nested value with its tensors detached and on the host; containers are unchanged."""
    if isinstance(value, Tensor):
        return host(value)
    if isinstance(value, dict):
        return type(value)((key, plain(part)) for key, part in value.items())
    if isinstance(value, tuple | list):
        parts = [plain(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def close(ours: Any, expected: Any, **tolerance: float) -> None:
    """Compare nested values, wherever their tensors are."""
    torch.testing.assert_close(plain(ours), plain(expected), **tolerance)


def on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device with the same index."""
    return tensor.device == device


def share(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share their memory."""
    return a.device == b.device and _memory(a) == _memory(b)


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; an emulated tensor wraps the one that has it."""
    if hasattr(tensor, "__tensor_flatten__"):
        (name,), _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, name)
    return tensor.untyped_storage().data_ptr()


def gradients(module: nn.Module) -> list[Tensor]:
    """Return each parameter's gradient, cloned; all must have one."""
    found = [parameter.grad for parameter in module.parameters()]
    assert None not in found
    return [gradient.clone() for gradient in found if gradient is not None]


def check_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor], *, second: bool = False
) -> None:
    """Compare first (and second) derivatives of a function of doubles with finite differences."""
    torch.autograd.gradcheck(function, inputs)
    if second:
        torch.autograd.gradgradcheck(function, inputs)


@contextmanager
def young_garbage() -> Iterator[None]:
    """Let the collector visit only new objects: `gc.collect()` then takes microseconds.

    A cycle among new objects is found and counted as usual; objects that exist already are never
    collected from now on.
    """
    gc.collect()
    gc.freeze()
    yield
