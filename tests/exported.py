"""Handmade runs for the exports: a trial with every phase, a store, and the command line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dpbench import cli
from dpbench.records import HOST, Case, Memory, Phase, Sample, Span, Step, Trial, Verified
from dpbench.store import Identity, Naming, Store

DP = Case(model="mlp", strategy="dp", devices=2, batch_size=64, schedule="reference")
PLANNED = (
    # phase, device, from, to: shares of a step
    (Phase.SCATTER, 0, 0.00, 0.05),
    (Phase.SCATTER, 1, 0.03, 0.06),
    (Phase.REPLICATE, 0, 0.06, 0.10),
    (Phase.FORWARD, HOST, 0.10, 0.40),
    (Phase.FORWARD, 0, 0.10, 0.38),
    (Phase.FORWARD, 1, 0.12, 0.40),
    (Phase.GATHER, 0, 0.40, 0.45),
    (Phase.LOSS, 0, 0.45, 0.50),
    (Phase.BACKWARD, 1, 0.50, 0.80),
    (Phase.BACKWARD, 0, 0.50, 0.80),
    (Phase.REDUCE, 0, 0.70, 0.90),
    (Phase.OPTIMIZER, 0, 0.90, 0.98),
)
STEP_S = 0.002


def made(
    case: Case = DP,
    *,
    steps: int = 6,
    warmup: int = 2,
    number: int = 0,
    at_s: float = 5000.0,
    **changes: Any,
):
    """Return a trial whose steps abut, with spans of every phase and samples of both kinds."""
    clock = "cuda_event" if case.device_kind == "cuda" else "host"
    ends = [at_s + STEP_S * (i + 1) for i in range(steps)]
    series = tuple(
        Step(end - begun, i < warmup, end) for i, (begun, end) in enumerate(pairwise([at_s, *ends]))
    )
    spans = [
        Span(i, phase, device, clock, end - STEP_S * (1 - start), end - STEP_S * (1 - stop))
        for i, end in enumerate(ends)
        for phase, device, start, stop in PLANNED
        if device < case.devices
    ]
    samples = [
        Sample(end, device, "power_w", 100.5 + device) for end in ends for device in (HOST, 0, 1)
    ]
    given = {
        "verified": Verified.BITWISE,
        "round": number,
        "steps": series,
        "spans": tuple(spans),
        "samples": (*samples, Sample(0.0, 1, "kernel_busy_s", 0.25)),
        "memory": (Memory(0, 2**20, "allocator"),),
        "provenance": {"torch": "2.13.0"},
        "started_s": 1.7e9 + number,
        "setup": {"build_s": 0.5, "steps_s": 1.0},
    }
    return Trial(case=case, **{**given, **changes})


PROVENANCE = {
    "host": {
        "name": "secret-host",
        "cpu": "EPYC",
        "cores": 2,
        "system": "Linux",
        "machine": "x86_64",
    }
}


def stored(
    path: Path,
    *trials: Trial,
    provenance: dict[str, Any] | None = None,
    naming: Naming | None = None,
) -> str:
    with Store.create(path, naming) as store:
        facts = PROVENANCE if provenance is None else provenance
        run_id, _ = store.begin_run(
            Identity(str(time.time_ns()), "h", "c"), rounds=1, provenance=facts
        )
        for trial in trials:
            store.end_trial(store.begin_trial(run_id, trial.case, trial.round), trial)
        store.end_run(run_id)
    return run_id


Command = Callable[..., tuple[int, str, str]]


def command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Return a call of the command line in a folder: exit code, stdout and stderr."""
    monkeypatch.chdir(folder)

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            cli.main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capfd.readouterr()

    return call


def is_error(code: int, out: str, err: str, expected: int = 64) -> str:
    """Check that an error is one line, or click's usage and a message, with the right exit code.

    Return it.
    """
    assert code == expected, err
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith(("Usage: ", "error: ")), err
    assert err.startswith("Usage: ") or err.count("\n") == 1, err
    return err[err.lower().index("error: ") :]


def strict(text: str) -> Any:
    """Return the data of a JSON text, which must have no NaN."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


def compared(out: str) -> list[str]:
    """Return the lines on cases in the text that `dpbench compare` printed."""
    return out.partition("--\n")[2].partition("\n\n")[0].splitlines()
