"""Intervals: how often intervals, claims and choices are right, in simulated runs of known truth.

    python benchmarks/scripts/intervals.py [--runs 200]

A simulated run measures one model on one device, and `dp`, `torch_dp` and `ddp` on two, as trials
that go through the code of a report. In each round, the machine and each case deviate by normal
noise of the given size on a logarithmic scale. `UntilDecided` chooses the rounds. The table states
the share of runs in which

- the interval of a speed-up, of a mean step, of its ratio, or of a phase's share holds the truth
  (`pointwise`, 95 % promised for each);
- the intervals of all speed-ups hold together, at every look (`together`, at least 95 %);
- a claim about the first of a ranking is true, of those made (`order`);
- a choice is wrong: what is recommended is slower by all steps than one device by more than 5 %
  (`slower`), or another case is faster by more than 5 % although the answer is settled (`missed`).

`bursts` lengthens every tenth step of ddp; `drift` slows the machine by 30 % after four rounds;
`beside F` lengthens steps by what a program may take that uses the part F of a core: evenly, or all
of it from half of the steps. The seed is fixed. 200 runs per line take some minutes on one core.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dpbench.analysis import decision, stats, summary
from dpbench.analysis.decision import WORTH, Choice, First
from dpbench.measure.stopping import UntilDecided
from dpbench.records import Case, Phase, Span, Step, Trial, Verified
from dpbench.records.estimate import Estimate
from dpbench.records.facts import stated
from dpbench.records.load import Load

CORES = 2
STEPS = 20
WITHIN = 0.02
"""The standard deviation of a step's logarithm within a round."""
DATA = 0.3
"""The share of each step that is in the phase `data`."""
SEED = 45
SINGLE = Case(model="m", strategy="single", batch_size=64)
OTHERS = (
    Case(model="m", strategy="dp", devices=2, batch_size=64, schedule="reference"),
    Case(model="m", strategy="torch_dp", devices=2, batch_size=64),
    Case(model="m", strategy="ddp", devices=2, batch_size=64),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What disturbs the rounds of a run.

    `between` is the noise between rounds, and `spread` that of the true speed-ups around 1.6.
    `burst` is by how many of its steps every tenth step of ddp is longer. `drift` is whether the
    machine becomes slower, and `beside` the part of a core that another program uses.
    """

    between: float = 0.02
    spread: float = 0.3
    burst: float = 0.0
    drift: bool = False
    beside: float = 0.0


SETTINGS = {
    "no noise between rounds": Setting(between=0.0),
    "noise 1 %": Setting(between=0.01),
    "noise 2 %": Setting(between=0.02),
    "noise 5 %": Setting(between=0.05),
    "near ties, noise 2 %": Setting(spread=0.02),
    "bursts": Setting(burst=10.0),
    "drift": Setting(drift=True),
    "beside 0.1": Setting(beside=0.1),
    "beside 0.3": Setting(beside=0.3),
    "beside 0.6": Setting(beside=0.6),
}


@dataclass
class Outcomes:
    """The counts of what was right in the runs of one setting, and of what was said."""

    runs: int = 0
    right: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    rounds: int = 0

    def add(self, name: str, *, right: bool) -> None:
        """Count one statement."""
        self.said[name] += 1
        self.right[name] += right

    def share(self, name: str) -> float:
        """Return the share of statements that were right; 1 if none was made."""
        return self.right[name] / self.said[name] if self.said[name] else 1.0


def simulate(setting: Setting, runs: int, seed: int = SEED) -> Outcomes:
    """Return the outcomes of `runs` simulated runs."""
    generator = np.random.default_rng(seed)
    found = Outcomes()
    for _ in range(runs):
        _one(setting, generator, found)
    return found


def _one(setting: Setting, generator: np.random.Generator, found: Outcomes) -> None:
    truth = {SINGLE: 0.1}
    for case in OTHERS:
        truth[case] = 0.1 / 1.6 * float(np.exp(generator.normal(0, setting.spread)))
    if setting.spread > 0.1:  # some cases are slower than one device
        truth[OTHERS[0]] *= float(generator.choice([1.0, 2.0]))
    trials = []
    rule = UntilDecided()
    for number in range(stats.LOOKS[-1]):
        wanted = rule.wanted([*truth], number)
        if not wanted:
            break
        found.rounds += 1
        slower = 1.3 if setting.drift and number >= stats.LOOKS[0] else 1.0
        machine = slower * float(np.exp(generator.normal(0, setting.between)))
        for case in wanted:
            trial = _trial(case, truth[case] * machine, number, setting, generator)
            trials.append(trial)
            rule.add(trial)
    found.runs += 1
    _judge(truth, setting, trials, found)


def _trial(
    case: Case, step_s: float, number: int, setting: Setting, generator: np.random.Generator
) -> Trial:
    own = np.exp(generator.normal(0, setting.between) + generator.normal(0, WITHIN, STEPS))
    steps = step_s * own
    if setting.burst and case.strategy == "ddp":
        steps[generator.integers(10) :: 10] += step_s * setting.burst
    steps += _taken(case, steps, setting, generator)
    end_s, timed, spans = 0.0, [], []
    for index, seconds in enumerate(steps.tolist()):
        end_s += seconds
        timed.append(Step(seconds, False, end_s))
        begin_s = end_s - seconds
        middle_s = begin_s + DATA * seconds
        spans.append(Span(index, Phase.DATA, 0, "host", begin_s, middle_s))
        spans.append(Span(index, Phase.FORWARD, 0, "host", middle_s, end_s))
    used = setting.beside / CORES
    load = Load(foreign=used, steal=0.0, cores=CORES, seconds=float(steps.sum()))
    return Trial(
        case=case,
        round=number,
        verified=Verified.BITWISE,
        steps=tuple(timed),
        spans=tuple(spans),
        provenance=stated(foreign_load=load, looks=UntilDecided.looks),
    )


def _taken(
    case: Case,
    steps: np.ndarray[tuple[int], np.dtype[np.float64]],
    setting: Setting,
    generator: np.random.Generator,
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the seconds by which another program lengthens each step of a case on all cores."""
    if not setting.beside or case.devices < CORES:
        return np.zeros(len(steps))
    whole_s = steps.sum() * setting.beside / (1 - setting.beside)
    hit = np.ones(len(steps))
    if generator.random() < 0.5:
        hit[generator.permutation(len(steps))[: len(steps) // 2]] = 0
    taken: np.ndarray[tuple[int], np.dtype[np.float64]] = whole_s * hit / hit.sum()
    return taken


def _judge(
    truth: Mapping[Case, float], setting: Setting, trials: Sequence[Trial], found: Outcomes
) -> None:
    rows = {row.case: row for row in summary.rows(trials)}
    means = _true_means(truth, setting)
    together = True
    for case in OTHERS:
        row = rows[case]
        assert row.speedup
        gain = truth[SINGLE] / truth[case]
        together &= _holds(row.speedup, gain)
        alone = stats.ratio(rows[SINGLE].series, row.series)
        found.add("pointwise", right=_holds(alone, gain))
        of_means = stats.mean_ratio(rows[SINGLE].series, row.series)
        found.add("means", right=_holds(of_means, means[SINGLE] / means[case]))
    found.add("together", right=together)
    if not setting.drift and not setting.beside:
        assert rows[SINGLE].mean
        found.add("mean step", right=_holds(rows[SINGLE].mean, means[SINGLE]))
    (question,) = decision.questions([*rows.values()])
    decided = decision.decide(question)
    _judge_order(question, truth, found)
    chosen = decided.row
    if chosen and decided.choice is Choice.USE:
        found.add("not slower", right=means[chosen.case] <= WORTH * means[SINGLE])
    if chosen and not decision.unsettled(question, decided):
        found.add("not missed", right=truth[chosen.case] <= WORTH * min(truth.values()))


def _judge_order(question: decision.Question, truth: Mapping[Case, float], found: Outcomes) -> None:
    ranked = decision.ranking(question)
    claim = decision.of_first(ranked)
    if claim in (First.FASTEST, First.NEARLY):
        allowed = 1.0 if claim is First.FASTEST else WORTH
        found.add("order", right=truth[ranked[0].case] <= allowed * min(truth.values()))


def _true_means(truth: Mapping[Case, float], setting: Setting) -> dict[Case, float]:
    """Return the mean steps without what another program takes.

    The mean of a lognormal factor cancels in ratios, but not in a mean step.
    """
    factor = float(np.exp((2 * setting.between**2 + WITHIN**2) / 2))
    return {
        case: seconds * (factor + setting.burst / 10 * (case.strategy == "ddp"))
        for case, seconds in truth.items()
    }


def _holds(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


NAMES = ("pointwise", "means", "mean step", "together", "order", "not slower", "not missed")


def lines(runs: int) -> Iterator[str]:
    """Yield the lines of the Markdown table."""
    yield f"| {runs} runs each | rounds | {' | '.join(NAMES)} |"
    yield "|---|---|" + "---|" * len(NAMES)
    for name, setting in SETTINGS.items():
        found = simulate(setting, runs)
        cells = [
            f"{found.share(one):.1%} of {found.said[one]}" if found.said[one] else ""
            for one in NAMES
        ]
        yield f"| {name} | {found.rounds / found.runs:.1f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200, help="runs of each setting (default: 200)")
    for line in lines(parser.parse_args().runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
