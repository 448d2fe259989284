"""Pairs: let two processes take blocks of steps in turn until the answer is decided.

Each pair has fresh processes, because processes differ more than blocks of one. The order of the
blocks is ABBABAAB, and the side that begins changes with every pair, so that a steady change of the
machine's speed cancels. Both processes take the same steps: a block of one has the same numbers of
steps as the block of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpbench.analysis import stats
from dpbench.gating.judge import Answer, Finding, Pair, Taken, look
from dpbench.gating.sides import Block, CaseWork, Finished, Side, Starter, Work, watched
from dpbench.gating.trees import Tree, copies, shared
from dpbench.gating.verdict import Verdict
from dpbench.measure import scratch, selection
from dpbench.records import registry, words
from dpbench.records.errors import UsageError
from dpbench.records.options import Options
from dpbench.records.registry import Role

ORDER = "ABBABAAB"
"""The sides of the blocks of a pair; every second pair exchanges the sides."""
BLOCK_S = 0.1
"""The seconds that a block should last."""
WARMUP_STEPS, WARMUP_S = 5, 0.2
"""The steps of the warm-up are at least these, and as many as last these seconds."""
LIMIT, BUDGET_S = 0.05, 300.0
"""The default of the slow-down that is allowed, and of the seconds of a gate."""

Listener = Callable[[Finding], None]
"""Is told the finding of each planned look that decides nothing."""


def gate(
    base: str = "main",
    *,
    script: str = "",
    arguments: Sequence[str] = (),
    limit: float = LIMIT,
    budget: float = BUDGET_S,
    folder: Path | None = None,
    **options: Any,
) -> Verdict:
    """Return whether the step of a model or of a script became slower since the commit `base`.

    `options` select the cases, as those of `dpbench.run` do, such as models, strategies, devices
    and batch_sizes. `limit` is the relative slow-down that is allowed, and `budget` the most
    seconds. `folder` is one of the project's checkout (default: the working folder). Raises
    UsageError for a wrong argument, and SideFailed if one of the sides cannot take a step.
    """
    works = [watched(script, arguments)] if script else cases(options)
    return decided(base, works, limit=limit, budget_s=budget, folder=folder or Path.cwd())


def cases(options: dict[str, Any]) -> list[CaseWork]:
    """Return the works that options of a run select: the steps of one process each."""
    usual = {"strategies": (registry.of_role(Role.BASELINE),), "devices": (1,)}
    selected = Options.of(**{**usual, **options})
    found, _ = selection.cases_of(replace(selected, unverified=True))
    for case in found:
        if case.traits.ranks:
            raise UsageError(
                "{} has a process for each device, and the gate compares the steps of one process",
                option="strategies",
                value=case.strategy,
                remedy="leave it out, or run both commits and compare the runs",
            )
    return [CaseWork(case) for case in found]


def decided(
    base: str,
    works: Sequence[Work],
    *,
    limit: float = LIMIT,
    budget_s: float = BUDGET_S,
    folder: Path,
    listen: Listener = lambda finding: None,
) -> Verdict:
    """Return the verdict on works of the checkout with `folder`."""
    end = time.monotonic() + budget_s
    with copies(base, folder) as trees, scratch.folder() as files, ExitStack() as stack:
        starters = {work: stack.enter_context(work.starting(trees, files)) for work in works}
        findings = _findings(trees, starters, limit, end, listen)
        notes = [note for note in (shared(trees[0]),) if note]
        names = [str(tree) for tree in trees]
    return Verdict(base=names[0], head=names[1], limit=limit, findings=findings, notes=notes)


def _findings(
    trees: tuple[Tree, Tree],
    starters: dict[Work, Starter],
    limit: float,
    end: float,
    listen: Listener,
) -> list[Finding]:
    """Return a finding on each work, from pairs of all that are not decided yet, in turn."""
    pairs: dict[Work, list[Pair]] = {work: [] for work in starters}
    found: dict[Work, Finding] = {}
    began = time.monotonic()
    for number in range(stats.LOOKS[-1]):
        undecided = [work for work in starters if work not in found]
        for work in undecided:
            pairs[work].append(pair(starters[work], trees, number))
        pair_s = (time.monotonic() - began) / (number + 1)
        late = time.monotonic() + pair_s > end
        for work in undecided:
            one = look(work.name, pairs[work], limit=limit, works=len(starters))
            if one.answer is not Answer.UNKNOWN:
                found[work] = one
            elif late or number + 1 == stats.LOOKS[-1]:
                found[work] = _explained(one, pair_s)
            elif number + 1 in stats.LOOKS:
                listen(one)
        if len(found) == len(starters):
            break
    return [found[work] for work in starters]


def _explained(finding: Finding, pair_s: float) -> Finding:
    """Return a finding without an answer with the reason, and what would help."""
    if finding.pairs < stats.LOOKS[0]:
        needed_s = pair_s * stats.LOOKS[0]
        why = (
            f"{words.count(finding.pairs, 'pair')} of processes in the budget, but at least"
            f" {stats.LOOKS[0]} are needed, which take about {words.time(needed_s)}"
        )
    elif finding.pairs < stats.LOOKS[-1]:
        why = f"the budget is spent, and a pair takes about {words.time(pair_s)}"
    else:
        why = "the times differ too much from pair to pair: other programs may use the machine"
    return replace(finding, reason=why)


def pair(start: Starter, trees: tuple[Tree, Tree], number: int) -> Pair:
    """Return the blocks of one pair of fresh processes.

    A program that ends before the last block has fewer. Raises SideFailed if there is none of each
    side.
    """
    with ExitStack() as stack:
        base, head = (stack.enter_context(start(tree, number)) for tree in trees)
        first = {side: side.take(WARMUP_STEPS) for side in (base, head)}
        slowest_s = max(block.wall_s for block in first.values())
        if more := round(WARMUP_S / slowest_s):
            first = {side: side.take(more) for side in (base, head)}
        steps = max(1, round(BLOCK_S / first[base].wall_s))
        sides = {"A": head, "B": base} if number % 2 else {"A": base, "B": head}
        blocks: dict[Side, list[Block]] = {base: [], head: []}
        try:
            for letter in ORDER:
                blocks[sides[letter]].append(sides[letter].take(steps))
        except Finished:
            if not all(blocks.values()):
                raise
        # both sides take the same steps
        common = min(map(len, blocks.values()))
        for side in (base, head):
            side.release()
        return Pair(*(Taken(blocks[side][:common], side.trials()) for side in (base, head)))
