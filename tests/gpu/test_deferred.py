"""Races on GPUs: training, wrappers and verbs give the host's results in any order of execution.

Fake GPUs have a deferred mode (`FAKECUDA_DEFERRED=1`): work runs at a synchronization, in a random
order that streams and events allow, and freed memory is reused as early as the allocator permits.
A wait or a `record_stream` that is missing then gives wrong numbers in one order or another. This
file is skipped in every other process; `python -m tests.fakegpu.check deferred` runs it with
several seeds (`FAKECUDA_SEED`).

Where all additions have one order, numbers must equal the host's bit by bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpbench
from dpbench import models
from dpbench.engine import DataParallel, TrainStep
from dpbench.engine.containers import mapped
from dpbench.hardware.devices import open_devices
from dpbench.hardware.devices.cuda import CudaDevice
from dpbench.measure import clocks
from dpbench.models import Model, embedding, lstm
from dpbench.records import Case, Phase, no_mark
from dpbench.records.registry import own, strategy, traits
from dpbench.records.schedule import SELECTED, Schedule
from tests import commands
from tests.engine import conformance, nets
from tests.engine.law.sides import refusing

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(
        os.environ.get("FAKECUDA_DEFERRED") != "1",
        reason="needs fake GPUs in deferred mode: python -m tests.fakegpu.check deferred",
    ),
]

PLACES = ([0, 1, 2, 3], [0, 0, 0], [0, 1, 0])
NETS = ("mlp", "conv", "embedding", "lstm")
STEPS, TRIES = 3, 20

every_place = pytest.mark.parametrize("ids", PLACES, ids=str)
every_net = pytest.mark.parametrize("net", NETS)


@pytest.fixture(autouse=True)
def _small_models_and_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(embedding.DIMS, "small", embedding.DIMS["small"]._replace(rows=512))
    monkeypatch.setitem(lstm.DIMS, "small", lstm.DIMS["small"]._replace(tokens=6))


class Fading(nn.Module):
    """A module around a net, with a buffer that each forward reads and then writes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(x) * self.scale.clone()
        self.scale.mul_(0.5)
        return output


def loaded(net: str) -> Model:
    """Return a model of dpbench, or one of the nets of `nets` in a module with a buffer."""
    if net in ("mlp", "embedding", "lstm"):
        return models.load(net, "small", 0)
    made, x = nets.made(net, 1)

    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, *x.shape[1:], generator=generator), torch.arange(rows) % 5

    return Model(net, Fading(made), batch, F.cross_entropy)


def batches(model: Model, replicas: int) -> list[tuple[Any, Any]]:
    """Return a batch per step, which does not divide evenly."""
    return [model.batch(2 * replicas + 1, seed) for seed in range(STEPS)]


def pinned(batch: Any) -> Any:
    """Return a batch in pinned memory, from which copies to a GPU do not block the host."""
    return mapped(batch, torch.Tensor.pin_memory)


@contextmanager
def own_streams(ids: list[int]) -> Iterator[None]:
    """Make a new stream current on each GPU, for the calling thread."""
    for i in ids:
        torch.cuda.synchronize(i)
    with ExitStack() as streams:
        for i in sorted({*ids}, reverse=True):  # the last one's GPU becomes the current one
            streams.enter_context(torch.cuda.stream(torch.cuda.Stream(i)))
        yield


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


Numbers = dict[str, Tensor]
"""Numbers of the host by name: weights or gradients, and `losses`."""


def numbers(losses: list[Tensor], others: Mapping[str, Tensor]) -> Numbers:
    found = {**others, "losses": torch.stack(losses)}
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def trained(net: str, ids: list[Any], schedule: str, **options: Any) -> Numbers:
    """Return the losses of some steps, and the weights after them."""
    model = loaded(net)
    on_gpus = isinstance(ids[0], int)
    module = model.module.to(torch.device("cuda", ids[0]) if on_gpus else ids[0])
    with TrainStep(module, model.loss, optimizer, ids, schedule, **options) as step:
        losses = [
            step(*(pinned(batch) if on_gpus else batch)) for batch in batches(model, len(ids))
        ]
    return numbers(losses, module.state_dict())


@cache
def _on_the_host(net: str, replicas: int, options: tuple[tuple[str, Any], ...]) -> Numbers:
    return trained(net, ["cpu"] * replicas, "reference", **dict(options))


def on_the_host(net: str, replicas: int, **options: Any) -> Numbers:
    return dict(_on_the_host(net, replicas, tuple(options.items())))


ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
EXACT = {"rtol": 0.0, "atol": 0.0}
EXACT_NETS = ("mlp", "embedding")


def check(net: str, found: Numbers, expected: Numbers) -> None:
    """Compare with the host's numbers: bit by bit, except for the losses.

    Replicas may add their losses; convolutions and LSTMs group their additions by rows.
    """
    exact = EXACT if net in EXACT_NETS else ROUNDING
    torch.testing.assert_close(found.pop("losses"), expected.pop("losses"), **ROUNDING)
    torch.testing.assert_close(found, expected, **exact)


def schedules(net: str) -> list[str]:
    """Return every schedule that GPUs can run, and the names for which TrainStep selects one.

    Weights of RNNs cannot be flat there.
    """
    return [one for one in (*Schedule, *SELECTED) if (net, one) != ("lstm", Schedule.SHARDED)]


@every_place
@pytest.mark.parametrize(
    ("net", "schedule"), [(net, schedule) for net in NETS for schedule in schedules(net)]
)
def test_a_schedule_trains_as_the_host_does(net: str, schedule: str, ids: list[int]) -> None:
    check(net, trained(net, ids, schedule), on_the_host(net, len(ids)))


@every_place
@pytest.mark.parametrize("net", ["mlp", "conv", "tied"])
@pytest.mark.parametrize("schedule", schedules("mlp"))
def test_a_step_follows_the_callers_streams(net: str, schedule: str, ids: list[int]) -> None:
    """The caller makes the batch, and uses the loss, on streams of its own."""
    model = loaded(net)
    module = model.module.cuda(ids[0])
    home = torch.device("cuda", ids[0])
    losses = []
    with own_streams(ids):
        with TrainStep(module, model.loss, optimizer, ids, schedule) as step:
            for inputs, target in batches(model, len(ids)):
                losses.append(step(inputs.to(home) * 1, target.to(home) * 1) * 1)
        found = numbers(losses, module.state_dict())
    check(net, found, on_the_host(net, len(ids)))


@every_place
@pytest.mark.parametrize("option", [{"accumulate": 2}, {"clip_norm": 0.05}], ids=str)
@pytest.mark.parametrize("schedule", schedules("mlp"))
def test_gradients_that_are_kept_or_clipped_are_the_hosts(
    schedule: str, option: dict[str, Any], ids: list[int]
) -> None:
    expected = on_the_host("mlp", len(ids), **option)
    with refusing(schedule, "accumulate=2"):  # as with clip_norm
        torch.testing.assert_close(trained("mlp", ids, schedule, **option), expected, **ROUNDING)


@every_place
@pytest.mark.parametrize(
    ("net", "streams"),
    [*((net, nullcontext) for net in NETS), *((net, own_streams) for net in ("conv", "tied"))],
)
@pytest.mark.parametrize("schedule", conformance.SCHEDULES)
def test_a_wrapper_gives_the_hosts_outputs_and_gradients(
    net: str,
    streams: Callable[[list[int]], AbstractContextManager[None]],
    schedule: str,
    ids: list[int],
) -> None:
    def outputs_and_gradients(devices: list[Any], home: str) -> Numbers:
        model = loaded(net)
        module = model.module.to(home)
        wrapped = DataParallel(module, devices, schedule=schedule)
        losses, outputs = [], {}
        for inputs, target in batches(model, len(ids)):
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            output = wrapped(*(tensor.to(home) for tensor in given))
            losses.append(model.loss(output * 2, target.to(home)))
            losses[-1].backward()
            outputs[f"output {len(outputs)}"] = output * 1
        gradients = {name: p.grad * 1 for name, p in module.named_parameters()}
        return numbers(losses, {**outputs, **gradients})

    expected = outputs_and_gradients(["cpu"] * len(ids), "cpu")
    with streams(ids):
        found = outputs_and_gradients(ids, f"cuda:{ids[0]}")
    check(net, found, expected)


def steps(net: str, case: Case) -> Numbers:
    """Return what some steps of a case's strategy give."""
    model = loaded(net)
    devices = open_devices(
        case.device_kind,
        case.devices,
        placement=case.placement,
        shared_stream=traits(case.strategy).shared_stream,
    )
    with strategy(case.strategy).start(case, model, devices, no_mark) as step:
        losses = [step(*model.batch(case.batch_size, seed)) for seed in range(STEPS)]
    return numbers(losses, model.module.state_dict())


FILES = commands.ROOT / "benchmarks" / "strategies"
IN_ONE_PROCESS = ("data_parallel_block", "model_parallel", "pipelined")


@pytest.mark.parametrize("net", ["mlp", "embedding"])
@pytest.mark.parametrize("placement", ["spread", "colocated"])
@pytest.mark.parametrize("name", ["single", *IN_ONE_PROCESS])
def test_a_strategy_in_one_process_trains_as_on_the_host(
    name: str, placement: str, net: str
) -> None:
    case = Case(
        model=net,
        strategy=name if name == "single" else f"{FILES / name}.py:strategy",
        devices=1 if name == "single" else 2,
        batch_size=8,
        placement=placement,
    )
    expected = steps(net, replace(case, device_kind="cpu"))
    found = steps(net, replace(case, device_kind="cuda"))
    torch.testing.assert_close(found, expected, **ROUNDING)


@every_net
@pytest.mark.parametrize("placement", ["spread", "colocated"])
@pytest.mark.parametrize("name", [one for one in own("strategies") if traits(one).threads])
def test_a_strategy_trains_as_the_engine_on_the_host(name: str, placement: str, net: str) -> None:
    if net == "conv" and placement == "colocated" and name == "torch_dp":
        pytest.skip("replicas of torch's wrapper that share a GPU write the same buffers")
    case = Case(model="mlp", strategy=name, devices=3, batch_size=9, placement=placement)
    if name == "dp":
        case = replace(case, schedule="copying")

    expected = steps(net, replace(case, strategy="dp", schedule="reference", device_kind="cpu"))
    found = steps(net, replace(case, device_kind="cuda"))
    if name == "dp":
        check(net, found, expected)
    else:  # the order of its additions is torch's
        torch.testing.assert_close(found, expected, **ROUNDING)


def scattered(x: Tensor, ids: list[int]) -> list[Tensor]:
    return dpbench.scatter(x.to(f"cuda:{ids[0]}"), ids)


def replicated(x: Tensor, ids: list[int]) -> list[Tensor]:
    linear = nn.Linear(3, x.size(0), bias=False)
    linear.weight.data = x.to(f"cuda:{ids[0]}")
    return [one.weight.detach() for one in dpbench.replicate(linear, ids)]


def applied(x: Tensor, ids: list[int]) -> list[Tensor]:
    pieces = [piece.to(f"cuda:{i}") for i, piece in zip(ids, x.chunk(len(ids)), strict=True)]
    return dpbench.parallel_apply([torch.neg] * len(ids), pieces, None, ids)


def gathered(x: Tensor, ids: list[int]) -> list[Tensor]:
    pieces = [piece.to(f"cuda:{i}") for i, piece in zip(ids, x.chunk(len(ids)), strict=True)]
    return [dpbench.gather(pieces, ids[0])]


def reduced(x: Tensor, ids: list[int]) -> list[Tensor]:
    with torch.no_grad():
        return dpbench.reduce([[(x * n).to(f"cuda:{i}")] for n, i in enumerate(ids, 1)], ids)


VERBS: dict[Callable[[Tensor, list[int]], list[Tensor]], Callable[[Tensor, int], list[Tensor]]] = {
    scattered: lambda x, count: list(x.chunk(count)),
    replicated: lambda x, count: [x] * count,
    applied: lambda x, count: [-piece for piece in x.chunk(count)],
    gathered: lambda x, count: [x],
    reduced: lambda x, count: [x * sum(range(1, count + 1))],
}


@every_place
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_what_a_verb_returns_is_ready_for_the_callers_stream(
    verb: Callable[[Tensor, list[int]], list[Tensor]], ids: list[int]
) -> None:
    """The caller's next work is queued at once, and the results are freed before it has run."""
    for seed in range(TRIES):
        x = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed)).round(decimals=2)
        found = [result * 1 for result in verb(x, ids)]
        torch.testing.assert_close(
            [result.cpu() for result in found], VERBS[verb](x, len(ids)), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("placement", ["spread", "colocated"])
@pytest.mark.parametrize("home", ["pageable", "pinned", "cuda"])
def test_pieces_are_ready_for_the_replicas_streams(home: str, placement: str) -> None:
    devices = open_devices("cuda", 3, placement=placement)
    for seed in range(TRIES):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
        given = {"pageable": x, "pinned": x.pin_memory(), "cuda": x.cuda() * 1}[home]
        doubled = []
        for device, piece in zip(devices, dpbench.scatter(given, devices), strict=True):
            with device.guard():
                doubled.append(piece * 2)
        for device in devices:
            device.synchronize()
        assert torch.equal(torch.cat([piece.cpu() for piece in doubled]), x * 2)


def test_a_copy_from_the_host_is_made_in_a_background_stream() -> None:
    """A stream that waits for the background stream alone can read the copy."""
    (device,) = open_devices("cuda", 1)
    assert isinstance(device, CudaDevice)
    other = torch.cuda.Stream(0)
    for seed in range(TRIES):
        x = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        copied = device.put(x)
        assert device._background is not None
        other.wait_stream(device._background)
        with torch.cuda.stream(other):
            assert torch.equal(copied.cpu(), x)


@pytest.mark.parametrize("verb", ["gather", "reduce"])
def test_memory_that_a_verb_reads_on_another_stream_is_not_reused(verb: str) -> None:
    """Each replica frees its tensor, and fills its memory, before the root has read it."""
    devices = open_devices("cuda", 3, placement="colocated")

    def computed(seed: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
        pieces = []
        for device, piece in zip(devices, x, strict=True):
            with device.guard():
                pieces.append(piece.cuda() * 1)
        if verb == "gather":
            found, expected = dpbench.gather(pieces, devices[0], devices), x.flatten()
        else:
            (found,) = dpbench.reduce([[piece] for piece in pieces], devices)
            expected = x[0] + x[1] + x[2]
        del pieces
        others = []
        for device in devices:
            with device.guard():
                others += [torch.full((64,), 5.0, device="cuda") for _ in range(4)]
        with devices[0].guard():
            return found.cpu(), expected

    for seed in range(TRIES):
        assert torch.equal(*computed(seed))


COPIES, COPY_BYTES, FASTEST_LINK = 8, 2**24, 2e10
"""Copies from the host, and more bytes a second than a fake GPU's link has."""


def test_a_mark_times_the_work_of_its_replica() -> None:
    """Replica 1 has a stream of its own, which is not the current one where the mark begins."""
    devices = open_devices("cuda", 2, placement="colocated")
    clock = clocks.choose(devices)
    given = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    copied = given.cuda()
    devices[0].synchronize()
    step = clock.step(warmup=False)
    with clock.block(), step, clock.mark(Phase.FORWARD, 1), devices[1].guard():
        for _ in range(COPIES):
            copied.copy_(given, non_blocking=True)
    (span,) = clock.spans()
    assert span.end_s - span.start_s > COPIES * COPY_BYTES / FASTEST_LINK
