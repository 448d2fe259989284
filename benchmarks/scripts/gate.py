"""Gate: decide whether this checkout's engine is slower than that of another commit.

    make gate BASE=main
    python benchmarks/scripts/gate.py BASE [--minutes 10] [--margin 0.05] [--cases ...]

For each small case, processes are forked in pairs from two servers, one of which imports the
package of BASE and the other the package of this checkout with its uncommitted changes. The
processes of a pair run blocks of steps in the order ABBA, and the side that starts changes with
every pair. A pair gives two ratios of the checkout's median block to BASE's: of wall time and of
CPU time. Both processes run on one core, because they never run at the same time.

The rule is sequential: after 5, 8, 12, 18, 27 and 40 pairs, one-sided t-tests on the logarithms of
the ratios are made. A case is "slower" if a ratio is decidedly above 1, and "not slower" if a ratio
is decidedly below 1 plus the margin. Bonferroni's correction over cases, looks and the two times
bounds the probability of any wrong "slower" by 5 %, and that of missing a slowdown by the margin by
5 % too. Wall time is asked first. Where CPU time decides alone, the answer says so: it does not
contain waiting.

Exit code 0: no case is slower; 1: at least one is; 3: cannot tell within the time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
from scipy import stats

from dpbench.records.environment import Environment, forbidding
from dpbench.records.facts import RunFacts

CASES = ("mlp reference", "mlp local", "convolutions reference")
"""The small cases, each a model and a schedule; `gate_side.py` builds them."""
TIMES = ("wall_s", "cpu_s")
"""The times that decide, the first one first."""
LOOKS = (5, 8, 12, 18, 27, 40)
"""The numbers of pairs after which the rule looks at the ratios."""
ALPHA = 0.05
ORDER = "ABBABAAB"
"""The sides of the blocks of a pair; every second pair exchanges the sides."""
BLOCK_S = 0.05
"""The seconds that a block should take."""
EXIT = {"not slower": 0, "slower": 1, "cannot tell": 3}


class Answer(StrEnum):
    """The three answers."""

    SLOWER = "slower"
    NOT_SLOWER = "not slower"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer on one case after `pairs` pairs, with the ratio of this checkout to BASE.

    `time` is the time that decided, "wall_s" or "cpu_s". The interval of the ratio has the level of
    the one-sided tests.
    """

    case: str
    answer: Answer
    time: str
    pairs: int
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        alone = (
            " (CPU time; wall time is undecided)"
            if self.time == "cpu_s" and self.answer != Answer.UNKNOWN
            else ""
        )
        span = f"{self.ratio:.3f}x ({self.low:.3f}-{self.high:.3f})"
        return (
            f"{self.case:<24} {self.answer:<12} {span} the time of BASE, {self.pairs} pairs{alone}"
        )


def judge(case: str, ratios: Mapping[str, Sequence[float]], margin: float, level: float) -> Finding:
    """Return the finding on a case from the ratios of its pairs, by time.

    One-sided tests have the level `level`.
    """
    found = []
    for name in TIMES:
        logs = np.log(ratios[name])
        centre, spread = float(logs.mean()), float(stats.sem(logs))
        reach = float(stats.t.isf(level, len(logs) - 1)) * spread
        answer = Answer.UNKNOWN
        if centre - reach > 0:
            answer = Answer.SLOWER
        elif centre + reach < math.log1p(margin):
            answer = Answer.NOT_SLOWER
        low, high = math.exp(centre - reach), math.exp(centre + reach)
        found.append(
            Finding(
                case=case,
                answer=answer,
                time=name,
                pairs=len(logs),
                ratio=math.exp(centre),
                low=low,
                high=high,
            )
        )
    return next((one for one in found if one.answer is not Answer.UNKNOWN), found[-1])


class Side:
    """A running server of one tree.

    `start` begins a case, `block` times a block of it, and `end` ends it.
    """

    def __init__(self, tree: Path) -> None:
        script = Path(__file__).with_name("gate_side.py")
        env = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env=env,
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        first = self._read()
        self.environment = Environment.of(RunFacts.of(first["facts"]))
        found = Path(first["dpbench"])
        if found.parent.resolve() != tree.resolve():
            raise SystemExit(f"gate: dpbench was imported from {found}, not from {tree}")

    def start(self, case: str) -> None:
        """Fork a process for a case and wait until it is warm."""
        self._write(f"fork {case}")
        self._read()

    def block(self, steps: int) -> dict[str, float]:
        """Return the wall and CPU seconds of a block of steps."""
        self._write(f"block {steps}")
        return self._read()

    def end(self) -> None:
        """End the process of the case."""
        self._write("end")

    def _write(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n".encode())

    def _read(self) -> dict:
        assert self.process.stdout
        line = b""
        while not line.endswith(b"\n"):
            piece = self.process.stdout.readline()
            if not piece:
                raise SystemExit("gate: a server ended; its error is above")
            line += piece
        return json.loads(line)


@contextmanager
def server(tree: Path) -> Iterator[Side]:
    """Yield a running server of a tree, and end it."""
    side = Side(tree)
    try:
        yield side
    finally:
        side.process.kill()
        side.process.wait()


def pair(case: str, base: Side, head: Side, turned: bool) -> dict[str, float]:
    """Return the ratios of one pair of forked processes, by time.

    A ratio is the median block of `head` over that of `base`.
    """
    sides = {"A": head, "B": base} if turned else {"A": base, "B": head}
    for side in sides.values():
        side.start(case)
    steps = max(1, round(BLOCK_S / (base.block(10)["wall_s"] / 10)))
    head.block(10)
    seconds: dict[Side, list[dict[str, float]]] = {base: [], head: []}
    for letter in ORDER:
        seconds[sides[letter]].append(sides[letter].block(steps))
    for side in sides.values():
        side.end()
    return {
        name: (
            statistics.median(one[name] for one in seconds[head])
            / statistics.median(one[name] for one in seconds[base])
        )
        for name in TIMES
    }


def decide(
    base: Path, head: Path, *, cases: Sequence[str], seconds: float, margin: float
) -> list[Finding]:
    """Return a finding on each case for the trees `base` and `head`, within about `seconds`."""
    level = ALPHA / (len(cases) * len(LOOKS) * len(TIMES))
    end = time.monotonic() + seconds
    ratios: dict[str, dict[str, list[float]]] = {
        case: {name: [] for name in TIMES} for case in cases
    }
    open_ = list(cases)
    found: dict[str, Finding] = {}
    with ExitStack() as stack:
        one, other = stack.enter_context(server(base)), stack.enter_context(server(head))
        refuse_unlike(one.environment, other.environment)
        for number in range(LOOKS[-1]):
            for case in open_:
                for name, ratio in pair(case, one, other, bool(number % 2)).items():
                    ratios[case][name].append(ratio)
            late = time.monotonic() > end
            # a look between the planned ones would need another correction: it decides nothing
            if number + 1 in LOOKS or late:
                for case in open_:
                    one_case = judge(case, ratios[case], margin, level)
                    found[case] = (
                        one_case
                        if number + 1 in LOOKS
                        else replace(one_case, answer=Answer.UNKNOWN)
                    )
                open_ = [case for case in open_ if found[case].answer is Answer.UNKNOWN]
            if late or not open_:
                break
    return list(found.values())


def refuse_unlike(base: Environment, head: Environment) -> None:
    """Raise SystemExit if the two sides run in environments whose times must not be compared."""
    if unlike := forbidding(base, head):
        raise SystemExit(
            "gate: BASE and this checkout run in unlike environments, so that a ratio would not"
            f" compare their engines: {'; '.join(map(str, unlike))}"
        )


def on_one_core() -> None:
    """Bind this process, and the servers that it will start, to one core.

    No step then moves between cores.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def whole(found: Sequence[Finding]) -> Answer:
    """Return the answer on all cases together."""
    answers = {one.answer for one in found}
    return next(one for one in (Answer.SLOWER, Answer.UNKNOWN, Answer.NOT_SLOWER) if one in answers)


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Yield a folder with the package of a commit of this repository."""
    folder = Path(tempfile.mkdtemp(prefix="gate-"))
    try:
        archive = subprocess.run(
            ["git", "archive", commit, "dpbench"], check=True, stdout=subprocess.PIPE
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Compare this checkout with the given commit, print the findings, and exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="the commit, branch or tag to compare with")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--margin", type=float, default=0.05)
    parser.add_argument("--cases", nargs="+", default=CASES, help='such as "mlp pool"')
    arguments = parser.parse_args()
    here = Path(__file__).resolve().parents[2]
    on_one_core()
    with tree_of(arguments.base) as base:
        found = decide(
            base,
            here,
            cases=arguments.cases,
            seconds=60 * arguments.minutes,
            margin=arguments.margin,
        )
    for one in found:
        print(one)
    answer = whole(found)
    print(f"gate: {answer}")
    sys.exit(EXIT[answer])


if __name__ == "__main__":
    main()
