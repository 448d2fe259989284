"""Odd runs: every reader shows each case with its result, or with the reason why it has none."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from dpbench.analysis import frames, summary
from dpbench.analysis.findings import text
from dpbench.cli.tables import table
from dpbench.records import HOST, Case, Memory, Phase, Sample, Span, Status, Step, Trial, Verified
from dpbench.report import markdown, page
from dpbench.store import export
from tests import exported
from tests.amounts import amounts
from tests.trials import report_on

SINGLE = Case(model="mlp", strategy="single", batch_size=1)
DP = replace(SINGLE, strategy="dp", schedule="reference", devices=2)
DDP = replace(DP, strategy="ddp", schedule="")
METRICS = ("busy_s", "kernel_busy_s", "memory_used_bytes", "energy_j", "utilization_ratio")


def trial(
    case: Case, seconds: Sequence[float] = (0.01,) * 5, *, number: int = 0, **changes: Any
) -> Trial:
    """Return a trial of one warm-up step and these timed steps, each of which is all forward."""
    steps = tuple(Step(one, k == 0, 1.0 + k) for k, one in enumerate((0.5, *seconds)))
    spans = tuple(Span(k, Phase.FORWARD, 0, "host", k + 0.9, k + 1.0) for k in range(len(steps)))
    given = {
        "verified": Verified.BITWISE,
        "round": number,
        "steps": steps,
        "spans": spans,
    } | changes
    return Trial(case=case, **given)


def rounds(case: Case, count: int = 3, **changes: Any) -> list[Trial]:
    return [trial(case, number=number, **changes) for number in range(count)]


def empty_device(case: Case, count: int = 3) -> list[Trial]:
    """Return rounds in which device 1 has no row of the batch, hence no memory and no busy time."""
    memory = (Memory(0, 1000, "ledger"), Memory(1, 0, "ledger"), Memory(HOST, 5000, "rss"))
    samples = tuple(Sample(2.0 + k, d, "busy_s", 0.01 * (d == 0)) for k in range(5) for d in (0, 1))
    return rounds(case, count, memory=memory, samples=samples)


ODD: dict[str, list[Trial]] = {
    "no trial": [],
    "one device without rows": [*rounds(SINGLE), *empty_device(DP), *rounds(DDP)],
    "one failed": [
        *rounds(SINGLE),
        Trial(case=DP, status=Status.FAILED, reason="planted\nin forward"),
    ],
    "all failed": [
        Trial(case=DP, status=Status.OOM, reason="planted"),
        Trial(case=SINGLE, status=Status.TIMEOUT),
    ],
    "no steps": [*rounds(SINGLE), Trial(case=DP, verified=Verified.BITWISE)],
    "warm-up alone": [*rounds(SINGLE), trial(DP, ())],
    "one step": [trial(SINGLE, (0.01,)), trial(DP, (0.02,))],
    "one round": [trial(SINGLE), trial(DP)],
    "one device": rounds(SINGLE),
    "zero seconds": [*rounds(SINGLE), *[trial(DP, (0.01, 0.0), number=n) for n in range(3)]],
    "not a number": [*rounds(SINGLE), *[trial(DP, (0.01, math.nan), number=n) for n in range(3)]],
    "infinite seconds": [
        *rounds(SINGLE),
        *[trial(DP, (0.01, math.inf), number=n) for n in range(3)],
    ],
    "one round of zero seconds": [*rounds(SINGLE), *rounds(DP), trial(DP, (0.0,), number=3)],
    "unverified": [*rounds(SINGLE), trial(DP, verified=Verified.NO, reason="planted difference")],
    "no spans": [*rounds(SINGLE), *rounds(DP, spans=())],
    "idle device 0": (
        rounds(DP, samples=tuple(Sample(2.0, d, "busy_s", float(d)) for d in (0, 1)))
        + rounds(
            replace(DP, batch_size=2),
            samples=tuple(Sample(2.0, d, "busy_s", float(d)) for d in (0, 1)),
        )
    ),
    "no parameters": rounds(
        DP,
        spans=(Span(1, Phase.REPLICATE, 0, "host", 1.9, 2.0),),
        provenance={"model": {"parameter_tensors": 0, "buffer_tensors": 0, "modules": 1}},
    ),
}


def readers(trials: list[Trial]) -> dict[str, str]:
    """Return what each reader shows of a run."""
    content = report_on(trials)
    rows = content.rows
    shown = {
        "table": (
            table(rows, content.ladders)
            + "\n".join([*content.notes, *map(str, content.statements)])
        ),
        "page": page.render(content),
        "markdown": markdown.render(content),
        "explain": text.render(content.diagnoses, rows),
        "csv": frames.frame(rows).to_csv(),
        "jsonl": "".join(export.jsonl(content.run.id, trials)),
    }
    for line in shown["jsonl"].splitlines():
        exported.strict(line)
    if trials:
        shown["trace"] = "".join(
            export.trace(content.run.id, {}, export.pick(trials, every=True), summary.labels)
        )
    if any(row.step for row in rows):
        shown["pyperf"] = export.pyperf(content.run.id, {}, trials, summary.labels)
    return shown


@pytest.mark.parametrize("name", ODD)
def test_every_reader_shows_every_odd_case_with_its_reason(name: str) -> None:
    trials = ODD[name]
    shown = readers(trials)
    rows = summary.rows(trials)
    assert len(list(csv.DictReader(io.StringIO(shown["csv"])))) == len(rows)
    assert shown["page"].count('<tbody class="case"') == len(rows)
    for row in rows:
        if row.step is None:
            assert row.outcome != "ok"
            reason = row.reason.partition("\n")[0]
            assert reason
            for reader in ("table", "csv", "page", "explain"):
                assert row.outcome in shown[reader], reader
                assert reason in shown[reader], reader
    for reader in ("table", "markdown", "explain"):
        said = shown[reader].replace("took nan s", "").replace("took inf s", "")
        assert not re.search(r"\b(nan|inf)\b", said), reader


numbers = st.sampled_from([0.0, math.nan, math.inf, -1.0, 1e-9, 1e-3, 1e-3, 0.5, 1e6])
verified = st.sampled_from([*Verified, Verified.BITWISE, Verified.BITWISE])
statuses = st.sampled_from([*Status, Status.OK, Status.OK, Status.OK, Status.OK])


@st.composite
def trials_(draw: st.DrawFn) -> Trial:
    strategy = draw(st.sampled_from(["single", "dp", "ddp", "single_all_cores"]))
    case = Case(
        model="mlp",
        strategy=strategy,
        batch_size=draw(st.integers(1, 4)),
        devices=draw(st.integers(1, 3)) if strategy in ("dp", "ddp") else 1,
        schedule=draw(st.sampled_from(["reference", "cached", "pool"])) if strategy == "dp" else "",
        device_kind=draw(st.sampled_from(["cpu", "cpu", "emulated", "cuda"])),
    )
    seconds = draw(st.lists(numbers, max_size=4))
    memory = draw(
        st.lists(
            st.builds(
                Memory,
                st.integers(HOST, 3),
                st.sampled_from([0, 1, 2**40]),
                st.sampled_from(["ledger", "allocator"]),
                st.sampled_from(["", "forward"]),
            ),
            max_size=4,
        )
    )
    finite = st.sampled_from([0.0, 1e-9, 0.5, 1e9])  # the store keeps no others
    samples = draw(
        st.lists(
            st.builds(
                Sample,
                st.sampled_from([0.0, 2.0, 3.0]),
                st.integers(HOST, 3),
                st.sampled_from(METRICS),
                finite,
            ),
            max_size=6,
        )
    )
    return trial(
        case,
        seconds,
        number=draw(st.integers(0, 3)),
        status=draw(statuses),
        verified=draw(verified),
        memory=tuple(memory),
        samples=tuple(samples),
        reason=draw(st.sampled_from(["", "planted", "a\nb"])),
        **({"spans": ()} if draw(st.booleans()) else {}),
    )


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(trials_(), max_size=8))
def test_no_run_makes_a_reader_fail(trials: list[Trial]) -> None:
    shown = readers(trials)
    assert shown.pop("jsonl").count("\n") == len(trials)
    assert all(shown.values())


def test_a_device_without_rows_is_not_one_of_the_others() -> None:
    rows = {row.case.strategy: row for row in summary.rows(ODD["one device without rows"])}
    assert rows["dp"].memory_imbalance is None
    assert rows["dp"].imbalance is None
    three = replace(DP, devices=3, batch_size=2)
    memory = tuple(Memory(device, size, "ledger") for device, size in enumerate((300, 100, 0)))
    (row,) = summary.rows(rounds(three, memory=memory))
    assert row.memory_imbalance == pytest.approx(3.0)


def test_a_round_without_result_is_told_beside_the_others() -> None:
    content = report_on(ODD["one round of zero seconds"])
    row = next(row for row in content.rows if row.case == DP)
    assert (row.outcome, row.rounds, row.fault) == ("ok", 3, None)
    (lost,) = (one for one in content.statements if one.key == "lost_rounds")
    assert [case for case, _ in lost.cases] == [DP]
    assert amounts(lost.text)[0] == "0.0 s"
    assert "bad clock in round 4" in page.render(content)


def test_compare_shows_a_case_that_lost_its_result_and_does_not_call_it_well(
    dpbench: exported.Command, tmp_path: Path
) -> None:
    exported.stored(tmp_path / "a.db", *rounds(SINGLE), *rounds(DP))
    lost = Trial(case=DP, status=Status.FAILED, reason="planted")
    exported.stored(tmp_path / "b.db", *rounds(SINGLE), lost)
    code, out, _ = dpbench("compare", "a.db", "b.db")
    assert code == 3
    assert [line.split()[0] for line in exported.compared(out)] == ["same", "undecided"]
    for sides, run in ((("a.db", "b.db"), "after"), (("b.db", "a.db"), "before")):
        reasons = json.loads(dpbench("compare", *sides, "--json")[1])["lost"]
        assert [*reasons] == [DP.label]
        assert f'"{run}": {lost.reason}' in reasons[DP.label]
        assert f"{DP.label}: {reasons[DP.label]}\n" in dpbench("compare", *sides)[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "--md"),
        ("explain",),
        ("export", "csv"),
        ("export", "jsonl"),
        ("export", "pyperf"),
        ("list", "runs"),
    ],
    ids=" ".join,
)
def test_the_reading_commands_end_well_on_a_device_without_rows(
    dpbench: exported.Command, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    exported.stored(tmp_path / "dpbench.db", *ODD["one device without rows"])
    code, out, err = dpbench(*arguments)
    assert (code, err) == (0, "")
    assert out
