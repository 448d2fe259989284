"""Parallel apply: run each replica on its device, in its worker, under the caller's torch settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpbench.engine.containers import devices_of
from dpbench.engine.run_on_devices import on_each
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
    """Call `modules[i](*inputs[i], **kwargs[i])` on `devices[i]`, each in its worker; return the outputs.

    Without `devices`, where the inputs are. An input that is no tuple or list is a single argument. One module runs
    in the calling thread. When replicas fail, the error of the lowest is raised after all have ended: see
    `errors.in_replica`. `compat` forwards only the settings that torch.nn.parallel.parallel_apply forwards.
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

    return on_each(call, devices, workers, compat=compat, starting=mark(Phase.FORWARD, HOST))
