"""Table: predictions, memory, changes and scores as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dpbench.predict.cases import Prediction, speedup
from dpbench.predict.needs import Need
from dpbench.predict.scoring.published import Excluded
from dpbench.predict.scoring.score import ScoreLine
from dpbench.predict.what_if import WhatIf
from dpbench.records import UNATTRIBUTED, Step, ledger, words
from dpbench.records.words import aligned

COLUMNS = ("model", "strategy", "devices", "batch", "ms/step", "80 % interval", "samples/s", "speed-up", "phases, ms",
           "profile", "label")  # fmt: skip
SHOWN = 0.03
"""The minimum share of the step for a phase to be shown in the table."""
SCORES = ("group", "strategy", "metric", "n", "MAPE", "median", "p90", "bias", "overhead", "skill", "80 % holds",
          "hard n", "hard MAPE", "left out")  # fmt: skip


def predictions(found: Sequence[Prediction]) -> str:
    """Return the predictions as a table with one line per case."""
    return "\n".join(aligned([COLUMNS, *(_cells(one, found) for one in found)], left=(0, 1, 8, 9, 10)))


def _cells(one: Prediction, others: Sequence[Prediction]) -> tuple[str, ...]:
    case = one.case
    schedule = f"[{case.schedule}]" if case.schedule not in ("", "reference") else ""
    ratio, scaling = speedup(one, others)
    return (
        case.model, case.strategy + schedule, str(case.devices), str(case.batch_size),
        words.number(one.seconds * 1e3), f"{words.number(one.low_s * 1e3)}–{words.number(one.high_s * 1e3)}",
        words.number(case.batch_size / one.seconds),
        f"{words.number(ratio)}x{' weak' if scaling == 'weak' else ''}" if ratio else "", _phases(one), one.profile,
        "PREDICTED, EXPERIMENTAL, CPU-ONLY" if case.device_kind == "cpu" else "PREDICTED",
    )  # fmt: skip


def _phases(one: Prediction) -> str:
    """Return, as text, the phases that take at least the share `SHOWN` of the step, with their milliseconds."""
    if not one.spans:
        return "formula: none"
    charged = ledger.phases(Step(one.seconds, False, one.seconds), one.spans)
    shown = {name: s for name, s in charged.items() if s >= SHOWN * one.seconds and name != UNATTRIBUTED}
    return " ".join(f"{name} {words.number(seconds * 1e3)}" for name, seconds in shown.items())


NEEDS = ("model", "strategy", "devices", "batch", "GPU 0 allocated", "others", "GPU 0 reserved",
         "with context and NCCL", "fits", "largest batch", "label")  # fmt: skip


def needs(found: Iterable[Need]) -> str:
    """Return a table of each case's memory: the peaks of device 0, the highest of the others, and whether it fits."""
    lines: list[tuple[str, ...]] = [NEEDS]
    for one in found:
        case = one.case
        schedule = f"[{case.schedule}]" if case.schedule not in ("", "reference") else ""
        head = (case.model, case.strategy + schedule, str(case.devices), str(case.batch_size))
        if one.reason:
            lines.append((*head, *["-"] * 4, one.reason, "", "PREDICTED"))
            continue
        allocated, reserved = one.peaks("allocated"), one.peaks("reserved")
        fits = {True: "yes", False: f"no: device {one.failed_device}", None: "unknown"}[one.fits]
        others = words.size(max(allocated[1:])) if allocated[1:] else ""
        held = (words.size(allocated[0]), others, words.size(reserved[0]), words.size(one.process_bytes[0]))
        lines.append((*head, *held, fits, "" if one.largest is None else str(one.largest), "PREDICTED"))
    return "\n".join(aligned(lines, left=(0, 1, 8, 10)))


def what_ifs(found: Sequence[WhatIf]) -> str:
    """Return the gains of changes as a table."""
    lines = [("model", "devices", "batch", "what if", "ms/step", "samples/s", "times as fast")]
    for one in found:
        rate = one.batch / one.seconds
        lines.append((one.model, str(one.devices), str(one.batch), one.change, words.number(one.seconds * 1e3),
                      words.number(rate), f"{words.number(one.gain)}x"))  # fmt: skip
    return "\n".join(aligned(lines, left=(0, 3)))


def scores(lines: Iterable[ScoreLine]) -> str:
    """Return the scoreboard as a table with one line per group, strategy and metric."""
    rows = [SCORES]
    for one in lines:
        rows.append((
            one.group, one.strategy, one.metric, str(one.n), f"{one.mape:.1%}", f"{one.median:.1%}", f"{one.p90:.1%}",
            f"{one.bias:+.1%}", f"{one.overhead:+.0%}", f"{one.skill:+.2f}",
            "" if one.coverage is None else f"{one.coverage:.0%}", str(one.hard_n),
            "" if one.hard_mape is None else f"{one.hard_mape:.1%}", str(one.excluded),
        ))  # fmt: skip
    return "\n".join(aligned(rows, left=(0, 1, 2)))


def excluded(rows: Iterable[Excluded], most: int = 5) -> str:
    """Return the reasons why rows were left out as text, each with its number of rows and the first `most` ids."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row.reason, []).append(row.id)
    counts = Counter({reason: len(ids) for reason, ids in reasons.items()})
    return "\n".join(
        f"{count:5d}  {reason}: {', '.join(reasons[reason][:most])}{', ...' if count > most else ''}"
        for reason, count in counts.most_common()
    )
