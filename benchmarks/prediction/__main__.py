"""Score predictions of GPUs against published measurements, and print the errors.

    python -m benchmarks.prediction FILE.csv [--json] [--all-rows]

FILE.csv is a table of measurements, such as tests/data/published.csv. Rows whose ids are equal up
to the last "-" form a group, which must include a measurement on one device. No row is predicted
with constants that were fitted to its group.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.prediction import score
from benchmarks.prediction.published import Excluded
from benchmarks.prediction.score import Coverage, Scored, ScoreLine
from dpbench.records import words
from dpbench.records.files import UnreadableFile
from dpbench.records.visible import visible
from dpbench.records.words import aligned

COLUMNS = (
    "group",
    "strategy",
    "metric",
    "n",
    "MAPE",
    "median",
    "p90",
    "bias",
    "overhead",
    "skill",
    "80 % holds",
    "score",
    "hard n",
    "hard MAPE",
    "left out",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Score the table that is named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE.csv", type=Path, help="a table of measurements")
    parser.add_argument("--json", action="store_true", help="print the errors as JSON")
    parser.add_argument(
        "--all-rows", action="store_true", help="also use repeated, suspect and low-trust rows"
    )
    options = parser.parse_args(arguments)
    try:
        scored, excluded = score.score(options.file, all_rows=options.all_rows)
    except (OSError, UnreadableFile) as error:
        parser.exit(2, f"error: {visible(str(error), lines=True)}\n")
    if options.json:
        print(json.dumps(score.as_json(score.lines(scored, excluded)), indent=1))
    else:
        print(_text(scored, excluded))


def _text(scored: Sequence[Scored], excluded: Sequence[Excluded]) -> str:
    """Return the scoreboard, coverage, scores of calibrated predictions, and rows left out."""
    parts = [_table(score.lines(scored, excluded))]
    for kind, rows in (("rows", scored), ("hard rows", [one for one in scored if one.hard])):
        if coverage := score.coverage(rows):
            parts.append(_coverage_line(kind, coverage))
    if calibrated := score.calibrated_lines([one.matched for one in scored]):
        title = "predictions of each model with a machine calibrated on other models:"
        parts.append(f"{title}\n{_table(calibrated)}")
    if excluded:
        parts.append(f"left out:\n{_left_out(excluded)}")
    return "\n\n".join(parts)


def _table(lines: Iterable[ScoreLine]) -> str:
    """Return one line of text per group of rows, strategy and metric."""
    rows = [COLUMNS]
    for one in lines:
        rows.append(
            (
                one.group,
                one.strategy,
                one.metric,
                str(one.n),
                f"{one.mape:.1%}",
                f"{one.median:.1%}",
                f"{one.p90:.1%}",
                f"{one.bias:+.1%}",
                f"{one.overhead:+.0%}",
                f"{one.skill:+.2f}",
                "" if one.coverage is None else f"{one.coverage:.0%}",
                "" if one.interval_score is None else f"{one.interval_score:.2f}",
                str(one.hard_n),
                "" if one.hard_mape is None else f"{one.hard_mape:.1%}",
                str(one.excluded),
            )
        )
    return "\n".join(aligned(rows, left=(0, 1, 2)))


def _coverage_line(kind: str, found: Coverage) -> str:
    """Return a line of text on how often measured steps lie in their predicted 80 % intervals."""
    return (
        f"{kind}: of {words.count(found.rows, 'step')} on {words.count(found.machines, 'machine')},"
        f" {words.percent(found.share)} (95 % interval, clustered by machine:"
        f" {words.percent(found.low)} to {words.percent(found.high)}) lie in their predicted 80 %"
        f" interval; interval score {found.score:.3f}"
    )


def _left_out(rows: Iterable[Excluded], most: int = 5) -> str:
    """Return one line of text per reason to leave out rows, the most frequent first.

    A line has the number of rows, the reason, and the ids of the first `most` rows.
    """
    ids: dict[str, list[str]] = {}
    for row in rows:
        ids.setdefault(row.reason, []).append(row.id)
    lines = []
    for reason, every in sorted(ids.items(), key=lambda item: -len(item[1])):
        more = ", ..." if len(every) > most else ""
        lines.append(f"{len(every):5d}  {reason}: {', '.join(every[:most])}{more}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
