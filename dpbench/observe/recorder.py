"""Recorder: the log of a watched training loop, which hooks in torch fill while the script runs.

The log has one interval per update of the weights, from the end of an optimizer's step to the end
of the next one, with the spans that the hooks recorded: the kind of work, its start and its end.
`observe.loop` turns intervals into steps and phases after the script has ended, so that the script
waits for as little as possible.

Only the thread that made the recorder records. A span inside another span is not recorded
separately, except for the pairs in `INTERRUPTS`.

An error of dpbench's own code must not end the user's script: every function that torch calls, or
that a replacement of one of torch's functions calls, ends the recording instead (`give_up`).
"""

from __future__ import annotations

import itertools
import math
import os
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NamedTuple

from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.hardware.samplers import GOLDEN
from dpbench.observe.moments import GpuTimes, Moment, capturing
from dpbench.records import HOST, Phase
from dpbench.records.facts import Products

Function = Callable[..., Any]
_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()
"""This process's recorders, which a forked process, such as a DataLoader worker, must not fill."""


def _forget() -> None:
    for one in _RECORDERS:
        one.active = False


os.register_at_fork(after_in_child=_forget)

EVALUATION, CHECKPOINT, WITHIN, FAILED = "evaluation", "checkpoint", "within", "failed"
"""Not phases: evaluation, a saved checkpoint, a wrapper that records its phases, an exception."""
OWN = -2
"""The `device` of a span that occupies all devices of this process."""
BY_HAND = 0
"""The owner of an interval that no optimizer ended: the script may have updated the weights."""
SPANS = 40_000
"""The number of spans after which the recorder keeps only a sample of the intervals."""
BLOCK = 32
"""The number of consecutive intervals that are kept or left out together."""

PINNED_READS = 8
"""The number of updates in which the recorder asks if copied tensors are in pinned memory."""

CAPTURED = (
    "the script captured a graph (torch.cuda.graph): dpbench records nothing during the capture,"
    " and takes a replay of the graph as a whole, in no phase"
)
INTERRUPTED = "interrupted"
"""The note of a part of a span that ends because an inner span begins."""
_CLOSURE = frozenset(
    {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.DATA, Phase.SCATTER, Phase.CLIP, EVALUATION}
)
INTERRUPTS: dict[str, frozenset[str]] = {
    Phase.FORWARD: frozenset({Phase.READ}),
    Phase.LOSS: frozenset({Phase.READ}),
    EVALUATION: frozenset(),
    Phase.OPTIMIZER: _CLOSURE,  # the closure of LBFGS runs inside the optimizer's step
}
"""The kinds of inner spans that interrupt an outer one and are recorded, by its kind."""
ASIDE = frozenset({EVALUATION, CHECKPOINT})
"""The kinds that belong to no step; they are recorded even in intervals that are not kept."""
_BACKWARD, _DATA = Phase.BACKWARD, Phase.DATA  # an attribute of an enumeration is slow to read
_OTHERS = frozenset({EVALUATION, WITHIN})
"""The kinds that `_log` records at their end: it merges evaluations and drops `WITHIN`."""
_NEXT = frozenset({Phase.DATA, Phase.SCATTER, Phase.FORWARD, EVALUATION})
"""The kinds of spans with which the next step of a loop without an optimizer begins."""
_BETWEEN_EVALUATIONS = frozenset({Phase.DATA, Phase.SCATTER, Phase.READ, Phase.LOSS})


class Raw(NamedTuple):
    """A span as a hook in torch recorded it, in moments of the recorder's clock (`Recorder.now`).

    `note` depends on the kind: the number of the loader for data, the place in the script for
    reads, and the id of the module for forward and evaluation. For an evaluation in training mode
    or with gradients enabled, it is the negative id.
    """

    kind: str
    start: Any
    end: Any
    device: int = OWN
    note: Any = None


class Interval(NamedTuple):
    """The time between two updates of the weights.

    `owner` is the number of the optimizer that made the second one. `start` is None for the first
    interval, because nothing marks the beginning of its step.
    """

    number: int
    owner: int
    start: Any
    end: Any
    spans: list[Raw]


@dataclass
class Seen:
    """The facts about a loop that the hooks in torch collect.

    The keys are ids of modules, or numbers of optimizers, loaders or engines (`Recorder.owner`).
    """

    file: str = ""
    """The path of the script's file that calls the optimizer."""
    wrapper: str = ""
    synchronized: Counter[bool] = field(default_factory=Counter)
    """The forwards of a DistributedDataParallel by whether their backward adds the gradients."""
    threads: bool = False
    devices: int = 1
    opened: Sequence[Device] = ()
    """The devices of dpbench's own engine, whose streams need not be the current ones."""
    ranks: bool = False
    grouped: bool = False
    """Whether a process group of several ranks existed when a trained module was first called."""
    optimizers: dict[int, str] = field(default_factory=dict)
    loaders: dict[int, int] = field(default_factory=dict)
    """The workers of each DataLoader."""
    trained: set[int] = field(default_factory=set)
    in_training: set[int] = field(default_factory=set)
    """The trained modules that were called in training mode with gradients."""
    rows: dict[int, Counter[int]] = field(default_factory=dict)
    """The calls of each module, or of each step of dpbench's engine, by rows in the batch."""
    models: dict[int, dict[str, float]] = field(default_factory=dict)
    """The sizes of each trained module, by the name of the size."""
    precisions: dict[int, str] = field(default_factory=dict)
    """The precision of each trained module, such as "bf16"."""
    products: dict[int, Products] = field(default_factory=dict)
    """The formats of float32 products when each module was first trained."""
    own_loss: set[int] = field(default_factory=set)
    """The trained modules that return their own loss."""
    compiled: set[int] = field(default_factory=set)
    """The modules that torch.compile has made."""
    device_kind: str = "cpu"
    device_ids: tuple[int, ...] = ()
    pinned: bool | None = None
    skipped: Counter[int] = field(default_factory=Counter)
    """How often a GradScaler skipped the step of an optimizer; its first step begins the count."""
    unknown: dict[str, int] = field(default_factory=dict)


class _Open(NamedTuple):
    kind: str
    start: Any
    note: Any


new = tuple.__new__
"""Makes a NamedTuple faster than the constructor of its class, which runs Python code."""


class Recorder:
    """The log of one loop: hooks in torch fill it, and `observe.loop` reads it after `stop`."""

    def __init__(self, clock: Callable[[], Any] = time.perf_counter, spans: int = SPANS) -> None:
        self.now = clock
        self.seen = Seen()
        self.intervals: list[Interval] = []
        self.asides: list[Raw] = []
        self.ends = array("d")
        self.gpus: GpuTimes | None = None
        self.listeners: list[Callable[[array[float]], None]] = []
        """The functions to call after every update, with the times of all updates."""
        self.due: float = math.inf
        """The number of updates after which `look` is called with that number."""
        self.look: Callable[[int], None] = lambda _: None
        self.reduction: Callable[[float], Sequence[tuple[Phase, int, float, float]]] | None = None
        """Maps the end of backward to the spans of the exposed reduction; None if unused."""
        self.kept = True
        self.thread = get_ident()
        self._most = spans
        self._total = 0
        self._full = 0
        self.open: list[_Open] = []
        """The open spans, the outermost first."""
        self._spans: list[Raw] = []
        self._start: Any = None
        self.updating: Any = None
        """The end of backward or a later `no_grad` block, without an optimizer; else None."""
        self._left = False
        self.captured: list[tuple[int, str]] = []
        """The updates (owner and name) in the CUDA graph that is being captured."""
        self.deferred = 0
        """How many running calls, such as GradScaler.step, end the interval themselves."""
        self._owners: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self.active = True
        _RECORDERS.add(self)

    # -- spans

    def begin(self, kind: str, note: Any = None, start: Any = None) -> bool:
        """Begin a span; return whether it is recorded, in which case `end` must be called.

        It begins at the moment `start`, or now if `start` is None or another span has ended since.
        A span is not recorded in another thread, or inside an open span unless it interrupts that
        span (`INTERRUPTS`). In an interval that is not kept, only the kinds in `ASIDE` are
        recorded.
        """
        if not self.active or get_ident() != self.thread or not (self.kept or kind in ASIDE):
            return False
        try:
            if start is not None and self._spans and self._spans[-1].end > start:
                start = None
            if self.open:
                if kind not in INTERRUPTS.get(self.open[-1].kind, ()):
                    return False
            elif self.updating is not None and kind in _NEXT:
                self.update(BY_HAND, end=self.updating if self._left else None)
            start = start or self.now()
            if isinstance(start, Moment) and not start.events:  # a CUDA graph is captured
                return False
            if self.open:
                top = self.open[-1]
                self._log(top.kind, top.start, start, top.note or INTERRUPTED)
            self.open.append(new(_Open, (kind, start, note)))
        except Exception as error:
            self.give_up(error)
        return self.active

    def end(self, place: str | None = None) -> None:
        """End the innermost open span; `place` replaces its note, unless it is None."""
        if not self.open:  # the recorder was stopped meanwhile
            return
        try:
            kind, start, note = self.open.pop()
            now = self.now()
            if kind in _OTHERS:
                self._log(kind, start, now, note)
            else:
                self._spans.append(
                    new(Raw, (kind, start, now, HOST if kind == _DATA else OWN, place or note))
                )
            if self.open:
                self.open[-1] = self.open[-1]._replace(start=now)
            if kind == _BACKWARD and (self.reduction is not None or not self.seen.optimizers):
                self._backward(start, now)
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Stop recording after an error of dpbench's own code, so that the user's script goes on.

        What was recorded before is kept.
        """
        if self.active:
            self.active = False
            self.open.clear()
            number = len(self.ends)
            first, _, _ = str(error).partition("\n")
            self.seen.unknown[
                f"dpbench stopped recording in update {number}, because its own code failed there"
                f" ({type(error).__name__}: {first})"
            ] = 0

    def _backward(self, began: Any, now: Any) -> None:
        if self.reduction is not None:
            for phase, device, start, end in self.reduction(now):
                if began < start < end:  # else this backward reduced nothing, and the times are old
                    self._spans.append(Raw(phase, start, end, device))
        if not self.open and not self.seen.optimizers:
            self.updating = now
            self._left = False

    def fail(self) -> None:
        """Note that an exception ends the outermost open span.

        The script continues if it catches the exception.
        """
        if len(self.open) == 1 and self.open[0].kind not in ASIDE:
            now = self.moment()
            self._spans.append(Raw(FAILED, now, now))

    def add(self, kind: str, start: Any, end: Any, device: int = OWN, note: Any = None) -> None:
        """Record a span that an engine or a wrapper has measured; any thread may call this."""
        if self.active and self.kept and not (self.gpus is not None and self._capturing()):
            self._spans.append(Raw(kind, start, end, device, note))

    def moment(self, device: int = OWN) -> Any:
        """Return the present moment: on one device, on the host (`HOST`), or on all (`OWN`)."""
        try:
            if self.gpus is None or device == OWN:
                return self.now()
            return self.gpus.now(() if device == HOST else (device,))
        except Exception as error:
            self.give_up(error)
            return time.perf_counter()

    def safely(self, function: Function) -> Function:
        """Return `function` so that it gives up the recording and returns None, if it raises."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.give_up(error)

        return call

    def mark(self, phase: Phase, device: int) -> AbstractContextManager[Any]:
        """Return a context manager that records a phase of dpbench's engine, from any thread."""
        return _Mark(self, phase, device)

    def copied(self, tensor: Any, start: Any) -> None:
        """Record the copy of a host tensor to a device, from the moment `start` to now."""
        self.add(Phase.SCATTER, start, self.moment())
        # the driver must be asked, and its answer is the same in every step
        if len(self.ends) < PINNED_READS:
            self.seen.pinned = bool(self.safely(tensor.is_pinned)())

    def _log(self, kind: str, start: Any, end: Any, note: Any) -> None:
        spans = self._spans
        if kind == WITHIN:
            return
        if kind == EVALUATION:  # a pass over a data set is one span, also with thousands of batches
            place = len(spans)
            while place and spans[place - 1].kind in _BETWEEN_EVALUATIONS:
                place -= 1
            if place and spans[place - 1].kind == EVALUATION and spans[place - 1].note == note:
                start = spans[place - 1].start
                del spans[place - 1 :]
        spans.append(Raw(kind, start, end, HOST if kind == _DATA else OWN, note))

    @property
    def mine(self) -> bool:
        """Return whether the recorder is active and records the calling thread."""
        return self.active and get_ident() == self.thread

    @property
    def inside(self) -> str:
        """Return the kind of the innermost open span, or an empty text."""
        return self.open[-1].kind if self.open else ""

    # -- intervals

    def owner(self, thing: Any) -> int:
        """Return the number of an optimizer, a loader or an engine.

        Unlike an id, it is not used again for a later object.
        """
        number = self._owners.get(id(thing))
        if number is None:
            number = next(self._numbers)
            self.own(thing, number)
        return number

    def own(self, thing: Any, number: int) -> None:
        """Give an object a number: an iterator of a loader has that of its loader."""
        if id(thing) not in self._owners:
            weakref.finalize(thing, self._owners.pop, id(thing), None).atexit = False
        self._owners[id(thing)] = number

    def update(self, owner: int, name: str = "", end: Any = None) -> None:
        """End the interval at the moment `end` (default: now), and set if the next one is kept.

        `owner` is the number of the optimizer or engine that has updated the weights, and `name`
        that of its class. If the script itself updated them, they are `BY_HAND` and empty.
        """
        if not self.active:
            return
        try:
            if self.seen.device_kind == "cuda" and self._capturing():
                self.captured.append((owner, name))
                return
            end = end or self.now()
            if name and owner not in self.seen.optimizers:
                self.seen.optimizers[owner] = name
            self.updating = None
            number = len(self.ends)
            spans = self._spans
            self.ends.append(float(end))
            self._spans = []
            if self.kept:
                self.intervals.append(new(Interval, (number, owner, self._start, end, spans)))
                self._total += len(spans) + 1
            else:
                self.asides += spans
            self._start = end
            if self.gpus is not None:
                self.gpus.updated()
            # the devices are known once a module has been trained
            elif self.seen.device_kind == "cuda":
                opened = self.seen.opened
                self.gpus = GpuTimes(
                    opened or open_devices("cuda", self.seen.devices, ids=self.seen.device_ids)
                )
                self.now = self.gpus.now
                self._start = self.now()
            if self._full or self._total >= self._most:
                was_kept = self.kept
                self.kept = self._keeps(number + 1)
                if self.kept and not was_kept:
                    self._start = self.now()
            if number + 1 >= self.due:
                self.look(number + 1)
            for listen in self.listeners:
                listen(self.ends)
        except Exception as error:
            self.give_up(error)

    def resume(self) -> None:
        """Begin the present interval now, because the process has waited since the last update."""
        self._start = self.now()

    def _capturing(self) -> bool:
        """Return whether the current stream captures a CUDA graph, and note it if it does."""
        found = capturing()
        if found:
            self.seen.unknown[CAPTURED] = 0
        return found

    def elsewhere(self) -> None:
        """Note that an optimizer steps in a thread that is not recorded."""
        problem = (
            "an optimizer steps in a thread that dpbench does not watch: start watching in that"
            " thread"
        )
        self.seen.unknown[problem] = self.seen.unknown.get(problem, 0) + 1

    def updated_by_hand(self) -> None:
        """Note the end of a `no_grad` block, in which the script may have updated the weights."""
        if self.updating is not None and not self.open and self.mine:
            self.updating = self.moment()
            self._left = True

    def _keeps(self, number: int) -> bool:
        """Return whether to keep the interval `number`.

        At first, every interval is kept; later, blocks of `BLOCK` intervals at growing, irregular
        distances, which match no period of the loop. The number of kept blocks grows with the
        logarithm of the number of all blocks.
        """
        block = number // BLOCK
        self._full = self._full or max(1, block)
        return block < self._full or (block * GOLDEN) % 1.0 < self._full / block

    def seconds(self, moment: float, device: int) -> float:
        """Return the time in seconds at which a device, or the host (HOST), reached a moment."""
        return (
            float(moment)
            if self.gpus is None or device == HOST
            else self.gpus.seconds(moment, device)
        )

    def stop(self) -> list[Raw]:
        """Stop recording; return the spans since the last update."""
        self.active = False
        self.open.clear()
        if self.gpus is not None:
            self.gpus.stop()
        return self._spans


class _Mark:
    __slots__ = ("_device", "_phase", "_recorder", "_start")

    def __init__(self, recorder: Recorder, phase: Phase, device: int) -> None:
        self._recorder = recorder
        self._phase = phase
        self._device = device

    def __enter__(self) -> None:
        self._start = self._recorder.moment(self._device)

    def __exit__(self, *error: object) -> None:
        end = self._recorder.moment(self._device)
        self._recorder.add(self._phase, self._start, end, self._device)
