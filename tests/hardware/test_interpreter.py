"""Interpreter: the lock that an import switches on is noticed, and the module that did it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench import strategies
from dpbench.hardware import interpreter
from dpbench.measure.worker import loaders, trial
from dpbench.records import Case, Status
from dpbench.records.loading import Loading
from tests.runs import TWO_STEPS
from tests.trials import report_on, trial_of

CASE = Case(model="mlp", strategy="dp", devices=2, batch_size=8)

WARNING = (
    "The global interpreter lock (GIL) has been enabled to load module 'pkg._fast', which has not"
    " declared that it can run safely without the GIL. To override this behavior and keep the GIL"
    " disabled (at your own risk), run with PYTHON_GIL=0 or -Xgil=0."
)
"""What CPython 3.13 and 3.14 say, once in a process."""


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that switches the lock of this process, as it says of itself."""
    monkeypatch.setattr(interpreter._Watch, "began", False)
    monkeypatch.setattr(interpreter._Watch, "module", interpreter.UNKNOWN)
    monkeypatch.setattr(warnings, "showwarning", lambda *_, **__: None)

    def switch(on: bool) -> None:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: on, raising=False)

    return switch


def _warned(filters: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(filters)  # type: ignore[arg-type]
        warnings.warn(WARNING, RuntimeWarning, stacklevel=1)


def test_the_module_that_switches_the_lock_on_is_noted(lock: Callable[[bool], None]) -> None:
    lock(False)
    interpreter.watch_gil()
    assert (interpreter.gil(), interpreter.switched_on_by()) == ("off", "")
    lock(True)
    _warned("always")
    interpreter.watch_gil()
    assert (interpreter.gil(), interpreter.switched_on_by()) == ("on", "pkg._fast")


def test_other_warnings_are_shown_and_name_nothing(
    lock: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    lock(False)
    interpreter.watch_gil()
    _warned("always")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("another", stacklevel=1)
    assert shown == [WARNING, "another"]
    lock(True)
    assert interpreter.switched_on_by() == "pkg._fast"


def test_without_the_warning_the_module_is_unknown(lock: Callable[[bool], None]) -> None:
    lock(False)
    interpreter.watch_gil()
    _warned("ignore")
    lock(True)
    assert interpreter.switched_on_by() == interpreter.UNKNOWN


def test_a_lock_that_was_on_before_was_switched_by_nobody(lock: Callable[[bool], None]) -> None:
    lock(True)
    interpreter.watch_gil()
    _warned("always")
    assert interpreter.switched_on_by() == ""


def test_a_text_without_the_warning_names_no_module() -> None:
    assert interpreter.switching(f"a line\n{WARNING}\n") == "pkg._fast"
    assert interpreter.switching("RuntimeWarning: the GIL") == ""


class Examples:
    """A dataset whose examples import a module that is not ready for a Python without the lock."""

    def __init__(self, load: Callable[[], None]) -> None:
        self.load = load

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        self.load()
        return torch.zeros(1)


class Lazy(strategies.Strategy):
    """A strategy whose third step imports such a module."""

    def __init__(self, load: Callable[[], None]) -> None:
        self.load = load
        self.steps = 0

    @contextmanager
    def start(self, case: Case, model: Any, devices: Any, mark: Any) -> Iterator[Any]:
        def step(inputs: Any, target: Any) -> torch.Tensor:
            self.steps += 1
            if self.steps == 3:
                self.load()
            return torch.tensor(1.0)

        yield step


@pytest.mark.parametrize("loads", [False, True], ids=["steps", "batches"])
@pytest.mark.parametrize("switches", [False, True])
def test_a_trial_states_the_lock_as_its_steps_left_it_and_who_switched_it_on(
    loads: bool,
    switches: bool,
    lock: Callable[[bool], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load() -> None:
        if switches:
            lock(True)
            _warned("always")

    lock(False)
    interpreter.watch_gil()
    if loads:
        monkeypatch.setattr(loaders, "opened", lambda name, **_: Examples(load))
        found = loaders.measure(Loading(examples=8).case("data.py:train", 0, 4), 0, tmp_path)
    else:
        case = Case(model="mlp", strategy="single", batch_size=4, unverified=True)
        effort = replace(TWO_STEPS, min_steps=4, max_steps=4)
        found = trial.measure(case, effort, Lazy(load))
    assert found.status is Status.OK, found.reason
    stated = (found.facts.gil, found.facts.gil_switched_on_by)
    assert stated == (("on", "pkg._fast") if switches else ("off", ""))


def test_a_report_warns_once_of_each_module_that_switched_the_lock_on() -> None:
    def stated(module: str) -> list[str]:
        facts = {"gil": "on", "gil_switched_on_by": module}
        trials = [trial_of(CASE, [0.01] * 9, round=n, provenance=facts) for n in range(3)]
        report = report_on(trials)
        said = [one for one in report.statements if one.key == "gil"]
        assert all(one.warns for one in said)
        return [one.text for one in said]

    (text,) = stated("pkg._fast")
    assert "pkg._fast" in text
    assert stated("") == []
