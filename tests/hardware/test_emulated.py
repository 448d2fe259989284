"""Emulated devices refuse what a GPU refuses, count bytes, and compute as logical CPU devices."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpbench.engine import DataParallel, resolve
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.hardware.devices._byte_count import ByteCount, DeviceFull
from dpbench.hardware.devices._wrapper import EmulatedTensor
from dpbench.hardware.devices.host import EmulatedDevice, bounded, bytes_only
from tests.garbage import COUNTED
from tests.marked import patience

L0, L1 = torch.device("lazy", 0), torch.device("lazy", 1)
FLOAT = 4


@pytest.fixture(autouse=True)
def _empty_devices() -> Iterator[None]:
    """Every test begins and ends with nothing allocated."""
    devices = [EmulatedDevice(i) for i in range(4)]
    if any(d.allocated() for d in devices):
        gc.collect()  # what failed before keeps its frames
    assert [d.allocated() for d in devices] == [0] * 4
    for device in devices:
        device.reset_memory()
    yield
    if any(d.allocated() for d in devices):
        gc.collect()  # parametrized modules are part of cycles
    assert [d.allocated() for d in devices] == [0] * 4


def emulated(n: int) -> list[str]:
    return [f"emulated:{i}" for i in range(n)]


# ---------------------------------------------------------------- names


def test_names_resolve_to_devices() -> None:
    for ids in (emulated(2), [L0, L1], ["lazy:0", "lazy:1"]):
        devices = resolve(ids)
        assert [d.name for d in devices] == ["emulated:0", "emulated:1"]
        assert [d.index for d in devices] == [0, 1]
        assert [d.torch_device for d in devices] == [L0, L1]
        assert all(isinstance(d, Device) for d in devices)
    assert [d.name for d in open_devices("emulated", 2)] == emulated(2)
    assert [d.name for d in resolve(["emulated"])] == ["emulated:0"]


def test_kinds_do_not_mix() -> None:
    with pytest.raises(
        ValueError, match=r"all be of one kind: GPUs, 'cpu', or emulated .*; got emulated:0, cpu"
    ):
        resolve(["emulated:0", "cpu"])
    with pytest.raises(RuntimeError):
        resolve(["emulated:x"])


def test_colocated_replicas_share_one_memory() -> None:
    devices = open_devices("emulated", 2, placement="colocated")
    assert [d.torch_device for d in devices] == [L0, L0]
    assert devices[0].take_peaks()["allocated"] == 0
    assert devices[1].take_peaks() == {}


def test_there_are_no_collectives_streams_or_events() -> None:
    first, second = resolve(emulated(2))
    assert not first.can_collect([first, second])
    assert first.event() is None
    for refused in (first.broadcast, first.reduce_add):
        with pytest.raises(RuntimeError, match="emulated:0 has no collectives"):
            refused([], [first, second])


# ---------------------------------------------------------------- placement

MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "in place": lambda a, b: a.mul_(b),
    "out": lambda a, b: torch.add(a, a, out=b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "linear": F.linear,
    "lists": lambda a, b: torch._foreach_add([a, a], [a, b]),
}


@pytest.mark.parametrize("other", [L1, torch.device("cpu")], ids=str)
@pytest.mark.parametrize("op", MIXED.values(), ids=MIXED)
def test_devices_do_not_mix(op: Callable[[Tensor, Tensor], Any], other: torch.device) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"Expected all tensors to be on the same device.*(lazy:0 and|and lazy:0)",
    ):
        op(torch.ones(2, 2, device=L0), torch.ones(2, 2, device=other))


def test_scalars_of_the_host_go_anywhere_and_those_of_a_device_do_not() -> None:
    x = torch.ones(2, device=L0)
    assert (x * torch.tensor(2.0)).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="lazy:0 and lazy:1"):
        x * torch.tensor(2.0, device=L1)


def test_indices_of_the_host_go_anywhere() -> None:
    x = torch.arange(3, device=L0)
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]


def test_copies_go_anywhere() -> None:
    x = torch.ones(2, device=L0)
    assert x.to(L1).device == L1
    assert x.cpu().device.type == "cpu"
    x.copy_(torch.zeros(2, device=L1))
    assert x.tolist() == [0.0, 0.0]
    torch._foreach_copy_([x], [torch.ones(2)])
    assert x.tolist() == [1.0, 1.0]
    (first,) = resolve(["emulated:0"])
    assert first.put(x) is not x
    assert first.put(x).held.data_ptr() % 64 == 0  # type: ignore[attr-defined]


def test_numpy_is_refused_as_on_a_gpu() -> None:
    with pytest.raises(TypeError, match="can't convert lazy:0 device type tensor to numpy"):
        torch.ones(2, device=L0).numpy()


# ---------------------------------------------------------------- what users write


def test_factories_make_the_numbers_of_the_host() -> None:
    makers: list[Callable[..., Tensor]] = [
        lambda **d: torch.arange(3, **d),
        lambda **d: torch.tensor([[1.0, 2.0]], **d),
        lambda **d: torch.eye(2, **d),
        lambda **d: torch.full((2,), 3.0, **d),
        lambda **d: torch.randn(3, **d),
        lambda **d: torch.randint(9, (3,), **d),
        lambda **d: torch.randperm(5, **d),
        lambda **d: torch.linspace(0, 1, 3, **d),
    ]
    for make in makers:
        torch.manual_seed(0)
        host = make()
        torch.manual_seed(0)
        there = make(device="lazy:1")
        assert there.device == L1
        assert torch.equal(host, there.cpu())
    with L0:
        assert nn.Linear(2, 2).weight.device == L0


def test_writing_in_place_through_views_and_out() -> None:
    def play(device: Any) -> Tensor:
        x = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
        y = x * 2
        y[0].mul_(3)
        y.view(-1)[1:5].add_(1)
        z = torch.empty_like(y)
        with torch.no_grad():
            torch.mul(y, y, out=z)
            z.t_()
        (y**2).sum().backward()
        assert x.grad is not None
        return torch.cat([x.grad.cpu(), z.t().cpu(), y.detach().cpu()])

    assert torch.equal(play("cpu"), play(L0))


def test_a_view_takes_no_bytes() -> None:
    device = EmulatedDevice(0)
    x = torch.zeros(6, 10, device=L0)
    views = [
        x[0],
        x.view(-1),
        x.t(),
        x.expand(2, 6, 10),
        *x.chunk(3),
        *x.split(4),
        x.detach(),
        x.data,
    ]
    assert device.allocated() == 60 * FLOAT
    del x
    assert device.allocated() == 60 * FLOAT
    del views
    assert device.allocated() == 0


def test_a_module_moves_there_and_back() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = copy.deepcopy(net.state_dict())
    net.to("lazy:0")
    assert net[2].weight is net[0].weight, "ties survive"
    assert optimizer.param_groups[0]["params"][0] is net[0].weight, "optimizers follow"
    assert all(isinstance(p, nn.Parameter) and p.device == L0 for p in net.parameters())
    assert all(b.device == L0 for b in net.buffers())
    net.to(L1).double().float().cpu()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    net.to("lazy:0").load_state_dict(before)
    lstm = nn.LSTM(3, 2).to("lazy:0").to("lazy:1").cpu()
    assert lstm(torch.ones(1, 1, 3))[0].device.type == "cpu"


def test_data_takes_numbers_over() -> None:
    p = nn.Parameter(torch.ones(2, device=L0))
    p.data = torch.zeros(2, device=L0)
    p.data.add_(5)
    assert p.tolist() == [5.0, 5.0]
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        p.data = torch.zeros(2)


def test_copies_pickles_and_prints() -> None:
    net = nn.Linear(3, 2).to("lazy:0")
    net.weight.tag = "kept"
    net.weight.grad = torch.ones(2, 3, device=L0)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(twin.weight, nn.Parameter)
        assert twin.weight.device == L0
        assert twin.weight.requires_grad
        assert twin.weight.tag == "kept"
        assert torch.equal(twin.weight, net.weight)
        twin.weight.data.zero_()
        assert net.weight.count_nonzero() > 0
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=False)["weight"].device == L0
    assert "device='lazy:0', requires_grad=True" in repr(net.weight)
    assert f"{torch.tensor(1.5, device=L0):.2f}" == "1.50"
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(net.weight * 2)


def test_inference_mode_and_threads() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("lazy:0")
    seen: list[Any] = []

    def work() -> None:
        with torch.inference_mode():
            seen.append(net(torch.ones(2, 3, device=L0)).add_(1).view(-1).device)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [L0]


def test_conjugates_keep_their_values() -> None:
    z = torch.tensor([1 + 2j], device=L0)
    assert torch.view_as_real(z.conj()).tolist() == [[1.0, -2.0]]


def test_sparse_gradients_train() -> None:
    def train(device: Any) -> Tensor:
        torch.manual_seed(0)
        net = nn.Embedding(9, 3, sparse=True).to(device)
        net(torch.tensor([[1, 2, 1]], device=device)).pow(2).sum().backward()
        assert net.weight.grad is not None
        assert net.weight.grad.is_sparse
        torch.optim.SGD(net.parameters(), 0.1).step()
        return net.weight.detach().cpu()

    assert torch.equal(train("cpu"), train(L0))


def test_packed_sequences_and_recurrent_nets_agree_with_the_host_within_rounding() -> None:
    def train(device: Any) -> Tensor:
        torch.manual_seed(0)
        net = nn.LSTM(3, 2, num_layers=2, bidirectional=True, batch_first=True).to(device)
        x = torch.randn(4, 5, 3).to(device).requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor([5, 1, 3, 1]), True, enforce_sorted=False
        )
        output, _ = nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
        output.pow(2).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(train("cpu"), train(L0))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_optimizers_update_bit_by_bit(name: str, foreach: bool) -> None:
    def train(device: Any) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1)
        ).to(device)
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01, foreach=foreach)
        x = torch.randn(6, 3).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        return [t.detach().cpu() for t in net.state_dict().values()]

    assert all(map(torch.equal, train("cpu"), train(L0)))


def test_parametrized_modules_move() -> None:
    for wrapper in (
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ):
        net = wrapper(nn.Linear(3, 3)).to("lazy:0")
        net(torch.ones(2, 3, device=L0)).sum().backward()


# ---------------------------------------------------------------- bytes


@COUNTED
def test_the_ledger_is_exact_for_an_mlp() -> None:
    device = EmulatedDevice(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to("lazy:0")
    weights = (4 * 8 + 8 + 8 * 2 + 2) * FLOAT
    assert device.allocated() == weights
    x = torch.randn(16, 4).to("lazy:0")
    batch, hidden, out, loss_bytes = 16 * 4 * FLOAT, 16 * 8 * FLOAT, 16 * 2 * FLOAT, FLOAT
    output = net(x)
    peak = device.take_peaks()["allocated"]
    assert peak == weights + batch + 2 * hidden, "linear's output lives until relu's is there"
    assert device.allocated() == weights + batch + hidden + out, (
        "relu keeps its own output for backward"
    )
    loss = output.sum()
    device.reset_memory()
    loss.backward()
    last = (8 * 2 + 2) * FLOAT
    # when relu's backward has just run: its output saved, its gradient in and out, the last layer's
    # gradients
    assert (
        device.take_peaks()["allocated"]
        == weights + batch + out + loss_bytes + loss_bytes + 3 * hidden + last
    )
    assert device.allocated() == 2 * weights + batch + out + loss_bytes
    del loss, output, x
    net.zero_grad()
    assert device.allocated() == weights
    del net
    assert device.allocated() == 0
    assert EmulatedDevice(1).take_peaks()["allocated"] == 0


def test_a_storage_counts_once_with_its_present_size() -> None:
    count, device, storage = ByteCount(), torch.device("cpu"), torch.UntypedStorage(100)
    count.bind(device, 150)
    # a view of a tensor has the storage of the tensor, which needs no more memory
    for _ in range(2):
        count.own(storage, device)
        assert (count.now(device), count.take(device)) == (100, 100)
    storage.resize_(140)
    count.own(storage, device)
    assert (count.now(device), count.take(device)) == (140, 140)
    storage.resize_(151)
    with pytest.raises(DeviceFull, match="140 are in use; tried to allocate 11 more bytes"):
        count.own(storage, device)
    assert (count.now(device), count.take(device)) == (140, 140)
    storage.resize_(30)
    count.own(storage, device)
    assert (count.now(device), count.take(device)) == (30, 140)
    other = torch.UntypedStorage(20)
    count.own(other, device)
    del storage
    gc.collect()  # the traceback of the error refers to it
    assert count.now(device) == 20


def test_a_view_fits_on_a_full_device() -> None:
    with bounded(1, EmulatedDevice(0).allocated() + 100 * FLOAT):
        full = torch.zeros(100, device=L0)
        assert full.view(10, 10).shape == (10, 10)
        with pytest.raises(DeviceFull):
            torch.zeros(1, device=L0)


def test_replicas_hold_what_they_must() -> None:
    devices = [EmulatedDevice(i) for i in range(3)]
    net = nn.Linear(10, 10, bias=False).to("lazy:0")
    weights, x = 100 * FLOAT, torch.ones(6, 10)
    output = DataParallel(net, emulated(3))(x)
    chunk = 2 * 10 * FLOAT
    assert [d.allocated() for d in devices[1:]] == [chunk + 0] * 2, (
        "linear saves its input; the input needs no gradient"
    )
    assert devices[0].allocated() == weights + chunk + 3 * chunk
    assert [d.take_peaks()["allocated"] for d in devices[1:]] == [weights + 2 * chunk] * 2
    output.sum().backward()
    del output
    assert [d.allocated() for d in devices] == [2 * weights, 0, 0]


def test_threads_lose_no_byte() -> None:
    def churn(i: int) -> None:
        for n in range(1, 200):
            torch.zeros(n, device=torch.device("lazy", i % 2)).add(1).mul_(2)

    threads = [threading.Thread(target=churn, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_bytes_only_counts_what_no_machine_here_could_hold() -> None:
    device = EmulatedDevice(0)
    with bytes_only():
        with torch.device("meta"):
            net = nn.Linear(100_000, 100_000, bias=False)
        net.to("lazy:0")
        loss = net(torch.empty(8, 100_000, device=L0)).sum()
        loss.backward()
        assert device.allocated() == 2 * 10**10 * FLOAT + FLOAT
        with pytest.raises(RuntimeError, match="meta"):
            loss.item()
    assert torch.zeros(1, device=L0).item() == 0


def test_nothing_here_warns_or_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(torch.ones(1, device=L0), EmulatedTensor)
    assert capsys.readouterr() == ("", "")


FIRST_USE = """
import contextlib, sys, threading, warnings
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import dpbench

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

class Net(torch.nn.Module):
    def forward(self, x):
        for name in NAMES:
            together.wait()
            with contextlib.suppress(Exception):
                getattr(x, name)()
        return x

NAMES = [name for name in dir(torch.Tensor) if name[0] != "_" and name not in ("cuda", "xpu")]
warnings.simplefilter("ignore")
sys.setswitchinterval(1e-6)
devices, together = sys.argv[1:], threading.Barrier(len(sys.argv) - 1)
with contextlib.nullcontext() if "emulated:0" in devices else Mode():
    dpbench.DataParallel(Net(), devices)(torch.rand(8, 2))
"""
"""A program whose replicas are the first to use each operator, all at the same time, in Python."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices", [["cpu"] * 4, [f"emulated:{i}" for i in range(4)]], ids=["mode", "emulated"]
)
def test_the_first_use_of_an_operator_in_several_threads_does_not_crash(devices: list[str]) -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE, *devices], check=True, timeout=patience(100))
