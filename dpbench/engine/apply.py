"""Parallel apply: run each replica on its device, in its worker thread, under the caller's torch settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpbench.engine.containers import devices_of
from dpbench.engine.run_on_devices import run_on_devices
from dpbench.engine.workers import Spawn, Workers
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import HOST, Mark, Phase, no_mark


def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Devices | None = None,
    *,
    workers: Workers = Spawn(),  # noqa: B008  it has no state
    compat: bool = False,
    mark: Mark = no_mark,
) -> list[Any]:
    """Call `modules[i](*inputs[i], **kwargs[i])` on `devices[i]`, each in its own worker; return the list of outputs.

    Without `devices`, each replica runs on the device of its input's first tensor. An input that is not a tuple or list
    is passed as a single argument. A single module runs in the calling thread. When replicas fail, the error of the
    failed replica with the lowest index is raised after all have ended: see `errors.in_replica`. `compat` forwards only
    the settings that torch.nn.parallel.parallel_apply forwards. Raises ValueError when the lengths of the four
    sequences differ.
    """
    devices = devices_of(inputs) if devices is None else as_devices(devices)
    kwargs = kwargs or [{}] * len(modules)
    if not len(modules) == len(inputs) == len(kwargs) == len(devices):
        raise ValueError(
            f"parallel_apply needs one input, one kwargs and one device per module; got {len(modules)} modules, "
            f"{len(inputs)} inputs, {len(kwargs)} kwargs, {len(devices)} devices"
        )

    def call(i: int) -> Any:
        arguments = inputs[i] if isinstance(inputs[i], tuple | list) else (inputs[i],)
        with mark(Phase.FORWARD, devices[i].index):
            return modules[i](*arguments, **kwargs[i])

    return run_on_devices(call, devices, workers, compat=compat, starting=mark(Phase.FORWARD, HOST))
