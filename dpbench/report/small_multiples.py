"""Small multiples: the distribution of cases to panels, and their order and names in each panel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from dpbench.analysis.summary import Row
from dpbench.records import HABITS, Case, Trial, names, plan, words
from dpbench.records.grouping import grouped
from dpbench.records.registry import Role
from dpbench.report import naming

PANELS = 6
"""The largest number of panels in a section; cases in further panels are only in the table."""
OfCase = TypeVar("OfCase", Row, Trial)
_SETTING = ("model", "size", "precision", "optimizer", "device_kind", *HABITS)


@dataclass(frozen=True)
class Facet:
    """The cases of one panel, each with a name that is unique within the panel."""

    title: str
    rows: tuple[Row, ...]
    names: tuple[str, ...]

    @property
    def cases(self) -> tuple[Case, ...]:
        """Return the panel's cases."""
        return tuple(row.case for row in self.rows)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of the panel's cases, without duplicates."""
        return naming.labels(self.rows)


def order(found: Iterable[OfCase]) -> list[OfCase]:
    """Return rows or trials sorted by setting, batch size, devices, and `rank` of their cases."""
    return sorted(
        found,
        key=lambda one: (setting(one.case), one.case.batch_size, one.case.devices, *rank(one.case)),
    )


def rank(case: Case) -> tuple[Hashable, ...]:
    """Return a sort key for equal work: baselines, DataParallel, the engine, DDP, others."""
    role = [*Role].index(case.traits.role)
    return (role, case.strategy, plan.place(case.schedule), case.placement, case.options, case.seed)


def setting(case: Case) -> tuple[str, ...]:
    """Return the settings of a case that must be equal for all cases of a panel."""
    return tuple(str(getattr(case, name)) for name in _SETTING)


def split(
    rows: Iterable[Row],
    *,
    per: int,
    key: Callable[[Row], Hashable] = lambda row: None,
    unit: Callable[[Row], Hashable] = lambda row: row.case,
) -> tuple[list[Facet], str]:
    """Return the panels of a section, and a sentence on the cases left out, or "".

    The cases of a panel have equal settings and equal results of `key`. A panel has at most `per`
    units: rows for which `unit` returns the same value are one unit and stay together.
    """
    groups = grouped(((setting(row.case), key(row)), row) for row in order(rows))
    return panels(groups.values(), per=per, unit=unit)


def panels(
    groups: Iterable[Sequence[Row]],
    *,
    per: int,
    unit: Callable[[Row], Hashable] = lambda row: row.case,
) -> tuple[list[Facet], str]:
    """Return the panels of groups, at most `PANELS`, and a sentence on the cases left out, or "".

    `per` and `unit` are those of `split`.
    """
    all_groups = list(groups)
    facets = [facet for group in all_groups for facet in _parts(group, per, unit)][:PANELS]
    left_out = sum(map(len, all_groups)) - sum(len(facet.rows) for facet in facets)
    cases = f"{words.count(left_out, 'more case')} {words.verb(left_out, 'is', 'are')}"
    return facets, f"{cases} not drawn; the table shows all cases." if left_out else ""


def _parts(group: Sequence[Row], per: int, unit: Callable[[Row], Hashable]) -> Iterator[Facet]:
    """Yield the panels of a group, with nearly equal numbers of units; see `split`."""
    pairs = list(zip(group, named(group), strict=True))
    units = list(dict.fromkeys(unit(row) for row in group))
    count = -(-len(units) // per)
    edges = [len(units) * part // count for part in range(count + 1)]
    for number, (start, end) in enumerate(pairwise(edges), start=1):
        title = heading(group) + (f" ({number} of {count})" if count > 1 else "")
        members = [(row, name) for row, name in pairs if unit(row) in units[start:end]]
        yield Facet(title, tuple(row for row, _ in members), tuple(name for _, name in members))


def heading(group: Sequence[Row]) -> str:
    """Return the title of a panel: the model, settings and batch size that its cases share."""
    case = group[0].case
    batches = {row.case.batch_size for row in group}
    batch = [f"batch {case.batch}"] if len(batches) == 1 else []
    kind = [] if case.device_kind == "cpu" else [case.device_kind]
    return naming.clip(", ".join([names.model(case), *kind, *batch]), 90)


def named(group: Sequence[Row]) -> tuple[str, ...]:
    """Return a name for each case: its strategy, devices, and the settings that differ."""
    differ = {
        name
        for name in ("batch_size", "seed", "options", "habits")
        if len({getattr(r.case, name) for r in group}) > 1
    }
    common = set.intersection(*(set(row.labels) for row in group))
    return tuple(_name(row, differ, common) for row in group)


def _name(row: Row, differ: set[str], common: set[str]) -> str:
    case = row.case
    count = "" if case.traits.one_device else f" ×{case.devices}"
    parts = [f"{names.strategy(case)}{count}"]
    if "batch_size" in differ:
        parts.append(f"batch {case.batch}")
    if "seed" in differ:
        parts.append(f"seed {case.seed}")
    if "habits" in differ:
        parts += case.habits
    if "options" in differ:
        parts += [f"{name}={value}" for name, value in case.options]
    if row.run:
        parts.append(row.run)
    # labels come first, because long names are cut off at the end
    return naming.plain(
        "".join(f"[{label}] " for label in row.labels if label not in common) + ", ".join(parts)
    )
