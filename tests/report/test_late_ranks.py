"""The picture of ranks and steps: a stroke for each wait, none for the rank that was last."""

from __future__ import annotations

import pytest

from dpbench.analysis.arrivals import Collective
from dpbench.measure import merging
from dpbench.report import late_ranks, small_multiples, svg
from tests.analysis.test_arrivals import FIRST, LAST, rank
from tests.observe.test_reports import report


def test_a_run_with_ranks_has_the_picture_of_its_arrivals() -> None:
    merged = merging.merge([rank(0, FIRST, steps=8), rank(1, LAST, steps=8)])
    found = report([merged])
    with svg.theme():
        section = late_ranks.section(found.rows, found.arrivals, "ranks")
    assert section is not None
    (panel,) = section.panels
    assert "Rank 1 arrived last at 14 of 14 collectives in 7 steps." in panel.caption
    assert "a rank waits 15.0 ms on average, and the transfer takes 10.0 ms" in panel.caption
    assert "rank 0: 15.0 ms (median), up to 20.0 ms" in panel.svg
    assert "rank 1: 0 ms (median)" in panel.svg


@pytest.mark.parametrize(
    ("more", "said"),
    [(0, ""), (1, "1 more case is not drawn."), (2, "2 more cases are not drawn.")],
)
def test_the_cases_that_are_not_drawn_are_counted(
    monkeypatch: pytest.MonkeyPatch, more: int, said: str
) -> None:
    merged = merging.merge([rank(0, FIRST, steps=8), rank(1, LAST, steps=8)])
    found = report([merged])
    monkeypatch.setattr(small_multiples, "PANELS", 1)
    with svg.theme():
        section = late_ranks.section(found.rows * (1 + more), found.arrivals, "ranks")
    assert section is not None
    assert section.note == said


def test_a_run_without_arrivals_has_no_picture() -> None:
    found = report([rank(0, FIRST, steps=8)])
    assert found.arrivals == {}
    assert late_ranks.section(found.rows, found.arrivals, "ranks") is None


def test_the_buckets_of_a_step_stand_side_by_side() -> None:
    waits = [(0, 0.0), (0, 1.0), (1, 2.0), (1, 0.0), (1, 1.0)]
    buckets = [Collective(step=step, waits_s=(one, 0.0), transfer_s=0.1) for step, one in waits]
    places = late_ranks._places(buckets)
    assert places == pytest.approx([0.25, 0.75, 1 + 1 / 6, 1.5, 1 + 5 / 6])


def test_ranks_beyond_those_that_are_drawn_are_named() -> None:
    for ranks, named in ((late_ranks.RANKS, False), (late_ranks.RANKS + 1, True)):
        waits_s = (0.001,) * (ranks - 1) + (0.0,)
        said = late_ranks._said([Collective(step=0, waits_s=waits_s, transfer_s=0.001)])
        assert ("are drawn" in said) is named
