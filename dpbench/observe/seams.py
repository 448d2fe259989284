"""Seams: the places in torch at which dpbench watches a training loop.

A seam is a public hook of torch where there is one: the hooks of optimizers and of modules.
Everywhere else it is a function or a method of torch that is replaced while the loop is watched.
Each replacement calls the original with the same arguments, draws no random numbers, and does
nothing else in other threads and under torch.compile.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.multiprocessing
import torch.utils.data
from torch import nn
from torch.compiler import is_compiling
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from dpbench.engine import DataParallel, TrainStep
from dpbench.observe.modules import Outermost, batched, engine, on_devices, precision
from dpbench.observe.recorder import CHECKPOINT, WITHIN, Function, Recorder, new
from dpbench.observe.script import of_script, place
from dpbench.records import Phase

TESTED = "2.13"
"""The version of torch in which every seam is tested."""
LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)
"""The loss functions of torch.nn.functional."""
READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__format__",
    "__repr__",
)
"""The methods of a tensor with which the host waits for its value."""
MOVES = ("to", "cuda")
"""The methods of a tensor that may copy it to another device."""
SCHEDULERS = (
    lr_scheduler.LRScheduler,
    lr_scheduler.ChainedScheduler,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.ReduceLROnPlateau,
    lr_scheduler.SequentialLR,
)
"""The learning-rate schedulers whose class defines `step`; all other schedulers inherit it."""
SPAWNED = (
    "the processes that torch.multiprocessing.spawn starts are not watched: start the script with"
    " torchrun"
)
CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_OPTIMIZER, _READ = Phase.OPTIMIZER, Phase.READ  # an attribute of an enumeration is slow to read


@contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    """Hook into torch, so that `recorder` records the loop; on exit, remove everything."""
    with ExitStack() as stack:
        replace = functools.partial(_replace, stack)
        outermost = stack.enter_context(Outermost(recorder).installed())
        _optimizers(recorder, replace, stack)
        replace(torch.no_grad, "__exit__", lambda was: _leaving(recorder, was))
        _data(recorder, replace, outermost)
        for name in LOSSES:
            replace(nn.functional, name, _around(recorder, Phase.LOSS))
        _tensors(recorder, replace)
        _engines(recorder, replace)
        _graphs(recorder, replace)
        for owner in (nn.utils, nn.utils.clip_grad):
            for name in CLIPS:
                replace(owner, name, _around(recorder, Phase.CLIP))
        for name in ("backward", "grad"):
            replace(torch.autograd, name, _around(recorder, Phase.BACKWARD))
        if torch.distributed.is_available():
            replace(torch.distributed, "all_reduce", _around(recorder, Phase.REDUCE))
        replace(torch.multiprocessing, "spawn", lambda was: _noting(recorder, was, SPAWNED))
        saving = _around(recorder, CHECKPOINT)
        replace(torch, "save", lambda was: outermost.without_hooks(saving(was)))
        yield


def _replace(stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    defined = name in vars(owner)
    was = getattr(owner, name)
    setattr(owner, name, make(was))
    stack.callback(setattr, owner, name, was) if defined else stack.callback(delattr, owner, name)


def _around(
    recorder: Recorder, kind: str, number: Callable[[Any], int] | None = None
) -> Callable[[Function], Function]:
    """Return a decorator that lets a function run inside a span of the kind `kind`.

    Its note is what `number` returns for the first argument.
    """
    noted = recorder.safely(number) if number else None

    def around(was: Function) -> Function:
        @functools.wraps(was)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.begin(kind, noted and noted(args[0])):
                return was(*args, **kwargs)
            try:
                return was(*args, **kwargs)
            except StopIteration:  # the end of an epoch
                raise
            except BaseException:
                recorder.fail()
                raise
            finally:
                recorder.end()

        return call

    return around


def _noting(recorder: Recorder, was: Function, problem: str) -> Function:
    @functools.wraps(was)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.seen.unknown[problem] = 0
        return was(*args, **kwargs)

    return call


def _leaving(recorder: Recorder, was: Function) -> Function:
    """Return a replacement of torch.no_grad.__exit__, which notes a possible update by hand."""

    @functools.wraps(was)
    def leave(*args: Any) -> None:
        was(*args)
        if recorder.updating is not None and not is_compiling():
            recorder.updated_by_hand()

    return leave


class _Running(NamedTuple):
    """A running step of an optimizer: its id, the frame that calls its hooks, if it has a span."""

    optimizer: int
    frame: types.FrameType
    recorded: bool


def _runs(frame: types.FrameType, caller: types.FrameType | None) -> bool:
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame


def _around_step(frame: types.FrameType | None) -> Iterator[type]:
    """Yield the classes of the optimizers, such as wrappers, whose `step` runs around `frame`."""
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_code.co_varnames:
            optimizer = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(optimizer, torch.optim.Optimizer):
                yield type(optimizer)
        frame = frame.f_back


class _Steps:
    """The hooks around steps, which end an interval unless a GradScaler or an engine does."""

    def __init__(
        self,
        recorder: Recorder,
        replace: Function,
        stack: ExitStack,
    ) -> None:
        self._recorder = recorder
        self._replace = replace
        self._stack = stack
        self._running: list[_Running] = []
        self._called: Any = None
        """The moment at which the script called a step that has not begun yet; else None."""
        self._classes: set[type] = set()

    def _leave(self, number: int) -> None:
        """Record that all running steps after the first `number` have failed."""
        while len(self._running) > number:
            if self._running.pop().recorded:
                self._recorder.fail()
                self._recorder.end()

    def _calling(self, was: Function) -> Function:
        """Return a replacement of a class's `step` that notes its calls and if they raise."""
        recorder = self._recorder
        running = self._running

        @functools.wraps(was)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.active or get_ident() != recorder.thread:
                return was(optimizer, *args, **kwargs)
            number = len(running)
            outermost = recorder.kept and self._called is None
            if outermost:
                self._called = recorder.moment()
            try:
                return was(optimizer, *args, **kwargs)
            except BaseException:
                self._leave(number)
                raise
            finally:
                if outermost:
                    self._called = None

        return step

    def _starting(self, optimizer: Any, assigned: Any) -> None:
        """Observe calls of `assigned`: the `step` that a scheduler, say, has set."""
        watched = self._calling(lambda optimizer, *args, **kwargs: assigned(*args, **kwargs))
        alive = weakref.ref(optimizer)

        @functools.wraps(assigned)
        def step(*args: Any, **kwargs: Any) -> Any:
            return watched(alive(), *args, **kwargs)

        step.watched = True  # type: ignore[attr-defined]
        optimizer.step = step
        self._stack.callback(
            lambda: setattr(one, "step", assigned) if (one := alive()) is not None else None
        )

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        running = self._running
        if not recorder.active:
            return
        if get_ident() != recorder.thread:
            recorder.elsewhere()
            return
        frame = sys._getframe(2)  # the one that calls the hooks
        # a step that raised before its class was hooked
        while running and not _runs(running[-1].frame, frame):
            self._leave(len(running) - 1)
        # the span begins with the call, because torch takes long for a profiler's range before it
        # calls this hook
        called = self._called
        self._called = None
        running.append(
            new(_Running, (id(optimizer), frame, recorder.begin(_OPTIMIZER, None, called)))
        )
        if type(optimizer) not in self._classes:
            if (found := of_script(frame)) is not None:
                recorder.seen.file = found.f_code.co_filename
            for kind in {type(optimizer), *_around_step(frame)} - self._classes:
                self._classes.add(kind)
                self._replace(kind, "step", self._calling)
                if "zero_grad" in vars(kind):
                    self._replace(kind, "zero_grad", _around(recorder, Phase.OPTIMIZER))
        assigned = vars(optimizer).get("step")
        if (
            assigned is not None
            and not isinstance(assigned, types.MethodType)
            and not hasattr(assigned, "watched")
        ):
            self._starting(optimizer, assigned)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        running = self._running
        if not recorder.active or get_ident() != recorder.thread:
            return
        # otherwise steps within this one have raised
        if not running or running[-1].optimizer != id(optimizer):
            place = next(
                (at for at, one in enumerate(running) if one.optimizer == id(optimizer)), None
            )
            if place is None:
                return
            self._leave(place + 1)
        if running.pop().recorded:
            recorder.end()
        # a step inside backward (of one parameter) and a step inside another optimizer's step end
        # no interval
        if not running and not recorder.deferred and not recorder.open:
            owner = recorder.owner(optimizer)
            if not recorder.seen.trained and owner not in recorder.seen.optimizers:
                # the loop calls no module
                on_devices(recorder.seen, optimizer.param_groups[0]["params"][0].device)
                precision(recorder.seen, owner)
            recorder.update(owner, type(optimizer).__name__)


def _optimizers(recorder: Recorder, replace: Function, stack: ExitStack) -> None:
    steps = _Steps(recorder, replace, stack)
    before, after = recorder.safely(steps.before), recorder.safely(steps.after)
    stack.callback(register_optimizer_step_pre_hook(before).remove)
    stack.callback(register_optimizer_step_post_hook(after).remove)
    updating = _around(recorder, Phase.OPTIMIZER)
    replace(torch.optim.Optimizer, "zero_grad", updating)
    replace(nn.Module, "zero_grad", updating)
    for scheduler in SCHEDULERS:
        replace(scheduler, "step", updating)
    for name in ("unscale_", "update"):
        replace(torch.amp.GradScaler, name, updating)
    replace(torch.amp.GradScaler, "step", lambda was: _scaled_step(recorder, was))
    replace(swa_utils.AveragedModel, "update_parameters", updating)


@contextmanager
def _deferring(recorder: Recorder, kind: str) -> Iterator[None]:
    """Record the body as a span in which no step of an optimizer ends the interval."""
    recorder.deferred += 1
    began = recorder.begin(kind)
    try:
        yield
    except BaseException:
        recorder.fail()
        raise
    finally:
        if began:
            recorder.end()
        recorder.deferred -= 1


def _scaled_step(recorder: Recorder, was: Function) -> Function:
    @functools.wraps(was)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.mine or recorder.deferred:
            return was(self, optimizer, *args, **kwargs)
        stepped: list[int] = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        try:
            with _deferring(recorder, Phase.OPTIMIZER):
                result = was(self, optimizer, *args, **kwargs)
        finally:
            hook.remove()
        owner = recorder.owner(optimizer)
        skipped = recorder.seen.skipped
        if stepped:
            skipped.setdefault(owner, 0)
        elif owner in skipped:  # before the first step, the scaler looks for a scale
            skipped[owner] += 1
        if not recorder.inside:
            recorder.update(owner, type(optimizer).__name__)
        return result

    return step


def _data(recorder: Recorder, replace: Function, outermost: Outermost) -> None:
    loaders = recorder.seen.loaders
    own = recorder.safely(recorder.own)

    def number(iterator: Any) -> int:
        known = recorder.owner(iterator)
        loaders.setdefault(known, iterator._num_workers)  # one that began before the watching
        return known

    def starting(was: Function) -> Function:
        start = _around(recorder, Phase.DATA, recorder.owner)(was)

        @recorder.safely
        def note(loader: Any) -> None:
            loaders[recorder.owner(loader)] = loader.num_workers
            if _pickles(loader) and not recorder.inside:
                outermost.look_anew()
            else:
                outermost.look()

        @functools.wraps(was)
        def starting(self: Any) -> Any:
            if not recorder.mine:
                return was(self)
            note(self)
            iterator = start(self)
            own(iterator, recorder.owner(self))
            return iterator

        return starting

    following = _around(recorder, Phase.DATA, number)
    replace(dataloader._BaseDataLoaderIter, "__next__", following)
    replace(torch.utils.data.DataLoader, "__iter__", starting)


def _pickles(loader: Any) -> bool:
    """Return whether a DataLoader now starts workers that get its dataset by pickle.

    All do but forked ones.
    """
    context = loader.multiprocessing_context or torch.multiprocessing
    starts = loader.num_workers and not (loader.persistent_workers and loader._iterator)
    return bool(starts) and context.get_start_method() != "fork"


def _tensors(recorder: Recorder, replace: Function) -> None:
    open_spans = recorder.open
    seen = recorder.seen
    placed = recorder.safely(place)

    def moving(was: Function) -> Function:
        @functools.wraps(was)
        def move(self: Any, *args: Any, **kwargs: Any) -> Any:
            # the first test is the cheapest: clipping moves the norm of every parameter
            if open_spans or is_compiling() or not recorder.mine:
                return was(self, *args, **kwargs)
            start = recorder.moment()
            moved = was(self, *args, **kwargs)
            if moved.device != self.device:
                if self.device.type == "cpu":
                    recorder.copied(self, start)
                else:
                    where = placed(sys._getframe(1), "to")
                    recorder.add(Phase.READ, start, recorder.moment(), note=where)
            return moved

        return move

    def reading(name: str) -> Callable[[Function], Function]:
        def make(was: Function) -> Function:
            @functools.wraps(was)
            def read(self: Any, *args: Any, **kwargs: Any) -> Any:
                # in a loop on GPUs, the host waits only for tensors on a GPU
                if (
                    is_compiling()
                    or (seen.device_kind == "cuda" and not self.is_cuda)
                    or not recorder.begin(_READ)
                ):
                    return was(self, *args, **kwargs)
                where = placed(sys._getframe(1), name)
                try:
                    return was(self, *args, **kwargs)
                finally:
                    recorder.end(where)

            return read

        return make

    # a CPU build of torch has no other device to copy to
    for name in MOVES if torch.version.cuda or torch.version.hip else ():
        replace(torch.Tensor, name, moving)
    for name in READS:
        replace(torch.Tensor, name, reading(name))


def _engines(recorder: Recorder, replace: Function) -> None:
    def marked(was: Function) -> Function:
        @functools.wraps(was)
        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            if recorder.active:
                kwargs.setdefault("mark", recorder.mark)
            was(self, *args, **kwargs)

        return build

    @recorder.safely
    def note(step: Any, args: Any) -> None:
        seen = recorder.seen
        owner = recorder.owner(step)
        if owner not in seen.precisions:
            engine(seen, step, step.devices)
            precision(seen, owner)
        for first in batched(args)[:1]:
            seen.rows.setdefault(owner, Counter())[len(first)] += 1

    def stepping(was: Function) -> Function:
        @functools.wraps(was)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.mine:
                return was(self, *args, **kwargs)
            note(self, args)
            with _deferring(recorder, WITHIN):
                result = was(self, *args, **kwargs)
            recorder.update(recorder.owner(self), type(self.optimizer).__name__)
            return result

        return step

    replace(DataParallel, "__init__", marked)
    replace(TrainStep, "__init__", marked)
    replace(TrainStep, "__call__", stepping)


def _graphs(recorder: Recorder, replace: Function) -> None:
    """Let a replay of a CUDA graph end an interval if the graph has an update of the weights."""
    updates: weakref.WeakKeyDictionary[Any, list[tuple[int, str]]] = weakref.WeakKeyDictionary()

    def ending(was: Function) -> Function:
        @functools.wraps(was)
        def capture_end(self: Any) -> None:
            was(self)
            updates[self] = [*recorder.captured]
            recorder.captured.clear()

        return capture_end

    def replaying(was: Function) -> Function:
        @functools.wraps(was)
        def replay(self: Any) -> None:
            was(self)
            if recorder.mine and not recorder.open:
                for owner, name in updates.get(self, ()):
                    recorder.update(owner, name)

        return replay

    replace(torch.cuda.CUDAGraph, "capture_end", ending)
    replace(torch.cuda.CUDAGraph, "replay", replaying)
