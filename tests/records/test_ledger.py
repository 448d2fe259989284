"""The ledger's laws: the parts sum to the step, nothing is counted twice, nothing is negative."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.engine import TrainStep
from dpbench.measure.clocks import HostClock
from dpbench.records import UNATTRIBUTED, Case, Phase, Span, Step, Trial, ledger
from dpbench.records.trial import joined

STEP = Step(10.0, False, 110.0)  # 100 .. 110
REST = (UNATTRIBUTED, -1)


def span(start: float, end: float, phase: str = "forward", device: int = 0, step: int = 0) -> Span:
    """Return a span by its distance from the step's start."""
    return Span(step, Phase(phase), device, "host", 100 + start, 100 + end)


moments = st.integers(-40, 160).map(lambda ticks: ticks / 10)
spans = st.builds(
    lambda a, b, phase, device: span(min(a, b), max(a, b), phase, device),
    moments,
    moments,
    st.sampled_from([p.value for p in Phase]),
    st.integers(-1, 3),
)


def covered(given: list[Span]) -> float:
    """Return the length of the union of spans inside the step, by counting ticks."""
    ticks = range(100)
    return sum(any(s.start_s <= 100 + (k + 0.5) / 10 <= s.end_s for s in given) for k in ticks) / 10


@hypothesis.given(st.lists(spans, max_size=8))
def test_parts_sum_to_the_step_and_are_never_negative(given: list[Span]) -> None:
    parts = ledger.charge(STEP, given)
    assert math.fsum(parts.values()) == pytest.approx(10.0, abs=1e-9)
    assert all(seconds >= 0 for seconds in parts.values())
    assert set(parts) <= {(s.phase.value, s.device) for s in given} | {REST}


@hypothesis.given(st.lists(spans, max_size=8))
def test_unattributed_is_exactly_what_no_span_covers(given: list[Span]) -> None:
    assert ledger.charge(STEP, given).get(REST, 0.0) == pytest.approx(
        10.0 - covered(given), abs=1e-9
    )


@hypothesis.given(st.lists(spans, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_spans_does_not_matter(given: list[Span], random: object) -> None:
    shuffled = list(given)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    left, right = (ledger.phases(STEP, order) for order in (given, shuffled))
    assert sum(left.values()) == pytest.approx(sum(right.values()))
    # where two spans are alike in both ends nothing tells which was first; all others must agree
    if len({(s.start_s, s.end_s) for s in given}) == len(given):
        assert ledger.charge(STEP, given) == pytest.approx(ledger.charge(STEP, shuffled))


@hypothesis.given(st.lists(spans, max_size=8))
def test_no_part_exceeds_its_own_spans(given: list[Span]) -> None:
    for key, seconds in ledger.charge(STEP, given).items():
        if key != REST:
            mine = [s for s in given if (s.phase.value, s.device) == key]
            assert seconds <= covered(mine) + 1e-9


@hypothesis.given(st.lists(spans, max_size=5), moments, moments)
def test_a_span_that_ends_before_it_starts_counts_for_nothing(
    given: list[Span], a: float, b: float
) -> None:
    hypothesis.assume(a != b)
    backwards = span(max(a, b), min(a, b), "reduce", 3)
    parts = {
        key: seconds for key, seconds in ledger.charge(STEP, [*given, backwards]).items() if seconds
    }
    assert parts == pytest.approx({k: s for k, s in ledger.charge(STEP, given).items() if s})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {REST: 10}),
        ([span(0, 10)], {("forward", 0): 10}),
        ([span(0, 10), span(0, 10, device=1)], {10}),
        ([span(2, 4), span(6, 9, "loss")], {("forward", 0): 2, ("loss", 0): 3, REST: 5}),
        # the outer one ended last: it has the time down to its start
        ([span(0, 10), span(3, 7, "loss")], {("forward", 0): 10}),
        # of two that overlap, the later has all of its own, the earlier what is left
        ([span(0, 6), span(4, 10, "loss")], {("forward", 0): 4, ("loss", 0): 6}),
        # a straggler ended last: it is what the others waited for
        (
            [span(0, 4, device=0), span(0, 9, device=1), span(9, 10, "gather")],
            {("forward", 1): 9, ("gather", 0): 1},
        ),
        # the walk goes on below the straggler's start
        (
            [span(0, 4, device=0), span(3, 9, device=1)],
            {("forward", 0): 3, ("forward", 1): 6, REST: 1},
        ),
        # device 0 gathers from 4 on, but waits until 7 for the outputs of device 1, and reduces
        # likewise
        (
            [span(0, 4), span(1, 7, device=1), span(4, 10, "gather")],
            {("forward", 0): 1, ("forward", 1): 6, ("gather", 0): 3},
        ),
        (
            [span(0, 5, "backward"), span(0, 8, "backward", 1), span(5, 10, "reduce")],
            {("backward", 1): 8, ("reduce", 0): 2},
        ),
        # of the wait, what no other device explains stays with the phase
        (
            [span(0, 2), span(5, 6, device=1), span(2, 10, "gather")],
            {("forward", 0): 2, ("gather", 0): 3 + 4, ("forward", 1): 1},
        ),
        # device 1 opens backward at 3, but waits until 6 for the loss of device 0
        (
            [
                span(2, 4, "gather"),
                span(4, 6, "loss"),
                span(3, 10, "backward", 1),
                span(6, 9, "backward"),
            ],
            {("gather", 0): 2, ("loss", 0): 2, ("backward", 1): 4, REST: 2},
        ),
        # device 1 has its rows at 1, and waits until 7 for device 0, which sends the weights
        (
            [
                span(0, 7, "scatter"),
                span(7, 10, "replicate"),
                span(0, 1, "scatter", 1),
                span(1, 10, "replicate", 1),
            ],
            {("scatter", 0): 7, ("replicate", 0): 3},
        ),
        # a rank waits for no other rank's loss
        (
            [
                span(0, 3, "loss"),
                span(3, 7, "backward"),
                span(0, 2, "loss", 1),
                span(2, 10, "backward", 1),
            ],
            {("loss", 1): 2, ("backward", 1): 8},
        ),
        # device 0 does not wait for itself
        ([span(2, 6), span(1, 10, "gather")], {("gather", 0): 9, REST: 1}),
        # what reaches outside the step is clipped
        ([span(-5, 3), span(8, 99, "loss")], {("forward", 0): 3, ("loss", 0): 2, REST: 5}),
        ([span(-9, -1), span(11, 12)], {REST: 10}),
        ([span(-9, 99)], {("forward", 0): 10}),
        ([span(5, 5)], {REST: 10}),
    ],
)
def test_walk_back_from_the_end(
    given: list[Span], expected: dict[tuple[str, int], float] | set[float]
) -> None:
    parts = {key: seconds for key, seconds in ledger.charge(STEP, given).items() if seconds}
    if isinstance(expected, set):  # one of the two gets it all, which one is open
        assert sorted(parts.values()) == pytest.approx(sorted(expected))
    else:
        assert parts == pytest.approx(expected)


def test_rounded_clocks_do_not_move_time_from_one_phase_to_another() -> None:
    """Both GPUs end backward at 9, when GPU 1 has added the last gradients.

    Their clocks show ends up to 1 us early.
    """
    given = [
        *(span(*ends, device=device) for device in (0, 1) for ends in ((0, 2), (2, 9, "backward"))),
        span(4, 7, "reduce"),
        span(7, 9, "reduce", 1),
        span(9, 10, "optimizer"),
    ]
    for late_s in itertools.product((0.0, -1e-6), repeat=len(given)):
        rounded = [
            replace(one, clock="cuda_event", end_s=one.end_s + late)
            for one, late in zip(given, late_s, strict=True)
        ]
        parts = ledger.phases(STEP, rounded)
        expected = {
            "forward": 2.0,
            "backward": 2.0,
            "reduce": 5.0,
            "optimizer": 1.0,
            UNATTRIBUTED: 0.0,
        }
        assert parts == pytest.approx(expected, abs=1e-5)
        assert math.fsum(parts.values()) == pytest.approx(STEP.seconds, abs=1e-12)


def test_phases_are_named_in_order_with_the_rest_last() -> None:
    given = [
        span(8, 9, "optimizer"),
        span(0, 3, "scatter"),
        span(3, 5, "forward"),
        span(5, 6, "forward", 1),
    ]
    assert list(ledger.phases(STEP, given)) == ["scatter", "forward", "optimizer", UNATTRIBUTED]
    assert ledger.phases(STEP, given)["forward"] == pytest.approx(3)
    assert ledger.phases(STEP, [span(0, 10)])[UNATTRIBUTED] == 0


def test_a_trial_has_a_ledger_for_every_step_and_strays_are_dropped() -> None:
    steps = (Step(10.0, True, 110.0), Step(5.0, False, 115.0))
    given = (span(0, 4), span(10, 12, "loss", step=1), span(0, 1, step=2), span(0, 1, step=-1))
    trial = Trial(case=Case(model="mlp", strategy="dp", batch_size=4), steps=steps, spans=given)
    first, second = trial.ledger.phases
    assert first == pytest.approx({"forward": 4, UNATTRIBUTED: 6})
    assert second == pytest.approx({"loss": 2, UNATTRIBUTED: 3})


def concurrency(given: list[Span]) -> tuple[float, float]:
    """Return the sum and the union of the spans of backward in one timed step."""
    return ledger.Ledger([STEP], given).concurrency[Phase.BACKWARD]


def test_a_joint_phase_on_the_host_is_one_and_on_gpus_says_nothing_about_concurrency() -> None:
    both = [span(2, 8, "backward"), span(2.001, 7.999, "backward", 1)]
    assert concurrency(both) == pytest.approx((6 + 5.998, 6))
    assert concurrency([replace(one, clock="host_joint") for one in both]) == pytest.approx((6, 6))
    assert concurrency([replace(one, clock="cuda_event_joint") for one in both]) == (0, 0)
    apart = [*(replace(one, clock="host_joint") for one in both), span(8, 10, "backward", 2)]
    assert concurrency(apart) == pytest.approx((8, 8))


@pytest.mark.parametrize(("schedule", "joint"), [("reference", True), ("local", False)])
def test_the_joint_backward_of_a_step_on_cpu_devices_is_one_phase(
    schedule: str, joint: bool
) -> None:
    clock = HostClock()
    torch.manual_seed(0)
    net, x, y = nn.Linear(16, 4), torch.randn(32, 16), torch.randint(4, (32,))
    step = TrainStep(
        net,
        F.cross_entropy,
        lambda p: torch.optim.SGD(p, lr=0.1),
        ["cpu", "cpu"],
        schedule,
        mark=clock.mark,
    )
    with clock.step(warmup=False):
        step(x, y)
    backward = [span for span in clock.spans() if span.phase is Phase.BACKWARD]
    assert {span.device for span in backward} == {0, 1}
    assert {span.joint for span in backward} == {joint}
    assert not any(
        span.joint for span in clock.spans() if span.phase in (Phase.FORWARD, Phase.LOSS)
    )


# ---------------------------------------------------------------- planted pauses in real steps

PAUSE_S = 0.005
TICK_S = 1e-7
STEPS = 4


class Time:
    """A time that only a reading and a pause move on: the machine's load affects no result."""

    def __init__(self) -> None:
        self.lock, self.at_s = threading.Lock(), 0.0

    def now(self) -> float:
        self.pause(TICK_S)
        return self.at_s

    def pause(self, seconds: float) -> None:
        with self.lock:
            self.at_s += seconds


class Net(nn.Module):
    """A small net that calls `pause` where its second chunk is marked."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.pause = pause

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] == 1:
            self.pause()
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize(
    ("plant", "where"), [("between", REST), ("forward", ("forward", 1))], ids=str
)
def test_a_planted_pause_shows_where_it_was_planted(plant: str, where: tuple[str, int]) -> None:
    time, others = Time(), threading.Semaphore(0)
    clock = HostClock(now=time.now)

    def pause() -> None:
        if plant == "forward":
            for _ in range(2):  # the pause holds up device 1 alone
                assert others.acquire(timeout=60), (
                    "the forward of device 0 or the start of the threads did not end"
                )
            time.pause(PAUSE_S)

    @contextmanager
    def mark(phase: Phase, device: int) -> Iterator[None]:
        with clock.mark(phase, device):
            yield
        if phase is Phase.FORWARD and device != 1:
            others.release()
        if phase is Phase.LOSS and plant == "between":
            time.pause(PAUSE_S)

    torch.manual_seed(0)
    net, x, y = Net(pause), torch.randn(32, 16), torch.randint(4, (32,))
    x[:16, 0], x[16:, 0] = 0, 1  # the second half goes to device 1
    step = TrainStep(
        net,
        F.cross_entropy,
        lambda p: torch.optim.SGD(p, lr=0.1),
        ["cpu", "cpu"],
        "reference",
        mark=mark,
    )
    for _ in range(STEPS):
        with clock.step(warmup=False):
            step(x, y)
    for whole, own in zip(clock.steps(), ledger.by_step(clock.spans(), STEPS), strict=True):
        assert ledger.charge(whole, own)[where] == pytest.approx(PAUSE_S, abs=100 * TICK_S)


def test_a_typical_steps_parts_sum_to_it_and_a_disturbed_step_does_not_count() -> None:
    """Two parts alternate in being slow: their medians, 1 and 1, sum to no step's duration."""
    each = [(1, 9), (9, 1), (1, 9), (9, 1), (1, 9), (9, 1), (1, 500), (0.5, 0.5)]
    steps = tuple(Step(sum(pair), False, 100.0 + sum(pair)) for pair in each)
    spans = tuple(
        made
        for n, (a, b) in enumerate(each)
        for made in (span(0, a, "forward", step=n), span(a, a + b, "backward", step=n))
    )
    warm = Step(7.0, True, 107.0)
    trial = Trial(
        case=Case(model="mlp", strategy="single", batch_size=2), steps=(*steps, warm), spans=spans
    )
    found = trial.ledger.typical()
    assert found["forward"] + found["backward"] == pytest.approx(10)
    assert found["forward"] == pytest.approx(5)
    assert found[UNATTRIBUTED] == 0


@pytest.mark.parametrize(
    ("count", "kept"),
    [(0, []), (1, [0]), (3, [0, 1, 2]), (4, [1, 2]), (6, [1, 2, 3, 4]), (12, [3, 4, 5, 6, 7, 8])],
)
def test_the_middle_half_leaves_out_a_quarter_on_either_side(count: int, kept: list[int]) -> None:
    assert ledger.middle_half(list(range(count))) == kept


def test_a_device_that_begins_the_next_step_early_is_occupied_in_the_present_step() -> None:
    steps = (Step(10.0, True, 110.0), Step(10.0, False, 120.0), Step(10.0, False, 130.0))
    spans = [
        span(0, 10, step=0),
        span(10, 20, step=1),
        span(20, 30, step=2),  # device 0 ends every step
        span(9, 12, "scatter", 1, 1),
        span(13, 16, device=1, step=1),
        span(18, 25, "scatter", 1, 2),
    ]
    occupied = {
        device: [*seconds] for device, seconds in ledger.Ledger(steps, spans).occupied.items()
    }
    assert occupied == {0: [10.0, 10.0], 1: [pytest.approx(2 + 3 + 2), pytest.approx(5)]}


def test_what_a_device_moves_lasts_as_long_as_its_own_spans_wherever_the_step_begins() -> None:
    """Rank 1 ran ahead: its copy lies before the step, and overlaps a part of itself."""
    steps = [Step(1.0, False, 10.0), Step(1.0, False, 11.0)]
    spans = [
        Span(1, Phase.SCATTER, 1, "host", 9.5, 9.8),
        Span(1, Phase.SCATTER, 1, "host", 9.7, 9.9),
        Span(1, Phase.SCATTER, 0, "host", 10.0, 10.25),
        Span(1, Phase.FORWARD, 0, "host", 10.25, 11.0),
    ]
    moved = ledger.Ledger(steps, spans).moved
    assert {key: list(seconds) for key, seconds in moved.items()} == {
        (Phase.SCATTER, 0): pytest.approx([0.0, 0.25]),
        (Phase.SCATTER, 1): pytest.approx([0.0, 0.4]),
    }


def test_a_reduction_of_ranks_begins_when_the_last_one_arrives() -> None:
    """Rank 0 waits from 2 to 6 for rank 1's backward: that is backward, not communication."""
    case = Case(model="mlp", strategy="ddp", batch_size=2, devices=2)
    early = Trial(
        case=case,
        steps=(Step(8.0, False, 108.0),),
        spans=(span(0, 2, "backward"), span(2, 8, "reduce")),
    )
    late = Trial(
        case=case,
        steps=(Step(7.0, False, 107.5),),
        spans=(span(0, 6, "backward", device=1), span(6, 7.5, "reduce", device=1)),
    )
    steps, spans = joined([early, late])
    assert steps == (Step(8.0, False, 108.0),)
    assert {one.start_s - steps[0].start_s for one in spans if one.phase is Phase.REDUCE} == {6.0}
    assert ledger.phases(steps[0], spans) == {"backward": 6.0, "reduce": 2.0, UNATTRIBUTED: 0.0}


def test_a_rank_that_waits_inside_backward_charges_the_phase_of_the_last_rank() -> None:
    """Rank 0, in backward from 1 on, waits from 3 to 6 for rank 1, which is in forward until 4."""
    case = Case(model="mlp", strategy="ddp", batch_size=2, devices=2)
    parts = [
        Trial(
            case=case,
            steps=(Step(8.0, False, 108.0),),
            spans=(
                span(0, forward, device=rank),
                span(forward, 8, "backward", rank),
                span(arrives, 8, "reduce", rank),
            ),
        )
        for rank, forward, arrives in ((0, 1, 3), (1, 4, 6))
    ]
    for order in (parts, parts[::-1]):
        steps, spans = joined(order)
        assert ledger.phases(steps[0], spans) == {
            "forward": 4.0,
            "backward": 2.0,
            "reduce": 2.0,
            UNATTRIBUTED: 0.0,
        }
    spans = tuple(
        replace(one, end_s=108.0 - 1e-7) if one.phase is Phase.BACKWARD and not one.device else one
        for part in parts
        for one in part.spans
    )
    early = [
        replace(part, spans=tuple(s for s in spans if s.device == i))
        for i, part in enumerate(parts)
    ]
    steps, spans = joined(early)
    assert ledger.phases(steps[0], spans)["forward"] == 4.0  # rank 0's clock is 0.1 us behind


def test_a_rank_that_left_before_another_arrived_has_reduced_nothing() -> None:
    case = Case(model="mlp", strategy="ddp", batch_size=2, devices=2)
    gone = Trial(case=case, steps=(Step(4.0, False, 104.0),), spans=(span(2, 3, "reduce"),))
    late = Trial(
        case=case, steps=(Step(8.0, False, 108.0),), spans=(span(6, 8, "reduce", device=1),)
    )
    _, spans = joined([gone, late])
    assert [s.end_s - s.start_s for s in spans] == [0.0, 2.0]
