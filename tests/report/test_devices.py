"""Memory by phase as a report tells it: device 0's excess, in bytes and by phase.

And the tables on devices.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dpbench.analysis import imbalance
from dpbench.records import UNATTRIBUTED, Case, Memory, Phase, Sample, Span, Step, Trial, Verified
from dpbench.report import devices, markdown, page
from dpbench.report.section import Section
from tests.trials import report_on

DP = Case(model="mlp", strategy="dp", schedule="reference", batch_size=30, devices=3)
PEAKS = {
    "forward": (100, 80, 60),
    "reduce": (400, 90, 110),
    "gather": (150, 100, 50),
    UNATTRIBUTED: (400, 10, 10),
}
SHAPES = {
    "parameter_tensors": 2,
    "parameter_bytes": 2**20,
    "trainable_bytes": 2**20,
    "buffer_bytes": 0,
    "input_bytes": 1.0,
    "target_bytes": 1.0,
    "output_bytes": 0.0,
}


def trial(case: Case = DP, *, number: int = 0, grown: int = 0, **changed: Any) -> Trial:
    """Return a trial with peaks by phase, busy time and a reduction of half a second."""
    steps = tuple(Step(1.0, k == 0, 10.0 + k) for k in range(6))
    imbalance = tuple(
        Memory(d, size + grown, "ledger", phase, kind)
        for phase, sizes in PEAKS.items()
        for d, size in enumerate(sizes[: case.devices])
        for kind in ("allocated", "reserved")
    )
    values = {
        "verified": Verified.BITWISE,
        "steps": steps,
        "round": number,
        "memory": (*imbalance, Memory(-1, 9999, "rss")),
        "spans": tuple(
            Span(k, Phase.REDUCE, 0, "host", s.end_s - 0.5, s.end_s) for k, s in enumerate(steps)
        ),
        "samples": tuple(
            Sample(s.end_s, d, "busy_s", 0.2 + 0.2 * (d == 0))
            for s in steps
            for d in range(case.devices)
        ),
        "provenance": {"model": SHAPES},
    } | changed
    return Trial(case=case, **values)


def test_the_excess_names_its_phase_and_its_bytes() -> None:
    (found,) = imbalance.footprints([trial()])
    assert found.whole == {0: 400, 1: 100, 2: 110}
    assert found.top == "reduce"  # the phase before the unattributed rest, which holds as much
    assert found.excess_bytes == 400 - 105
    assert list(found.peaks) == ["forward", "gather", "reduce", UNATTRIBUTED]  # the order of a step
    assert found.basis == "ledger"


def test_peaks_are_the_highest_over_trusted_rounds() -> None:
    wrong = trial(number=2, grown=1000, verified=Verified.NO)
    (found,) = imbalance.footprints([trial(), trial(number=1, grown=7), wrong])
    assert found.peaks["forward"] == {0: 107, 1: 87, 2: 67}


def test_a_peak_of_any_round_counts_wherever_it_is() -> None:
    """Neither the smallest peak nor that of the last round: what a device needed once must fit."""
    rounds = [trial(number=number, grown=grown) for number, grown in enumerate((3, 9, 0))]
    (found,) = imbalance.footprints(rounds)
    assert found.peaks["forward"] == {0: 109, 1: 89, 2: 69}
    assert found.whole == {0: 409, 1: 109, 2: 119}
    used = [
        replace(
            one,
            samples=tuple(
                Sample(12.0 + k, 0, "memory_used_bytes", size) for k, size in enumerate(sizes)
            ),
        )
        for one, sizes in zip(rounds, ([10, 40, 20], [30, 70, 50], [60, 20, 10]), strict=True)
    ]
    (found,) = imbalance.footprints(used)
    assert found.used == {0: 70}


def test_nvml_tells_what_is_in_use_on_the_cases_own_devices() -> None:
    base = trial()
    readings = tuple(
        Sample(t, d, "memory_used_bytes", 1000.0 * (d + 1) + t)
        for d in range(5)
        for t in (12.0, 14.0, 13.0)
    )
    given = replace(base, samples=(*base.samples, *readings))
    (found,) = imbalance.footprints([given])
    assert found.used == {0: 1014, 1: 2014, 2: 3014}
    assert cells(parts([given])["memory-by-phase"], 0)["in use, NVML"] == ("1,014 B", "2.46 KiB")


def test_one_device_has_no_excess_and_whole_steps_have_no_phase() -> None:
    (found,) = imbalance.footprints([trial(replace(DP, devices=1))])
    assert found.excess_bytes is None
    assert (
        imbalance.footprints([trial(memory=(Memory(0, 5, "allocator"), Memory(1, 5, "allocator")))])
        == []
    )


# ---------------------------------------------------------------- tables


def parts(trials: list[Trial]) -> dict[str, Section]:
    report = report_on(trials)
    return {part.id: part for part in devices.parts(report)}


def cells(part: Section, line: int) -> dict[str, tuple[str, str]]:
    (table,) = part.tables
    return {
        name: (cell.text, cell.small)
        for name, cell in zip(table.columns, table.lines[line], strict=True)
    }


def test_the_tables_say_what_was_found() -> None:
    single = replace(DP, strategy="single", schedule="", devices=1)
    ddp = replace(DP, strategy="ddp", schedule="")
    found = parts([*(trial(case, number=n) for case in (DP, ddp) for n in range(3)), trial(single)])
    assert list(found) == ["phases", "imbalance", "memory-by-phase", "links"]
    busy = cells(found["imbalance"], 0)
    assert busy["quantity"] == ("busy time", "thread CPU time")
    assert busy["device 0"] == ("400 ms", "")
    assert busy["device 0 / others"] == ("2.00×", "2.00–2.00")
    assert busy["control, ddp"] == ("2.00×", "2.00–2.00")
    assert busy["verdict"] == ("not distinguishable from the control", "")
    assert busy["single"] == ("400 ms", "")
    imbalance = cells(found["memory-by-phase"], 0)
    assert imbalance["excess of device 0"] == ("295 B", "peak in reduce")
    assert imbalance["reduce"] == ("400 B", "100 B")
    assert imbalance["backward"] == ("", "")
    lines = [cells(found["links"], n) for n in range(len(found["links"].tables[0].lines))]
    (reduce,) = [
        line for line in lines if line["phase"][0] == "reduce" and line["case"][0].startswith("dp")
    ]
    assert reduce["direction"] == ("each → 0", "")
    assert reduce["bytes per step"] == ("2.00 MiB", "")
    assert reduce["device ms"] == ("500", "")
    assert reduce["GB/s"] == ("0.00419", "")
    (ring,) = [
        line for line in lines if line["phase"][0] == "reduce" and line["case"][0].startswith("ddp")
    ]
    assert (ring["direction"], ring["GB/s"]) == (("a ring", ""), ("", ""))
    assert all(part.labels == ("MEASURED", "CPU-ONLY") for part in found.values())


def test_what_a_run_does_not_have_makes_no_section() -> None:
    bare = trial(replace(DP, strategy="single", schedule="", devices=1), provenance={}, memory=())
    assert parts([bare]) == {}


@pytest.mark.parametrize("form", [page.render, markdown.render])
def test_page_and_markdown_have_the_tables(form: Any) -> None:
    trials = [trial(number=n) for n in range(3)]
    text = form(report_on(trials))
    for title in ("Device 0 against the others", "Memory by phase", "Bytes over links"):
        assert re.search(rf"<(h2|summary)>[^<]*{title}<", text), title
    assert "295 B" in text
    assert text.count("peak in reduce") == 1
