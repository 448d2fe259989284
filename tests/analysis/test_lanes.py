"""The timeline of a median step, and its swim lanes: known bars, idle time and critical path."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from html import unescape
from itertools import pairwise
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from dpbench.analysis import lanes, summary
from dpbench.analysis.lanes import Bar, Lanes
from dpbench.records import HOST, Case, Phase, Source, Span, Step, Trial, Verified
from dpbench.report import svg, swim_lanes
from dpbench.report.section import Panel, Section
from tests.amounts import amounts
from tests.records.test_ledger import STEP, span, spans
from tests.trials import report_on

DP = Case(model="mlp", strategy="dp", schedule="reference", devices=2, batch_size=64)
SINGLE = Case(model="mlp", strategy="single", batch_size=64)
GIVEN = [
    span(1, 5, "forward", HOST),
    span(1, 3, "forward", 0),
    span(2, 5, "forward", 1),
    span(5, 6, "gather", 0),
    span(6, 8, "backward", 0),
    span(7, 8.5, "reduce", 0),
    span(9, 10, "optimizer", 0),
]
"""The spans of a step of 10 s: device 1 works only in the forward, and no phase is open in the
first second.
"""


def trial(
    case: Case, seconds: list[float], number: int = 0, given: list[Span] = GIVEN, **more
) -> Trial:
    """Return a trial of two warm-up steps and these timed steps, with the spans scaled to each."""
    steps, placed, end = [], [], 0.0
    for index, took in enumerate([7.0, 7.0, *seconds]):
        end += took
        steps.append(Step(took, index < 2, end))
        scale = took / 10
        placed += [
            replace(
                s,
                step=index,
                start_s=end - took + (s.start_s - 100) * scale,
                end_s=end - took + (s.end_s - 100) * scale,
            )
            for s in given
        ]
    return Trial(
        case=case,
        round=number,
        verified=Verified.BITWISE,
        steps=tuple(steps),
        spans=tuple(placed),
        **more,
    )


def of(*trials: Trial) -> Lanes:
    """Return the timeline of the only case of some trials."""
    (found,) = lanes.of_rows(summary.rows(trials), trials).values()
    return found


def test_bars_idle_time_and_critical_path_of_a_known_step() -> None:
    given = Trial(case=DP, verified=Verified.BITWISE, steps=(STEP,), spans=tuple(GIVEN))
    found = of(given)
    assert (found.step, found.round, found.seconds, found.timed) == (0, 0, 10.0, 1)
    assert [lane.device for lane in found.lanes] == [HOST, 0, 1]
    host, first, second = found.lanes
    assert host.bars == (Bar(HOST, Phase.FORWARD, 1, 5),)
    # reduce overlaps backward, and is on a second row
    assert [(bar.phase, bar.start_s, bar.end_s, bar.row) for bar in first.bars] == [
        ("forward", 1, 3, 0),
        ("gather", 5, 6, 0),
        ("backward", 6, 8, 0),
        ("reduce", 7, 8.5, 1),
        ("optimizer", 9, 10, 0),
    ]
    assert (first.rows, second.rows) == (2, 1)
    assert first.idle == ((0, 1), (3, 5), (8.5, 9))
    assert second.idle == ((0, 2), (5, 10))
    assert second.idle_s == 7
    path = [
        (part.bar and (part.bar.device, part.bar.phase), part.start_s, part.end_s)
        for part in found.path
    ]
    assert path == [
        (None, 0, 1),
        ((0, "forward"), 1, 2),
        ((1, "forward"), 2, 5),
        ((0, "gather"), 5, 6),
        ((0, "backward"), 6, 7),
        ((0, "reduce"), 7, 8.5),
        (None, 8.5, 9),
        ((0, "optimizer"), 9, 10),
    ]


@hypothesis.given(st.lists(spans, min_size=1, max_size=8, unique=True))
def test_the_critical_path_is_the_step_and_idle_time_is_the_rest_of_each_lane(
    given: list[Span],
) -> None:
    found = of(Trial(case=DP, verified=Verified.BITWISE, steps=(STEP,), spans=tuple(given)))
    edges = [0.0, *(part.end_s for part in found.path)]
    assert edges[-1] == pytest.approx(10)
    assert [one.start_s for one in found.path] == edges[:-1]
    assert math.fsum(one.end_s - one.start_s for one in found.path) == pytest.approx(10)
    for one in found.path:
        if one.bar:
            (lane,) = [lane for lane in found.lanes if lane.device == one.bar.device]
            assert one.bar in lane.bars
            assert one.bar.start_s <= one.start_s
            assert one.end_s <= one.bar.end_s
            assert any(s.phase is one.bar.phase and s.device == one.bar.device for s in given)
    for lane in found.lanes:
        ticks = [k / 10 + 0.05 for k in range(100)]
        idle = [any(start < at < end for start, end in lane.idle) for at in ticks]
        assert idle == [not any(bar.start_s < at < bar.end_s for bar in lane.bars) for at in ticks]
        for row in range(lane.rows):
            ends = sorted((bar.start_s, bar.end_s) for bar in lane.bars if bar.row == row)
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_the_step_is_the_median_of_the_round_closest_to_the_case() -> None:
    rounds = [
        trial(DP, seconds, i) for i, seconds in enumerate(([5, 1, 9], [2, 8, 4], [30, 20, 10]))
    ]
    found = of(*rounds)
    # the medians of the rounds are 5, 4 and 20; the case's is 5, that of the step with index 2,
    # after two warm-up steps
    assert (found.round, found.step, found.seconds, found.timed) == (0, 2, 5, 3)
    even = of(trial(DP, [4, 1, 3, 2]))
    assert (even.step, even.seconds) == (5, 2)


DDP = Case(model="mlp", strategy="ddp", devices=2, batch_size=64)


def ranks_of_which_one_ran_ahead(*, lead: float = 6.0) -> Trial:
    """Return a trial of two ranks: rank 1 begins the second step `lead` seconds before rank 0.

    Rank 1 computes for 5 s, and then waits for rank 0, which computes for 5 s too. Both reduce for
    2 s. Rank 1 ends the step 1 s before rank 0, and begins the next one at once.
    """
    steps = (Step(10.0, True, 100.0), Step(10.0, False, 110.0))
    given = [
        span(0, 2, device=0, step=1),
        span(2, 5, "backward", 0, 1),
        span(5, 7, "reduce", 0, 1),
        span(7, 10, "optimizer", 0, 1),
        span(-lead, 2 - lead, device=1, step=1),
        span(2 - lead, 5 - lead, "backward", 1, 1),
        span(5, 7, "reduce", 1, 1),
        span(7, 9, "optimizer", 1, 1),
        span(9, 12, device=1, step=2),
        span(-2 - lead, -lead, "optimizer", 1, 0),
        span(-3, 0, "optimizer", 0, 0),
    ]
    return Trial(case=DDP, verified=Verified.BITWISE, steps=steps, spans=tuple(given))


@pytest.mark.parametrize("lead", [6.0, 3.0])
def test_phases_of_a_rank_that_ran_ahead_are_drawn_where_they_were_and_are_not_idle_time(
    lead: float,
) -> None:
    ran_ahead = ranks_of_which_one_ran_ahead(lead=lead)
    for given in (ran_ahead, ran_ahead.summary()):
        first, second = of(given).lanes
        assert (first.begin_s, first.idle, first.idle_share) == (0, (), 0)
        assert [(bar.phase, bar.start_s, bar.end_s, bar.step) for bar in second.bars] == [
            ("forward", -lead, 2 - lead, 0),
            ("backward", 2 - lead, 5 - lead, 0),
            ("reduce", 5, 7, 0),
            ("optimizer", 7, 9, 0),
            ("forward", 9, 10, 1),
        ]
        assert second.idle == ((5 - lead, 5),)
        assert (second.begin_s, second.idle_share) == (-lead, lead / (10 + lead))


def test_a_rank_that_ran_ahead_is_drawn_from_before_the_step_on() -> None:
    (panel,) = section(*(replace(ranks_of_which_one_ran_ahead(), round=i) for i in range(3))).panels
    found = bars(panel.svg)
    forward = found["forward on device 1", "2.00 s", "-6.00 s", "20%"]
    backward = found["backward on device 1", "3.00 s", "-4.00 s", "30%"]
    (following,) = (box for said, box in found.items() if said[1:] == ("1.00 s", "9.00 s", "10%"))
    first = found["forward on device 0", "2.00 s", "0 ms", "20%", "2.00 s"]
    unit = (first[2] - first[0]) / 2
    for box, start, seconds in ((forward, -6, 2), (backward, -4, 3), (following, 9, 1)):
        assert box[2] - box[0] == pytest.approx(unit * seconds, abs=0.02)
        assert box[0] - first[0] == pytest.approx(unit * start, abs=0.02)
    assert amounts(panel.caption)[-4:] == ["0", "0.0%", "1", "38%"]


def test_the_step_is_near_the_median_in_every_phase_on_every_device() -> None:
    """The second timed step takes exactly the median, but its rank 1 had run ahead.

    Backward of the third is long.
    """
    usual = [span(0, 4), span(4, 9, "backward"), span(0, 4, device=1), span(4, 9, "backward", 1)]
    ahead = [*usual[:2], span(-5, -1, device=1), span(-1, 9, "backward", 1)]
    long = [span(0, 1), span(1, 9, "backward"), *usual[2:]]
    seconds, given = [9.995, 10.0, 10.0, 10.01, 10.02], [usual, ahead, long, usual, usual]
    steps, spans_, end = [], [], 0.0
    for number, (took, own) in enumerate(zip(seconds, given, strict=True)):
        end += took
        steps.append(Step(took, False, end))
        at = end - took - 100
        spans_ += [replace(s, step=number, start_s=at + s.start_s, end_s=at + s.end_s) for s in own]
    found = of(Trial(case=DDP, verified=Verified.BITWISE, steps=tuple(steps), spans=tuple(spans_)))
    assert (found.step, found.seconds) == (0, 9.995)


def test_a_joint_phase_is_named_as_one_operation_of_all_devices() -> None:
    both = [replace(span(2, 8, "backward", device), clock="host_joint") for device in (0, 1)]
    given = [span(0, 2), span(0, 2, device=1), *both, span(8, 10, "optimizer")]
    rounds = [trial(DP, [10, 10, 10], i, given=given) for i in range(3)]
    joint = {(lane.device, bar.phase): bar.joint for lane in of(*rounds).lanes for bar in lane.bars}
    assert {key for key, value in joint.items() if value} == {(0, "backward"), (1, "backward")}
    (panel,) = section(*rounds).panels
    found = bars(panel.svg)
    both_lanes = found["joint backward on devices 0, 1", "6.00 s", "2.00 s", "60%", "6.00 s"]
    first, second = (box for said, box in found.items() if said[0].startswith("forward"))
    assert both_lanes[1::2] == (first[1], second[3])
    assert "joint phase (backward)" in panel.caption
    assert "joint" not in drawn().caption


def test_summaries_keep_the_spans_of_one_step_and_give_the_same_timeline() -> None:
    rounds = [
        trial(DP, seconds, i) for i, seconds in enumerate(([5, 1, 9], [2, 8, 4], [30, 20, 10]))
    ]
    short = [one.summary() for one in rounds]
    assert all(not one.spans for one in short)
    assert [len(one.ledger.median_step[1]) for one in short] == [len(GIVEN)] * 3
    assert of(*short) == of(*rounds)


def test_cases_without_trusted_spans_have_no_timeline() -> None:
    rounds = [trial(DP, [1, 2, 3], i, given=[]) for i in range(3)]
    assert lanes.of_rows(summary.rows(rounds), rounds) == {}
    assert not section(*rounds).panels
    assert section(*rounds).note, "it says why nothing is drawn"
    wrong = replace(trial(DP, [1, 2, 3]), verified=Verified.NO)
    assert lanes.of_rows(summary.rows([wrong]), [wrong]) == {}


# ---------------------------------------------------------------- the drawing


def section(*trials: Trial) -> Section:
    """Return the section of swim lanes on some trials."""
    report = report_on(trials)
    with svg.theme():
        return swim_lanes.section(report, report.rows)


@cache
def drawn() -> Panel:
    """Return the panel on dp, which takes 10 s per step, and single, which takes 4 s."""
    rounds = [trial(DP, [10, 10, 10], i) for i in range(3)]
    alone = [span(0, 10, "forward")]
    (panel,) = section(
        *rounds, *(trial(SINGLE, [4, 4, 4], i, given=alone) for i in range(3))
    ).panels
    return panel


BAR = re.compile(
    r'<g[^>]* data-bar=""><title>([^<]*)</title>'
    r'<path d="M ([\d.]+) ([\d.]+) L ([\d.]+) [\d.]+ L [\d.]+ ([\d.]+) [^"]*"'
)


def bars(drawing: str) -> dict[tuple[str, ...], tuple[float, float, float, float]]:
    """Return the left, top, right and bottom edges of each bar of a drawing, by the bar's text.

    It is what the bar shows, then its time, its start, its share of the step and, on the critical
    path, the time for which the step waits for it.
    """
    return {
        (name, *amounts(numbers)): tuple(map(float, edges))
        for said, *edges in BAR.findall(drawing)
        for name, _, numbers in [unescape(said).partition(": ")]
    }


def idle_of(found: dict[tuple[str, ...], Any], device: int) -> Any:
    """Return the box of a device's idle stretch, which says what the step waits for."""
    (box,) = [
        box
        for (name, *numbers), box in found.items()
        if re.fullmatch(rf"device {device} idle, waiting for \w+ on device 0", name)
        and numbers == ["5.00 s", "5.00 s", "50%"]
    ]
    return box


def test_bars_share_one_axis_and_say_their_phase_device_time_and_share() -> None:
    panel = drawn()
    found = bars(panel.svg)
    assert len(found) == panel.svg.count("data-bar") == 1 + 7 + 2 + 3 + 2
    single = found["forward on device 0", "4.00 s", "0 ms", "100%", "4.00 s"]
    backward = found["backward on device 0", "2.00 s", "6.00 s", "20%", "1.00 s"]
    idle = idle_of(found, 1)
    assert ("forward on host", "4.00 s", "1.00 s", "40%") in found, "not on the critical path"
    unit = (single[2] - single[0]) / 4
    for box, start, seconds in ((backward, 6, 2), (idle, 5, 5)):
        assert box[2] - box[0] == pytest.approx(unit * seconds, abs=0.02)
        assert box[0] - single[0] == pytest.approx(unit * start, abs=0.02)
    reduce = found["reduce on device 0", "1.50 s", "7.00 s", "15%", "1.50 s"]
    assert reduce[1] >= backward[3]  # bars that overlap in time are on different rows


def test_the_outline_is_the_critical_path() -> None:
    panel = drawn()
    found = bars(panel.svg)
    outlines = re.findall(
        r'd="([^"]*)" fill="none"[^>]* stroke="var\(--fg\)" stroke-width="([\d.]+)"', panel.svg
    )
    (dp,) = [path for path, width in outlines if width == "1.3" and path.count("z") > 1]
    edges = [
        tuple(map(float, box))
        for box in re.findall(r"M (\S+) (\S+) L (\S+) \S+ L \S+ (\S+) L \S+ \S+ L \S+ \S+ z", dp)
    ]
    critical = {
        said: box
        for said, box in found.items()
        if len(said) == 5 and said[1:3] != ("4.00 s", "0 ms")
    }
    assert len(edges) == len(critical) == 6
    idle = idle_of(found, 1)
    second = (idle[2] - idle[0]) / 5
    for box, (said, bar) in zip(
        edges, sorted(critical.items(), key=lambda one: one[1][0]), strict=True
    ):
        seconds = float(said[-1].removesuffix(" s"))
        assert box[0] == pytest.approx(bar[0], abs=0.02)
        assert box[1::2] == pytest.approx(bar[1::2], abs=0.02)
        assert box[2] - box[0] == pytest.approx(seconds * second, abs=0.03)
    gaps = re.findall(r'<path d="([^"]*)" fill="var\(--muted\)"', panel.svg)
    assert len(gaps) == 2 + 1, "two in the lanes, and one in the legend"


def test_phases_are_written_on_their_bars_and_idle_on_the_gaps() -> None:
    panel = drawn()
    said = re.findall(r">([^<>]+)</text>", panel.svg)
    assert {
        "dev 0",
        "dev 1",
        "host",
        "forward",
        "backward",
        "gath",
        "opt",
        "idle",
        "critical path",
    } <= set(said)
    assert panel.labels == ("MEASURED", "CPU-ONLY")
    assert amounts(panel.caption) == ["2", "0", "35%", "1", "70%"]
    description = re.search(r"<desc[^>]*>(.*?)</desc>", panel.svg)[1]
    which, on_1, path = (
        description[description.index("dp ×2") :].partition(mark)[2]
        for mark in ("dp ×2", "device 1", "path")
    )
    assert amounts(which)[:4] == ["10.0 s", "2", "1", "3"], "its step, round and timed steps"
    assert amounts(on_1)[:2] == ["3.00 s", "7.00 s"], "forward and idle"
    assert amounts(path)[:5] == ["1.50 s", "0", "1.00 s", "1", "3.00 s"], "after which, on which"


def test_a_panel_has_the_cases_on_most_devices_and_their_baseline() -> None:
    four = replace(DP, devices=4)
    weak = replace(DP, batch_size=128)
    shown = [
        SINGLE,
        replace(DP, devices=1),
        DP,
        four,
        replace(four, strategy="ddp", schedule=""),
        weak,
    ]
    rows = summary.rows([trial(case, [1, 2, 3]) for case in shown])
    groups = [{row.case for row in group} for group in swim_lanes._groups(rows)]
    assert groups == [{SINGLE, four, replace(four, strategy="ddp", schedule="")}, {SINGLE, weak}]
    alone = summary.rows([trial(SINGLE, [1, 2, 3])])
    assert [[row.case for row in group] for group in swim_lanes._groups(alone)] == [[SINGLE]]


def test_many_devices_are_cut_and_doubtful_and_predicted_steps_say_so() -> None:
    wide = replace(DP, devices=16, device_kind="cuda")
    many = [span(0, 9, "backward", device) for device in range(16)]
    foreseen = trial(replace(wide, schedule=""), [8], given=many, source=Source.PREDICTED)
    (panel,) = section(trial(wide, [10, 10], given=many), foreseen).panels
    assert len(bars(panel.svg)) == 2 * 2 * swim_lanes.DEVICES
    assert "8.00 s, predicted." in panel.svg
    first, second, doubtful = re.split(r"(?<=\.) ", panel.caption)
    for said, label in ((first, "[MEASURED]"), (second, "[PREDICTED]")):
        assert said.startswith(label)
        assert amounts(said) == ["16", "0", "10%", "10%", "8"], "8 devices are not drawn"
    assert doubtful.endswith(": [MEASURED] dp ×16.")
    assert set(panel.labels) >= {"MEASURED", "PREDICTED"}
