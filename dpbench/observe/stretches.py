"""Stretches: the phases of one host thread, from its annotations or else from its operators.

Autograd numbers the operators that it records in forward, and `HostEvent.backward` marks those that
it runs in a backward pass.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dpbench.observe.kineto import WAIT, HostEvent
from dpbench.records import Phase

STEP = re.compile(r"ProfilerStep\s*#\s*(?P<number>\d{1,18})")
UPDATE = re.compile(r"Optimizer\.step#(?P<name>\w+)\.step")
LOADER = re.compile(r"enumerate\(DataLoader\)#(?P<kind>\w+)\.__next__")
_ANNOTATIONS = (
    (Phase.DATA, re.compile(r"^enumerate\(|\bdata[ _]?(?:load(?:er|ing)?)?\b", re.IGNORECASE)),
    (Phase.OPTIMIZER, re.compile(r"\boptimi[sz]er|\bzero_grad\b", re.IGNORECASE)),
    (Phase.CLIP, re.compile(r"\bclip", re.IGNORECASE)),
    (Phase.BACKWARD, re.compile(r"\bbackward\b", re.IGNORECASE)),
    (Phase.LOSS, re.compile(r"\b(?:loss|criterion)\b", re.IGNORECASE)),
    (Phase.FORWARD, re.compile(r"\bforward\b", re.IGNORECASE)),
)
"""Phases and the patterns of annotations that name them, in the order of trial."""
_DATA_PARALLEL = {"Scatter": Phase.SCATTER, "Broadcast": Phase.REPLICATE, "Gather": Phase.GATHER}
"""The operators of torch.nn.DataParallel, which autograd calls by the names of their classes."""
_ADDING = re.compile(r"(?:autograd::engine::evaluate_function: )?BroadcastBackward")
_LOSS = re.compile(r"aten::\w*(?:loss|cross_entropy)\w*$")
_READS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}
_NORMS = {"aten::norm", "aten::linalg_vector_norm", "aten::_foreach_norm"}
_COPIES = {"aten::to", "aten::copy_", "aten::_to_copy", "aten::_copy_from"}
_PREPARES = {"aten::empty", "aten::zeros", "aten::ones_like"}
"""Operators that the profiler and `backward` themselves call; outside a phase, they begin none."""


class Stretch(NamedTuple):
    """A stretch of time in which a host thread is in one phase."""

    start_us: float
    end_us: float
    phase: Phase


def phase_of_copy(name: str) -> Phase | None:
    """Return the phase of a copy between host and device; None for other activities."""
    return {"Memcpy HtoD": Phase.SCATTER, "Memcpy DtoH": Phase.READ}.get(name[:11])


def stretches(
    events: Sequence[HostEvent], copied: Mapping[float, Phase], backwards: Sequence[float]
) -> Iterator[Stretch]:
    """Yield the stretches of one thread in order of time; an inner phase interrupts the outer one.

    `events` are sorted by start, an event before the events inside it. `copied` maps the start in
    microseconds of each of the thread's copies between host and device to its phase. `backwards`
    are the sorted starts of the operators of backward in all threads: on GPUs, autograd runs
    backward in a separate thread, for which this thread waits.
    """
    copies = sorted(copied)
    closures = _with_backward(events)
    # end, phase, whether its operators are outermost
    stack: list[tuple[float, Phase | None, bool]] = []
    at_us = float("-inf")
    state = _State()
    passed = 0

    def until(now_us: float) -> Iterator[Stretch]:
        nonlocal at_us
        while stack and stack[-1][0] <= now_us:
            end_us, phase, _ = stack.pop()
            if phase and end_us > at_us:
                yield Stretch(at_us, end_us, phase)
            at_us = max(at_us, end_us)
        if stack and stack[-1][1] and now_us > at_us:
            yield Stretch(at_us, now_us, stack[-1][1])
        at_us = max(at_us, now_us)

    for number, event in enumerate(events):
        yield from until(event.start_us)
        reached = bisect_right(backwards, event.start_us)
        if reached > passed:
            passed = reached
            state.backward()
        outer, outermost = (stack[-1][1], stack[-1][2]) if stack else (None, True)
        copies_here = (
            copied[copies[i]]
            if (i := bisect_right(copies, event.start_us)) < len(copies)
            and (copies[i] < event.end_us)
            else None
        )
        phase, container = state.phase_of(
            event, outer, outermost, copies_here, closure=number in closures
        )
        stack.append((event.end_us, phase, container))
    yield from until(float("inf"))


def _with_backward(events: Sequence[HostEvent]) -> set[int]:
    """Return the indices of optimizers' steps that run backward, as a closure of LBFGS does."""
    starts = [event.start_us for event in events if event.backward]
    numbers = set()
    for number, event in enumerate(events):
        if UPDATE.match(event.name):
            place = bisect_right(starts, event.start_us)
            if place < len(starts) and starts[place] < event.end_us:
                numbers.add(number)
    return numbers


class _State:
    """The state by which earlier operators decide the phase of one without an annotation."""

    def __init__(self) -> None:
        self._after_backward = self._clips = False

    def backward(self) -> None:
        self._after_backward = True
        self._clips = False

    def phase_of(
        self,
        event: HostEvent,
        outer: Phase | None,
        outermost: bool,
        copies: Phase | None,
        *,
        closure: bool,
    ) -> tuple[Phase | None, bool]:
        """Return the phase of an event, and whether operators inside it get their own phases.

        `outer` is the phase of the enclosing event. `outermost` is whether only annotations enclose
        it. `copies` is the phase of a copy between host and device that the event launches.
        `closure` is whether it is an optimizer's step that runs a backward pass.
        """
        name = event.name
        if event.backward:
            self.backward()
            return Phase.REDUCE if _ADDING.match(name) else Phase.BACKWARD, False
        if outer in (Phase.DATA, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CLIP, Phase.REDUCE):
            return outer, False
        if name.endswith(WAIT):
            return Phase.READ if outermost else outer, False
        if "::" not in name and not name.startswith("nccl:"):
            return (outer, True) if closure or STEP.match(name) else self._annotated(name, outer)
        if not (outermost or outer is Phase.FORWARD):
            return outer, False
        return self._operator(event, outer, copies), False

    def _annotated(self, name: str, outer: Phase | None) -> tuple[Phase | None, bool]:
        if name in _DATA_PARALLEL:
            return _DATA_PARALLEL[name], False
        named = next((phase for phase, pattern in _ANNOTATIONS if pattern.search(name)), None)
        if named is Phase.OPTIMIZER or named is Phase.DATA or named is Phase.FORWARD:
            self._after_backward = self._clips = False
        if named is Phase.BACKWARD:
            self._after_backward = True
        return named or outer, named is None or named is Phase.FORWARD

    def _operator(
        self, event: HostEvent, outer: Phase | None, copies: Phase | None
    ) -> Phase | None:
        name = event.name
        if name in _READS or (name in _COPIES and copies):
            return copies or Phase.READ
        if _LOSS.match(name):
            self._after_backward = False
            return Phase.LOSS
        if outer:
            return outer
        # autograd does not record clipping or an update
        if self._after_backward and event.sequence < 0:
            self._clips |= name in _NORMS
            return Phase.CLIP if self._clips else None
        if name in _PREPARES:
            return None
        if event.sequence >= 0:
            self._after_backward = self._clips = False
        return Phase.FORWARD
