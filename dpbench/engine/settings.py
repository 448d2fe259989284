"""Settings: what the threads of replicas take over from the calling thread, and what they share."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn, overrides
from torch.autograd import graph
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch as dispatch

from dpbench.engine.errors import Refused
from dpbench.hardware.device import Device
from dpbench.hardware.devices.host import load_operators
from dpbench.hardware.processes import keep

Enter = Callable[[], AbstractContextManager[Any]]


def capture() -> Enter:
    """Return a factory of context managers that apply the calling thread's torch settings.

    The settings are grad and inference mode, every autocast with its dtype and cache setting,
    default device, saved-tensor hooks, function and dispatch modes, and the multithreading of
    backward. In the calling thread itself, the contexts change nothing. A new thread inherits the
    rounding of denormal numbers from the thread that starts it.
    """
    settings: list[Enter] = []
    if torch._C._is_any_autocast_enabled():
        settings += _autocasts()
    if functions := overrides._get_current_function_mode_stack():
        settings.append(partial(_function_modes, functions))
    if dispatches := dispatch._get_current_dispatch_mode_stack():
        load_operators()  # each of these modes receives operators in several threads
        settings.append(partial(_dispatch_modes, dispatches))
    if torch.is_inference_mode_enabled():
        settings.append(torch.inference_mode)
    # only the innermost hooks are included, because torch applies no others
    if hooks := torch._C._autograd._top_saved_tensors_default_hooks(False):
        settings.append(partial(graph.saved_tensors_hooks, *hooks))
    if forbidden := torch._C._autograd._saved_tensors_hooks_get_disabled_error_message():
        settings.append(partial(graph.disable_saved_tensors_hooks, forbidden))
    if not torch._C._is_multithreading_enabled():
        settings.append(partial(torch.autograd.set_multithreading_enabled, False))
    grad = partial(torch.set_grad_enabled, torch.is_grad_enabled())
    return partial(_applied, [*settings, grad]) if settings else grad


@contextmanager
def _applied(settings: Sequence[Enter]) -> Iterator[None]:
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting())
        yield


def _autocasts() -> list[Enter]:
    cache = torch.is_autocast_cache_enabled()
    return [
        partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=cache)
        for kind in torch._C._autocast_supported_devices()
        if torch.is_autocast_enabled(kind)
    ]


# The modes are pushed, not entered: entering stores state in the mode, which concurrent threads
# would overwrite. Modes that a thread already has are not pushed again.


@contextmanager
def _function_modes(modes: Sequence[Any]) -> Iterator[None]:
    missing = [mode for mode in modes if mode not in overrides._get_current_function_mode_stack()]
    for mode in missing:
        overrides._push_mode(mode)
    try:
        yield
    finally:
        for _ in missing:
            overrides._pop_mode()


@contextmanager
def _dispatch_modes(modes: Sequence[Any]) -> Iterator[None]:
    missing = [mode for mode in modes if mode not in dispatch._get_current_dispatch_mode_stack()]
    for mode in missing:
        dispatch._push_mode(mode)
    try:
        yield
    finally:
        for mode in reversed(missing):
            dispatch._pop_mode(
                getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None)
            )


def kept() -> Callable[[], None]:
    """Return a function that gives the calling thread the settings back that it has now.

    Call it after an error: an interrupt may arrive before or inside the `__exit__` of a context,
    and leave gradients off, threads divided, or a function of torch replaced.
    """
    grad, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    threads = torch.get_num_threads()
    runs = SAVED_RANDOM_STATES.runs.get(threading.get_ident(), 0)

    def restore() -> None:
        torch.set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cache)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        SAVED_RANDOM_STATES.reset(runs)

    return restore


def without_cast_cache() -> AbstractContextManager[Any]:
    """Return a context manager that disables autocast's cache of cast weights, if autocast is on.

    The cache keeps casts of leaf tensors only. With the cache, a weight that is used twice would be
    cast once on replicas with leaf parameters, but twice on replicas with non-leaf weights. The
    weight's gradients would therefore be added in different dtypes.
    """
    cached = torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()
    return _uncached() if cached else nullcontext()


@contextmanager
def _uncached() -> Iterator[None]:
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


def check_uncached(module: nn.Module) -> None:
    """Raise Refused inside torch.nn.utils.parametrize.cached() if `module` has parametrizations.

    The cache is global, and its keys name the original module: all replicas would use the weight of
    one of them.
    """
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, module.modules())):
        raise Refused(
            "torch.nn.utils.parametrize.cached() gives all replicas the same tensor for a"
            " parametrized weight, but each replica needs its own; call the step outside of"
            " cached(), or use one device"
        )


class SavedRandomStates:
    """A context that notices replicas that save the state of the random number generator.

    Activation checkpointing saves this state in forward, and restores it in backward to draw the
    same numbers again. Concurrent replicas share the host's generator, so that numbers that another
    replica drew in between are missing in the repetition: gradients would be wrong. In the context,
    torch.get_rng_state, which checkpoints call, is replaced. `saves` counts the saved states.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.runs: dict[int, int] = {}
        """How often each thread, by its ident, is inside this context."""
        self.saves = 0
        self._read = torch.get_rng_state
        self._thread = threading.local()

    def __enter__(self) -> None:
        self.reset(self.runs.get(threading.get_ident(), 0) + 1)

    def __exit__(self, *error: object) -> None:
        self.reset(self.runs.get(threading.get_ident(), 1) - 1)

    def reset(self, runs: int | None) -> None:
        """Set the number of runs of the calling thread or, for None, count a saved state.

        An interrupted call with a number can be repeated.
        """
        try:
            # no `with`: from Python 3.14 on, an interrupt between its `__enter__` and its block
            # leaves the lock taken, as 12,633 of 20,000 interrupts of a loop did
            self._lock.acquire()
            if runs is None:
                self.saves += 1
                return
            if runs:
                self.runs[threading.get_ident()] = runs
            else:
                self.runs.pop(threading.get_ident(), None)
            replaced = torch.get_rng_state == self._save
            if self.runs and not replaced:
                self._read = torch.get_rng_state
                torch.get_rng_state = self._save
            elif replaced and not self.runs:
                torch.get_rng_state = self._read
        finally:
            # as often as an interrupted call has left it taken; `suppress` would itself be a place
            # for an interrupt before the release
            try:
                while True:
                    self._lock.release()
            except RuntimeError:  # it is released
                pass

    def _save(self) -> torch.Tensor:
        state = self._read()
        # torch.random.fork_rng, which also calls this, repeats nothing
        repeats = sys._getframe(1).f_globals.get("__name__") != "torch.random"
        if repeats and getattr(self._thread, "saved", state) is None:
            self._thread.saved = state
            self.reset(None)
        return state

    def forget(self) -> None:
        """Call this in a replica whose forward ran while no other replica drew numbers."""
        if isinstance(getattr(self._thread, "saved", None), torch.Tensor):
            self._thread.saved = None

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raise Refused at the end if numbers were drawn after the calling thread saved a state."""
        before = getattr(self._thread, "saved", ...)
        self._thread.saved = None
        try:
            yield
            saved = self._thread.saved
        finally:
            self._thread.saved = before
        if saved is not None and not torch.equal(saved, torch.default_generator.get_state()):
            raise Refused(
                "activation checkpointing (or other code of forward) saves the state of the random"
                " number generator, while concurrent replicas draw numbers from the same generator,"
                " so that backward would repeat forward with other numbers, such as other dropout"
                " masks; use DistributedDataParallel, whose ranks have generators of their own, or,"
                " if no random numbers are drawn inside the checkpoints, checkpoint(...,"
                " preserve_rng_state=False)"
            )


SAVED_RANDOM_STATES = SavedRandomStates()
"""The one context of the process, because torch.get_rng_state exists only once."""


KEEP_MEMORY = "DPBENCH_KEEP_MEMORY"
"""The name of an environment variable; 0 leaves the settings of malloc unchanged."""


def keep_memory(devices: Sequence[Device]) -> None:
    """Make malloc keep freed memory if there are several logical CPU devices: see `processes.keep`.

    The setting applies to the whole process and is permanent. It affects only glibc's malloc.
    """
    if (
        len(devices) > 1
        and devices[0].torch_device.type == "cpu"
        and os.environ.get(KEEP_MEMORY) != "0"
    ):
        keep()


class IntraOp:
    """A context that divides torch's intra-op threads between logical CPU devices.

    Inside it an operation runs on max(1, threads // devices) threads; on exit the number of threads
    is restored. All schedules use it, because the rounding of some operations depends on the number
    of threads.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = len(devices) if devices and devices[0].torch_device.type == "cpu" else 1
        self._before = 0

    def __enter__(self) -> None:
        self._before = 0
        if self._devices > 1 and (threads := torch.get_num_threads()) > 1:
            self._before = threads
            torch.set_num_threads(max(1, threads // self._devices))

    def __exit__(self, *error: object) -> None:
        if self._before:
            torch.set_num_threads(self._before)
