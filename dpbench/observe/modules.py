"""Modules: record the calls of a loop's outermost modules as forward, loss or evaluation.

An outermost module is called by the script and not by another module. It gets forward hooks when it
is found. To find it, `Module.__call__` is replaced for a few updates: at the start, when an
iterator of a DataLoader starts, and after 64, 128, 256 and so on updates. The replacement is
removed while an outermost module runs, so that calls of inner modules are never slower and
torch.compile traces the original.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from dpbench.engine import DataParallel
from dpbench.hardware.device import Device
from dpbench.hardware.devices import float32, kind_of, open_devices
from dpbench.measure.worker.facts import sizes
from dpbench.observe.recorder import EVALUATION, OWN, WITHIN, Function, Recorder, Seen
from dpbench.records import Phase
from dpbench.strategies.ddp import ExposedReduction

FSDP = ("FSDPModule", "FullyShardedDataParallel")
"""The names of the classes that shard a module: those of FSDP2 and of FSDP1."""
LOOKS = 2
"""The number of updates during which new outermost modules are looked for."""
AGAIN = 64
"""The number of updates after which modules are looked for again, and then at each doubling."""
COUNTED = 64
"""The number of calls of each module in which the rows of batches are counted."""
OUTSIDE = ("", Phase.OPTIMIZER)
"""The open span around an outermost call: none, or an optimizer's step that runs a closure."""
_FORWARD = Phase.FORWARD  # an attribute of an enumeration is slow to read
METHODS = {
    "scatter": Phase.SCATTER,
    "replicate": Phase.REPLICATE,
    "parallel_apply": Phase.FORWARD,
    "gather": Phase.GATHER,
}
"""The phases of the methods of a torch.nn.DataParallel."""


class Outermost:
    """The outermost modules that were found, with their hooks."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[int, tuple[nn.Module, list[Any]]] = {}
        self._alive: dict[int, nn.Module] = {}
        """Every module that had hooks: what was seen is known by ids, which no other may get."""
        self._opened: list[tuple[bool, BaseException | None]] = []
        """For each open call: whether it is recorded, and the exception handled at its start."""
        self._original = nn.Module.__call__
        self._until = LOOKS
        self._looking = False

    @contextmanager
    def installed(self) -> Iterator[Outermost]:
        """Look for outermost modules; on exit, remove all hooks."""
        self.look()
        self._recorder.look = self._updated
        try:
            yield self
        finally:
            self._call(self._original)
            self._unhook()

    def look(self) -> None:
        """Look for outermost modules during the next updates."""
        self._until = len(self._recorder.ends) + LOOKS
        self._call(self._finding)
        self._wait()

    def look_anew(self) -> None:
        """Remove the hooks, which cannot be pickled, and look for outermost modules again."""
        self._unhook()
        self.look()

    def _wait(self) -> None:
        number = len(self._recorder.ends)
        again = max(AGAIN, 1 << number.bit_length())  # the next power of two
        self._recorder.due = min(again, self._until + 1) if self._looking else again

    def _updated(self, number: int) -> None:
        if number >= AGAIN and number & (number - 1) == 0:
            self.look()
        else:
            self._call(self._original)
            self._wait()

    def _call(self, function: Function) -> None:
        looking = function is not self._original
        if looking != self._looking:
            nn.Module.__call__ = function if looking else self._original  # type: ignore[method-assign]
            self._looking = looking

    @functools.cached_property  # torch.compile would compile again for a new function
    def _finding(self) -> Function:
        original = self._original
        hooked = self._known
        recorder = self._recorder
        hook = recorder.safely(self._hook)

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.mine or recorder.inside not in OUTSIDE:
                return original(module, *args, **kwargs)
            if id(module) not in hooked:
                hook(module)
            self._call(original)
            try:
                return original(module, *args, **kwargs)
            finally:
                self._call(self._finding)

        return call

    def _hook(self, module: nn.Module) -> None:
        recorder = self._recorder
        opened = self._opened
        seen = recorder.seen
        note_facts = recorder.safely(_note_facts)

        # closures and no methods: a copy of the module would copy the object of a method, with the
        # whole recorder
        def before(module: Any, args: Any, kwargs: Any) -> None:
            # torch.compile traces the hooks of a module inside a compiled function, and would break
            # the graph at them
            if is_compiling() or not recorder.active or get_ident() != recorder.thread:
                return
            handled = sys.exception()
            try:
                # the look at the module and its arguments is a part of the call
                start = recorder.now()
                kind = _kind(recorder, module, args, kwargs)
                hidden = kind == EVALUATION and (module.training or is_grad_enabled())
                recorded = recorder.begin(kind, -id(module) if hidden else id(module), start)
                opened.append((recorded, handled))
            except Exception as error:
                recorder.give_up(error)

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if (
                is_compiling()
                or not opened
                or not recorder.active
                or get_ident() != recorder.thread
            ):
                return
            recorded, handled = opened.pop()
            if recorded:
                if sys.exception() is not handled:  # this hook also runs if the call has raised
                    recorder.fail()
                recorder.end()
                if id(module) in seen.trained and id(module) not in seen.models:
                    note_facts(seen, module, args, kwargs, output)

        hooks: list[Any] = [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]
        self._known[id(module)] = (module, hooks)
        self._alive[id(module)] = module
        if type(module).__name__ == "OptimizedModule":
            seen.compiled.add(id(module))
        if isinstance(module, nn.DataParallel):
            seen.wrapper = type(module).__name__
            seen.threads = True
            seen.devices = max(1, len(module.device_ids))
            hooks.append(_marked(module, recorder))
        elif isinstance(module, DataParallel):
            engine(seen, module, module.devices)
        elif isinstance(module, nn.parallel.DistributedDataParallel):
            seen.wrapper = type(module).__name__
            seen.ranks = True
            hooks.append(module.register_forward_pre_hook(_counting_syncs(seen)))
            if next(module.parameters()).device.type == "cpu":
                recorder.reduction = ExposedReduction(module, open_devices("cpu", 1)[0]).observe
        # by its name, because the import of FSDP is slow
        elif any(one.__name__ in FSDP for one in type(module).__mro__):
            seen.wrapper = "FullyShardedDataParallel"
            seen.ranks = True
        elif any(isinstance(one, nn.parallel.DistributedDataParallel) for one in module.modules()):
            seen.ranks = True  # such as one that torch.compile has wrapped

    def _unhook(self) -> None:
        for _, hooks in self._known.values():
            for hook in hooks:
                hook.remove()
        self._known.clear()

    def without_hooks(self, function: Function) -> Function:
        """Return a function that first removes dpbench's hooks, which `function` would pickle."""
        look_anew = self._recorder.safely(self.look_anew)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._recorder.mine and not self._recorder.inside:
                look_anew()
            return function(*args, **kwargs)

        return call


def _counting_syncs(seen: Seen) -> Callable[[Any, Any], None]:
    def count(module: Any, args: Any) -> None:
        if is_grad_enabled() and not is_compiling():
            seen.synchronized[bool(module.require_backward_grad_sync)] += 1

    return count


def _kind(recorder: Recorder, module: Any, args: Any, kwargs: Any) -> str:
    """Return the kind of a call of an outermost module.

    A module without parameters is a loss if it gets a tensor that requires gradients. A call
    without gradients is an evaluation if the module is in eval mode or has been trained. A call
    with gradients is one if the module is in eval mode and was trained in training mode. If most
    steps make such a call, for example to find adversarial inputs, `trainings.with_teachers` later
    makes it a forward.
    """
    grad = is_grad_enabled()
    training = module.training
    seen = recorder.seen
    number = id(module)
    trained = number in seen.trained
    if not grad and (trained or not training):
        return EVALUATION
    if grad and not training and number in seen.in_training:
        return EVALUATION
    if not trained and module.__class__.__module__ == "torch.nn.modules.loss":
        return Phase.LOSS
    if not trained:  # the look at the parameters is slow
        if next(module.parameters(), None) is None:
            outputs = grad and any(
                isinstance(one, torch.Tensor) and one.requires_grad for one in args
            )
            return Phase.LOSS if outputs else _within(recorder, module)
        if not grad:
            return _within(recorder, module)
        seen.trained.add(number)
        seen.rows[number] = Counter()
        if not seen.opened:
            on_devices(seen, next(module.parameters()).device, getattr(module, "device_ids", None))
        precision(seen, number)
    if training:
        seen.in_training.add(number)
    rows = seen.rows[number]
    if sum(rows.values()) < COUNTED:
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not first.dim():
            first = next(iter(batched(args, kwargs)), None)
        if first is not None:
            rows[first.shape[0]] += 1
    return _FORWARD if seen.devices == 1 else _within(recorder, module)


def batched(*arguments: Any) -> list[torch.Tensor]:
    """Return the tensors in a call's arguments that have rows."""
    leaves = tree_leaves(arguments)
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.dim()]


def _within(recorder: Recorder, module: Any) -> str:
    """Return `WITHIN` for a wrapper over several devices, which records its own phases."""
    wraps = isinstance(module, (DataParallel, nn.DataParallel)) and recorder.seen.devices > 1
    return WITHIN if wraps else Phase.FORWARD


def engine(seen: Seen, wrapper: Any, devices: Sequence[Device]) -> None:
    """Note a wrapper of dpbench's own engine, and the devices that it drives."""
    seen.wrapper = type(wrapper).__name__
    seen.threads = True
    seen.devices = max(1, len(devices))
    seen.opened = devices
    if devices:
        ids = [device.torch_device for device in devices]
        on_devices(seen, ids[0], ids)


def on_devices(seen: Seen, first: torch.device, ids: Sequence[Any] | None = None) -> None:
    """Note the kind of the devices on which the loop trains, and the GPUs' CUDA ordinals.

    `first` is the device of its weights; `ids` are those of a wrapper over several devices.
    """
    seen.device_kind = kind_of(first)
    if seen.device_kind == "cuda":
        seen.device_ids = tuple(
            one if isinstance(one, int) else torch.device(one).index for one in ids or [first]
        )


def precision(seen: Seen, owner: int) -> None:
    """Note the precision in force as that of the module or engine with this key."""
    kind = seen.device_kind
    gpu = torch.device("cuda", seen.device_ids[0]) if kind == "cuda" else None
    seen.products[owner] = products = float32.products(kind, gpu)
    found = float32.TF32 if kind == "cuda" and products.matmul == float32.TF32 else "fp32"
    if kind != "emulated" and torch.is_autocast_enabled(kind):
        autocast = torch.get_autocast_dtype(kind)
        found = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(autocast, "fp32")
    seen.precisions[owner] = found


def in_group() -> bool:
    """Return whether this process belongs to a process group of several ranks."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _note_facts(seen: Seen, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Note the sizes of a module, and whether it returns its own loss.

    The sizes include the bytes of the call's inputs and outputs per row.
    """
    inputs = batched(args, kwargs)
    outputs = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
    rows = len(inputs[0]) if inputs else 1
    seen.grouped |= in_group()
    seen.models[id(module)] = {
        **sizes(module),
        "input_bytes": sum(one.nbytes for one in inputs) / rows,
        "output_bytes": sum(one.nbytes for one in outputs) / rows,
    }
    if any(one.requires_grad and not one.dim() for one in outputs):
        seen.own_loss.add(id(module))


class _marked:  # noqa: N801
    """Replaced methods of a torch.nn.DataParallel, which record its phases."""

    def __init__(self, module: Any, recorder: Recorder) -> None:
        self._module = module
        for name, phase in METHODS.items():
            setattr(module, name, self._around(getattr(module, name), phase, recorder))

    def _around(self, was: Function, phase: Phase, recorder: Recorder) -> Function:
        @functools.wraps(was)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = recorder.moment()
            try:
                return was(*args, **kwargs)
            finally:
                # a GPU sends its output itself; elsewhere, the first device fetches all outputs
                fetched = phase is Phase.GATHER and recorder.gpus is None
                recorder.add(phase, start, recorder.moment(), 0 if fetched else OWN)

        return call

    def remove(self) -> None:
        for name in METHODS:
            self._module.__dict__.pop(name, None)
