"""Judge: whether a step became slower, from pairs of processes that took blocks of it in turn.

A pair gives, for each side, the seconds of a step in several blocks. `analysis.stats.ratio` turns
pairs into the ratio of the present step to that of the base. As for two runs, the intervals of all
works, quantities and looks hold together with `comparison.SURE`. The wall time decides: the step is
not slower if the interval lies below 1 plus the limit, and slower if it lies above 1 and the ratio
itself reaches the limit. If it has decided nothing up to the last look, CPU time may say that the
step is slower, by the same rule, because other processes disturb it less; the ratio of wall times
must then reach the limit as well, and that of CPU times exceed it by no more than the limit: a step
that only uses more cores is not slower. CPU time never says that the step is not slower, because it
contains no waiting. Memory is judged by the same rule. There is no "not slower" from steps whose
batches the workers of a DataLoader may have fetched before: a slower loader would show only later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dpbench.analysis import comparison, stats
from dpbench.gating.sides import Block
from dpbench.records import Trial
from dpbench.records.estimate import Estimate

QUANTITIES = 3
"""Wall time, CPU time and memory: their intervals hold together."""
LOOKS = (*stats.LOOKS, 46, 68, 100)
"""The numbers of pairs after which the rule looks: those of a run's rounds, and more."""


class Answer(StrEnum):
    """The three answers, the one that counts most for several works first."""

    SLOWER = "slower"
    UNKNOWN = "cannot tell"
    NOT_SLOWER = "not slower"


@dataclass(frozen=True)
class Taken:
    """The blocks of one side of a pair, without the warm-up, and the trials with all its steps.

    `files` are those of which it has imported modules. `draining` are the blocks right before
    `blocks`, in which a queue of batches becomes empty if the workers of a DataLoader are slower
    than the step.
    """

    blocks: Sequence[Block]
    trials: Sequence[Trial] = ()
    files: Sequence[str] = ()
    draining: Sequence[Block] = ()

    @property
    def ahead(self) -> int:
        """Return the most batches that workers fetched before they were needed."""
        return max(block.ahead for block in (*self.draining, *self.blocks))

    @property
    def drained(self) -> int:
        """Return the batches that it took before `blocks`."""
        return sum(block.batches for block in self.draining)

    @property
    def fed(self) -> int:
        """Return how many of these, at most, its workers had fetched before."""
        return self.ahead - (self.draining[-1].ready if self.draining else 0)

    @property
    def memory_bytes(self) -> int:
        """Return the peak of its memory."""
        return max(block.memory_bytes for block in self.blocks)


@dataclass(frozen=True)
class Pair:
    """The two sides of a pair."""

    base: Taken
    head: Taken


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer on one work after `pairs` pairs, with ratios of the present step to the base.

    `by_cpu` is True if CPU time decided. `phase` is the phase that became longer by most, by
    `phase_s` seconds; "" if none is known. `reason` says why there is no answer.
    """

    name: str
    answer: Answer
    pairs: int
    wall: Estimate
    cpu: Estimate
    memory: Estimate
    more_memory: bool = False
    by_cpu: bool = False
    phase: str = ""
    phase_s: float = 0.0
    reason: str = ""

    @property
    def worse(self) -> bool:
        """Return whether the step became slower or needs more memory."""
        return self.answer is Answer.SLOWER or self.more_memory


def look(
    name: str, pairs: Sequence[Pair], *, limit: float, works: int, last: bool = False
) -> Finding:
    """Return the finding on a work after some pairs.

    `limit` is the relative slow-down that is accepted, and `works` the number of works that are
    judged together. There is an answer after the numbers of pairs in `LOOKS` only: others
    would need wider intervals. `last` says that no further look follows.
    """
    level = stats.joint_level(works * QUANTITIES * len(LOOKS), comparison.SURE)

    def ratio(of: Callable[[Taken], Sequence[float]]) -> Estimate:
        before, after = (
            {number: of(side) for number, side in enumerate(sides)}
            for sides in ([pair.base for pair in pairs], [pair.head for pair in pairs])
        )
        return stats.ratio(after, before, level=level)

    wall = ratio(lambda side: [block.wall_s for block in side.blocks])
    cpu = ratio(lambda side: [block.cpu_s for block in side.blocks])
    memory = ratio(lambda side: [side.memory_bytes])
    planned = len(pairs) in LOOKS
    answer = _answer(wall, limit) if planned else Answer.UNKNOWN
    undecided = planned and last and answer is Answer.UNKNOWN
    by_cpu = (
        undecided
        and wall.value >= 1 + limit
        and cpu.value <= wall.value * (1 + limit)
        and _answer(cpu, limit) is Answer.SLOWER
    )
    moved = comparison.moved(
        [trial for pair in pairs for trial in pair.base.trials],
        [trial for pair in pairs for trial in pair.head.trials],
    )
    hidden = _hidden([pair.head for pair in pairs], limit) if answer is Answer.NOT_SLOWER else ""
    if hidden:
        answer = Answer.UNKNOWN
    phase, phase_s = max(moved.items(), key=lambda one: one[1], default=("", 0.0))
    return Finding(
        name=name,
        answer=Answer.SLOWER if by_cpu else answer,
        pairs=len(pairs),
        wall=wall,
        cpu=cpu,
        memory=memory,
        more_memory=planned and _answer(memory, limit) is Answer.SLOWER,
        by_cpu=by_cpu,
        phase=phase,
        phase_s=phase_s,
        reason=hidden,
    )


def _answer(ratio: Estimate, limit: float) -> Answer:
    if not ratio.decides:
        return Answer.UNKNOWN
    if ratio.high < 1 + limit:
        return Answer.NOT_SLOWER
    return Answer.SLOWER if ratio.low > 1 and ratio.value >= 1 + limit else Answer.UNKNOWN


def needed(ahead: int, limit: float) -> int:
    """Return how many batches empty a queue of `ahead` batches if the loader is too slow.

    It is too slow if a batch takes it 1 plus the limit times as long as the step.
    """
    return math.ceil(round(ahead * (1 + limit) / limit, 6))


def _hidden(heads: Sequence[Taken], limit: float) -> str:
    """Return why queues of batches may hide that a loader became slower; "" if they cannot."""
    missing = sum(needed(one.fed, limit) for one in heads)
    taken = sum(one.drained for one in heads)
    if missing <= taken:
        return ""
    return (
        f"its DataLoaders fetch up to {max(one.ahead for one in heads)} batches ahead, which hide a"
        f" slower loader until a process has taken {math.ceil(missing / len(heads))}; it took"
        f" {taken // len(heads)} before the steps that count: give fewer workers, a smaller"
        " prefetch_factor, a larger limit or budget, or more steps"
    )


def whole(found: Sequence[Finding]) -> Answer:
    """Return the answer on all works together: that of the worst."""
    return min((one.answer for one in found), key=[*Answer].index)
