"""The state of the GPUs of a run: their clocks, their facts, and their links."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from itertools import permutations
from typing import Any

import pytest
import torch

from dpbench.analysis import imbalance, summary, transfers
from dpbench.hardware import foreign_load, rates
from dpbench.hardware.devices import open_devices
from dpbench.measure.server import Server
from dpbench.measure.worker.bench import FEW_PAIRS
from dpbench.records import HOST, Case, Effort, Sample, Status, Step, Trial, Verified
from dpbench.records.estimate import Doubt
from dpbench.records.facts import TrialFacts
from dpbench.records.load import Load
from dpbench.records.work import CopyTimes
from dpbench.store import Store
from tests.runs import run
from tests.standing_in import QUIET
from tests.standing_in import Server as StandIn

ALONE = Case(model="mlp", strategy="single", batch_size=8, device_kind="cuda")
QUICK = Effort(budget_s=0.5, block_steps=1, memory_by_phase=False, profile=False, links=False)
"""Also on a busy machine, no first step is so long that the case counts as slow."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("warmup_steps", "budget_s", "heats"), [(2, 0.5, True), (200, 0.05, False)]
)
def test_gpus_are_heated_for_the_time_that_the_warm_up_does_not_last(
    server: Server, warmup_steps: int, budget_s: float, heats: bool
) -> None:
    """The steps of `mlp` take more than half a millisecond, also on a fast GPU."""
    effort = replace(QUICK, warmup_steps=warmup_steps, budget_s=budget_s)
    trial = server.run(ALONE, effort, 0, 120.0)
    assert trial.status is Status.OK, trial.reason
    heat_s = trial.setup.get("heat_s", 0.0)
    assert (heat_s > 0) is heats
    assert heat_s >= 0.9 * (min(0.5, budget_s) - warmup_steps * trial.steps[1].seconds)
    assert all(step.warmup for step in trial.steps[:2])


def test_cpus_are_not_heated(server: Server) -> None:
    trial = server.run(replace(ALONE, device_kind="cpu"), QUICK, 0, 120.0)
    assert "heat_s" not in trial.setup


@pytest.mark.gpu
def test_a_trial_records_the_versions_below_torch_and_the_cost_of_marks(server: Server) -> None:
    found = server.run(ALONE, replace(QUICK, budget_s=5.0), 0, 120.0).provenance
    assert found["gpu"] == torch.cuda.get_device_name(0)
    assert (found["cuda"], found["cudnn"]) == (torch.version.cuda, torch.backends.cudnn.version())
    assert found["nccl"] == ".".join(map(str, torch.cuda.nccl.version()))
    assert len(found["mark_pairs"]) >= FEW_PAIRS


# -- links, profile and memory


@pytest.fixture
def asked(quick: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, int, Effort]]:
    """Let a stand-in measure, and return the list of the requests that it gets."""
    requests: list[tuple[Case, int, Effort]] = []

    def act(case: Case, effort: Effort) -> dict[str, Any]:
        requests.append((case, len(requests), effort))
        widest = case.devices > 1 and not case.traits.ranks
        links = {"links": [LINK]} if effort.links and widest else {}
        samples = (Sample(0.0, 0, "kernel_busy_s", 0.001),) if effort.profile else ()
        return {"verified": Verified.BITWISE, "provenance": links, "samples": samples}

    monkeypatch.setattr(StandIn, "act", staticmethod(act))
    monkeypatch.setattr(foreign_load, "of_gpus", lambda gpus: ())
    return requests


LINK = asdict(CopyTimes(source=0, target=1, bytes=2**27, seconds=(0.01,)))
CASES = [
    ALONE,
    *(replace(ALONE, strategy="dp", devices=n, schedule="reference") for n in (2, 4)),
    replace(ALONE, strategy="ddp", devices=4),
]


def test_links_are_timed_once_in_a_run_and_profiles_are_of_the_first_round(
    store: Store, asked: list[tuple[Case, int, Effort]]
) -> None:
    """Of DistributedDataParallel, whose phase `reduce` is from the profile, every round's."""
    run(CASES, store, rounds=3, patience_s=0)
    assert [case.devices for case, _, effort in asked if effort.links] == [4]
    profiled = Counter(case.strategy for case, _, effort in asked if effort.profile)
    assert profiled == {"single": 1, "dp": 2, "ddp": 3}
    assert sum(effort.memory_by_phase for _, _, effort in asked) == len(CASES)
    assert sum(effort.marks for _, _, effort in asked) == len(CASES)


def test_a_trial_that_is_repeated_measures_again_what_its_predecessor_had(
    store: Store, asked: list[tuple[Case, int, Effort]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the two counts no more."""
    busy = Load(foreign=0.99, steal=0.0, cores=2, seconds=1.0)
    loads = [busy, QUIET, QUIET]
    monkeypatch.setattr(foreign_load, "since", lambda before: loads.pop(0))
    run(CASES[1:2], store, rounds=2, patience_s=1)
    assert [(e.links, e.profile, e.memory_by_phase) for _, _, e in asked] == [
        (True, True, True),
        (False, False, False),
        (True, True, True),
    ]


def test_a_resumed_run_times_no_links_again(
    store: Store, asked: list[tuple[Case, int, Effort]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = StandIn.act

    def act(case: Case, effort: Effort) -> dict[str, Any]:
        if len(asked) == 3:
            asked.append((case, 3, effort))
            raise KeyboardInterrupt
        return calm(case, effort)

    monkeypatch.setattr(StandIn, "act", staticmethod(act))
    with pytest.raises(KeyboardInterrupt):
        run(CASES[1:2], store, rounds=5, patience_s=0)
    run(CASES[1:2], store, rounds=5, patience_s=0)
    assert [e.links for _, _, e in asked] == [True] + [False] * (len(asked) - 1)


def copies(source: int, target: int, seconds: float, passes: int) -> list[dict[str, Any]]:
    one = CopyTimes(source=source, target=target, bytes=2**27, seconds=(seconds,) * 3)
    return [asdict(one)] * passes


@pytest.mark.parametrize("wrong", [{"bytes": 0}, {"seconds": ()}, {"seconds": (0.0, 0.1)}])
def test_a_stored_copy_without_a_rate_is_left_out(wrong: dict[str, Any]) -> None:
    stored = [LINK, {**LINK, **wrong}]
    assert len(TrialFacts.of({"links": stored}).copies) == 1


@pytest.mark.parametrize("per_round", [False, True])
def test_a_slow_link_is_found_for_every_case_that_uses_it(per_round: bool) -> None:
    """From the passes of one trial of the run, or from the rounds of an older store."""
    pairs = list(permutations(range(4), 2))
    slow_s = {(0, 1): 0.04, (1, 0): 0.04}
    passes = 1 if per_round else 3
    measured = [one for pair in pairs for one in copies(*pair, slow_s.get(pair, 0.01), passes)]
    trials_of = {
        case: [
            Trial(
                case=case,
                round=number,
                steps=(Step(0.1, False, 100.0),),
                verified=Verified.BITWISE,
                provenance={"links": measured}
                if case.devices == 4 and (per_round or not number)
                else {},
            )
            for number in range(3)
        ]
        for case in CASES[:3]
    }
    for case in CASES[1:3]:
        found = transfers.slow_links(transfers.with_links(case, trials_of), to_host=False)
        if case.devices == 4:
            (link,) = found
            assert (link.ends, link.slower.doubt) in (((0, 1), None), ((1, 0), None))
            assert link.rate == pytest.approx(2**27 / 0.04)
    other = replace(CASES[1], device_ids=(2, 3))
    assert transfers.with_links(other, {**trials_of, other: []}) == []


def test_of_one_profiled_round_the_steps_show_the_balance() -> None:
    """As many profiled steps as an estimate needs rounds."""
    case = CASES[1]

    def trial(number: int, steps: int) -> Trial:
        busy = [
            Sample(0.0, device, "kernel_busy_s", 0.02 if device == 0 else 0.01)
            for device in range(2)
            for _ in range(steps)
        ]
        return Trial(
            case=case,
            round=number,
            steps=(Step(0.1, False, 100.0),) * 10,
            verified=Verified.BITWISE,
            samples=tuple(busy),
        )

    trials = [trial(0, 5), trial(1, 0), trial(2, 0)]
    (row,) = summary.rows(trials)
    assert row.imbalance is not None
    assert (row.imbalance.value, row.imbalance.doubt) == (pytest.approx(2.0), None)
    index = next(one for one in imbalance.indexes(trials) if one.quantity == "busy time")
    assert (index.first.value, index.first.doubt) == (pytest.approx(2.0), None)
    few = [trial(0, 1), trial(1, 0), trial(2, 0)]
    assert summary.rows(few)[0].imbalance.doubt is Doubt.ROUNDS


@pytest.mark.multi_gpu
def test_links_are_timed_with_large_copies_or_the_largest_that_fit() -> None:
    devices = open_devices("cuda", 2)
    found = list(rates.links(devices, passes=2))
    assert {one.bytes for one in found} == {128 * 2**20}
    assert Counter((one.source, one.target) for one in found) == dict.fromkeys(
        [(HOST, 0), (HOST, 1), (0, 1), (1, 0)], 2
    )
    assert all(len(one.seconds) == rates.COPIES for one in found)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(1)
    filled = torch.empty(free - 40 * 2**20, dtype=torch.uint8, device="cuda:1")
    sizes = {one.bytes for one in rates.links(devices)}
    del filled
    torch.cuda.empty_cache()
    assert len(sizes) == 1
    assert rates.LINK_LEAST_BYTES <= sizes.pop() < rates.LINK_BYTES


@pytest.mark.multi_gpu
def test_a_copy_between_gpus_is_timed_on_the_stream_of_its_source() -> None:
    """Torch queues it there: a busy target must not lengthen it, and a busy source delays it."""
    source, target = open_devices("cuda", 2)
    recorded: list[int] = []
    for device in (source, target):
        event = device.event

        def noted(reuse: Any = None, *, device: Any = device, event: Any = event) -> Any:
            recorded.append(device.index)
            return event(reuse)

        device.event = noted
    for one in rates.links([source, target]):
        owner = one.target if one.source == HOST else one.source
        assert set(recorded) == {owner}
        recorded.clear()
