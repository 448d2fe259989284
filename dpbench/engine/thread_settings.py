"""Thread settings: capture torch's per-thread settings in the caller, and apply them in the worker threads.

Settings that are process-wide need no transfer: default dtype, deterministic algorithms, anomaly mode, the flags of
cuDNN and of attention, the number of threads. torch has no public interface for the stacks of modes and of saved-tensor
hooks; only this module reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import overrides
from torch.autograd import graph
from torch.utils import _python_dispatch as dispatch

from dpbench.hardware.device import Device
from dpbench.hardware.malloc import keep

Enter = Callable[[], AbstractContextManager[Any]]


def capture(*, compat: bool = False) -> Enter:
    """Return a factory of context managers that apply the calling thread's settings in any thread.

    The settings are grad and inference mode, every autocast with its dtype and cache setting, default device,
    saved-tensor hooks, function and dispatch modes, and the multithreading of backward. With `compat` they are only
    those that torch.nn.DataParallel forwards: grad mode, and which autocasts are on, with the receiving thread's dtype.
    """
    settings = [*_autocasts(compat), *([] if compat else [*_modes(), *_autograd()])]
    grad = partial(torch.set_grad_enabled, torch.is_grad_enabled())
    return partial(_applied, [*settings, grad]) if settings else grad


def without_cast_cache() -> AbstractContextManager[Any]:
    """Return a context manager that disables autocast's cache of cast weights, if autocast is on.

    The cache keeps casts of leaf tensors only. With the cache, the gradients of a weight that is used twice would be
    added in one dtype on replicas with leaf parameters, and in another on replicas with non-leaf weights.
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


@contextmanager
def _applied(settings: Sequence[Enter]) -> Iterator[None]:
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting())
        yield


def _autocasts(compat: bool) -> list[Enter]:
    """Return a factory for each autocast that is on."""
    if not torch._C._is_any_autocast_enabled():
        return []
    kinds = [kind for kind in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(kind)]
    if compat:
        return [partial(torch.autocast, kind) for kind in kinds]
    cache = torch.is_autocast_cache_enabled()
    return [partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=cache) for kind in kinds]


def _modes() -> list[Enter]:
    """Return factories that push the caller's modes on a thread's stacks; a default device is a function mode."""
    settings: list[Enter] = []
    if functions := overrides._get_current_function_mode_stack():
        settings.append(partial(_function_modes, functions))
    if dispatches := dispatch._get_current_dispatch_mode_stack():
        settings.append(partial(_dispatch_modes, dispatches))
    return settings


# The modes are pushed, not entered: entering stores state in the mode, which concurrent threads would overwrite.
# Modes that a thread already has are not pushed again.


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
            dispatch._pop_mode(getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None))


def _autograd() -> list[Enter]:
    """Return factories for inference mode, for saved-tensor hooks, and for single-threaded backward.

    If the caller has disabled saved-tensor hooks, a factory disables them, too. Of the hooks only the innermost are
    returned, because torch applies no others.
    """
    settings: list[Enter] = []
    if torch.is_inference_mode_enabled():
        settings.append(torch.inference_mode)
    if hooks := torch._C._autograd._top_saved_tensors_default_hooks(False):
        settings.append(partial(graph.saved_tensors_hooks, *hooks))
    if forbidden := torch._C._autograd._saved_tensors_hooks_get_disabled_error_message():
        settings.append(partial(graph.disable_saved_tensors_hooks, forbidden))
    if not torch._C._is_multithreading_enabled():
        settings.append(partial(torch.autograd.set_multithreading_enabled, False))
    return settings


KEEP_MEMORY = "DPBENCH_KEEP_MEMORY"
"""The environment variable that, with the value 0, leaves the settings of malloc unchanged."""


def keep_memory(devices: Sequence[Device]) -> None:
    """Let malloc keep freed memory if there are several logical CPU devices, unless DPBENCH_KEEP_MEMORY=0.

    The setting is process-wide and permanent: see `malloc.keep`, which does nothing unless malloc is glibc's.
    """
    if len(devices) > 1 and devices[0].torch_device.type == "cpu" and os.environ.get(KEEP_MEMORY) != "0":
        keep()


class IntraOp:
    """A context that shares the caller's intra-op threads between logical CPU devices that work at the same time.

    Inside the context an operation runs on max(1, threads // devices) threads; on exit the caller's number is restored.
    The number is the same under every schedule, because the rounding of some operations depends on the number of
    threads.
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
