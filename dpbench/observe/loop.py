"""Loop: the steps and phases of a watched training loop, from the intervals of its recorder.

An interval lasts from one update of the weights to the next. A step may consist of several
intervals: it ends with an update by the slowest optimizer (`trainings`). Evaluation and checkpoints
belong to no step: if they ran in a step's interval, the step begins with the first work of training
after them. If an exception ended an iteration in a step's interval, the step begins after the
exception. A step is left out if some of its work came before the exception.

dpbench cannot observe where some phases begin or end. The neighbouring phases then define them:

- `loss` is the time from the end of the forward to the beginning of backward, without other spans
  in between.
- `clip` begins when backward ends.
- Without a DataLoader, `data` is the time from the end of a step, of a backward or of a read to the
  next transfer or forward. If the module also returns its own loss, the time from the forward to
  backward is `data`, too.
- If the loop calls no module, `forward` is the time from the arrival of the batch to the loss.
- Without an optimizer, `optimizer` is the time from the end of backward to the end of the last
  `no_grad` block before the next batch; without such a block, it lasts to the next batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TypeVar

from dpbench.observe import trainings
from dpbench.observe.recorder import (
    ASIDE,
    BY_HAND,
    CHECKPOINT,
    EVALUATION,
    FAILED,
    INTERRUPTED,
    OWN,
    Interval,
    Raw,
    Recorder,
)
from dpbench.records import HOST, Phase, Span, Step, ledger
from dpbench.records.facts import Products
from dpbench.records.observed import WITHOUT_LOADER, Unknown
from dpbench.records.words import count, verb

TRAINING = frozenset({Phase.DATA, Phase.SCATTER, Phase.REPLICATE, Phase.FORWARD})
"""The phases with which the training in a step can begin."""
Fact = TypeVar("Fact")
WARMUP = 5
"""The least number of warm-up steps, in which dpbench looks for the loop's modules."""
GAP, GAP_S, SELDOM = 0.05, 0.3e-3, 0.1
"""Time in no phase is noted above `GAP` of a step and `GAP_S`, in over `SELDOM` of the steps."""
APART = ASIDE | {FAILED}
"""The kinds of spans that belong to no step; a step begins after the last of them."""
BATCH = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD})
"""The phases of a batch, without the update."""
COMPUTED = frozenset({Phase.FORWARD, Phase.LOSS, Phase.BACKWARD})
"""The phases that compute the gradients of a batch."""
UPDATES = frozenset({Phase.CLIP, Phase.OPTIMIZER})
"""The phases that use the gradients."""
_TIMES = attrgetter("start", "end")


@dataclass(frozen=True, kw_only=True)
class WatchedLoop:
    """The steps of a loop, with their spans and places of reads, and the facts about the loop.

    `numbers` has the number of the update that ended each step; ranks number their updates alike.
    `updates` is the usual number of calls of backward in a step, and `batches` that of batches.
    `rows` is the number of rows in all batches of a step, 0 if unknown. `model` has the sizes of
    the trained module, and `optimizers` the names of the optimizers' classes. `skipped` is the
    number of updates that a GradScaler skipped after the optimizer's first step. `products` is None
    if no call was recorded. `compiled` is whether torch.compile made the module.
    """

    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    reads: tuple[frozenset[str], ...]
    numbers: tuple[int, ...]
    updates: int
    batches: int
    evaluation_s: float
    checkpoint_s: float
    loader_workers: int
    rows: int
    model: Mapping[str, float]
    optimizers: tuple[str, ...]
    skipped: int
    precision: str
    products: Products | None
    compiled: bool
    unknown: tuple[Unknown, ...]


def of(recorder: Recorder, first: int = 0) -> WatchedLoop:
    """Return the loop of a recorder that has stopped.

    `first` is the index of the first device of this process among the devices of all ranks.
    """
    seen = recorder.seen
    place = recorder.seconds
    clock = "host" if recorder.gpus is None else "cuda_event"
    unknown = dict(seen.unknown)
    intervals = trainings.longest(recorder.intervals, unknown)
    keys = frozenset[int]().union(*map(trainings.keys, intervals))
    ended = [one for one in intervals if one.owner != BY_HAND]
    groups = list(trainings.groups(intervals, trainings.slowest(ended, unknown)))
    kinds = {raw.kind for one in intervals for raw in one.spans}
    functional = kinds.isdisjoint((Phase.FORWARD, EVALUATION))
    loaded = Phase.DATA in kinds
    own_loss = frozenset[int]() if loaded else frozenset(seen.own_loss)
    rows = [
        [
            raw
            for one in group
            for raw in _spans(one, own_loss, by_hand=not ended, functional=functional)
        ]
        for group in groups
    ]
    rows = trainings.with_teachers(rows, seen.trained)
    rows = _without_usual_failures(groups, rows, unknown)
    source, evaluated = _sources(rows)
    aside = [*recorder.asides, *_asides(groups, rows)]
    cut = list(_cut(groups, rows, evaluated, unknown))
    whole = [raws for _, _, raws in cut]
    steps: list[Step] = []
    spans: list[Span] = []
    gaps: list[dict[tuple[str, str], float]] = []
    for number, (group, start, raws) in enumerate(cut):
        if not loaded and not functional:
            raws[:0] = _unloaded(raws, start)
        local = range(seen.devices)
        end_s = max(place(group[-1].end, device) for device in local)
        start_s = max(place(start, device) for device in local)
        steps.append(Step(end_s - start_s, False, end_s))
        first_span = len(spans)
        for raw in raws:
            for device in local if raw.device == OWN else (raw.device,):
                name, index = ("host", HOST) if device == HOST else (clock, first + device)
                spans.append(
                    Span(
                        number,
                        Phase(raw.kind),
                        index,
                        name,
                        place(raw.start, device),
                        place(raw.end, device),
                    )
                )
        gaps.append(ledger.gaps(steps[-1], spans[first_span:]))
    updates = Counter(map(_calls, whole))
    if steps:
        _define(
            unknown, loaded=loaded, functional=functional, optimized=bool(ended), updates=updates
        )
        _count_skips(unknown, whole, evaluated)
        _count_gaps(unknown, steps, gaps)
    missing = sum(not any(raw.kind == Phase.BACKWARD for raw in raws) for raws in rows)
    if missing and any(group[0].start is not None for group in groups):
        unknown[
            "a step without a call of backward: dpbench cannot observe how its gradients are"
            " computed"
        ] = missing
    calls = updates.most_common(1)[0][0] if updates else 1
    batches = Counter(
        sum(raw.kind == Phase.DATA and raw.note not in evaluated for raw in raws) for raws in whole
    )
    together = _together(calls, batches) if loaded else int(calls <= 1)
    return WatchedLoop(
        steps=tuple(steps),
        spans=tuple(spans),
        reads=tuple(
            frozenset(raw.note for raw in raws if raw.kind == Phase.READ and raw.note)
            for raws in whole
        ),
        numbers=tuple(group[-1].number for group, _, _ in cut),
        updates=calls,
        batches=max(1, together),
        rows=_rows(_kept(seen.rows, keys)) * together,
        model=_first(seen.models, keys, {}),
        optimizers=tuple(name for owner, name in seen.optimizers.items() if owner in keys),
        skipped=sum(number for owner, number in seen.skipped.items() if owner in keys),
        precision=_first(seen.precisions, keys, "fp32"),
        products=_first(seen.products, keys, None),
        compiled=not seen.compiled.isdisjoint(keys),
        evaluation_s=sum(raw.end - raw.start for raw in aside if raw.kind == EVALUATION),
        checkpoint_s=sum(raw.end - raw.start for raw in aside if raw.kind == CHECKPOINT),
        loader_workers=seen.loaders.get(source, 0) if loaded else WITHOUT_LOADER,
        unknown=tuple(Unknown(problem=problem, steps=steps) for problem, steps in unknown.items()),
    )


def _asides(groups: Sequence[Sequence[Interval]], rows: Sequence[list[Raw]]) -> Iterator[Raw]:
    for group, raws in zip(groups, rows, strict=True):
        if group[0].start is not None:
            yield from (raw for raw in raws if raw.kind in ASIDE)


def _define(
    unknown: dict[str, int],
    *,
    loaded: bool,
    functional: bool,
    optimized: bool,
    updates: Counter[int],
) -> None:
    """Add to `unknown` how unobserved phases are defined, and the steps with unusual calls.

    `updates` counts the steps by their number of calls of backward.
    """
    if not optimized:
        unknown[
            "the loop has no torch.optim optimizer: a step ends where the script next takes a batch"
            " or calls a module after backward, and `optimizer` is the time from backward to"
            " this end"
        ] = 0
    if functional:
        unknown[
            "the loop calls no module: `forward` is the time to the loss, from the arrival of the"
            " batch or (without a DataLoader) from the end of the previous step"
        ] = 0
    elif not loaded:
        unknown[
            "the loop has no DataLoader: `data` is the time from the end of a step, of a backward"
            " or of a read to the next transfer or forward"
        ] = 0
    ((usual, number),) = updates.most_common(1)
    if others := updates.total() - number:
        unknown[
            f"{count(others, 'step')} {verb(others, 'does', 'do')} not call backward"
            f" {count(usual, 'time')} as the others do: a group of accumulated batches may be"
            " incomplete"
        ] = 0


def _count_skips(
    unknown: dict[str, int], rows: Sequence[Sequence[Raw]], evaluated: frozenset[int]
) -> None:
    """Add to `unknown` the number of steps in which no backward follows the forward of a batch.

    Most steps seem to skip a batch in a loop with several DataLoaders: this is not noted.
    """
    number = 0
    for raws in rows:
        taken = [
            raw
            for raw in raws
            if raw.kind in BATCH and not (raw.kind == Phase.DATA and raw.note in evaluated)
        ]
        number += any(a.kind == Phase.FORWARD and b.kind == Phase.DATA for a, b in pairwise(taken))
    if 0 < number <= len(rows) / 2:
        unknown[
            f"{count(number, 'step')} {verb(number, 'includes', 'include')} a batch that the script"
            " skipped before its backward"
        ] = 0


def _count_gaps(
    unknown: dict[str, int], steps: Sequence[Step], gaps: Sequence[Mapping[tuple[str, str], float]]
) -> None:
    """Add to `unknown` the number of steps after warm-up with a notable time in no phase.

    In a few steps only, or at different places, it is a disturbance, which is not noted.
    """
    timed = [*zip(steps, gaps, strict=True)][WARMUP:]
    notable = [gap for step, gap in timed if sum(gap.values()) > max(GAP * step.seconds, GAP_S)]
    places = Counter(max(sorted(gap), key=lambda place: gap[place]) for gap in notable)
    if places and max(places.values()) > max(2, SELDOM * len(timed)):
        ((before, after), _), *_ = places.most_common()
        where = f"after {before or 'the last step'} and before {after or 'the end of the step'}"
        unknown[f"more than {GAP:.0%} of the time is in no phase, most of it {where}"] = len(
            notable
        )


def _together(calls: int, batches: Counter[int]) -> int:
    """Return the number of batches that a step with `calls` calls of backward accumulates.

    `batches` counts the steps by the batches that they took from DataLoaders. A step may take
    batches for other steps, or use one batch in several calls of backward.
    """
    return max(1, min(calls, max(batches, key=lambda number: batches[number], default=1)))


def _kept(facts: Mapping[int, Fact], keys: frozenset[int]) -> list[Fact]:
    """Return the facts about the modules with these keys; all facts if there are none.

    The keys come from recorded calls. A wrapper over several devices has none: it records phases.
    """
    return [fact for key, fact in facts.items() if key in keys] or [*facts.values()]


def _first(facts: Mapping[int, Fact], keys: frozenset[int], unknown: Fact) -> Fact:
    return next(iter(_kept(facts, keys)), unknown)


def _rows(counted: Sequence[Counter[int]]) -> int:
    """Return the most common number of rows in a call; 0 if unknown."""
    return max(sum(counted, Counter[int]()).items(), key=lambda pair: pair[1], default=(0, 0))[0]


def _spans(
    interval: Interval, own_loss: frozenset[int], *, by_hand: bool, functional: bool
) -> list[Raw]:
    """Return the spans of an interval in order of time, with those that their neighbours define.

    `own_loss` has the ids of modules that return their own loss: the time after their forward is
    `data`. The flags tell if the script updates weights itself (`by_hand`), and calls no module
    (`functional`).
    """
    ordered = _without_closures(sorted(interval.spans, key=_TIMES))
    if functional and interval.start is not None:
        starting = Raw(Phase.DATA, interval.start, interval.start, HOST)
        ordered = sorted([*ordered, *_forwards([starting, *ordered])], key=_TIMES)
    defined: list[Raw] = []
    for place, raw in enumerate(ordered):
        if raw.kind == Phase.BACKWARD:
            since = _last(ordered, place, Phase.FORWARD)
            whole = since is not None and ordered[since].note in own_loss
            defined += _between(ordered, since, place, Phase.DATA if whole else Phase.LOSS)
        elif raw.kind == Phase.CLIP:
            defined += _between(
                ordered, _last(ordered, place, Phase.BACKWARD, Phase.CLIP), place, Phase.CLIP
            )
        elif raw.kind == Phase.FORWARD:
            since = _last(ordered, place, Phase.FORWARD, Phase.BACKWARD)
            if since is not None and any(one.kind == Phase.LOSS for one in ordered[since:place]):
                defined += _between(ordered, since, place, Phase.LOSS)
    if by_hand and interval.start is not None:
        closing = Raw(Phase.OPTIMIZER, interval.end, interval.end)
        since = _last([*ordered, closing], len(ordered), Phase.BACKWARD, Phase.CLIP)
        defined += _between([*ordered, closing], since, len(ordered), Phase.OPTIMIZER)
    return sorted([*ordered, *defined], key=_TIMES)


def _forwards(ordered: Sequence[Raw]) -> Iterator[Raw]:
    for place, raw in enumerate(ordered):
        if raw.kind == Phase.BACKWARD:
            since = _last(ordered, place, Phase.DATA, Phase.SCATTER, Phase.BACKWARD) or 0
            until = next(
                number for number in range(since + 1, place + 1) if ordered[number].kind in COMPUTED
            )
            yield from _between(ordered, since, until, Phase.FORWARD)


def _without_closures(ordered: Sequence[Raw]) -> list[Raw]:
    """Return all spans but the parts of an optimizer's span inside its closure."""
    kept: list[Raw] = []
    since = 0
    for raw in ordered:
        if raw.kind == Phase.FORWARD:
            since = len(kept)
        elif raw.kind == Phase.BACKWARD and kept and kept[since].kind == Phase.FORWARD:
            kept[since:] = [
                one
                for one in kept[since:]
                if (one.kind, one.note) != (Phase.OPTIMIZER, INTERRUPTED)
            ]
        kept.append(raw)
    return kept


def _last(ordered: Sequence[Raw], before: int, *kinds: str) -> int | None:
    return next((at for at in range(before - 1, -1, -1) if ordered[at].kind in kinds), None)


def _between(ordered: Sequence[Raw], since: int | None, until: int, kind: str) -> Iterator[Raw]:
    """Yield spans that fill the gaps between the spans with the indices `since` to `until`."""
    if since is None:
        return
    reach = ordered[since].end
    for raw in ordered[since + 1 : until + 1]:
        if raw.start > reach:
            yield Raw(kind, reach, raw.start, HOST if kind == Phase.DATA else OWN)
        reach = max(reach, raw.end)


def _calls(raws: Sequence[Raw]) -> int:
    """Return the number of calls of backward; a backward on several devices has a span on each."""
    return sum(raw.kind == Phase.BACKWARD and raw.device in (OWN, 0) for raw in raws)


def _usual_calls(rows: Sequence[Sequence[Raw]]) -> int:
    calls = Counter(_calls(raws) for raws in rows if not any(raw.kind == FAILED for raw in raws))
    return calls.most_common(1)[0][0] if calls else 1


def _without_usual_failures(
    groups: Sequence[Sequence[Interval]], rows: Sequence[list[Raw]], unknown: dict[str, int]
) -> list[list[Raw]]:
    """Return the spans without the marks of exceptions, if most steps have one."""
    failed = [any(raw.kind == FAILED for raw in raws) for raws in rows]
    if sum(failed) <= len(rows) / 2:
        return [*rows]
    unknown[
        "an exception ends a part of the work in most steps, and the script goes on: the phases"
        " include this work"
    ] = sum(one and group[0].start is not None for one, group in zip(failed, groups, strict=True))
    return [[raw for raw in raws if raw.kind != FAILED] for raws in rows]


def _cut(
    groups: Sequence[Sequence[Interval]],
    rows: Sequence[list[Raw]],
    evaluated: frozenset[int],
    unknown: dict[str, int],
) -> Iterator[tuple[Sequence[Interval], float, list[Raw]]]:
    """Yield the intervals, the start and the spans of each step, without work outside steps.

    How many steps follow an exception, or are left out because of one, is added to `unknown`.
    """
    usual = _usual_calls(rows)
    followed = 0
    torn = 0
    for group, recorded in zip(groups, rows, strict=True):
        start = group[0].start
        raws = [raw for raw in recorded if raw.kind not in APART]
        if start is None:
            continue
        if len(raws) < len(recorded):
            start = _trimmed(recorded, evaluated, group[-1].end)
            raws = [raw for raw in raws if raw.start >= start]
        failed = max((raw.start for raw in recorded if raw.kind == FAILED), default=None)
        if failed is not None:
            before = [raw for raw in recorded if raw.kind == Phase.BACKWARD and raw.end < failed]
            if _calls(raws) != usual or (usual > 1 and before):
                torn += 1
                continue
            followed += 1
        if start < group[-1].end:  # otherwise nothing of the step came after an evaluation
            yield group, start, raws
    if followed:
        begin = (
            f"an iteration that an exception ended, and {verb(followed, 'begins', 'begin')} with"
            " the first work"
        )
        unknown[
            f"{count(followed, 'step')} {verb(followed, 'follows', 'follow')} {begin} after the"
            " exception"
        ] = 0
    if torn:
        leave = f"{count(torn, 'step')} {verb(torn, 'is', 'are')} left out"
        unknown[
            f"{leave}, because an exception ended a part of {verb(torn, 'its', 'their')} work"
        ] = 0


def _sources(rows: Sequence[Sequence[Raw]]) -> tuple[int, frozenset[int]]:
    """Return the training loader (0: unknown) and the loaders that only evaluations read."""
    trained: Counter[int] = Counter()
    evaluated: set[int] = set()
    for raws in rows:
        source, taken = 0, Counter[int]()
        for raw in raws:
            if raw.kind == Phase.DATA:
                taken[raw.note] += 1
            elif raw.kind in (EVALUATION, Phase.FORWARD):
                # of several loaders, the one with the most batches counts, or the last of equal
                # ones
                if taken:
                    counts = taken
                    source = max(reversed(counts), key=lambda number: counts[number])
                    taken = Counter()
                if raw.kind == EVALUATION:
                    evaluated.add(source)
                else:
                    trained[source] += 1
    source = max(
        trained, key=lambda source_number: (source_number != 0, trained[source_number]), default=0
    )
    return source, frozenset(
        evaluated
        - {source}
        - {source_number for source_number, times in trained.items() if times > 1}
    )


def _trimmed(raws: Sequence[Raw], evaluated: frozenset[int], end: float) -> float:
    """Return the start of a step: its first work of training after other work (`APART`)."""
    last: float = max(raw.end for raw in raws if raw.kind in APART)
    training: list[float] = [
        raw.start
        for raw in raws
        if raw.start >= last
        and raw.kind in TRAINING
        and not (raw.kind == Phase.DATA and raw.note in evaluated)
    ]
    return min(training, default=min(last, end))


def _unloaded(raws: Sequence[Raw], start: float) -> Iterator[Raw]:
    """Yield `data` for gaps from the start, a backward or a read to a transfer or forward."""
    reach = start
    counts = True
    computed = False
    gaps = list[Raw]()
    for raw in raws:
        if raw.start > reach and counts:
            gaps.append(Raw(Phase.DATA, reach, raw.start, HOST))
        reach = max(reach, raw.end)
        if raw.kind in TRAINING:
            yield from gaps
        if raw.kind in TRAINING or raw.kind in COMPUTED or (raw.kind in UPDATES and computed):
            gaps.clear()
            counts = raw.kind == Phase.BACKWARD or raw.kind in UPDATES
            computed = raw.kind == Phase.BACKWARD
        counts = counts or raw.kind == Phase.READ
