"""The tests that need a GPU. One GPU is enough: replicas share it (colocated)."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench import models
from dpbench.doctor import probe
from dpbench.engine import DataParallel, TrainStep
from dpbench.hardware.devices import open_devices, resolve
from dpbench.hardware.devices.cuda import CudaDevice
from dpbench.hardware.nvml import describe, open_nvml
from dpbench.hardware.provenance import collect
from dpbench.measure import clocks
from dpbench.measure.server import Server
from dpbench.measure.worker.facts import gpu_uuids
from dpbench.records import HOST, Case, Effort, Phase, Status, Trial, Verified
from dpbench.records.schedule import Schedule
from dpbench.records.series import JOINT
from tests.engine.law.sides import refusing
from tests.trials import report_on

pytestmark = pytest.mark.gpu

MODELS = ("mlp", "resnet18", "transformer", "lstm", "embedding", "vgg16")


def _case(strategy: str, devices: int, model: str = "mlp") -> Case:
    placement = "colocated" if devices > 1 else "spread"
    schedule = "reference" if strategy == "dp" else ""
    return Case(
        model=model,
        strategy=strategy,
        devices=devices,
        batch_size=64,
        device_kind="cuda",
        placement=placement,
        schedule=schedule,
    )


def _profiled(server: Server, case: Case) -> Trial:
    """Run a case, again if the profiler lost a record: its figures are then withheld."""
    trial = server.run(case, Effort(budget_s=0.3), 0, 120.0)
    for _ in range(2):
        if "no_profile" in trial.provenance:
            trial = server.run(case, Effort(budget_s=0.3), 0, 120.0)
    return trial


@pytest.mark.parametrize(
    ("strategy", "devices", "model"),
    [
        *(("dp", 2, model) for model in MODELS),
        *((name, count, "mlp") for name, count in (("single", 1), ("dp", 1), ("torch_dp", 2))),
        ("dp", 4, "lstm"),
    ],
)
def test_a_strategy_is_verified_and_its_ledger_closes(
    server: Server, strategy: str, devices: int, model: str
) -> None:
    trial = _profiled(server, _case(strategy, devices, model))
    assert trial.status is Status.OK, trial.reason
    assert trial.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE)
    for step, phases in zip(trial.steps, trial.ledger.phases, strict=True):
        assert sum(phases.values()) == pytest.approx(step.seconds)
    clocks_used = {span.clock.removesuffix(JOINT) for span in trial.spans if span.device != HOST}
    assert clocks_used == {"cuda_event"}
    busy = [sample.value for sample in trial.samples if sample.metric == "kernel_busy_s"]
    assert any(busy), trial.provenance.get("no_profile")
    assert any(memory.source == "allocator" and memory.peak_bytes > 0 for memory in trial.memory)


def test_ddp_runs_on_one_gpu(server: Server) -> None:
    for devices in (1, 2):
        trial = server.run(_case("ddp", devices), Effort(budget_s=0.3), 0, 120.0)
        assert trial.status is Status.OK, trial.reason


def _gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("ids", [[0], [0, 0], [0, 0, 0, 0]])
def test_outputs_and_gradients_equal_torch_data_parallel(ids: list[int]) -> None:
    model = models.load("mlp", "small", 0)
    ours, theirs = model.module.cuda(), copy.deepcopy(model.module).cuda()
    inputs, target = (t.cuda() for t in model.batch(50, 1))
    for module, wrapped in (
        (ours, DataParallel(ours, ids)),
        (theirs, torch.nn.DataParallel(theirs, ids)),
    ):
        output = wrapped(inputs)
        model.loss(output, target).backward()
        module.output = output.detach()
    torch.testing.assert_close(ours.output, theirs.output)
    for mine, other in zip(_gradients(ours), _gradients(theirs), strict=True):
        torch.testing.assert_close(mine, other)


def test_colocated_streams_do_not_race() -> None:
    model = models.load("resnet18", "small", 0)
    batches = [model.batch(16, seed) for seed in range(4)]

    def trained(ids: list[int], steps: int = 20) -> list[torch.Tensor]:
        module = copy.deepcopy(model.module).cuda()
        with TrainStep(module, model.loss, lambda p: torch.optim.SGD(p, lr=0.01), ids) as step:
            for i in range(steps):
                loss = step(*batches[i % 4])
        assert torch.isfinite(loss)
        return [p.detach().clone() for p in module.parameters()]

    torch.backends.cudnn.deterministic = True
    try:
        first = trained([0, 0, 0])
        for _ in range(3):
            for a, b in zip(first, trained([0, 0, 0]), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    finally:
        torch.backends.cudnn.deterministic = False


def test_cuda_steps_agree_with_the_host_over_a_block() -> None:
    devices = open_devices("cuda", 2, placement="colocated")
    listener = clocks.choose(devices)
    assert isinstance(listener, clocks.CudaClock)
    work = torch.randn(2048, 2048, device="cuda")
    work @ work
    torch.cuda.synchronize()
    with listener.block():
        began = time.perf_counter()
        for _ in range(30):
            with listener.step(warmup=False), listener.mark(Phase.FORWARD, 1), devices[1].guard():
                for _ in range(5):
                    work @ work
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    steps, spans = listener.steps(), listener.spans()
    assert sum(step.seconds for step in steps) == pytest.approx(wall, rel=0.05)
    assert steps[-1].end_s == pytest.approx(began + wall, rel=0, abs=0.05 * wall)
    assert all(span.start_s <= span.end_s for span in spans)
    inside = [span.end_s - span.start_s for span in spans]
    assert sum(inside) == pytest.approx(wall, rel=0.2)


def test_a_copy_from_the_host_does_not_wait_for_the_replicas_work() -> None:
    (device,) = open_devices("cuda", 1)
    assert isinstance(device, CudaDevice)
    work = torch.randn(4096, 4096, device="cuda")
    work @ work
    device.put(torch.ones(8))
    assert device._background is not None
    began, worked, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    began.record()
    for _ in range(10):
        work @ work
    worked.record()
    device.put(torch.ones(8))
    copied.record(device._background)
    torch.cuda.synchronize()
    assert began.elapsed_time(copied) < began.elapsed_time(worked)


def test_out_of_memory_is_a_trial_that_names_the_device(server: Server, tmp_path: Path) -> None:
    case = _case("dp", 2, "tests.hungry:GPU")
    trial = server.run(case, Effort(budget_s=0.3), 0, 120.0)
    assert trial.status is Status.OOM, trial.reason
    assert "cuda:0" in trial.reason
    assert trial.failed_device in (
        0,
        1,
    )  # the replica whose worker met it, or the GPU that both share


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("dp", 2), ("ddp", 1)])
def test_peaks_by_phase_come_from_the_allocator(
    server: Server, strategy: str, devices: int
) -> None:
    trial = server.run(_case(strategy, devices, "resnet18"), Effort(budget_s=0.1), 0, 120.0)
    assert trial.status is Status.OK, trial.reason
    assert "no_memory_by_phase" not in trial.provenance
    found = {(m.phase, m.kind): m.peak_bytes for m in trial.memory if m.device == 0}
    for kind in ("allocated", "reserved"):
        by_phase = {phase: size for (phase, k), size in found.items() if k == kind and phase}
        assert {"scatter", "forward", "loss", "backward", "optimizer"} <= set(by_phase)
        assert max(by_phase.values()) <= found["", kind] * 1.5  # whole steps, from another start
    assert all(
        found[phase, "reserved"] >= size
        for (phase, kind), size in found.items()
        if kind == "allocated"
    )
    assert found["backward", "allocated"] > found["scatter", "allocated"]


def test_module_elsewhere_is_refused_with_the_way_out() -> None:
    model = models.load("mlp", "small", 0)
    wrapped = DataParallel(model.module, [0, 0])
    model.module.cpu()
    with pytest.raises(RuntimeError, match=r"module\.to\('cuda:0'\)"):
        wrapped(model.batch(8, 0)[0])


def test_bare_resolve_finds_every_gpu() -> None:
    assert len(resolve(None)) == torch.cuda.device_count()


def test_nvml_reads_this_gpu() -> None:
    with open_nvml() as nvml:
        assert nvml is not None
        assert len(nvml.gpus) == torch.cuda.device_count()


def test_trials_survive_json(server: Server) -> None:
    trial = server.run(_case("single", 1), Effort(budget_s=0.1), 0, 120.0)
    assert Trial.from_dict(trial.to_dict()) == trial


def _trained(
    schedule: str, ids: list[int], model: str = "mlp", steps: int = 5, **options: Any
) -> torch.nn.Module:
    """Return a module after some steps on GPUs, on batches that do not divide evenly."""
    loaded = models.load(model, "small", 0)
    module = loaded.module.cuda(ids[0])
    with TrainStep(
        module, loaded.loss, lambda p: torch.optim.SGD(p, lr=0.01), ids, schedule, **options
    ) as step:
        for seed in range(steps):
            step(*loaded.batch(8 * len(ids) + 3, seed))
    return module


def _near(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    torch.testing.assert_close(
        dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.multi_gpu
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 0.5}], ids=str)
@pytest.mark.parametrize("rung", Schedule)
def test_rungs_on_distinct_gpus_agree_with_reference_within_rounding(
    rung: str, options: dict[str, Any]
) -> None:
    ids = list(range(torch.cuda.device_count()))
    with refusing(
        rung, *("clip_norm" if o == "clip_norm" else f"{o}={n}" for o, n in options.items())
    ):
        _near(_trained(rung, ids, **options), _trained("reference", ids, **options))


@pytest.fixture(scope="module")
def single(server: Server) -> Trial:
    return server.run(_case("single", 1, "resnet18"), Effort(budget_s=0.5), 0, 120.0)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("strategy", ["dp", "torch_dp", "ddp"])
def test_spread_devices_go_from_the_worker_to_the_report(
    server: Server, single: Trial, strategy: str
) -> None:
    case = replace(_case(strategy, 2, "resnet18"), placement="spread")
    trial = _profiled(server, case)
    assert trial.status is Status.OK, trial.reason
    assert {span.device for span in trial.spans} >= {0, 1}
    for step, phases in zip(trial.steps, trial.ledger.phases, strict=True):
        assert sum(phases.values()) == pytest.approx(step.seconds)
    busy = {sample.device for sample in trial.samples if sample.metric == "kernel_busy_s"}
    assert busy == {0, 1}, "both GPUs computed"
    report = report_on([single, trial], collect(describe()))
    assert [row.case for row in report.rows] == [single.case, case]


@pytest.mark.multi_gpu
def test_nvml_and_cuda_number_gpus_alike() -> None:
    found = [one.removeprefix("GPU-") for one in gpu_uuids(range(torch.cuda.device_count()))]
    with open_nvml() as nvml:
        assert nvml is not None
        assert [gpu.uuid.removeprefix("GPU-") for gpu in nvml.gpus] == found, (
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )


@pytest.mark.multi_gpu
def test_the_probe_times_every_link() -> None:
    count = torch.cuda.device_count()
    rates = dict(probe._copies(count))
    assert len(rates) == 2 * count + count * (count - 1)
    assert min(rates.values()) > 1e8


def test_host_spans_lie_within_the_steps(server: Server) -> None:
    trial = server.run(_case("dp", 2), Effort(budget_s=0.3), 0, 120.0)
    host = [span for span in trial.spans if span.device == HOST]
    assert host, "the engine marks work of the host"
    first, last = trial.steps[0].start_s, trial.steps[-1].end_s
    assert all(first - 0.1 <= span.start_s <= span.end_s <= last + 0.1 for span in host)


@pytest.mark.multi_gpu
def test_nccl_sums_cuts_and_spreads_in_place() -> None:
    devices = resolve(None)
    count = len(devices)
    collectives = devices[0].collectives(devices)
    assert collectives is not None
    whole = sum(
        torch.arange(32 * count) * (i + 1) for i in range(count)
    ).float()  # whole numbers: exact in any order

    def run(name: str, *arguments: Any) -> list[torch.Tensor]:
        tensors = [
            (torch.arange(32 * count) * (i + 1)).float().to(d.torch_device)
            for i, d in enumerate(devices)
        ]
        for i in range(count):
            collectives.follow(i)
        getattr(collectives, name)(tensors, *arguments)
        for i in range(count):
            collectives.lead(i)
        return [tensor.cpu() for tensor in tensors]

    assert all(torch.equal(one, whole) for one in run("all_reduce"))
    assert all(torch.equal(one, torch.arange(32.0 * count) * 2) for one in run("broadcast", 1))
    for i, one in enumerate(run("reduce_scatter")):
        assert torch.equal(one.view(count, -1)[i], whole.view(count, -1)[i])
    for one in run("all_gather"):
        for i in range(count):
            assert torch.equal(
                one.view(count, -1)[i], torch.arange(32.0 * count).view(count, -1)[i] * (i + 1)
            )


@pytest.mark.multi_gpu
@pytest.mark.parametrize("rung", ["allreduce", "sharded"])
def test_replicas_on_distinct_gpus_stay_alike_bit_by_bit(rung: str) -> None:
    ids = list(range(torch.cuda.device_count()))
    loaded = models.load("resnet18", "small", 0)
    module = loaded.module.cuda()
    with TrainStep(module, loaded.loss, torch.optim.Adam, ids, rung) as step:
        for seed in range(5):
            step(*loaded.batch(8 * len(ids) + 3, seed))
        first, *others = step._runner._weights.parameters
        for other in others:
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, other, strict=True))
