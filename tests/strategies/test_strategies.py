"""The laws of all strategies: their gradients, and the phases of the tasks that predict them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench import models
from dpbench.engine import resolve
from dpbench.measure import verification
from dpbench.measure.server import Server
from dpbench.measure.worker import trial
from dpbench.measure.worker.bench import MARK_PAIRS
from dpbench.predict.tasks import of_step
from dpbench.predict.work import Profile
from dpbench.records import Case, Effort, Phase, Status, Trial, Verified, no_mark, registry
from dpbench.records.errors import UsageError
from dpbench.records.plan import normalise
from dpbench.records.schedule import Schedule
from dpbench.records.work import Task
from dpbench.strategies import OPTIMIZERS, Step, Strategy, begin, load, optimizer_of
from tests.runs import bare

NAMES = registry.names("strategies")
MODELS = registry.names("models")
LAUNCHED = [name for name in NAMES if registry.traits(name).ranks]
SHORT = bare(Effort(budget_s=30, warmup_steps=2, min_steps=4, max_steps=4, block_steps=3))
"""Six steps, whatever they take: a budget that they could exceed would cut their warm-up.

The second block is cut, because it would exceed the maximum.
"""
PROFILE = Profile(
    model="mlp",
    parameter_tensors=6,
    parameter_bytes=1000,
    buffer_bytes=10,
    input_bytes=50.0,
    output_bytes=4.0,
)
UNITS = ("share", "bytes", "launches", "modules", "tensors", "threads", "wakes")
every_strategy = pytest.mark.parametrize("name", NAMES)
DevicePhase = tuple[Phase, int]


def case_of(name: str, **changed: Any) -> Case:
    """Return a case in the form that a plan gives it: a strategy of one device has one."""
    return normalise(
        Case(**{"model": "mlp", "strategy": name, "devices": 2, "batch_size": 7, **changed})
    )


def runnable(case: Case) -> Strategy:
    """Return the case's strategy; skip the test, with its own reason, where it cannot run here."""
    plug = load(case.strategy)
    if reason := plug.skip(case):
        pytest.skip(f"{case.strategy}: {reason}")
    return plug


def measured(server: Server, case: Case, effort: Effort = SHORT) -> Trial:
    """Return the trial of a case, after a check of its status and its timed steps."""
    done = server.run(case, effort, 0, 60)
    assert done.status is Status.OK, done.reason
    assert sum(not step.warmup for step in done.steps) <= SHORT.max_steps, done.reason
    return done


# ---------------------------------------------------------------- tasks


def collapsed(tasks: Sequence[Task], *, overlap: bool) -> set[tuple[DevicePhase, DevicePhase]]:
    """Return the edges between different (phase, device): those marked overlap, or the others."""
    found = set()
    for task in tasks:
        for before in task.overlap if overlap else task.after:
            a, b = (tasks[before].phase, tasks[before].device), (task.phase, task.device)
            if a != b:
                found.add((a, b))
    return found


@every_strategy
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_tasks_are_a_graph_in_order(name: str, devices: int, rows: int) -> None:
    case = case_of(name, devices=devices, batch_size=rows)
    tasks = of_step(case, PROFILE)
    assert tasks
    for index, task in enumerate(tasks):
        assert all(0 <= other < index for other in (*task.after, *task.overlap))
        assert not set(task.after) & set(task.overlap)
        assert task.amount >= 0
        assert task.unit in UNITS
        assert task.device in range(-1, devices)
        assert task.resource
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        shares = [task.amount for task in tasks if task.phase is phase and task.unit == "share"]
        assert sum(shares) == pytest.approx(len(case.rows)), "each device computes its rows once"


# ---------------------------------------------------------------- the trace contract


@every_strategy
@pytest.mark.parametrize(("devices", "rows"), [(1, 6), (2, 7), (2, 1), (3, 2)])
def test_a_trace_is_what_tasks_say(server: Server, name: str, devices: int, rows: int) -> None:
    case = case_of(name, devices=devices, batch_size=rows)
    runnable(case)
    hold(measured(server, case), of_step(case, PROFILE))


@pytest.mark.parametrize("name", Schedule)
@pytest.mark.parametrize(("devices", "rows"), [(2, 7), (3, 2)])
def test_a_trace_of_every_schedule_is_what_tasks_say(
    server: Server, name: str, devices: int, rows: int
) -> None:
    case = case_of("dp", devices=devices, batch_size=rows, schedule=name)
    # replicas that persist are filled in the first step, on devices without rows too
    hold(measured(server, case), of_step(case, PROFILE), first=1)


def hold(done: Trial, tasks: Sequence[Task], first: int = 0) -> None:
    """Check a trace from step `first` on against the tasks' phases per device and dependencies."""
    assert len(done.steps) >= SHORT.warmup_steps + SHORT.min_steps
    edges = collapsed(tasks, overlap=False)
    strict = edges - collapsed(tasks, overlap=True)
    for number, step in [*enumerate(done.steps)][first:]:
        spans = [span for span in done.spans if span.step == number]
        assert {(s.phase, s.device) for s in spans} == {(t.phase, t.device) for t in tasks}
        assert all(s.start_s <= s.end_s for s in spans)
        assert all(s.end_s <= step.end_s for s in spans)
        times = {
            key: sorted((s.start_s, s.end_s) for s in spans if (s.phase, s.device) == key)
            for key in {(s.phase, s.device) for s in spans}
        }
        for before, after in strict:
            # what comes twice in a step (weights before forward, and after the update) is late the
            # first time already
            twice = reaches(after, before, edges)
            ended = times[before][0 if twice else -1][1]
            assert ended <= times[after][-1][0], (
                f"step {number}: {after} starts before {before} has ended"
            )
        for before, after in collapsed(tasks, overlap=True):
            if before[1] in (after[1], -1):  # beside it, but not before it: a stale timer would be
                assert times[before][0][0] <= times[after][-1][0], (
                    f"step {number}: {after} starts before {before} does"
                )


def reaches(
    start: DevicePhase, goal: DevicePhase, edges: set[tuple[DevicePhase, DevicePhase]]
) -> bool:
    """Return whether a chain of edges leads from one (phase, device) to another."""
    seen, todo = {start}, [start]
    while todo:
        here = todo.pop()
        found = {b for a, b in edges if a == here} - seen
        seen |= found
        todo += found
    return goal in seen


@every_strategy
def test_a_trial_has_all_that_was_seen(server: Server, name: str) -> None:
    case = case_of(name, model="resnet18", devices=2, batch_size=8)
    runnable(case)
    done = measured(server, case, replace(SHORT, memory_by_phase=True))
    assert done.verified is not Verified.NO
    assert done.verified is not Verified.NOT_APPLICABLE
    assert [step.warmup for step in done.steps][:3] == [True, True, False]
    assert {s.device for s in done.samples} == set(range(len(case.rows)))
    assert all(value > 0 for value in done.setup.values())
    assert any(m.device == -1 and m.peak_bytes > 1e7 for m in done.memory)
    assert done.reason


@every_strategy
def test_a_trial_weighs_its_marks(server: Server, name: str) -> None:
    case = case_of(name)
    runnable(case)
    done = measured(server, case, replace(SHORT, marks=True, budget_s=300.0))
    assert len(done.facts.mark_pairs) == MARK_PAIRS
    assert done.setup["marks_s"] > 0


# ---------------------------------------------------------------- verdicts


def verdict(
    plug: Strategy, name: str, devices: int, rows: int = 11, strategy: str = "dp", **changed: Any
) -> verification.Verification:
    case = case_of(strategy, model=name, devices=devices, batch_size=rows, **changed)
    opened = resolve(
        ["cpu" if case.device_kind == "cpu" else f"emulated:{i}" for i in range(case.devices)]
    )
    return verification.check(
        plug.start,
        case,
        models.load(name, "small", 0),
        opened,
        split=plug.split,
        buffers=plug.compares_buffers(case),
    )


IN_PROCESS = [n for n in NAMES if n not in LAUNCHED]


@pytest.mark.parametrize("strategy", IN_PROCESS)
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_strategies_of_one_process_are_bitwise_on_every_model(
    strategy: str, model: str, devices: int
) -> None:
    plug = runnable(case_of(strategy, devices=devices))
    found = verdict(plug, model, devices, strategy=strategy)
    assert found.verified is Verified.BITWISE, str(found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", IN_PROCESS)
def test_bf16_stays_within_tolerance_with_every_optimizer(strategy: str, optimizer: str) -> None:
    plug = runnable(case_of(strategy))
    found = verdict(
        plug, "transformer", 2, strategy=strategy, precision="bf16", optimizer=optimizer
    )
    assert found.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE), str(found)


@pytest.mark.parametrize("name", LAUNCHED)
@pytest.mark.parametrize(
    ("model", "devices", "rows"),
    [
        ("mlp", 2, 64),
        ("embedding", 2, 9),
        ("lstm", 3, 10),
        ("mlp", 4, 9),  # three pieces for four devices
        ("mlp", 6, 25),  # five pieces, where fewer rows would make six
    ],
)
def test_strategies_of_several_processes_are_verified(
    server: Server, name: str, model: str, devices: int, rows: int
) -> None:
    case = case_of(name, model=model, devices=devices, batch_size=rows)
    runnable(case)
    assert measured(server, case).verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE)


# ---------------------------------------------------------------- planted faults


class Planted(Strategy):
    """Joins each parameter's gradients of its chunks in the given way."""

    def __init__(self, fault: Callable[[list[torch.Tensor | None]], torch.Tensor | None]) -> None:
        self._fault, self.steps = fault, 0

    @contextmanager
    def start(self, case: Case, model: models.Model, devices: Any, mark: Any) -> Iterator[Any]:
        optimizer = optimizer_of(case)(model.module.parameters())

        def step(inputs: Any, target: Any) -> torch.Tensor:
            self.steps += 1
            total, parts, whole = len(target), [], 0.0
            for piece, wanted in zip(
                inputs.chunk(case.devices), target.chunk(case.devices), strict=True
            ):
                optimizer.zero_grad()
                loss = model.loss(model.module(piece), wanted) * len(wanted) / total
                loss.backward()
                whole += loss.item()
                parts.append(
                    [None if p.grad is None else p.grad.clone() for p in model.module.parameters()]
                )
            for parameter, column in zip(
                model.module.parameters(), zip(*parts, strict=True), strict=True
            ):
                parameter.grad = self._fault(list(column))
            optimizer.step()
            return torch.tensor(whole)

        yield step


RIGHT = {
    "sum": lambda parts: sum(parts[1:], parts[0]),
    "another order": lambda parts: sum(parts[-2::-1], parts[-1]),
}
WRONG = {
    "last replica dropped": lambda parts: sum(parts[1:-1], parts[0]),
    "first replica dropped": lambda parts: sum(parts[2:], parts[1]),
    "average": lambda parts: sum(parts[1:], parts[0]) / len(parts),
    "one replica twice": lambda parts: sum(parts[1:], parts[0] * 2),
    "nothing": lambda parts: None,
    "not a number": lambda parts: sum(parts[1:], parts[0]) * float("nan"),
    "scaled by 1 %": lambda parts: sum(parts[1:], parts[0]) * 1.01,
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("join", RIGHT.values(), ids=RIGHT)
def test_sums_in_any_order_are_accepted(join: Any, devices: int) -> None:
    found = verdict(Planted(join), "mlp", devices)
    assert found.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE), str(found)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("join", WRONG.values(), ids=WRONG)
def test_wrong_gradients_are_refused_and_never_timed(
    join: Any, devices: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plug = Planted(join)
    case = Case(model="mlp", strategy="dp", devices=devices, batch_size=11)
    with pytest.raises(trial.Unverified, match="fc"):
        trial.measure(case, SHORT, plug)
    assert plug.steps == 1, "an unverified strategy was stepped again"
    monkeypatch.setattr(registry, "strategy", lambda name: plug)
    done = trial.run(case, SHORT, tmp_path)
    assert (done.status, done.verified, done.steps) == (Status.FAILED, Verified.NO, ())
    assert "gradients or buffers are wrong" in done.reason


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("strategy", IN_PROCESS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_loss_falls_as_on_a_single_device(strategy: str, optimizer: str) -> None:
    losses = []
    for name, devices in ((strategy, 3), ("single", 1)):
        case = case_of(name, devices=devices, batch_size=16, optimizer=optimizer)
        plug = runnable(case)
        model = models.load("mlp", "small", 0)
        batch = model.batch(16, 1)
        with plug.start(case, model, resolve(["cpu"] * case.devices), no_mark) as step:
            losses.append([step(*batch).item() for _ in range(8)])
    ours, single = losses
    assert ours == pytest.approx(single, abs=1e-4)
    assert ours[-1] < ours[0]


class Settling:
    """A function that is settled after its first call, as a TrainStep may be."""

    settled = False

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        self.settled = True
        return torch.zeros(())


class SettlingStep(Settling, Step):
    """The same as a step of dpbench."""


class Observing(Settling):
    """A function that also observes spans."""

    def observe(self) -> tuple[()]:
        return ()


class Yielding(Strategy):
    """A strategy whose step is given."""

    def __init__(self, step: Any) -> None:
        self._step = step

    @contextmanager
    def start(self, case: Case, model: Any, devices: Any, mark: Any) -> Iterator[Any]:
        yield self._step


def begun(step: Any) -> Step:
    model = models.load("mlp", "small", 0)
    with begin(Yielding(step), case_of("single"), model, resolve(["cpu"]), no_mark) as found:
        return found


@pytest.mark.parametrize("kind", [Settling, SettlingStep])
def test_a_step_says_whether_it_is_settled(kind: Any) -> None:
    step = begun(kind())
    before = step.settled
    step(None, None)
    assert (before, step.settled, step.observe()) == (False, True, ())


def test_a_plain_function_is_a_settled_step() -> None:
    step = begun(lambda inputs, target: 7)
    assert (step(None, None), step.settled) == (7, True)


def test_a_step_that_observes_must_be_a_step_of_dpbench() -> None:
    with pytest.raises(UsageError, match=r"Observing, has the method observe, but is no dpbench.s"):
        begun(Observing())


class Inferring(Strategy):
    """A strategy whose forward is settled after its first call, as a DataParallel may be."""

    @contextmanager
    def infer(self, case: Case, model: Any, devices: Any, mark: Any) -> Iterator[Any]:
        yield Forward()


class Forward(Settling):
    def __call__(self, inputs: Any) -> torch.Tensor:
        return super().__call__(inputs, None)


def test_the_forward_alone_is_settled_when_its_module_is() -> None:
    case = case_of("single", mode="inference")
    model = models.load("mlp", "small", 0)
    with begin(Inferring(), case, model, resolve(["cpu"]), no_mark) as step:
        before = step.settled
        step(model.batch(4, 1)[0], None)
        assert (before, step.settled) == (False, True)


def test_unknown_optimizers_list_the_known() -> None:
    with pytest.raises(LookupError, match=r"'sgdd'.*adam.*sgd"):
        optimizer_of(case_of("dp", optimizer="sgdd"))


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("rows", range(1, 20))
def test_rows_are_those_of_torch_chunk(devices: int, rows: int) -> None:
    expected = [len(piece) for piece in torch.empty(rows).chunk(devices)]
    assert list(case_of("dp", devices=devices, batch_size=rows).rows) == list(expected)
