"""Signals: SIGINT, SIGTERM and SIGHUP end a command, even while it waits for another process.

The first signal raises `EndedBySignal`, so that context managers exit and the run is marked as
interrupted. Python drops an exception that a signal handler raises inside `__del__` or a callback,
and a signal just before a blocking system call does not interrupt that call. The signal is
therefore also stored, `check` raises `EndedBySignal` again, and `wait` ends when a signal arrives.
A second Ctrl-C ends the process, and those that it has started, at once.

A script that runs in this process gets its signals back (`hand_over`).
"""

from __future__ import annotations

import functools
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from dpbench.records import unix  # noqa: F401 (systems without it lack these signals, too)

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FATAL = (signal.SIGTERM, signal.SIGHUP)
"""The signals that end a Python process at once if it has no handler for them."""
_SHOW_CURSOR = b"\x1b[?25h\n"


class EndedBySignal(KeyboardInterrupt):
    """A signal has asked this process to end."""


class ScriptInterrupted(SystemExit):
    """An interrupt, which has been printed, ended a script in this process."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGINT)


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


def hand_over(last: Callable[[], object]) -> None:
    """Give the signals of this process, to its end, to a script that runs in it.

    The script finds the handlers of a new Python process. If SIGTERM or SIGHUP would then end the
    process, `last` is called before, once; during this call, a further signal has its usual effect.
    """
    if _State.wake is not None:
        os.close(signal.set_wakeup_fd(-1))
        os.close(_State.wake)
        _State.wake = None
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _FATAL:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)
    _call_before_end(last)


def _call_before_end(last: Callable[[], object]) -> None:
    """Call `last` before SIGTERM or SIGHUP ends this process, and show the script no handler.

    `signal.signal` and `signal.getsignal` are replaced, because scripts and libraries install no
    handler of their own where they find one.
    """
    owner = os.getpid()
    get, put = signal.getsignal, signal.signal

    def end(number: int, frame: FrameType | None) -> None:
        release_fatal()
        try:
            last()
        finally:
            os.kill(os.getpid(), number)

    def release_fatal() -> None:
        for number in _FATAL:
            if get(number) is end:
                put(number, signal.SIG_DFL)

    @functools.wraps(get)
    def getsignal(number: int) -> Any:
        found = get(number)
        return signal.SIG_DFL if found is end else found

    @functools.wraps(put)
    def set_signal(number: int, handler: Any) -> Any:
        ours = handler == signal.SIG_DFL and number in _FATAL and os.getpid() == owner
        before = put(number, end if ours else handler)
        return signal.SIG_DFL if before is end else before

    vars(signal).update(getsignal=getsignal, signal=set_signal)
    for number in _FATAL:
        if get(number) == signal.SIG_DFL:
            put(number, end)
    # a child process that the script forks ends as the child of an unwatched script does
    os.register_at_fork(after_in_child=release_fatal)


def _end(number: int, frame: FrameType | None) -> None:
    if _State.number:
        if number == signal.SIGINT:
            if os.isatty(2):
                os.write(2, _SHOW_CURSOR)
            os._exit(128 + number)
        return
    _State.number = number
    raise EndedBySignal
