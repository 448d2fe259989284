"""Parallel apply: call each replica in a thread of its own, on its device, with its inputs.

A new thread starts per replica and call, as in torch.nn.DataParallel. If several replicas fail,
only one of their errors is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

from dpbench.engine.containers import devices_of
from dpbench.engine.errors import call_on, in_replica
from dpbench.engine.settings import SAVED_RANDOM_STATES, capture
from dpbench.engine.turn import AT_ONCE, NOTHING, Context, Latch, Turn
from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import HOST, Mark, Phase, no_mark

Job = Callable[[int], None]
"""The work of one replica, called with the replica's index.

A job stores its results and errors and never raises.
"""


Stop = Callable[[], None]
"""A function that makes all jobs end that wait for another job."""


class Calls:
    """The calls of one job in several threads, each of which is made at most once."""

    def __init__(self, job: Job, numbers: Iterable[int]) -> None:
        self._jobs = dict.fromkeys(numbers, job)
        self._ended = {i: Latch() for i in self._jobs}

    def make(self, i: int) -> None:
        """Call `job(i)`, unless `finish` has cancelled the call."""
        # no variable refers to the job: a thread that then waits must not keep a step's objects
        self._jobs.pop(i, _do_nothing)(i)
        self._ended[i].set()

    def wait(self) -> None:
        """Wait until all calls have ended."""
        for ended in self._ended.values():
            ended.wait()

    def finish(self) -> None:
        """After an interrupt, cancel the calls that have not begun, and wait for the others.

        A job that still ran in the next step would write into that step's tensors.
        """
        for i, ended in self._ended.items():
            if self._jobs.pop(i, None) is not None:
                ended.set()
        self.wait()


def _do_nothing(i: int) -> None:
    pass


class Workers:
    """The threads that run the replicas; all jobs run at the same time, and may wait for others."""

    turn: Turn = AT_ONCE
    """When each forward on the host may begin."""

    def run(
        self, job: Job, count: int, starting: Context = NOTHING, stop: Stop = lambda: None
    ) -> None:
        """Call `job(i)` for each i below `count`, and wait for all of these calls to end.

        Other threads get their jobs inside the context `starting`, such as a mark that records the
        host's time for this. If the calling thread is interrupted, it calls `stop`, so that no job
        waits for one that does not run, and raises the interrupt when all calls have ended. A
        second interrupt is raised at once.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the threads that persist between calls; a later `run` starts new ones.

        By default, none persist.
        """


class Spawn(Workers):
    """Workers that start a new thread per replica and call, as torch.nn.DataParallel does."""

    def run(
        self, job: Job, count: int, starting: Context = NOTHING, stop: Stop = lambda: None
    ) -> None:
        """Run each job in a new thread, or a single job in the calling thread."""
        if count == 1:
            return job(0)
        calls = Calls(job, range(count))
        # daemons: a thread whose `start` is interrupted can wait for ever, and Python with it
        threads = [
            threading.Thread(target=calls.make, args=(i,), name=f"replica-{i}", daemon=True)
            for i in range(count)
        ]
        try:
            with starting:
                for thread in threads:
                    thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            stop()
            calls.finish()
            raise
        return None


def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Devices | None = None,
    *,
    workers: Workers = Spawn(),  # noqa: B008  it has no state
    turn: Turn | None = None,
    mark: Mark = no_mark,
) -> list[Any]:
    """Call `modules[i](*inputs[i], **kwargs[i])` on `devices[i]`, each in its own thread.

    Without `devices`, each module runs on the device of its input's first tensor. An input that is
    not a tuple or list is passed as a single argument. A single module runs in the calling thread.
    `turn` says when each call may begin; None leaves it to `workers`.
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
    if turn is None:
        # a forward on a GPU only queues work: it need not wait, and has no time to compare
        on_host = devices and devices[0].torch_device.type == "cpu"
        turn = workers.turn if on_host else AT_ONCE

    def forward(i: int) -> None:
        arguments = inputs[i] if isinstance(inputs[i], tuple | list) else (inputs[i],)
        with turn.of(i), mark(Phase.FORWARD, devices[i].index):
            outputs[i] = call_on(devices[i], modules[i], arguments, kwargs[i])

    with Team(devices) as team:
        workers.run(partial(team.do, forward), len(devices), mark(Phase.FORWARD, HOST))
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

    def do(self, work: Callable[[int], object], i: int) -> None:
        """Call `work(i)` on device i with the caller's settings; an error is kept."""
        try:
            if threading.get_ident() != self._caller:
                self._devices[i].settle()
            with self._checked(), self.settings(), self.guards[i]:
                work(i)
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
