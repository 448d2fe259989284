"""The report without the GIL: the tables and the figure of its data, and the predicted steps.

`python -m benchmarks.scripts.without_the_gil --table` writes them between `<!-- NAME -->` and
`<!-- end -->` in README.md of the report and in docs/why-dataparallel-is-slow.md.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.models import bound
from benchmarks.scripts.without_the_gil import FOLDER, MODELS, Pair, limit, read, unknown_facts
from dpbench.analysis import stats
from dpbench.hardware import foreign_load
from dpbench.predict import cases as predictions
from dpbench.predict import machine
from dpbench.records import Case, Phase, Trial, disturbance, names, plan, words
from dpbench.records.environment import Environment
from dpbench.records.estimate import Estimate
from dpbench.records.facts import RunFacts
from dpbench.records.grouping import grouped
from dpbench.records.ledger import PHASES, Ledger
from dpbench.records.series import Step
from dpbench.report import markdown, svg

TUTORIAL = FOLDER.parents[1] / "docs" / "why-dataparallel-is-slow.md"
LABELS = {
    "cpu": "CPU-ONLY",
    "emulated": "EMULATED",
    "fake-gpus": "FAKE-GPU",
    "control": "CPU-ONLY",
}
MACHINE = "8x A100 PCIe 40GB"
"""The machine of the predictions."""
LAUNCHES = 2 * bound.LAYERS
"""The least number of operations of a forward of the host-bound model: two in each layer."""
BEFORE = re.compile(r"other processes took (\d+)%(?: and other virtual machines (\d+)%)? of (\d+)")
"""The text of the foreign load before a round, with two percentages and the number of cores."""
REASON = 160
"""The number of columns of a failure's reason."""
COLUMNS = 120
"""The number of columns of a line of a document."""
STEP = "step"
"""The name of the whole step beside those of the phases."""
WITH, WITHOUT = 0, 1
"""The sides of a pair."""
SIDES = ("with the lock", "without it")
"""Their names."""


def typical(side: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a trial's typical step by phase, and of the whole `STEP`."""
    series = side["phases_us"]
    rows = [
        {phase: 1e-6 * value for phase, value in zip(series, row, strict=True)}
        for row in zip(*series.values(), strict=True)
    ]
    steps = [Step(seconds=sum(row.values()), warmup=False, end_s=0.0) for row in rows]
    found = Ledger.recorded(steps, rows).typical()
    return {**found, STEP: sum(found.values())}


def is_timed(side: dict[str, Any]) -> bool:
    """Return whether a side of a pair has the times of steps."""
    return "phases_us" in side


def disturbed(
    case: Case, pairs: Sequence[Pair], side: int
) -> tuple[frozenset[int], dict[int, float]]:
    """Return the result of `disturbance.by_round` for one side.

    Earlier pairs state only the load before their round. Nothing bounds what others took in a round
    that began with too much of it, and what they took in other rounds is unknown.
    """
    during: dict[int, Any] = {
        pair["round"]: pair["sides"][side].get("foreign_load") for pair in pairs
    }
    before = {pair["round"]: load_before(pair) for pair in pairs if not during[pair["round"]]}

    def judged(loads: Mapping[int, Any]) -> tuple[frozenset[int], dict[int, float]]:
        trials = [
            Trial(case=case, round=number, provenance={"foreign_load": load})
            for number, load in loads.items()
        ]
        return disturbance.by_round(trials)

    noisy, taken = judged(during)
    earlier, _ = judged(before)
    return noisy | earlier, taken | dict.fromkeys(earlier, math.inf)


def load_before(pair: Pair) -> dict[str, float] | None:
    """Return the foreign load before the round of a pair; None if it is unknown."""
    if not (found := BEFORE.match(pair["load"])):
        return None
    foreign, steal, cores = (int(number or 0) for number in found.groups())
    return {
        "foreign": foreign / 100,
        "steal": steal / 100,
        "cores": cores,
        "seconds": foreign_load.WINDOW_S,
    }


class Paired:
    """The rounds of one case in which both sides were timed.

    NOISY rounds of either side are left out if enough others remain, see `stats.Timed.quiet`.
    """

    def __init__(self, case: Case, pairs: Sequence[Pair], level: float = stats.CONFIDENCE) -> None:
        self.case = case
        self._level = level
        self._pairs = pairs
        timed = {pair["round"]: pair for pair in pairs if all(map(is_timed, pair["sides"]))}
        self._disturbed = [disturbed(case, [*timed.values()], side) for side in (WITH, WITHOUT)]
        noisy = frozenset[int]().union(*(rounds for rounds, _ in self._disturbed))
        kept = stats.Timed(dict.fromkeys(timed, ()), noisy).quiet
        self._sides = {number: [*map(typical, timed[number]["sides"])] for number in kept}
        self.left_out = len(timed) - len(kept)
        self.noisy = len(noisy & kept.keys())

    @property
    def model(self) -> str:
        return self.case.model.partition(":")[2]

    @property
    def name(self) -> str:
        """Return the strategy and the number of devices, such as "dp[local] x2"."""
        if self.case.options == plan.LIMIT:
            return f"the limit: {self.case.batch_size} rows of {MODELS[self.case.model]}"
        return f"{names.strategy(self.case)} x{self.case.devices}"

    @property
    def rounds(self) -> int:
        return len(self._sides)

    @property
    def counted(self) -> str:
        """Return the number of rounds, and how many are NOISY, or left out for this."""
        noisy = f", {self.noisy} NOISY" if self.noisy else ""
        left_out = f", {self.left_out} NOISY left out" if self.left_out else ""
        return f"{self.rounds}{noisy}{left_out}"

    def failure(self, sides: Sequence[str]) -> str:
        """Return in how many rounds each side failed, and why first; "" if none failed."""
        counts = []
        for number, side in enumerate(sides):
            every = [pair["sides"][number] for pair in self._pairs]
            failed = [one["reason"] for one in every if not is_timed(one)]
            why = f" ({markdown.said(failed[0], REASON)})" if failed else ""
            counts.append((len(failed), f"{side} in {len(failed)}{why}"))
        if not any(count for count, _ in counts):
            return ""
        of_rounds = words.count(len(self._pairs), "round")
        return f"failed {' and '.join(text for _, text in counts)} of {of_rounds}"

    def of(self, side: int, phase: str = STEP) -> stats.Timed:
        """Return the seconds of a phase on one side, one value in each round."""
        seconds = {number: [both[side].get(phase, 0.0)] for number, both in self._sides.items()}
        return stats.Timed(seconds, *self._disturbed[side])

    @property
    def drawn(self) -> bool:
        """Return whether the figure shows the case: fewer rounds do not show how they differ."""
        return self.rounds >= Estimate.ROUNDS and self.case.strategy != "fsdp"

    def has(self, phase: str) -> bool:
        """Return whether a round has time in a phase."""
        return any(phase in side for both in self._sides.values() for side in both)

    def step(self, side: int) -> Estimate:
        """Return the seconds of a step."""
        return stats.median(self.of(side))

    @property
    def gain(self) -> Estimate:
        """Return the step with the lock over that without it: above 1, it is faster without.

        The intervals of all cases of a set hold together.
        """
        return stats.ratio(self.of(WITH), self.of(WITHOUT), level=self._level)

    @property
    def phases(self) -> list[str]:
        """Return the phases in which a round has time."""
        return [*filter(self.has, PHASES)]

    def cost(self, phase: str = STEP, level: float = stats.CONFIDENCE) -> Estimate:
        """Return the seconds that the lock costs; the costs of the phases sum to the step's."""
        return stats.mean_difference(self.of(WITH, phase), self.of(WITHOUT, phase), level=level)

    @property
    def share(self) -> Estimate:
        """Return the cost of the lock as a share of the step with it."""
        locked, free = self.of(WITH), self.of(WITHOUT)
        found = stats.portion({n: [locked[n][0] - free[n][0]] for n in locked}, locked)
        return replace(found, signed=True, noisy=self.cost().noisy)

    def over(self, other: Paired, side: int) -> Estimate:
        """Return the ratio of the step to that of another case on the same side."""
        return stats.ratio(self.of(side), other.of(side))

    def overlap(self, other: Paired, side: int) -> Estimate:
        """Return the overlap of forwards: 1 if they ran one after another, n if all at once.

        `other` is the limit: its forward is that of one device.
        """
        alone = other.of(side, Phase.FORWARD).scaled(self.case.devices)
        return stats.ratio(alone, self.of(side, Phase.FORWARD))


Data = dict[str, list[Paired]]
"""The cases of each set that has data."""


def load(folder: Path) -> Data:
    """Return the cases of each set of which the folder has data."""
    found = {}
    for name in LABELS:
        if (file := folder / f"{name}.jsonl.gz").exists():
            by_case = grouped((pair["case"], pair) for pair in read(file)[1])
            level = stats.joint_level(len(by_case))
            found[name] = [Paired(case, pairs, level) for case, pairs in by_case.items()]
    return found


def beside(one: Paired, cases: Sequence[Paired]) -> tuple[Paired | None, Paired | None]:
    """Return the limit of a case and its DDP; None for one that was not measured."""
    limits = [each for each in cases if each.case == limit(one.case)]
    ddp = replace(one.case, strategy="ddp", schedule="")
    return next(iter(limits), None), next((each for each in cases if each.case == ddp), None)


NONE, MISSING = "–", "Not measured."


def share(estimate: Estimate) -> str:
    """Return a share and its interval."""
    if estimate.doubt:
        return words.withheld(estimate)
    value, low, high = map(words.percent, (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def ms(estimate: Estimate, scale: float = 1e3) -> str:
    """Return a difference in milliseconds and its interval, or in another unit of 1 / `scale` s."""
    if estimate.doubt:
        return words.withheld(estimate)
    value, low, high = (
        words.number(scale * one) for one in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} ({low} to {high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def failures(cases: Sequence[Paired], label: str = "", sides: Sequence[str] = SIDES) -> str:
    """Return a line for each case of which a side failed in a round; `sides` are their names."""
    found = [(one, one.failure(sides)) for one in cases]
    where = f", {label}" if label else ""
    items = [f"- {one.model}{where}, {one.name}: {text}." for one, text in found if text]
    return "\n".join(textwrap.fill(item, COLUMNS, subsequent_indent="  ") for item in items)


def steps(cases: Sequence[Paired]) -> str:
    """Return the table of whole steps, and what failed."""
    head = ("model", "strategy", "rounds", "ms with the lock", "ms without it", "ratio")
    rows = []
    for one in cases:
        found = [NONE] * 5
        if one.rounds:
            sides = [words.ms(one.step(side)) for side in (WITH, WITHOUT)]
            found = [*sides, words.times(one.gain), ms(one.cost()), share(one.share)]
        rows.append([one.model, one.name, one.counted, *found])
    every = table([*head, "the lock costs, ms", "share of the step"], rows)
    return "\n\n".join(filter(None, [every, failures(cases)]))


def phases(cases: Sequence[Paired]) -> str:
    """Return the table of what the lock costs in each phase, in milliseconds."""
    used = [one for one in cases if one.rounds]
    columns = [name for name in PHASES if any(one.has(name) for one in used)]
    rows = [
        [one.model, one.name, *(ms(one.cost(name)) if one.has(name) else NONE for name in columns)]
        for one in used
    ]
    return table(["model", "strategy", *columns], rows)


def remaining(cases: Sequence[Paired]) -> str:
    """Return the table of what remains: forward's overlap, and ratios to the limit and to DDP."""
    head = ["model", "strategy"]
    for name in ("forward's overlap", "step / limit", "step / ddp"):
        head += [f"{name}, with the lock", "without it"]
    rows = []
    for one in cases:
        alone, ddp = beside(one, cases)
        if not (one.rounds and alone and alone.rounds) or one is alone:
            continue
        row = [one.model, one.name]
        for ratio, other in ((one.overlap, alone), (one.over, alone), (one.over, ddp)):
            timed = other and other.rounds
            row += [words.times(ratio(other, side)) if timed else NONE for side in (WITH, WITHOUT)]
        rows.append(row)
    return table(head, rows)


def longest(one: Paired) -> str:
    """Return the longest phase of a step with the lock, and its share of the step."""
    name = max(one.phases, key=lambda name: stats.average(one.of(WITH, name)).value)
    found = stats.portion(one.of(WITH, name), one.of(WITH))
    return f"{words.part(name)}, {share(replace(found, signed=True, noisy=one.cost().noisy))}"


def decided(one: Paired, level: float) -> dict[str, Estimate]:
    """Return what the lock costs in those phases in which it decidedly costs, or saves, time."""
    costs = {name: one.cost(name, level) for name in one.phases}
    return {
        name: cost
        for name, cost in costs.items()
        if not cost.doubt and not cost.low <= 0 <= cost.high
    }


def most(one: Paired, level: float) -> str:
    """Return the phases of which the lock decidedly costs, or saves, the most."""
    sure = decided(one, level)
    largest = sorted(sure, key=lambda name: -abs(sure[name].value))[:2]
    return ", ".join(f"{words.part(name)} {ms(sure[name])}" for name in largest)


VERDICTS = {
    "faster": "faster without the lock",
    "slower": "slower without the lock",
    "same": "as fast with the lock as without it",
    "undecided": "undecided",
}
"""What is said for each verdict on a ratio."""


def about(name: str, one: Paired, cases: Sequence[Paired], level: float) -> list[str]:
    """Return the row of a case in the answer, whose phases' intervals have a level."""
    alone, ddp = beside(one, cases)
    return [
        f"{one.model}, {LABELS[name]}",
        one.name,
        VERDICTS[stats.verdict(one.gain)],
        words.times(one.gain),
        share(one.share),
        both(one.overlap, alone),
        both(one.over, ddp),
        longest(one),
        most(one, level) or NONE,
    ]


def both(ratio: Callable[[Paired, int], Estimate], other: Paired | None) -> str:
    """Return a ratio to another case with the lock, and without it."""
    if other is None or not other.rounds:
        return NONE
    return " → ".join(words.times(ratio(other, side)) for side in (WITH, WITHOUT))


def answer(data: Data) -> str:
    """Return the table on torch's DataParallel, or the engine's form of it, and counts.

    The intervals of all phases in the table hold together.
    """
    shown, counts = [], []
    for name, cases in data.items():
        if name == "control":
            continue
        threads = [one for one in cases if one.case.traits.threads and one.case.devices > 1]
        timed = [one for one in threads if one.rounds]
        wrapper = "dp" if name == "cpu" else "torch_dp"  # torch's needs an accelerator
        shown += [(name, one) for one in timed if names.strategy(one.case) == wrapper]
        counts += [
            f"- All threads on several devices, {model}, {LABELS[name]}: {verdicts(found)}."
            for model, found in grouped((one.model, one) for one in timed).items()
        ]
        counts += filter(None, [failures(threads, LABELS[name])])
    level = stats.joint_level(sum(len(one.phases) for _, one in shown))
    rows = [about(name, one, data[name], level) for name, one in shown]
    head = ("model", "DataParallel", "the step is", "ratio", "the lock's share of the step")
    further = ("forward's overlap, with → without", "step / ddp, with → without")
    every = (
        *head,
        *further,
        "the longest phase with the lock",
        "decided by phase, ms with − without",
    )
    if not rows:
        return MISSING
    cases = [one for _, one in shown]
    rounds = sorted({one.rounds for one in cases})
    many = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0])
    undecided = all(stats.verdict(one.gain) == "undecided" for one in cases)
    by_model = grouped((one.model, one) for one in cases)
    sentences = [
        f"**In short:** of {words.count(len(cases), 'step')} of DataParallel ({many} rounds each),"
        f" of {'; of '.join(f'`{name}`: {verdicts(found)}' for name, found in by_model.items())}.",
        "These data cannot tell whether DataParallel is faster in a Python without the lock."
        if undecided
        else "",
        by_phase(cases, level),
    ]
    said = " ".join(filter(None, sentences))
    return "\n".join([said, "", table(every, rows), "", *counts])


def by_phase(cases: Sequence[Paired], level: float) -> str:
    """Return in how many of the cases each phase is decidedly shorter, or longer."""
    found = [(name, cost.value > 0) for one in cases for name, cost in decided(one, level).items()]
    texts = [
        f"{words.part(name)} is shorter without the lock in {found.count((name, True))} and longer"
        f" in {found.count((name, False))}"
        for name in PHASES
        if (name, True) in found or (name, False) in found
    ]
    every = f"By phase, of {words.count(len(cases), 'step')}"
    return f"{every}: {'; '.join(texts) or 'no phase is decidedly shorter or longer'}."


def verdicts(cases: Sequence[Paired]) -> str:
    """Return how often each verdict on the steps of cases occurs, and the decided ratios."""
    gains = grouped((stats.verdict(one.gain), one.gain) for one in cases)
    return "; ".join(
        f"{len(gains[key])} {text}{_range(gains[key]) if key in ('faster', 'slower') else ''}"
        for key, text in VERDICTS.items()
        if key in gains
    )


def _range(gains: Sequence[Estimate]) -> str:
    """Return the least and the largest of some ratios in parentheses."""
    values = sorted(one.value for one in gains)
    ends = dict.fromkeys(f"{words.number(value)}×" for value in (values[0], values[-1]))
    return f" ({' to '.join(ends)})"


def of_set(name: str) -> Callable[[Data], str]:
    """Return a function that makes the tables of a set."""

    def tables(data: Data) -> str:
        if name not in data:
            return MISSING
        parts = [of(data[name]) for of in (steps, phases, remaining)]
        return "\n\n".join(part for part in parts if part.count("\n") > 1)

    return tables


def control(data: Data) -> str:
    """Return what pairs with the lock on both sides show."""
    if "control" not in data:
        return MISSING
    cases = [one for one in data["control"] if one.rounds]
    gains = [one.gain for one in cases if one.gain.decides]
    wrong = sum(not each.low <= 1 <= each.high for each in gains)
    rows = [[one.model, one.name, one.counted, words.times(one.gain)] for one in cases]
    counted = f"{wrong} of {words.count(len(gains), 'interval')} exclude 1."
    every = table(["model", "strategy", "rounds", "ratio"], rows)
    failed = failures(data["control"], sides=("on the first side", "on the second"))
    return "\n\n".join(filter(None, [counted, every, failed]))


def tutorial(data: Data) -> str:
    """Return the table of the tutorial: DataParallel, the engine and DDP."""
    strategies = ("torch_dp", "dp", "dp[local]", "ddp")
    chosen = [
        (name, one)
        for name in ("emulated", "cpu")
        for one in data.get(name, ())
        if names.strategy(one.case) in strategies and one.case.devices > 1
    ]
    rows = [
        [
            f"{one.model}-bound",
            f"{one.name}, {LABELS[name]}",
            *(words.ms(one.step(side)) for side in (WITH, WITHOUT)),
            words.times(one.gain),
        ]
        for name, one in chosen
        if one.rounds
    ]
    if not rows:
        return MISSING
    every = table(["model", "strategy", "with the lock", "without it", "ratio"], rows)
    timed = [one for _, one in chosen if one.rounds]
    said = f"Of these {words.count(len(timed), 'step')}, {verdicts(timed)}."
    failed = [
        failures(cases, LABELS[name])  # sets have cases of equal names
        for name, cases in grouped(chosen).items()
    ]
    return "\n\n".join(filter(None, [every, said, *failed]))


def mutex(folder: Path) -> str:
    """Return the table of what the fake library's own mutex costs; see `fake_gpu_mutex.py`."""
    file = folder / "mutex.jsonl"
    if not file.exists():
        return MISSING
    rounds = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def of(made: str, threads: str) -> dict[int, list[float]]:
        return {number: [1e-6 * each[made][threads]] for number, each in enumerate(rounds)}

    own = {}
    rows = []
    for threads in rounds[0]["memset"]:
        booked, called = (of(made, threads) for made in ("memset", "labs"))
        own[threads] = {number: [booked[number][0] - called[number][0]] for number in booked}
        texts = (words.duration(stats.median(one)) for one in (booked, called))
        rows.append([threads, *texts, ms(stats.mean_difference(booked, called), 1e6)])
    waits = stats.mean_difference(own["2"], own["1"]).scaled(LAUNCHES)
    said = f"Over {LAUNCHES} operations, two threads wait {ms(waits)} ms for the fake library."
    return f"{table(['threads', 'cudaMemsetAsync', 'labs', 'difference, µs'], rows)}\n\n{said}"


def predicted() -> str:
    """Return the table of predicted steps on a machine with GPUs, with and without the lock."""
    locked, free = (
        predictions.Predictor(machine.load(line)) for line in (MACHINE, f"{MACHINE}, no GIL")
    )
    if getattr(free.machine.host, "gil", True):
        return "Not predicted."
    cases = predictions.sweep(
        [*MODELS, "resnet50"],
        strategies=["torch_dp", "dp[local]", "ddp"],
        devices=[2, 4, 8],
        batch_per_device=[32],
        size="full",
    )
    rows = []
    for case in cases:
        one, other = locked.predict(case), free.predict(case)
        ratio = stats.quotient(one.step, other.step, one.draws, other.draws)
        model = case.model.rpartition(":")[2]
        name = f"{names.strategy(case)} x{case.devices}"
        rows.append([model, name, words.ms(one.step), words.ms(other.step), words.times(ratio)])
    return table(["model", "strategy", "with the lock", "without it", "ratio"], rows)


def circumstances(folder: Path) -> str:
    """Return the interpreter, the libraries and the machine of each set."""
    found = []
    for name in LABELS:
        if not (file := folder / f"{name}.jsonl.gz").exists():
            continue
        facts, pairs = read(file)
        own = Environment.of(RunFacts.of(facts))
        loads = dict.fromkeys((pair["round"], pair.get("busy") or pair["load"]) for pair in pairs)
        before = Counter(text for _, text in loads)
        timed = [side for pair in pairs for side in pair["sides"] if is_timed(side)]
        checks = Counter(
            side["verified"].replace("_", " ") for side in timed if side["gil"] == "off"
        )
        unknown = [unknown_facts(facts)]
        if not all(side.get("foreign_load") for side in timed):
            unknown.append("what other processes took during a trial")
        sentences = [
            f"Python {own.python} ({own.build}), torch {own.torch}, {own.processor},"
            f" {words.count(own.cores or 0, 'core')}.",
            f"Before the rounds: {tallied(before)}.",
            f"Gradients without the lock, compared with the reference: {tallied(checks)}."
            if checks
            else "",
            f"Not stored: {', '.join(filter(None, unknown))}." if any(unknown) else "",
        ]
        found.append(f"- {name}: {' '.join(filter(None, sentences))}")
    return "\n".join(found)


def cores(folder: Path) -> str:
    """Return on how many cores the sets were measured."""
    files = [file for name in LABELS if (file := folder / f"{name}.jsonl.gz").exists()]
    found = {Environment.of(RunFacts.of(read(file)[0])).cores or 0 for file in files}
    every = " and ".join(words.count(number, "core") for number in sorted(found))
    return f"MEASURED, NO-GIL, on {every}." if every else MISSING


def tallied(texts: Mapping[str, int]) -> str:
    """Return texts and how often each occurs."""
    return ", ".join(f"{text} ({words.count(n, 'time')})" for text, n in texts.items())


def figure(data: Data, file: Path) -> None:
    """Draw the steps by phase with and without the lock, as stacked bars.

    The steps of FSDP are left out: they are several times as long as the others. So are cases of
    fewer than three rounds.
    """
    panels = [
        (name, shown)
        for name in data
        for model in MODELS
        if (shown := [one for one in data[name] if one.case.model == model and one.drawn])
        and name != "control"
    ]
    heights = [1.1 + 0.42 * len(cases) for _, cases in panels]
    drawn = Figure(figsize=(9, sum(heights)), layout="constrained")
    every = drawn.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, cases) in zip(every, panels, strict=True):
        for row, side in itertools.product(range(len(cases)), (WITH, WITHOUT)):
            bars(axes, row + 0.4 * side, cases[row], side)
        axes.set_yticks([row + 0.2 for row in range(len(cases))], [one.name for one in cases])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_title(f"{cases[0].model}-bound [{LABELS[name]} NO-GIL]", loc="left")
    every[-1].set_xlabel(
        "ms per step, upper bar with the lock, lower bar without (95 %); grey: in no phase"
    )
    used = [name for name in PHASES if any(one.has(name) for _, cases in panels for one in cases)]
    drawn.legend(handles=svg.phase_keys(used), loc="outside right upper")
    with mpl.rc_context({"svg.hashsalt": file.name, "svg.fonttype": "none"}):
        drawn.savefig(file, format="svg", metadata={"Date": None})


def bars(axes: Axes, place: float, one: Paired, side: int) -> None:
    """Draw the phases of a step beside each other, and the interval of the step."""
    left = 0.0
    for phase in filter(one.has, PHASES):
        width = 1e3 * stats.average(one.of(side, phase)).value
        look = svg.PHASES.get(phase)  # no phase covers the rest
        axes.barh(place, width, 0.36, left=left, color=look.fill if look else "#dddddd")
        left += width
    whole = stats.average(one.of(side))
    across = [[1e3 * (whole.value - whole.low)], [1e3 * (whole.high - whole.value)]]
    axes.errorbar([left], [place], xerr=across, color="black", capsize=2)


BLOCKS: dict[str, Callable[[Data], str]] = {
    "answer": answer,
    "cpu": of_set("cpu"),
    "emulated": of_set("emulated"),
    "fake-gpus": of_set("fake-gpus"),
    "control": control,
    "without the lock": tutorial,
}
"""What makes the text between `<!-- NAME -->` and `<!-- end -->`."""


def renewed(text: str, blocks: Mapping[str, str]) -> str:
    """Return a document with new text between its markers."""
    for name, block in blocks.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        text = between.sub(lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text)
    return text


def blocks(folder: Path) -> dict[str, str]:
    """Return the text of each block that the data make."""
    data = load(folder)
    return {
        **{name: of(data) for name, of in BLOCKS.items()},
        "circumstances": circumstances(folder) or MISSING,
        "cores": cores(folder),
        "mutex": mutex(folder),
    }


def write(folder: Path) -> None:
    """Write all that the data of a folder show, and the predictions, into its README.md and figure.

    Those of the repository's report go into the tutorial, too.
    """
    found = {**blocks(folder), "predicted": predicted()}
    for document in (folder / "README.md", *([TUTORIAL] if folder == FOLDER else [])):
        text = document.read_text(encoding="utf-8")
        document.write_text(renewed(text, found), encoding="utf-8")
    if data := load(folder):
        figure(data, folder / "phases.svg")
