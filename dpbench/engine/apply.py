"""Parallel apply: run each replica on its device, in a thread of its own, under the caller's torch settings."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dpbench.engine.devices import Devices, as_devices
from dpbench.records import HOST, Mark, Phase, no_mark


def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None,
    devices: Devices,
    *,
    mark: Mark = no_mark,
) -> list[Any]:
    """Call `modules[i](*inputs[i], **kwargs[i])` on `devices[i]`, each in a new thread; return the outputs.

    An input that is no tuple or list is a single argument. One module runs in the calling thread. When replicas fail,
    the error of the lowest is raised after all have ended, with the replica and its device as a note.
    """
    devices = as_devices(devices)
    kwargs = kwargs or [{}] * len(modules)
    if not len(modules) == len(inputs) == len(kwargs) == len(devices):
        raise ValueError(
            f"parallel_apply needs one input, one kwargs and one device per module; got {len(modules)} modules, "
            f"{len(inputs)} inputs, {len(kwargs)} kwargs, {len(devices)} devices"
        )
    results: list[Any] = [None] * len(modules)
    errors: list[BaseException | None] = [None] * len(modules)
    enter_settings = _thread_settings()
    guards = [device.guard() for device in devices]

    def run(i: int) -> None:
        arguments = inputs[i] if isinstance(inputs[i], tuple | list) else (inputs[i],)
        try:
            with enter_settings(), guards[i], mark(Phase.FORWARD, devices[i].index):
                results[i] = modules[i](*arguments, **kwargs[i])
        except BaseException as error:  # whatever it is, it belongs to the caller
            error.add_note(f"in replica {i} on device {devices[i].name}")
            errors[i] = error

    if len(modules) == 1:
        run(0)
    else:
        with mark(Phase.FORWARD, HOST):  # what starting threads costs is the schedule's, not a device's
            threads = [threading.Thread(target=run, args=(i,), name=f"replica-{i}") for i in range(len(modules))]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
    for error in errors:
        if error is not None:
            try:
                raise error
            finally:  # the frame and the error know each other: leave no cycle behind
                errors.clear()
                del error
    return results


def _thread_settings() -> Any:
    """Take the calling thread's grad, inference and autocast modes; return a context manager that applies them."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocasts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def applied() -> Iterator[None]:
        with ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, enabled, dtype in autocasts:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield

    return applied
