"""The rates and least times of the bytes that a step moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dpbench import models
from dpbench.analysis import transfers
from dpbench.analysis.moves import of_step
from dpbench.analysis.summary import BLANK
from dpbench.hardware.devices import open_devices
from dpbench.measure.worker.facts import operations, with_operations
from dpbench.records import Case, Phase, Trial, Verified
from dpbench.records.work import Operations
from tests.analysis.test_moves import DP, SHAPES, by_way
from tests.trials import trial_of


def trial(case: Case = DP, *, number: int = 0, **changed: Any) -> Trial:
    parts = [
        (Phase.SCATTER, 0, 0.0, 0.1),
        (Phase.SCATTER, 1, 0.1, 0.3),
        (Phase.REPLICATE, 1, 0.3, 0.5),
        (Phase.BACKWARD, 0, 0.5, 0.75),
        (Phase.REDUCE, 0, 0.75, 1.0),
    ]
    given = {"provenance": {"model": vars(SHAPES)}, "round": number} | changed
    return trial_of(case, [1.0] * 4, warmup=1, parts=parts, clock="cuda_event", **given)


def test_a_rate_is_bytes_over_the_seconds_of_the_devices_that_receive_them() -> None:
    found = {flow.phase: flow for flow in transfers.flows([trial(number=n) for n in range(3)])}
    scatter, reduce = found[Phase.SCATTER], found[Phase.REDUCE]
    assert scatter.seconds == pytest.approx({0: 0.1, 1: 0.2})
    assert scatter.bytes == 180
    assert scatter.rate == pytest.approx(180 / 0.3)
    assert scatter.rate_of(0) == pytest.approx(1300)
    assert scatter.rate_of(1) == pytest.approx(250)
    assert reduce.rate == pytest.approx(4000)
    backward, gather = found[Phase.BACKWARD], found[Phase.GATHER]
    assert (backward.rate, backward.hidden) == (None, True), "it moves beside compute"
    assert (gather.rate, gather.hidden) == (None, False), "no span of it"


def test_a_rate_counts_a_copy_whole_that_runs_beside_another_device() -> None:
    """The critical path goes through forward on rank 0: it leaves 0.05 s of scatter to rank 1."""
    of = replace(DP, strategy="ddp", schedule="")
    parts = [
        (Phase.SCATTER, 0, 0.0, 0.2),
        (Phase.SCATTER, 1, 0.05, 0.25),
        (Phase.FORWARD, 0, 0.2, 1.0),
        (Phase.FORWARD, 1, 0.25, 0.9),
    ]
    timed = trial_of(of, [1.0] * 4, parts=parts, provenance={"model": vars(SHAPES)})
    for one in (timed, timed.summary()):
        (scatter,) = [flow for flow in transfers.flows([one]) if flow.phase is Phase.SCATTER]
        assert scatter.seconds == pytest.approx({0: 0.2, 1: 0.2})
        assert scatter.rate == pytest.approx(scatter.bytes / 0.4)


def test_a_rate_leaves_out_the_device_that_sends_and_needs_the_spans_of_all_that_receive() -> None:
    parts = [(Phase.REPLICATE, 0, 0.0, 0.5), (Phase.REPLICATE, 1, 0.25, 0.5)]
    (both,) = _replicated(DP, parts)
    assert both.seconds == pytest.approx({1: 0.25})
    assert both.rate == pytest.approx(1240 / 0.25)
    (alone,) = _replicated(DP, parts[:1])
    assert (alone.seconds, alone.rate, alone.hidden) == ({}, None, False)


def test_a_reduction_of_one_process_counts_from_the_arrival_of_the_last_device() -> None:
    of = replace(DP, schedule="allreduce")
    parts = [
        (Phase.BACKWARD, 0, 0.0, 0.2),
        (Phase.BACKWARD, 1, 0.0, 0.8),
        (Phase.REDUCE, 0, 0.2, 0.9),
        (Phase.REDUCE, 1, 0.8, 0.9),
    ]
    timed = trial_of(of, [1.0] * 4, parts=parts, provenance={"model": vars(SHAPES)})
    (reduce,) = [flow for flow in transfers.flows([timed]) if flow.phase is Phase.REDUCE]
    assert reduce.seconds == pytest.approx({0: 0.1, 1: 0.1})


def _replicated(case: Case, parts: list[tuple[Phase, int, float, float]]) -> list[Any]:
    timed = trial_of(case, [1.0] * 4, parts=parts, provenance={"model": vars(SHAPES)})
    return [flow for flow in transfers.flows([timed]) if flow.phase is Phase.REPLICATE]


def test_a_floor_is_the_bytes_of_a_device_over_its_measured_links() -> None:
    """Copies of 1,000 bytes take 1 s, from the host 2 s: 2 and 4 bytes over 1,000 a second."""
    ends = [(source, target) for source in (-1, 0, 1) for target in (0, 1) if source != target]
    links = [
        {"source": s, "target": t, "bytes": 1000, "seconds": [2.0 if s < 0 else 1.0] * 3}
        for s, t in ends
    ]
    of = replace(DP, device_kind="cuda")
    timed = trial(of, provenance={"model": vars(SHAPES), "links": links})
    found = transfers.floors(of, {of: [timed]})
    moved = {flow.phase: flow for flow in transfers.flows([timed])}
    for phase in (Phase.SCATTER, Phase.REDUCE):
        each = 2e-3 if phase is Phase.SCATTER else 1e-3
        for device in (0, 1):
            into = sum(move.bytes for move in moved[phase].moves if move.target == device)
            out = sum(move.bytes for move in moved[phase].moves if move.source == device)
            assert found.get((phase, device), 0.0) == pytest.approx(each * max(into, out))
    assert transfers.floors(of, {of: [trial(of)]}) == {}, "no link was measured"
    half = trial(of, provenance={"model": vars(SHAPES), "links": links[:2]})
    assert {phase for phase, _ in transfers.floors(of, {of: [half]})} == {Phase.SCATTER}


def test_links_that_copy_at_the_same_time_need_no_longer_than_the_longest() -> None:
    """Each GPU has a link of its own to the host and to each other GPU, which copy side by side."""
    of = replace(DP, devices=4, batch_size=8)
    ends = [(source, target) for source in range(-1, 4) for target in range(4) if source != target]
    links = [{"source": s, "target": t, "bytes": 1000, "seconds": [1.0]} for s, t in ends]
    timed = trial(of, provenance={"model": vars(SHAPES), "links": links})
    found = transfers.floors(of, {of: [timed]})
    moves = of_step(of, SHAPES)
    for phase in (Phase.SCATTER, Phase.REPLICATE, Phase.GATHER, Phase.REDUCE):
        by_link = by_way([move for move in moves if move.phase is phase]).values()
        floor_s = max(seconds for (one, _), seconds in found.items() if one is phase)
        assert floor_s == pytest.approx(1e-3 * max(by_link)), phase


def test_a_floor_is_the_operations_of_a_device_over_the_best_peak() -> None:
    """Each row needs 1,000 operations in forward and 2,000 in backward, at 10,000 a second."""
    slower, best = (
        {"forward": 1000.0, "backward": 2000.0, "peak_per_s": peak} for peak in (5e3, 1e4)
    )
    other = replace(DP, batch_size=4)
    trials_of = {
        DP: [trial(DP, provenance={"operations": slower})],
        other: [trial(other, provenance={"operations": best})],
    }
    found = transfers.floors(DP, trials_of)
    for phase, each_s in ((Phase.FORWARD, 0.1), (Phase.BACKWARD, 0.2)):
        for device, rows in enumerate(DP.rows):
            assert found[phase, device] == pytest.approx(rows * each_s)
    forward_alone = replace(DP, mode="no_grad")
    alone = {forward_alone: [trial(forward_alone, provenance={"operations": best})]}
    assert {phase for phase, _ in transfers.floors(forward_alone, alone)} == {Phase.FORWARD}
    without_peak = [trial(DP, provenance={"operations": {**best, "peak_per_s": 0.0}})]
    assert transfers.floors(DP, {DP: without_peak}) == {}


def test_the_floor_of_a_phase_is_that_of_the_device_that_needs_most_and_below_its_seconds() -> None:
    floors = {(Phase.FORWARD, 0): 0.1, (Phase.FORWARD, 1): 0.2, (Phase.BACKWARD, 0): 0.5}
    row = replace(BLANK, phases={"forward": 0.3, "backward": 0.4, "loss": 0.1}, floors=floors)
    assert [row.least(phase) for phase in row.phases] == [0.2, 0.0, 0.0]


def test_the_operations_of_a_linear_model_are_two_per_weight_and_row() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    model = replace(models.load("mlp", "small", 0), module=layers)
    products = 2 * (8 * 16 + 16 * 4)
    # the gradients of all weights, and of the first layer's output
    expected = Operations(
        forward=products, backward=products + 2 * 16 * 4, peak_per_s=0.0, dtype="float32"
    )
    assert operations(model, (torch.randn(6, 8), torch.zeros(6))) == expected
    lstm = models.load("lstm", "small", 0)
    assert isinstance(operations(lstm, lstm.batch(4, 0)), str), "its packed sequences need values"
    rows, number = torch.randn(6, 8), torch.tensor(1.0)
    for inputs in ((rows, number), (number, rows)):
        reason = operations(model, (inputs, torch.zeros(6)))
        assert isinstance(reason, str), "a number has no rows"


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("planted"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=lambda error: type(error).__name__,
)
def test_a_trial_without_memory_for_the_peak_comes_back_without_its_operations(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*sizes: int, **options: Any) -> torch.Tensor:
        raise error

    model = models.load("mlp", "small", 0)
    timed = trial(replace(DP, device_kind="cpu"))
    batch, devices = model.batch(4, 0), open_devices("cpu", 1)
    assert with_operations(timed, model, batch, devices).provenance["operations"]["peak_per_s"] > 0
    monkeypatch.setattr(torch, "randn", failing)
    assert with_operations(timed, model, batch, devices) is timed


def test_a_reduction_beside_backward_has_no_rate() -> None:
    case = replace(DP, strategy="ddp", schedule="")
    found = {flow.phase: flow for flow in transfers.flows([trial(case)])}
    assert found[Phase.REDUCE].rate is None
    assert found[Phase.REDUCE].bytes > 0


def test_only_what_may_be_shown_has_flows() -> None:
    assert transfers.flows([trial(verified=Verified.NO), Trial(case=DP)]) == []
    assert transfers.flows([trial(provenance={})]) == []
