"""Graphs: when they are recorded and discarded, with a recorder on the host that replays by running again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.engine import cuda_graphs
from dpbench.engine.train_step import TrainStep
from dpbench.hardware.devices import resolve
from dpbench.hardware.devices.cuda import GraphRecorder
from dpbench.hardware.devices.host import HostDevice
from dpbench.records import schedule as schedules
from dpbench.records.schedule import RUNGS, Schedule
from tests.test_properties import leaves
from tests.test_schedules import OPTIMIZERS, differing, problem, train

EAGER = Schedule(**{**RUNGS["graphs"].turned(), "graphs": "off"})


class Rerun:
    """Records by running once, and replays by running again into the memory of the first results.

    Like a CUDA graph it takes no arguments and returns nothing; unlike one it runs Python, so that the closures'
    own state is as the latest run left it.
    """

    log: list[str] = []  # noqa: RUF012  of all of them, emptied by the fixture

    def warm_up(self, work: Callable[[], object]) -> None:
        self.log.append("warm")
        for _ in range(3):
            work()

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.log.append("record")
        first = work()

        def replay() -> None:
            self.log.append("replay")
            with torch.no_grad():
                pairs = list(zip(leaves(first, Tensor), leaves(run(), Tensor), strict=True))
                for into, value in pairs:
                    into.copy_(value)

        def run() -> Any:
            with torch.enable_grad():
                return work()

        return first, replay


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the host record, and the ladder believe it; return what has been recorded and replayed."""
    monkeypatch.setattr(HostDevice, "recorder", lambda self: Rerun())
    monkeypatch.setattr(schedules, "RULES", tuple(rule for rule in schedules.RULES if rule[2] != schedules.CUDA))
    Rerun.log.clear()
    yield Rerun.log
    Rerun.log.clear()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"clip_norm": 0.05},
        {"scaler": True},
        {"chunk_sizes": [1, 2, 2]},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("name", ["odd", "mlp", "embedding"])
def test_replays_make_the_bits_of_eager_steps(name: str, options: dict[str, Any], log: list[str]) -> None:
    def run(schedule: Schedule) -> tuple[nn.Module, list[float]]:
        given = dict(options)
        if "scaler" in given:
            given["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return train(name, schedule, 3, 11, "adam", **given)

    expected, losses = run(EAGER)
    assert not log
    found, ours = run(RUNGS["graphs"])
    assert not differing(expected, found)
    assert ours == losses
    assert (log.count("warm"), log.count("record"), log.count("replay")) == (3, 6, 5 * 6)


@pytest.mark.parametrize("n", [1, 3])
def test_gradients_that_are_kept_are_not_overwritten_by_the_next_replay(n: int) -> None:
    def run(schedule: Schedule) -> list[Tensor]:
        module, loss, batches = problem("mlp", 12)
        with TrainStep(module, loss, OPTIMIZERS["sgd"], ["cpu"] * n, schedule, accumulate=3) as step:
            for inputs, target in batches[:3]:
                step(inputs, target)
        return [p.grad for p in module.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(EAGER), run(RUNGS["graphs"]), strict=True))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Linear(6, 2))


def test_the_first_shapes_are_recorded_and_others_run_eagerly(log: list[str]) -> None:
    x, y = torch.randn(32, 4), torch.randn(32, 2)
    sizes = [8, 12, 8, 16, 20, 24, 24, 12, 24]  # 24 is the fifth

    def run(schedule: Schedule) -> nn.Module:
        module = _net()
        with TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], schedule) as step:
            for rows in sizes:
                log.clear()
                step(x[:rows], y[:rows])
                if schedule.graphs == "on":
                    assert log.count("record") == (4 if rows != 24 and rows not in seen else 0), rows
                    assert log.count("replay") == (0 if rows == 24 else 4), rows
                    seen.add(rows)
        return module

    seen: set[int] = set()
    assert cuda_graphs.LIMIT == 4
    assert not differing(run(EAGER), run(RUNGS["graphs"]))


def test_what_a_graph_is_bound_to_makes_it_void_when_it_changes(log: list[str]) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 2)

    def moved(module: nn.Module) -> None:
        module[0].weight.data = module[0].weight.data.clone()

    def shifted(module: nn.Module) -> None:
        module[1].running_mean = module[1].running_mean + 1.0

    def buffer_moved(module: nn.Module) -> None:
        module[1].running_mean.data = module[1].running_mean.data + 1.0

    def loaded(module: nn.Module) -> None:  # in place: graphs stay
        module.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in module.state_dict().items()})

    changes: list[tuple[Callable[[nn.Module], Any], bool]] = [
        (lambda module: None, False),
        (lambda module: module[1].eval(), True),
        (lambda module: module.__setitem__(2, nn.Tanh()), True),
        (moved, True),
        (shifted, True),
        (buffer_moved, True),
        (loaded, False),
    ]

    def run(schedule: Schedule) -> nn.Module:
        module = _net()
        with TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], schedule) as step:
            step(x, y)
            for change, voids in changes:
                change(module)
                log.clear()
                step(x, y)
                assert ("record" in log) == (voids and schedule.graphs == "on"), change
        return module

    separate = {"storage": "separate", "optimizer": "per_parameter"}
    eager, recorded = ({**EAGER.turned(), **separate, "graphs": one} for one in ("off", "on"))
    assert not differing(run(Schedule(**eager)), run(Schedule(**recorded)))


def test_autocast_is_part_of_what_a_graph_is_bound_to(log: list[str]) -> None:
    x, y, module = torch.randn(8, 4), torch.randn(8, 2), _net()
    with TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], "graphs") as step:
        for enabled, records in ((False, True), (False, False), (True, True), (True, False)):
            log.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                step(x, y)
            assert ("record" in log) == records


def test_inputs_that_want_gradients_or_hold_objects_run_eagerly(log: list[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, more: Any = None) -> Tensor:
            out: Tensor = self.layer(x) * (more if isinstance(more, float) else 1.0)
            return out

    x, y = torch.randn(8, 4), torch.randn(8, 2)
    wanting = x.clone().requires_grad_()
    with TrainStep(Net(), F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], "graphs") as step:
        step((wanting, None), y)
        assert wanting.grad is not None
        step((x, object()), y)
        assert not log
        for more in (None, 0.5, 0.25):  # a number is part of the graph
            log.clear()
            step((x, more), y)
            assert "record" in log


def test_nested_outputs_and_targets_are_recorded() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: dict[str, Tensor]) -> dict[str, Any]:
            out = self.layer(x["x"])
            return {"out": out, "pair": (out.exp(), None)}

    def summed(output: Any, target: Any) -> Tensor:
        loss: Tensor = ((output["out"] - target[0]) ** 2).sum() + output["pair"][0].sum()
        return loss

    def run(schedule: Schedule) -> nn.Module:
        torch.manual_seed(0)
        module = Net()
        weigh = (summed, lambda output, target: (target[0] > 0).sum())  # a tensor, by the data
        with TrainStep(module, weigh, OPTIMIZERS["sgd"], ["cpu"] * 3, schedule) as step:
            for seed in range(4):
                x = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
                step({"x": x[:, :4]}, [x[:, 4:]])
        return module

    assert not differing(run(EAGER), run(RUNGS["graphs"]))


def test_hooks_of_modules_are_refused_with_their_place() -> None:
    module = _net()
    module[3].register_forward_hook(lambda *_: None)
    with (
        TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], "graphs") as step,
        pytest.raises(ValueError, match=r"without hooks.*3 has a hook.*graphs=off"),
    ):
        step(torch.randn(8, 4), torch.randn(8, 2))


def test_what_cannot_be_recorded_says_which_replica_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Rerun, work: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    module, before = _net(), _net()
    monkeypatch.setattr(Rerun, "record", refuse)
    with (
        TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], "graphs") as step,
        pytest.raises(RuntimeError, match="operation not permitted") as caught,
    ):
        step(torch.randn(8, 4), torch.randn(8, 2))
    assert "replica 0 on device cpu:0" in caught.value.__notes__[0]
    assert "use a schedule with graphs=off" in caught.value.__notes__[0]
    assert not differing(module, before)  # the warm-up's statistics are taken back


def test_devices_that_record_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDevice, "recorder", lambda self: None)
    with pytest.raises(ValueError, match="cpu:0 cannot; use a schedule with graphs=off"):
        TrainStep(_net(), F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], "graphs")


@pytest.mark.parametrize("fault", ["inputs", "slope", "buffers"])
def test_the_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = train("odd", EAGER, 2, 8)
    original = cuda_graphs.copy_all
    if fault == "slope":
        monkeypatch.setattr(torch.Tensor, "copy_", _but_scalars(torch.Tensor.copy_))
    else:
        skip = 2 if fault == "inputs" else 3  # rows and target; running mean, variance and count
        monkeypatch.setattr(cuda_graphs, "copy_all", lambda a, b: None if len(a) == skip else original(a, b))
    assert differing(expected, train("odd", RUNGS["graphs"], 2, 8)[0])


def _but_scalars(copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def copied(self: Tensor, source: Tensor, *rest: Any, **more: Any) -> Tensor:
        return self if self.dim() == 0 and self.is_floating_point() else copy(self, source, *rest, **more)

    return copied


def test_keys_tell_what_one_graph_can_serve() -> None:
    x = torch.zeros(4, 2)
    assert cuda_graphs.key_of((x, {"a": [x, None]})) == cuda_graphs.key_of((x + 1, {"a": [x, None]}))
    different = [x[:3], x.double(), x.t().contiguous().t(), [x], {"x": x}]
    assert len({cuda_graphs.key_of(one) for one in [x, *different]}) == 1 + len(different)
    assert cuda_graphs.key_of(1) != cuda_graphs.key_of(True)
    assert cuda_graphs.key_of([x, x.clone().requires_grad_()]) is None
    assert cuda_graphs.key_of([x, object()]) is None
    assert resolve(["cpu"])[0].recorder() is not None


class _Stream(nullcontext[None]):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Any]]:
    """Replace the parts of CUDA by names; return their log and the arguments of the capture."""
    told: list[str] = []
    given: dict[str, Any] = {}
    here, side = _Stream("current", told), _Stream("side", told)

    class Capture:
        def __init__(self, graph: Any, **options: Any) -> None:
            given.update(options)

        def __enter__(self) -> None:
            told.append("begin")

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            told.append("end")
            if isinstance(error, RuntimeError):  # as torch does, it hides what went wrong
                raise RuntimeError("operation failed due to a previous error during capture")

    parts: dict[str, Any] = {
        "Stream": lambda ordinal: side,
        "graph_pool_handle": lambda: "pool",
        "current_stream": lambda ordinal: here,
        "stream": lambda stream: stream,
        "get_rng_state": lambda ordinal: "state",
        "set_rng_state": lambda state, ordinal: told.append(f"{state} of {ordinal} is back"),
        "synchronize": lambda ordinal: told.append("synchronize"),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: told.append("replay")),
        "graph": Capture,
    }
    for name, part in parts.items():
        monkeypatch.setattr(f"dpbench.hardware.devices.cuda.torch.cuda.{name}", part)
    return told, given


def test_a_capture_has_its_own_stream_pool_and_error_mode(cuda: tuple[list[str], dict[str, Any]]) -> None:
    told, given = cuda
    recorder = GraphRecorder(SimpleNamespace(ordinal=3))  # type: ignore[arg-type]
    recorder.warm_up(lambda: told.append("work"))
    assert told[:4] == ["side waits for current", *["work"] * 3]
    assert told[4:] == ["synchronize", "state of 3 is back"], "which waits for the side stream as well"
    told.clear()
    result, replay = recorder.record(lambda: "result")
    assert (result, told) == ("result", ["begin", "end"])
    assert (given["pool"], given["stream"].name, given["capture_error_mode"]) == ("pool", "side", "thread_local")
    replay()
    assert told[-1] == "replay"


@pytest.mark.parametrize("kind", [RuntimeError, KeyError])
def test_a_capture_that_fails_raises_what_failed(kind: type[Exception], cuda: Any) -> None:
    def work() -> None:
        raise kind("the cause")

    with pytest.raises(kind, match="the cause"):
        GraphRecorder(SimpleNamespace(ordinal=0)).record(work)  # type: ignore[arg-type]
