"""The verbs' results are ready for the caller's stream, in forward and in backward.

A caller who gives ids of GPUs knows no stream but the current one. Each test queues the caller's
work directly after a verb's, without a synchronisation, and repeats this, because a missing wait
shows only in some orders. On fake GPUs, the orders are random in deferred mode; elsewhere, the
first test repeats this file in a process in that mode.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpbench
from dpbench.engine import resolve
from dpbench.hardware.devices import open_devices

pytestmark = pytest.mark.gpu

DEFERRED = "FAKECUDA_DEFERRED"
TRIES = 12

every_placement = pytest.mark.parametrize(
    "ids",
    [
        pytest.param([0, 0], id="colocated"),
        pytest.param([0, 1], marks=pytest.mark.multi_gpu, id="spread"),
    ],
)


@pytest.mark.slow
def test_the_verbs_are_right_in_random_orders_of_execution() -> None:
    if not torch.cuda.get_device_name().startswith("Fake") or os.environ.get(DEFERRED):
        pytest.skip("needs fake GPUs, in a process that is not in deferred mode yet")
    options = ("-n0", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, *options],
        env={**os.environ, DEFERRED: "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


def always(expected: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
    """Compute tensors on the current streams several times; they must have the expected values."""
    for _ in range(TRIES):
        found = [tensor.detach().to("cuda:0") * 1 for tensor in compute()]
        torch.cuda.synchronize(0)
        torch.testing.assert_close([tensor.cpu() for tensor in found], list(expected))


def read(*tensors: Tensor) -> list[Tensor]:
    """Return copies that are made on the current streams at once.

    After a backward, these have waited for the devices.
    """
    return [tensor.detach() * 1 for tensor in tensors]


def halves() -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(4, 3)
    return x, list(x.chunk(2))


FACTORS = (2.0, 3.0)


def weighted(parts: Sequence[Tensor]) -> Tensor:
    """Return a scalar on GPU 0 whose gradient for part i is `FACTORS[i]` everywhere."""
    return sum(
        ((part * factor).sum().to("cuda:0") for part, factor in zip(parts, FACTORS, strict=True)),
        torch.zeros((), device="cuda:0"),
    )


def gradient_of_halves() -> Tensor:
    return torch.cat([torch.full((2, 3), factor) for factor in FACTORS])


@every_placement
@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
def test_pieces_are_ready(ids: list[int], home: str) -> None:
    x, pieces = halves()

    def scattered() -> list[Tensor]:
        return dpbench.scatter(x.clone().to(home), ids)

    always(pieces, scattered)


@every_placement
def test_the_gradient_of_scatter_is_ready(ids: list[int]) -> None:
    x, _ = halves()

    def gradient() -> list[Tensor]:
        leaf = x.cuda().requires_grad_()
        weighted(dpbench.scatter(leaf * 1, ids)).backward()
        assert leaf.grad is not None
        return [leaf.grad]

    always([gradient_of_halves()], gradient)


@every_placement
def test_replicas_and_their_gradients_are_ready(ids: list[int]) -> None:
    weight = torch.randn(3, 4)

    def replicated() -> list[Tensor]:
        module = nn.Linear(4, 3, bias=False)
        module.weight.data = weight.clone()
        copies = [one.weight for one in dpbench.replicate(module.cuda(), ids)]
        found = read(*copies)
        weighted(copies).backward()
        assert module.weight.grad is not None
        return [*found, module.weight.grad]

    always([weight, weight, torch.full((3, 4), sum(FACTORS))], replicated)


@every_placement
@pytest.mark.parametrize("named", [True, False], ids=["devices", "inputs"])
def test_outputs_and_gradients_of_parallel_apply_are_ready(ids: list[int], named: bool) -> None:
    _, pieces = halves()
    modules = [nn.Linear(3, 3).cuda(i) for i in ids]
    hosts = [nn.Linear(3, 3) for _ in ids]
    for module, host in zip(modules, hosts, strict=True):
        host.load_state_dict({name: p.cpu() for name, p in module.state_dict().items()})
    outputs = [host(piece) for host, piece in zip(hosts, pieces, strict=True)]
    weighted([output.cuda() for output in outputs]).backward()
    expected = [*(output.detach() for output in outputs), *(host.weight.grad for host in hosts)]

    def applied() -> list[Tensor]:
        leaves = [piece.cuda(i) for i, piece in zip(ids, pieces, strict=True)]
        for module in modules:
            module.zero_grad()
        outputs = dpbench.parallel_apply(modules, leaves, None, ids if named else None)
        found = read(*outputs)
        weighted(outputs).backward()
        return [*found, *(module.weight.grad for module in modules)]

    always(expected, applied)


@every_placement
@pytest.mark.parametrize("named", [True, False], ids=["devices", "outputs"])
def test_gathered_outputs_and_their_gradients_are_ready(ids: list[int], named: bool) -> None:
    x, pieces = halves()

    def gathered() -> list[Tensor]:
        leaves = [piece.cuda(i).requires_grad_() for i, piece in zip(ids, pieces, strict=True)]
        whole = dpbench.gather([leaf * 1 for leaf in leaves], 0, ids if named else None)
        found = read(whole)
        (whole * gradient_of_halves().cuda()).sum().backward()
        return [*found, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    always([x, *gradient_of_halves().chunk(2)], gathered)


@every_placement
@pytest.mark.parametrize("grad_mode", [True, False])
def test_sums_are_ready(ids: list[int], grad_mode: bool) -> None:
    _, pieces = halves()

    def summed() -> list[Tensor]:
        with torch.set_grad_enabled(grad_mode):
            given = [[piece.cuda(i) * 1] for i, piece in zip(ids, pieces, strict=True)]
            return dpbench.reduce(given, ids)

    always([pieces[0] + pieces[1]], summed)


class Doubling(dpbench.DataParallel):
    """A wrapper whose phases work on pieces and outputs, as subclasses of torch's wrapper may."""

    def scatter(self, *arguments: Any) -> Any:
        inputs, kwargs = super().scatter(*arguments)
        return tuple((piece * 2,) for (piece,) in inputs), kwargs

    def parallel_apply(self, *arguments: Any) -> list[Any]:
        return [output * 2 for output in super().parallel_apply(*arguments)]


def wrapped(module: nn.Module, ids: list[int], x: Tensor) -> Tensor:
    return dpbench.DataParallel(module, ids)(x)  # type: ignore[no-any-return]


def doubled(module: nn.Module, ids: list[int], x: Tensor) -> Tensor:
    return Doubling(module, ids)(x) / 4  # type: ignore[no-any-return]


def called(module: nn.Module, ids: list[int], x: Tensor) -> Tensor:
    return dpbench.data_parallel(module, x, ids)  # type: ignore[no-any-return]


def on_own_streams(module: nn.Module, ids: list[int], x: Tensor) -> Tensor:
    devices = resolve(ids, own_streams=True)
    return dpbench.DataParallel(module, devices)(x)  # type: ignore[no-any-return]


@every_placement
@pytest.mark.parametrize("call", [wrapped, doubled, called, on_own_streams])
@pytest.mark.parametrize("kind", [nn.Identity, nn.Tanh])
def test_a_wrapper_and_its_gradients_are_ready(
    ids: list[int],
    call: Callable[[nn.Module, list[int], Tensor], Tensor],
    kind: Callable[[], nn.Module],
) -> None:
    x = torch.rand(4, 3)
    host = x.clone().requires_grad_()
    factors = gradient_of_halves()
    inner = kind()
    expected = inner(host)
    if call is doubled:
        expected = inner(host * 2) / 2
    (expected * factors).sum().backward()
    assert host.grad is not None

    def both() -> list[Tensor]:
        leaf = x.cuda().requires_grad_()
        output = call(kind(), ids, leaf * 1)
        found = read(output)
        (output * factors.cuda()).sum().backward()
        assert leaf.grad is not None
        return [*found, leaf.grad]

    always([expected.detach(), host.grad], both)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "strided": (Tensor.clone, "detach"),
    "coo": (Tensor.to_sparse_coo, "_values"),
    "csr": (Tensor.to_sparse_csr, "values"),
    "csc": (Tensor.to_sparse_csc, "values"),
    "bsr": (lambda x: x.to_sparse_bsr((2, 2)), "values"),
    "bsc": (lambda x: x.to_sparse_bsc((2, 2)), "values"),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "values"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # some layouts are beta
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_of_a_borrowed_tensor_is_not_reused(layout: str) -> None:
    build, values_of = LAYOUTS[layout]
    reader = open_devices("cuda", 2, placement="colocated")[1]
    given = torch.ones(8, 8)

    def read() -> list[Tensor]:
        lent = build(given).cuda()
        values = getattr(lent, values_of)()
        size = values.shape
        reader.synchronize()
        with reader.guard():
            found = values * 2
        reader.borrow([lent])
        del lent, values
        others = [torch.full(size, 5.0, device="cuda:0") for _ in range(8)]
        reader.synchronize()
        del others  # which would have got the freed memory
        return [found.view(-1)]

    always([torch.full((64,), 2.0)], read)
