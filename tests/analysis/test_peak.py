"""The share of peak of a step, for steps whose seconds and operations are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dpbench.analysis import peak, quantities, statements, summary
from dpbench.analysis.statements import Statement
from dpbench.cli import tables
from dpbench.records import Case, Source, Trial
from dpbench.records.data_sheets import DataSheet
from dpbench.records.facts import Products, RunFacts, TrialHost, stated
from dpbench.records.work import Operations
from dpbench.report import markdown, page, table
from tests.amounts import amounts
from tests.trials import report_on, trial_of

ALONE = Case(model="mlp", strategy="single", batch_size=64, device_kind="cuda")
FOUR = replace(ALONE, strategy="ddp", devices=4)
SHEET = DataSheet(
    gpu="A GPU",
    flop_per_s={"fp32": 20e12, "tf32": 160e12, "bf16": 320e12},
    source="its data sheet",
)
COUNTED = Operations(
    forward=1e9,
    backward=2e9,
    peak_per_s=1e12,
    forward_convolutions=0.8e9,
    backward_convolutions=1.6e9,
    dtype="float32",
)
DEFAULT, TF32, IEEE = (
    Products(*formats) for formats in (("ieee", "tf32"), ("tf32", "tf32"), ("ieee", "ieee"))
)


def trial(of: Case = ALONE, seconds: float = 0.01, *, number: int = 0, **facts: Any) -> Trial:
    """Return a trial with ten steps of these seconds; `facts` replace those of `stated`."""
    known = {"operations": COUNTED, "data_sheet": SHEET, "float32": DEFAULT} | facts
    given = {name: value for name, value in known.items() if value is not None}
    return trial_of(of, [seconds] * 10, round=number, provenance=stated(**given))


def stated_of(trials: Sequence[Trial]) -> Statement | None:
    """Return the statement on an impossible share in a run of these trials."""
    made = statements.made(summary.rows(trials), trials, RunFacts())
    return next((one for one in made if one.key == "peak"), None)


def row(of: Case = ALONE, seconds: float = 0.01, **facts: Any) -> summary.Row:
    trials = [trial(of, seconds, number=number, **facts) for number in range(3)]
    (found,) = summary.rows(trials)
    return found


@pytest.mark.parametrize(
    ("case", "facts", "seconds"),
    [
        # 64 samples of 3 GFLOP: 2.4 in convolutions in TF32, 0.6 in float32
        (ALONE, {}, 64 * (2.4e9 / 160e12 + 0.6e9 / 20e12)),
        (replace(ALONE, precision="tf32"), {"float32": TF32}, 64 * 3e9 / 160e12),
        (ALONE, {"float32": IEEE}, 64 * 3e9 / 20e12),
        (replace(ALONE, precision="bf16"), {}, 64 * 3e9 / 320e12),
        # a forward alone has no backward
        (replace(ALONE, mode="no_grad"), {}, 64 * (0.8e9 / 160e12 + 0.2e9 / 20e12)),
        # the batch is that of all GPUs
        (FOUR, {}, 16 * (2.4e9 / 160e12 + 0.6e9 / 20e12)),
        (replace(FOUR, strategy="fsdp"), {}, 16 * (2.4e9 / 160e12 + 0.6e9 / 20e12)),
        # colocated replicas have one GPU, also if there are four
        (replace(FOUR, placement="colocated"), {}, 64 * (2.4e9 / 160e12 + 0.6e9 / 20e12)),
        # a model in bfloat16 computes in it whatever torch does with float32
        (ALONE, {"operations": replace(COUNTED, dtype="bfloat16")}, 64 * 3e9 / 320e12),
    ],
)
def test_the_share_is_the_seconds_at_the_peaks_of_the_formats_over_the_step(
    case: Case, facts: dict[str, Any], seconds: float
) -> None:
    found = row(case, seconds=0.01, **facts)
    assert found.at_peak is not None
    assert found.at_peak.seconds == pytest.approx(seconds)
    assert found.peak_share is not None
    assert found.peak_share.value == pytest.approx(seconds / 0.01)
    assert found.peak_share.low == pytest.approx(seconds / 0.01)


def test_the_interval_is_that_of_the_step() -> None:
    trials = [trial(seconds=seconds, number=n) for n, seconds in enumerate((0.009, 0.010, 0.011))]
    (found,) = summary.rows(trials)
    assert found.step
    assert found.at_peak
    assert found.peak_share
    at_s = found.at_peak.seconds
    assert found.peak_share.low == pytest.approx(at_s / found.step.high)
    assert found.peak_share.high == pytest.approx(at_s / found.step.low)


def test_a_loop_of_known_products_over_known_time() -> None:
    """1000 products of 4096 x 4096 matrices in float32 are 137.4 TFLOP: 10 s of this GPU's 19.5."""
    operations = 1000 * 2 * 4096**3
    sheet = replace_struct(SHEET, fp32=19.5e12)
    counted = Operations(forward=operations, backward=0.0, peak_per_s=1.0, dtype="float32")
    case = replace(ALONE, batch_size=1, mode="no_grad")
    found = row(case, 10.0, operations=counted, data_sheet=sheet)
    assert found.peak_share
    assert found.peak_share.value == pytest.approx(0.7048, rel=1e-3)


def replace_struct(sheet: DataSheet, **peaks: float) -> DataSheet:
    return DataSheet(gpu=sheet.gpu, flop_per_s={**sheet.flop_per_s, **peaks}, source=sheet.source)


@pytest.mark.parametrize(
    ("case", "facts"),
    [
        (ALONE, {"data_sheet": None}),
        (ALONE, {"operations": None}),
        (ALONE, {"float32": None}),
        (ALONE, {"float32": Products(None, "tf32")}),
        (ALONE, {"operations": replace(COUNTED, dtype="")}),
        (ALONE, {"operations": replace(COUNTED, dtype="float64")}),
        (replace(ALONE, precision="fp16"), {}),  # not in the data sheet
        (replace(ALONE, batch_size=0), {}),
        (ALONE, {"fake_gpus": True}),
        (ALONE, {"gpu": "Fake GPU 0"}),
        (FOUR, {"hosts": (TrialHost("a", "1", (0, 1)), TrialHost("b", "1", (2, 3)))}),
    ],
)
def test_there_is_no_share_where_a_part_is_unknown(case: Case, facts: dict[str, Any]) -> None:
    assert row(case, **facts).peak_share is None
    assert "of peak" not in tables.table([row(case, **facts)])


def test_only_measured_steps_have_a_share() -> None:
    assert peak.at_peak(replace(trial(), source=Source.PREDICTED)) is None


def test_the_table_has_the_share_and_names_the_peaks_with_their_source() -> None:
    text = tables.table([row(), row(FOUR)])
    assert "  of peak\n" in text
    assert " 29%" in text
    assert " 7.2%" in text
    assert row().peak_source.partition(": ")[2] in " ".join(text.split())
    headings = [column.heading for column in table.COLUMNS]
    assert headings.index("of peak") == headings.index("efficiency") + 1


def test_a_share_above_1_is_not_shown_but_stated_with_both_rates() -> None:
    """1 ms a step of 192 GFLOP are 192 TFLOP/s; the peaks of its parts take 2.88 ms, so 66.7."""
    trials = [trial(seconds=0.001, number=number) for number in range(3)]
    rows = summary.rows(trials)
    assert rows[0].peak_share is None
    assert "of peak" not in tables.table(rows)
    said = stated_of(trials)
    for rate in ("288%", "192 TFLOP/s", "66.7 TFLOP/s"):
        assert rate in str(said)
    assert rows[0].peak_source == ""
    assert stated_of([trial(number=number) for number in range(3)]) is None


def test_a_share_above_1_that_is_undecided_is_neither_shown_nor_stated() -> None:
    trials = [trial(seconds=0.0028 + 1e-4 * number, number=number) for number in range(3)]
    rows = summary.rows(trials)
    assert rows[0].step
    assert rows[0].step.high > rows[0].at_peak.seconds > rows[0].step.low
    undecided = replace(rows[0], step=replace(rows[0].step, value=0.00281))
    for one in (undecided, *summary.rows([trial(seconds=0.001)])):
        assert (one.peak_share, one.impossible_share) == (None, None)


def test_a_share_has_its_source_and_label_beside_it_in_records() -> None:
    (record,) = quantities.records([row()])
    assert record["peak_source"] == row().peak_source
    label, _, source = row().peak_source.partition(": ")
    assert label == "IMPORTED"
    assert amounts(source) == ["160 TFLOP/s", "20 TFLOP/s"]


def test_the_source_of_a_foreign_store_is_text_in_every_report() -> None:
    hostile = DataSheet(gpu="A GPU", flop_per_s=SHEET.flop_per_s, source="<script>1</script>[a](b)")
    trials = [trial(number=number, data_sheet=hostile) for number in range(3)]
    report = report_on(trials)
    text = markdown.render(report)
    assert "of peak" in text
    assert "<script>" not in text
    assert "[a](b)" not in text
    assert "<script>1" not in page.render(report)
