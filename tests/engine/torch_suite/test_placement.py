"""PyTorch's tests of module placement, spectral norm and ScriptModules, for our DataParallel.

`tests/engine/conformance.py` names the sources.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dpbench
from tests.engine.conformance import (
    HERE,
    KINDS,
    SWAP,
    Place,
    check_gradients,
    close,
    every_kind,
    every_schedule,
    known_fault,
    on,
    place,
    share,
)

__all__ = ["place"]

pytestmark = [
    # it says so on each use: a DeprecationWarning, and a FutureWarning since torch 2.14
    *(
        pytest.mark.filterwarnings(f"ignore:.*torch.jit.*:{kind}")
        for kind in ("DeprecationWarning", "FutureWarning")
    ),
    # torch's own check of batch sizes
    pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean"),
]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=marks) for kind, (_, marks) in KINDS.items()]
)
def test_every_kind_of_device_that_is_here_has_its_tests(kind: str) -> None:
    """Skipped, with the reason, for the kinds that are not.

    The tests of this folder leave those out.
    """
    assert kind in HERE


# ---------------------------------------------------------------- the check of device_ids[0]

HOST = -1


def moved(place: Place, module: nn.Module, i: int) -> nn.Module:
    return module.to("cpu" if i == HOST else place.device(i))


# where the layers of the module are, where the wrapper is moved afterwards, where the input is, the
# ids, does it fail
PLACEMENTS = {
    "host": ((HOST,), None, HOST, (0, 1), True),
    "second": ((1,), None, 0, (0, 1), True),
    "first, reversed ids": ((0,), None, 0, (1, 0), True),
    "first": ((0,), None, 0, (0, 1), False),
    "moved to the first": ((HOST,), 0, 0, (0, 1), False),
    "second, reversed ids": ((1,), None, 1, (1, 0), False),
    "moved to the second, reversed ids": ((HOST,), 1, 1, (1, 0), False),
    "nested on the host": ((HOST, None), None, HOST, (0, 1), True),
    "nested on the host, reversed ids": ((HOST, None), None, HOST, (1, 0), True),
    "host and first": ((HOST, 0), None, HOST, (0, 1), True),
    "host and first, reversed ids": ((HOST, 0), None, HOST, (1, 0), True),
    "first and second": ((0, 1), None, HOST, (0, 1), True),
    "first and second, reversed ids": ((0, 1), None, HOST, (1, 0), True),
    "both on the first": ((0, 0), None, HOST, (0, 1), False),
    "both on the first, reversed ids": ((0, 0), None, HOST, (1, 0), True),
    "both on the host, reversed ids": ((HOST, HOST), None, HOST, (1, 0), True),
    "both on the second, reversed ids": ((1, 1), None, HOST, (1, 0), False),
}


@every_schedule
@pytest.mark.parametrize("case", PLACEMENTS)
def test_data_parallel_model_device(place: Place, case: str) -> None:
    """Mirror A, test_data_parallel_model_device: only forward wants all on device_ids[0]."""
    place.needs_distinct("nothing can lie on the wrong one")
    layers, later, source, order, fails = PLACEMENTS[case]
    parts = [moved(place, nn.Linear(2, 2), i) for i in layers if i is not None]
    module = parts[0] if len(layers) == 1 else nn.Sequential(*parts)
    x = torch.randn(2, 2) if source == HOST else place.put(torch.randn(2, 2), source)
    wrapped = place.wrap(module, *order)
    if later is not None:
        wrapped = wrapped.to(place.device(later))
    calls: list[Callable[[], Tensor]] = [
        lambda: wrapped(x),
        lambda: dpbench.data_parallel(module, x, place.ids(*order)),
    ]
    for call in calls:
        if fails:
            told = f"module must have its parameters and buffers on device {place.device(order[0])}"
            with pytest.raises(RuntimeError, match=re.escape(told)):
                call()
        else:
            assert on(call(), place.device(order[0]))


# ---------------------------------------------------------------- spectral norm


class Normed:
    """A layer under spectral norm, of the old kind or the new, and its two vectors."""

    def __init__(self, place: Place, kind: str, *, learns: bool) -> None:
        self.kind = kind
        self.layer: nn.Module = nn.Linear(3, 4, dtype=torch.double).to(place.device())
        self.layer.weight.requires_grad_(learns)
        self.wrapped = place.wrap(self.layer)
        self.add()

    def add(self) -> None:
        if self.kind == "old":
            nn.utils.spectral_norm(self.layer)
        else:
            nn.utils.parametrizations.spectral_norm(self.layer)

    def remove(self) -> None:
        if self.kind == "old":
            nn.utils.remove_spectral_norm(self.layer)
        else:  # in training mode, removal takes one more power iteration
            self.layer.eval()
            nn.utils.parametrize.remove_parametrizations(self.layer, "weight")
            self.layer.train()

    def vectors(self) -> tuple[Tensor, Tensor]:
        if self.kind == "old":
            return self.layer.weight_u, self.layer.weight_v
        norm = self.layer.parametrizations.weight[0]
        return norm._u, norm._v

    def saved(self) -> list[Tensor]:
        return [vector.detach().clone() for vector in self.vectors()]

    def original(self) -> Tensor:
        return (
            self.layer.weight_orig
            if self.kind == "old"
            else self.layer.parametrizations.weight.original
        )


@every_schedule
@pytest.mark.parametrize("learns", [True, False], ids=["learns", "frozen"])
@pytest.mark.parametrize("kind", ["old", "new"])
def test_spectral_norm(place: Place, kind: str, learns: bool) -> None:
    """Mirror D, test_new_spectral_norm and old test_spectral_norm, their loop `for apply_dp`."""
    norm = Normed(place, kind, learns=learns)
    x = place.put(torch.randn(2, 3, dtype=torch.double))
    before = norm.saved()
    optimizer = torch.optim.SGD(norm.wrapped.parameters(), lr=0.1)
    norm.wrapped(x).sum().backward()
    optimizer.step()
    output = norm.wrapped(x)
    # training moves both vectors; the new kind starts from converged ones
    if learns or kind == "old":
        assert not any(
            torch.equal(now, then) for now, then in zip(norm.saved(), before, strict=True)
        )
    if learns:
        (gradient,) = torch.autograd.grad(output.sum(), norm.original())
        assert gradient.abs().sum() > 0

    kept = norm.saved()

    def twice(y: Tensor) -> Tensor:
        with torch.no_grad():  # each pair of forwards starts from the same vectors
            for vector, value in zip(norm.vectors(), kept, strict=True):
                vector.copy_(value)
        return norm.wrapped(y) + norm.wrapped(y)

    twice(x.clone().requires_grad_()).sum().backward()
    check_gradients(twice, [x.clone().requires_grad_()])


@every_schedule
@pytest.mark.parametrize("learns", [True, False], ids=["learns", "frozen"])
@pytest.mark.parametrize("kind", ["old", "new"])
def test_spectral_norm_removal(
    place: Place, kind: str, learns: bool, request: pytest.FixtureRequest
) -> None:
    """Mirror D, the same tests, the part on removal: what is left computes what was there."""
    norm = Normed(place, kind, learns=learns)
    cached = norm.wrapped.schedule == "cached"
    known_fault(
        request, RuntimeError, SWAP, when=cached and kind == "new" and place.kind == "emulated"
    )
    x = place.put(torch.randn(2, 3, dtype=torch.double))
    for forwards in (1, 3):
        for _ in range(forwards):
            output = norm.wrapped(
                x
            ).detach()  # a graph would hold on to the weight that removal replaces
        norm.remove()
        close(norm.wrapped(x), output)
        norm.add()


@every_schedule
@pytest.mark.parametrize("learns", [True, False], ids=["learns", "frozen"])
@pytest.mark.parametrize("kind", ["old", "new"])
def test_spectral_norm_evaluation(place: Place, kind: str, learns: bool) -> None:
    """Mirror D, the same tests on evaluation: it repeats the last output and moves no vector."""
    norm = Normed(place, kind, learns=learns)
    x = place.put(torch.randn(2, 3, dtype=torch.double))
    norm.wrapped(x)
    last, vectors = norm.wrapped(x), norm.saved()
    norm.wrapped.zero_grad()
    norm.wrapped.eval()
    for _ in range(2):
        close(norm.wrapped(x), last)
    close(norm.saved(), vectors)


# ---------------------------------------------------------------- ScriptModules


def block(place: Place) -> nn.Module:
    """Return a net on device 0.

    A ScriptModule cannot move to emulated devices, but it can be made there.
    """
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 2)).to(
        place.device()
    )


class Around(nn.Module):
    """A Python module around one child, or two that share."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.inner:
            x = child(x)
        return x


def check_replicas(place: Place, module: nn.Module) -> list[nn.Module]:
    """Replicate a module; each replica lies on its device and computes what the module does."""
    replicas = dpbench.replicate(module, place.ids())
    x = torch.randn(2, 2)
    expected = copy.deepcopy(module)(place.put(x))
    for i, replica in enumerate(replicas):
        tensors = [*replica.parameters(), *replica.buffers()]
        assert tensors
        assert all(on(tensor, place.device(i)) for tensor in tensors)
        close(replica(place.put(x, i)), expected)
    return replicas


@every_kind
def test_python_submodule_script(place: Place) -> None:
    """Mirror C, test_python_submodule_script: a ScriptModule inside a Python module."""
    check_replicas(place, Around(torch.jit.script(block(place))))


@every_kind
def test_shared_module(place: Place) -> None:
    """Mirror C, test_shared_module: a ScriptModule in two places of a Python module stays one."""
    shared = torch.jit.script(block(place))
    replicas = check_replicas(place, Around(Around(shared), shared))
    for replica in replicas:
        assert replica.inner[0].inner[0] is replica.inner[1]


@every_kind
def test_traced_module(place: Place) -> None:
    """Mirror C, test_traced_module: a traced Python module."""
    check_replicas(
        place, torch.jit.trace(Around(block(place)), place.put(torch.ones(2, 2)), check_trace=False)
    )


class Scripted(nn.Module):
    """Around, for torch.jit.script."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@every_kind
def test_tensor_sharing(place: Place) -> None:
    """Mirror C, test_tensor_sharing: only replica 0 of a ScriptModule shares the storage."""
    module = torch.jit.script(Scripted(block(place)))
    first, second = dpbench.replicate(module, place.ids())
    originals = tensors_of(module)
    assert len(originals) == 9
    assert tensors_of(first).keys() == tensors_of(second).keys() == originals.keys()
    assert all(share(tensor, originals[name]) for name, tensor in tensors_of(first).items())
    assert not any(share(tensor, originals[name]) for name, tensor in tensors_of(second).items())


@every_kind
def test_tensor_sharing_with_forward(place: Place) -> None:
    """Mirror C, test_tensor_sharing_with_forward: only replica 0 sees a later change of weights."""
    module = torch.jit.script(Scripted(block(place)))
    replicas = dpbench.replicate(module, place.ids())
    xs = [place.put(torch.randn(2, 2, requires_grad=True), i) for i in (0, 1)]
    xs[1] = place.put(xs[0].detach().cpu(), 1)
    before = module(xs[0])
    before.sum().backward()
    for parameter in module.parameters():
        # .data: the replicas' graph is never used, so its version may stay
        parameter.data -= parameter.grad
    after = module(xs[0])
    assert not torch.equal(before.cpu(), after.cpu())
    close(replicas[0](xs[0]), after)
    close(replicas[1](xs[1]), before)
