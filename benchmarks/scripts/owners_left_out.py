"""Owners left out: published steps, predicted with and without what machines lose.

    python -m benchmarks.scripts.owners_left_out FILE.csv

Each row of FILE.csv, such as tests/data/published.csv, is predicted by the model alone, and with
the deviations that were fitted without the row's owner. The output is the tables of
reports/owners-left-out/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.prediction import fit_deviations, score
from benchmarks.prediction.published import NAMED
from benchmarks.prediction.score import Modelled, Scored
from dpbench.predict.deviations import NONE
from dpbench.predict.network import LINK_KINDS

HEAD = (
    "rows",
    "bias",
    "with",
    "error",
    "with",
    "80 % holds",
    "with",
    "score",
    "with",
)
Group = Callable[[Modelled], str]


def groups(rows: Sequence[Modelled], group: Group) -> Iterator[tuple[str, list[Scored]]]:
    """Yield each group's name, with its predictions by the model and then with deviations."""
    found: dict[str, list[Modelled]] = {}
    for one in rows:
        found.setdefault(group(one), []).append(one)
    for name, mine in found.items():
        alone, learned = [one.scored(NONE) for one in mine], [score.unseen(one) for one in mine]
        yield name, [*alone, *learned]


def table(title: str, rows: Sequence[Modelled], group: Group) -> str:
    """Return a table with one line per group of rows, in the order of the rows."""
    lines = [f"| {title} | {' | '.join(HEAD)} |", f"|---|{'---|' * len(HEAD)}"]
    for name, both in groups(rows, group):
        half = len(both) // 2
        before, after = (score.line((name, "", ""), part) for part in (both[:half], both[half:]))
        cells = [
            str(half),
            f"{before.bias:+.1%}",
            f"{after.bias:+.1%}",
            f"{before.mape:.1%}",
            f"{after.mape:.1%}",
            f"{before.coverage:.0%}",
            f"{after.coverage:.0%}",
            f"{before.interval_score:.2f}",
            f"{after.interval_score:.2f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def owners(rows: Sequence[Modelled]) -> str:
    """Return a table of means over owners, with the uncertainty that their number leaves."""
    heads = ("", "owners", "bias", "error", "80 % holds", "95 % interval")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    parts = {
        "the model alone": [one.scored(NONE) for one in rows],
        "with deviations, the owner left out": [score.unseen(one) for one in rows],
    }
    for name, scored in parts.items():
        found = score.by_owner(scored)
        lines.append(
            f"| {name} | {found.owners} | {found.bias:+.1%} | {found.mape:.1%} |"
            f" {found.coverage:.0%} | {found.low:.0%} to {found.high:.0%} |"
        )
    return "\n".join(lines)


def fitted(rows: Sequence[Modelled]) -> str:
    """Return a table of the deviations that were fitted to all owners."""
    full = fit_deviations.fit(rows).table()
    lines = [f"| | {' | '.join(LINK_KINDS)} |", f"|---|{'---|' * len(LINK_KINDS)}"]
    for strategy, by_link in full.items():
        cells = [f"{by_link[link].mean:.3f} ± {by_link[link].scale:.3f}" for link in LINK_KINDS]
        lines.append(f"| {strategy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(path: Path) -> None:
    """Print the tables."""
    rows = fit_deviations.modelled(path)
    print(owners(rows), end="\n\n")
    print(table("all", rows, lambda one: "all rows"), end="\n\n")
    print(table("owner", rows, lambda one: one.matched.row.owner), end="\n\n")
    print(table("strategy", rows, lambda one: NAMED[one.matched.row.strategy]), end="\n\n")
    print(table("slowest link", rows, lambda one: one.link), end="\n\n")
    print(
        table("group", rows, lambda one: f"{one.matched.row.group} {one.matched.row.strategy}"),
        end="\n\n",
    )
    print(fitted(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
