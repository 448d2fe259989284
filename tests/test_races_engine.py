"""No schedule has a race; each engine call that orders streams or keeps memory is needed.

tests/races simulates the GPUs, and tests/test_races.py shows that the detector finds known races.
`REPORTING` names a run for each such call of the engine, which has a race when the call is left
out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpbench.hardware.devices import _cuda
from dpbench.models import load
from dpbench.records import Case, no_mark, registry
from dpbench.records.schedule import BEST, RUNGS, Schedule, ablations, parse
from tests.races.engine_runs import Run, places, without
from tests.races.machine import detect
from tests.races.recorder import Race

SCHEDULES = {str(schedule): schedule for schedule in RUNGS.values()}
SCHEDULES |= {f"{BEST} without {switch}": one for switch, one in ablations(RUNGS[BEST]).items()}
PAIR, SHARED, MIXED, FOUR = (0, 1), (0, 0), (0, 0, 1, 1), (0, 1, 2, 3)


def runs(schedule: Schedule) -> Iterator[Run]:
    """Yield a schedule's runs: 2 or 4 devices, spread or colocated, both orders, other loops."""
    yield from (Run(schedule, ordinals) for ordinals in (PAIR, SHARED, MIXED, FOUR))
    yield from (Run(schedule, ordinals, backwards=True) for ordinals in (SHARED, MIXED))
    yield Run(schedule, PAIR, side=False, nccl=False)
    yield Run(schedule, PAIR, backwards=True, nccl=False)
    yield from (Run(schedule, SHARED, kind=kind) for kind in ("host", "whole", "short", "written"))
    if not schedule.missing(train_step=False):
        yield from (Run(schedule, ordinals, kind="wrapper") for ordinals in (PAIR, SHARED))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_no_schedule_has_a_race(schedule: Schedule) -> None:
    found = {run: race for run in runs(schedule) for race in run().races}
    assert not found, "\n".join(f"{run}: {race}" for run, race in found.items())


OVERLAPPED, BEST_PLAIN = parse("overlap"), ablations(RUNGS[BEST])["optimizer"]
JOINT = Schedule(replicas="persistent", reduce="overlap")
REPORTING = {
    "collectives.reduce: root.wait(device)": Run(Schedule(), SHARED, kind="verbs"),
    "collectives.reduce: root.borrow(one)": Run(Schedule(), SHARED, kind="verbs"),
    "collectives.stage: self._collectives.follow(i)": Run(parse("persistent"), PAIR),
    "collectives.lead: self._collectives.lead(i)": Run(parse("persistent"), PAIR),
    "collectives._together: self._collectives.follow(i)": Run(parse("persistent"), PAIR),
    "collectives._together: self._collectives.lead(i)": Run(parse("persistent"), PAIR),
    "collectives.wait: self.lead()": Run(parse("persistent"), PAIR),
    "gather.forward: target.wait(device)": Run(Schedule(), SHARED, kind="verbs"),
    "gather.forward: target.borrow(tensors)": Run(Schedule(), SHARED, kind="verbs"),
    "losses.meet: root.wait(device)": Run(parse("local_loss"), SHARED),
    "losses.meet: root.borrow([*self._totals, *tensors])": Run(
        parse("local_backward"), MIXED, kind="host partly whole"
    ),
    "losses.backward: device.wait(self._devices[0])": Run(parse("local_backward"), SHARED),
    "losses.backward: device.borrow([self._weight])": Run(
        parse("local_backward"), PAIR, kind="whole"
    ),
    "persistent.modules: root.wait(device)": Run(parse("persistent"), SHARED),
    "persistent.refresh: device.wait(self._devices[0])": Run(
        parse("persistent"), SHARED, kind="host"
    ),
    "persistent_step.modules: exchange.wait()": Run(JOINT, PAIR, kind="unusual"),
    "persistent_step._together: exchange.wait()": Run(OVERLAPPED, PAIR),
    "persistent_step._together: exchange.wait() again": Run(parse("persistent"), PAIR),
    "persistent_step._step: self._devices[0].wait(device)": Run(
        parse("zero1"), SHARED, kind="short"
    ),
    "persistent_step.close: exchange.lead()": Run(OVERLAPPED, PAIR, kind="failed"),
    "persistent_step.close: self._devices[0].wait(device)": Run(BEST_PLAIN, SHARED, kind="failed"),
    "replicate.replicate: devices[0].wait(device)": Run(Schedule(), SHARED),
    "__init__.holding: device.hold()": Run(OVERLAPPED, SHARED),
    "update.collect: device.wait(other)": Run(parse("local_backward"), SHARED),
    "update.collect: device.borrow([g for g in gradients if g is not None])": Run(
        parse("persistent"), MIXED
    ),
    "update.copy: device.wait(self._devices[j])": Run(parse("zero1"), SHARED),
    "cuda.put: self._follow([tensor])": Run(Schedule(), SHARED, kind="verbs"),
    "cuda.put: self.borrow([tensor])": Run(Schedule(), SHARED, kind="verbs"),
    "cuda._put_from_host: self.stream.wait_stream(self._background)": Run(
        Schedule(), PAIR, kind="host"
    ),
    "cuda._put_from_host: self.borrow([copy])": Run(Schedule(), PAIR, kind="host"),
    "cuda.clone: self._follow(tensors)": Run(Schedule(), SHARED, kind="host"),
    "cuda.wait: self.stream.wait_stream(stream)": Run(Schedule(), SHARED),
    "cuda.borrow: part.record_stream(self.stream)": Run(Schedule(), SHARED, kind="verbs"),
    "cuda._follow: self.stream.wait_stream(source)": Run(Schedule(), SHARED),
    "cuda.follow: self._streams[i].wait_stream(torch.cuda.current_stream(self._ordinals[i]))": Run(
        parse("persistent"), PAIR
    ),
    "cuda.lead: torch.cuda.current_stream(self._ordinals[i]).wait_stream(self._streams[i])": Run(
        parse("persistent"), PAIR
    ),
}
"""For each call of the engine that orders streams or keeps memory, a run that has a race without
this call.
"""
UNSEEN = {"cuda.reduce_add: device.wait(cast(Device, self))"}
"""Calls without which no run here has a race: of gradients that are added on other streams than
those on which autograd announced them, which only a caller of the verb can arrange.
"""


def test_the_table_has_every_call_that_orders_streams() -> None:
    assert REPORTING.keys() | UNSEEN == places().keys()


@pytest.mark.parametrize("name", REPORTING)
def test_every_call_that_orders_streams_is_needed(name: str) -> None:
    run = REPORTING[name]
    with without(places()[name]) as left_out:
        found = run()
    assert left_out(), "the run does not make the call"
    assert found.races
    assert not races_of(run)


@functools.cache
def races_of(run: Run) -> list[Race]:
    return run().races


FILES = Path(__file__).parents[1] / "benchmarks" / "strategies"
IN_ONE_PROCESS = ("data_parallel_block", "model_parallel", "pipelined")
STRATEGIES = ["single", *(f"{FILES / name}.py:strategy" for name in IN_ONE_PROCESS)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["single", *IN_ONE_PROCESS])
@pytest.mark.parametrize("ordinals", [PAIR, SHARED, FOUR], ids=str)
def test_no_strategy_within_one_process_has_a_race(
    strategy: str, ordinals: tuple[int, ...]
) -> None:
    """`dp` is TrainStep, as above.

    Torch_dp copies in torch's C++ code, which the simulated machine does not see.
    """
    count = 1 if strategy == "single" else len(ordinals)
    case = Case(
        model="transformer" if count > 2 else "mlp",
        strategy=strategy,
        batch_size=8,
        devices=count,
        device_kind="cuda",
    )
    with detect() as found:
        model, runner = load(case.model, "small", 0), registry.strategy(strategy)
        batch = model.batch(8, 0)
        devices = _cuda(ordinals[:count], own_streams=not runner.traits.shared_stream)
        with runner.start(case, model, devices, no_mark) as step:
            step(*batch)
            waits = found.machine.waits
            step(*batch)
            assert found.machine.waits == waits, (
                "the host waited for a device, which orders everything"
            )
    assert not found.races
