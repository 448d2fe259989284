"""Parallel apply: call each replica in a thread of its own, on its device, with its inputs.

A new thread starts per replica and call, as in torch.nn.DataParallel. If several replicas fail,
only one of their errors is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, Self

from dpbench.engine.containers import devices_of
from dpbench.engine.errors import call_on, in_replica
from dpbench.engine.settings import SAVED_RANDOM_STATES, capture
from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import HOST, Mark, Phase, no_mark

Job = Callable[[int], None]
"""The work of one replica, called with the replica's index.

A job stores its results and errors and never raises.
"""
Context = AbstractContextManager[Any]
NOTHING: Context = nullcontext()


class Workers(Protocol):
    """The threads that run the replicas; all jobs run at the same time, and may wait for others."""

    @property
    def turn(self) -> Context:
        """The context of a forward on the host, which may wait there until another has ended."""

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Call `job(i)` for each i below `count`, and wait for all of these calls to end.

        Other threads get their jobs inside the context `starting`, such as a mark that records the
        host's time for this.
        """

    def close(self) -> None:
        """End the threads that persist between calls; a later `run` starts new ones."""


class Spawn:
    """Workers that start a new thread per replica and call, as torch.nn.DataParallel does."""

    turn: Context = NOTHING

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Run each job in a new thread, or a single job in the calling thread."""
        if count == 1:
            return job(0)
        with starting:
            threads = [
                threading.Thread(target=job, args=(i,), name=f"replica-{i}") for i in range(count)
            ]
            for thread in threads:
                thread.start()
        wait_for_all(thread.join for thread in threads)
        return None

    def close(self) -> None:
        """Do nothing, because every thread has ended when `run` returns."""


def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Devices | None = None,
    *,
    workers: Workers = Spawn(),  # noqa: B008  it has no state
    mark: Mark = no_mark,
) -> list[Any]:
    """Call `modules[i](*inputs[i], **kwargs[i])` on `devices[i]`, each in its own thread.

    Without `devices`, each module runs on the device of its input's first tensor. An input that is
    not a tuple or list is passed as a single argument. A single module runs in the calling thread.
    If modules fail, the error of the failed module with the lowest index is raised after all calls
    have ended; `errors.in_replica` describes this error. Raises ValueError if the lengths of the
    four sequences differ.
    """
    devices = devices_of(inputs) if devices is None else as_devices(devices)
    kwargs = kwargs or [{}] * len(modules)
    if not len(modules) == len(inputs) == len(kwargs) == len(devices):
        raise ValueError(
            "parallel_apply needs one element of inputs, kwargs and devices per module; the"
            f" numbers of elements are {len(modules)} (modules), {len(inputs)} (inputs),"
            f" {len(kwargs)} (kwargs), {len(devices)} (devices)"
        )
    outputs: list[Any] = [None] * len(modules)
    # a forward on a GPU only queues work: it must not wait, and has no time of its own to compare
    turn = workers.turn if devices and devices[0].torch_device.type == "cpu" else NOTHING

    def job(i: int) -> None:
        arguments = inputs[i] if isinstance(inputs[i], tuple | list) else (inputs[i],)
        with team.on(i), turn, mark(Phase.FORWARD, devices[i].index):
            outputs[i] = call_on(devices[i], modules[i], arguments, kwargs[i])

    with Team(devices) as team:
        workers.run(job, len(devices), mark(Phase.FORWARD, HOST))
    return outputs


class Team:
    """A context for the jobs of all devices: it gives them the caller's settings, and keeps errors.

    After an orderly end, the error with the lowest device index is raised, if there is one.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self.settings = capture()
        self.guards = [device.guard() for device in devices]
        self._caller = threading.get_ident()
        at_once = len(devices) > 1
        self._states: Context = SAVED_RANDOM_STATES if at_once else NOTHING
        self._checked = SAVED_RANDOM_STATES.checked if at_once else nullcontext
        self.errors: dict[int, BaseException] = {}

    def __enter__(self) -> Self:
        self._states.__enter__()
        return self

    @contextmanager
    def on(self, i: int) -> Iterator[None]:
        """Run the block on device i with the caller's settings; an error ends it, and is kept."""
        try:
            if threading.get_ident() != self._caller:
                self._devices[i].settle()
            with self._checked(), self.settings(), self.guards[i]:
                yield
        except BaseException as error:
            self.errors[i] = error

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._states.__exit__(kind, error, trace)
        if error is None and self.errors:
            i = min(self.errors)
            try:
                raise in_replica(self.errors[i], i, self._devices[i])
            finally:  # the frames and the errors reference each other: break the cycle
                self.errors.clear()


def wait_for_all(waits: Iterable[Callable[[], object]]) -> None:
    """Call all `waits`, each of which waits for one job, even if the calling thread is interrupted.

    The interrupt is raised after the last call, because a job that is still running in the next
    step would write into that step's tensors. A second interrupt is raised at once.
    """
    interrupt: BaseException | None = None
    for wait in waits:
        try:
            wait()
        except BaseException as error:
            if interrupt is not None:
                raise
            interrupt = error
            wait()
    if interrupt is not None:
        raise interrupt
