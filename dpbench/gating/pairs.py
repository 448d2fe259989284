"""Pairs: let two processes take blocks of steps in turn until the answer is decided.

Each pair has fresh processes, because processes differ more than blocks of one. The order of the
blocks is ABBABAAB, and the side that begins changes with every pair, so that a steady change of the
machine's speed cancels. Both processes take the same steps: a block of one has the same numbers of
steps as the block of the other.

A process that waits is stopped, but its DataLoaders keep the batches that their workers have
fetched, and what a worker waits for may arrive. If a DataLoader has workers, each side therefore
takes all its steps at once, after others that empty the queue of a loader that is too slow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpbench.gating import BUDGET_S, LIMIT, judge
from dpbench.gating.judge import Answer, Finding, Pair, Taken, look
from dpbench.gating.sides import Block, CaseWork, Finished, Side, Starter, Work, watched
from dpbench.gating.trees import Tree, Trees, copies
from dpbench.gating.verdict import Verdict
from dpbench.measure import scratch, selection
from dpbench.records import Trial, registry, words
from dpbench.records.errors import UsageError
from dpbench.records.options import Options
from dpbench.records.registry import Role

ORDER = "ABBABAAB"
"""The sides of the blocks of a pair; every second pair exchanges the sides."""
BLOCK_S = 0.1
"""The seconds that a block should last."""
WARMUP_S = 0.2
"""The seconds of the second and of the third block of the warm-up; the first one is a step."""
DRAINING = 0.25
"""The share of the time of a pair, within the budget, in which one side may empty its queues."""

Listener = Callable[[Finding], None]
"""Is told the finding of each planned look that decides nothing."""


def gate(
    base: str = "main",
    *,
    script: str = "",
    arguments: Sequence[str] = (),
    limit: float = LIMIT,
    budget: float = BUDGET_S,
    link: Sequence[str] = (),
    folder: Path | None = None,
    **options: Any,
) -> Verdict:
    """Return whether the step of a model or of a script became slower since the commit `base`.

    `options` select the cases, as those of `dpbench.run` do, such as models, strategies, devices
    and batch_sizes. A slow-down that is surely below the share `limit` is accepted. No pair of
    processes begins after `budget` seconds. `link` are ignored paths that both sides read. `folder`
    is one of the project's checkout (default: the working folder). Raises UsageError for a wrong
    argument, and SideFailed if one of the sides cannot take a step.
    """
    works = [watched(script, arguments)] if script else cases(options)
    return decided(
        base, works, limit=limit, budget_s=budget, link=link, folder=folder or Path.cwd()
    )


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
    link: Sequence[str] = (),
    folder: Path,
    listen: Listener = lambda finding: None,
) -> Verdict:
    """Return the verdict on works of the checkout with `folder`."""
    end = time.monotonic() + budget_s
    with copies(base, folder, link) as trees, scratch.folder() as files, ExitStack() as stack:
        starters = {work: stack.enter_context(work.starting(trees.both, files)) for work in works}
        pairs: dict[Work, list[Pair]] = {work: [] for work in works}
        findings = _findings(trees, starters, pairs, limit, end, listen)
        taken = [pair for every in pairs.values() for pair in every]
        imported = {file for pair in taken for file in pair.head.files}
        notes = trees.notes(imported)
        if unlike := differing(taken, told_settings):
            notes.append(f"the sides differ: {unlike}")
    return Verdict(
        base=str(trees.base), head=str(trees.head), limit=limit, findings=findings, notes=notes
    )


def _findings(
    trees: Trees,
    starters: dict[Work, Starter],
    pairs: dict[Work, list[Pair]],
    limit: float,
    end: float,
    listen: Listener,
) -> list[Finding]:
    """Return a finding on each work, from pairs of all that are not decided yet, in turn.

    The pairs are added to `pairs`. If they would not reach the next planned look within the time,
    none begins. Sides that do unequal work get no answer.
    """
    found: dict[Work, Finding] = {}
    began, first_s = time.monotonic(), 0.0
    draining_s = DRAINING * (end - began) / judge.LOOKS[0] / len(starters)
    for number in range(judge.LOOKS[-1]):
        undecided = [work for work in starters if work not in found]
        if not undecided:
            break
        for work in undecided:
            pairs[work].append(pair(starters[work], trees.both, number, limit, draining_s))
        # the first pair may build extensions, which the others then find
        first_s = first_s or time.monotonic() - began
        pair_s = (time.monotonic() - began - first_s) / number if number else 0.0
        planned = number + 1 in judge.LOOKS
        following = next((one for one in judge.LOOKS if one > number + 1), None)
        missing = following - number - 1 if following else 0
        # the last of the missing pairs must begin in time, and not end
        last = not following or time.monotonic() + (missing - 1) * pair_s > end
        if not planned and not last:
            continue
        for work in undecided:
            one = look(work.name, pairs[work], limit=limit, works=len(starters), last=last)
            if planned and (unlike := differing(pairs[work], told_work)):
                why = f"the sides do unequal work: {unlike}"
                one = replace(
                    one, answer=Answer.UNKNOWN, by_cpu=False, more_memory=False, reason=why
                )
            # a reason is one that further pairs would not remove
            if one.answer is not Answer.UNKNOWN or one.reason:
                found[work] = one
            elif last:
                found[work] = _explained(one, first_s, pair_s or first_s)
            elif planned:
                listen(one)
    return [found[work] for work in starters]


def _explained(finding: Finding, first_s: float, pair_s: float) -> Finding:
    """Return a finding without an answer with the reason, and what would help."""
    following = next((one for one in judge.LOOKS if one > finding.pairs), None)
    if following:
        needed = f"the next look needs {words.count(following, 'pair')}"
        all_s = words.time(first_s + pair_s * (following - 1))
        why = f"{needed}, which take about {all_s} in all: give a larger budget"
    else:
        why = "the times differ too much from pair to pair: other programs may use the machine"
    return replace(finding, reason=why)


def differing(pairs: Sequence[Pair], told: Callable[[Trial], str]) -> str:
    """Return what `told` says of the trials of each side, if it differs.

    The text is empty if they are alike, if a side is unknown (""), and if the trials of one side
    differ among themselves, as with batches of random sizes.
    """
    before, after = (
        {told(trial) for side in sides for trial in side.trials}
        for sides in ([one.base for one in pairs], [one.head for one in pairs])
    )
    if before == after or "" in before | after or len(before) != 1 or len(after) != 1:
        return ""
    return f"{before.pop()}, then {after.pop()}"


def told_work(trial: Trial) -> str:
    """Return the work of a step: its rows, and what a watched loop does with them; or ""."""
    case, loop = trial.case, trial.facts.loop
    if not case.batch_size:
        return ""
    parts = [f"batch {case.batch_size}"]
    if loop:
        optimizers = len(case.optimizer.split("+"))
        parts += [
            words.count(loop.batches, "batch", "batches"),
            f"{words.count(loop.updates, 'backward')} a step",
            words.count(optimizers, "kind", "kinds") + " of optimizer",
        ]
    return ", ".join(parts)


def told_settings(trial: Trial) -> str:
    """Return the settings of a step that leave its work as it is."""
    return f"{trial.case.precision}, {trial.case.device_kind}"


def pair(
    start: Starter,
    trees: Sequence[Tree],
    number: int,
    limit: float = LIMIT,
    draining_s: float = DRAINING * BUDGET_S / judge.LOOKS[0],
) -> Pair:
    """Return the blocks of one pair of fresh processes.

    The side that starts first changes with every pair, as that of the first block does. A program
    that ends before the last block has fewer. Raises SideFailed if there is none of each side.
    `draining_s` are the most seconds in which a side empties its queues of batches.
    """
    with ExitStack() as stack:
        order = trees[::-1] if number % 2 else trees
        first, second = (stack.enter_context(start(tree, number)) for tree in order)
        steps, step_s, queue = _warmed((first, second))
        sides = {"A": first, "B": second}
        base, head = (second, first) if number % 2 else (first, second)
        draining: dict[Side, list[Block]] = {base: [], head: []}
        blocks: dict[Side, list[Block]] = {base: [], head: []}
        at_once = bool(queue) and queue * step_s < draining_s
        try:
            if at_once:
                _take_at_once([*sides.values()], steps, queue, limit, draining_s, draining, blocks)
            else:
                for letter in ORDER:
                    blocks[sides[letter]].append(sides[letter].take(steps))
        except Finished:
            if not at_once and not all(blocks.values()):
                raise
        # both sides take the same steps
        common = min(map(len, blocks.values()))
        if common:
            for side in (base, head):
                side.release()
            return Pair(
                *(
                    Taken(blocks[side][:common], side.trials(), side.files, draining[side])
                    for side in (base, head)
                )
            )
    # the program is too short to empty its queues
    return pair(start, trees, number, limit, draining_s=0.0)


def _warmed(sides: Sequence[Side]) -> tuple[int, float, int]:
    """Let the sides warm up; return the steps of a block, the seconds of a step, and a queue.

    The queue is the number of steps for which the batches last that workers fetch ahead, or 0.
    """
    steps = 1
    ahead, batches, taken = 0, 0, 0
    for seconds in (WARMUP_S, WARMUP_S, BLOCK_S):
        blocks = [side.take(steps) for side in sides]
        ahead = max(ahead, *(block.ahead for block in blocks))
        batches += max(block.batches for block in blocks)
        taken += steps
        step_s = max(block.wall_s for block in blocks)
        steps = max(1, round(seconds / step_s))
    return steps, step_s, math.ceil(ahead * taken / max(batches, 1))


def _take_at_once(
    sides: Sequence[Side],
    steps: int,
    queue: int,
    limit: float,
    draining_s: float,
    draining: dict[Side, list[Block]],
    blocks: dict[Side, list[Block]],
) -> None:
    """Let one side after the other empty its queue of batches, and then take its block.

    The batches of a queue last for `queue` steps. A block has the steps of whole queues, because
    workers that begin together finish together.
    """

    def whole(number: float) -> int:
        return queue * math.ceil(number / queue)

    count = math.ceil(judge.needed(queue, limit) / whole(steps))
    end = time.monotonic() + draining_s
    for side in sides:
        while len(draining[side]) < count and time.monotonic() < end:
            draining[side].append(side.take(whole(steps)))
        blocks[side].append(side.take(whole(steps * len(ORDER) / 2)))
        # the other side takes the same steps
        count = len(draining[side])
        end = math.inf
