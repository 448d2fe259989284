"""Signals: SIGINT, SIGTERM and SIGHUP end a command, even while it waits for another process.

The first signal raises `EndedBySignal`, so that context managers exit and the run is marked as
interrupted. Python drops an exception that a signal handler raises inside `__del__` or a callback,
and a signal just before a blocking system call does not interrupt that call. The signal is
therefore also stored, `check` raises `EndedBySignal` again, and `wait` ends when a signal arrives.
A second Ctrl-C ends the process, and those that it has started, at once.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h\n"


class EndedBySignal(KeyboardInterrupt):
    """A signal has asked this process to end."""


class _State:
    """The first signal received (0: none), and the pipe by which signals end a wait."""

    number = 0
    wake: int | None = None


def install() -> None:
    """Make SIGINT, SIGTERM and SIGHUP end this process.

    A signal that was ignored when this process started, as by nohup, stays ignored.
    """
    if _State.wake is None:
        _State.wake, write = os.pipe()
        for end in (_State.wake, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def received() -> int:
    """Return the number of the first signal that has asked this process to end, or 0."""
    return _State.number


def check() -> None:
    """Raise EndedBySignal, in the main thread, if a signal has asked this process to end."""
    if _State.number and threading.current_thread() is threading.main_thread():
        raise EndedBySignal


def wait(descriptor: int, timeout_s: float) -> bool:
    """Wait until a descriptor can be read, up to `timeout_s` seconds; return whether it can.

    In the main thread, a signal that asks this process to end ends the wait and raises
    EndedBySignal.
    """
    check()
    main = threading.current_thread() is threading.main_thread()
    wake = [_State.wake] if _State.wake is not None and main else []
    ready = select.select([descriptor, *wake], [], [], timeout_s)[0]
    if _State.wake in ready:
        with suppress(BlockingIOError):
            os.read(wake[0], 4096)
        check()
    return descriptor in ready


def ignore(numbers: tuple[signal.Signals, ...] = ENDING) -> None:
    """Ignore signals that a terminal, or a tool such as timeout, sends to all processes.

    The process that has started this one handles them, and then ends this one.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def held() -> Iterator[None]:
    """Block the signals of `ENDING` while this process starts another one, which calls `release`.

    The new process thus receives no signal before it has installed its handlers, and this process
    none before it can end the new process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release() -> None:
    """Unblock the signals that were blocked when this process started; pending ones arrive."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _end(number: int, frame: FrameType | None) -> None:
    if _State.number:
        if number == signal.SIGINT:
            if os.isatty(2):
                os.write(2, _SHOW_CURSOR)
            os._exit(128 + number)
        return
    _State.number = number
    raise EndedBySignal
