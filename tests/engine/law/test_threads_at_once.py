"""Threads that run at once: callers of one wrapper, and what their replicas count and read.

Some of this can only go wrong where Python has no interpreter lock; with the lock, those tests are
skipped.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.engine import DataParallel
from dpbench.engine.containers import whole
from dpbench.engine.fast.turns import TurnsIfFaster
from dpbench.engine.settings import SavedRandomStates
from dpbench.hardware.interpreter import gil
from tests.engine.law.interrupts import Interrupted
from tests.engine.nets import Call, cpus

without_the_lock = pytest.mark.skipif(
    gil() == "on", reason="only an interpreter without its lock, or PYTHON_GIL=0, can fail here"
)
CALLERS = 3


def at_once(work: Callable[[int], object], threads: int = CALLERS) -> list[Exception]:
    """Call `work(i)` in several threads that begin together; return the errors."""
    ready = threading.Barrier(threads)
    errors: list[Exception] = []

    def run(i: int) -> None:
        ready.wait()
        try:
            work(i)
        except Exception as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return errors


@pytest.mark.parametrize("schedule", ["pool", "cached"])
def test_callers_of_one_wrapper_with_unlike_batches_take_turns_of_their_own(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TurnsIfFaster, "choose", lambda self, _: setattr(self, "taken", True))
    wrapped = DataParallel(nn.Linear(4, 4), cpus(3), schedule=schedule)

    def call(caller: int) -> None:
        rows = 3 if caller else 2  # one caller's batch has fewer pieces than there are devices
        for _ in range(60):
            assert len(wrapped(torch.randn(rows, 4))) == rows

    assert at_once(call) == []


@without_the_lock
def test_each_saved_random_state_counts() -> None:
    """A caller asks whether the count has grown: another's late write must not undo it."""
    states, each = SavedRandomStates(), 100_000
    states._read = lambda: torch.empty(0)  # type: ignore[method-assign]

    def save(_: int) -> None:
        for _ in range(each):
            states._thread.saved = None
            states._save()

    assert at_once(save, 2) == []
    assert states.saves == 2 * each


def test_an_interrupt_anywhere_leaves_no_thread_waiting_for_the_saved_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica saves a state in the calling thread, while another waits to save its own."""
    read = torch.get_rng_state
    taken: list[bool] = []
    for place in itertools.count(1):
        monkeypatch.setattr(torch, "get_rng_state", read)
        states = SavedRandomStates()
        states._thread.saved = None
        with contextlib.suppress(KeyboardInterrupt), Interrupted(place) as interrupted:
            states.reset(1)
            states._save()
            states.reset(0)
        acquire = functools.partial(states._lock.acquire, timeout=5)
        other = threading.Thread(target=lambda acquire=acquire: taken.append(acquire()))
        other.start()
        other.join()
        if not interrupted.raised:
            break
    assert len(taken) > 6
    assert all(taken), taken


@without_the_lock
@pytest.mark.slow
def test_a_call_reads_a_shared_dict_that_another_caller_fills() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        shared = module.shared
        for j in range(300):
            shared[j, x.shape] = j
        for j in range(300):
            shared.pop((j, x.shape), None)
        return module.layer(x)  # type: ignore[no-any-return]

    for _ in range(100):
        module = Call(forward, layer=nn.Linear(4, 4))
        module.shared = {i: i for i in range(500)}
        wrapped = DataParallel(module, cpus(2), schedule="reference")
        assert at_once(lambda _, wrapped=wrapped: wrapped(torch.randn(4, 4))) == []  # type: ignore[misc]


def test_what_changes_while_it_is_read_is_read_again() -> None:
    reads: list[int] = []

    def read() -> str:
        reads.append(len(reads))
        if len(reads) < 3:
            raise RuntimeError("dictionary changed size during iteration")
        return "whole"

    assert (whole(read), len(reads)) == ("whole", 3)


def test_an_error_that_stays_is_raised() -> None:
    with pytest.raises(RuntimeError, match="stays"):
        whole(_fail)


def _fail() -> None:
    raise RuntimeError("it stays")
