"""A run with simulated GPUs: the real server's forked worker verifies, times and profiles it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dpbench.measure.server import Server
from dpbench.records import Status, Verified
from tests.simulated import server
from tests.simulated.scenario import EFFORT, as_rounds, case_of, report_of


def test_a_slow_gpu_is_named_by_a_run_through_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = server.executable(tmp_path, count=3, speeds=[1.0, 1.0, 0.5])
    monkeypatch.setattr("dpbench.measure.server.sys", SimpleNamespace(executable=str(program)))
    with Server(tmp_path) as started:
        effort = replace(EFFORT, links=True)
        trial = started.run(case_of(3, batch=30, inputs="pageable"), effort, 0, 100.0)
    assert trial.status is Status.OK, trial.reason
    assert trial.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE)
    truth = trial.provenance[server.TRUTH]
    assert truth["pid"] != os.getpid()
    assert len(trial.facts.copies) == 3 * (3 + 3 * 2)
    ends_s = np.array([step.end_s for step in trial.steps])
    assert np.diff(ends_s) == pytest.approx(np.diff(truth["ends_s"]), rel=0.01)
    report = report_of(as_rounds(trial))
    (row,), (diagnosis,) = report.rows, report.diagnoses
    assert row.busy == pytest.approx(
        {d: np.median(seconds) for d, seconds in enumerate(truth["busy_s"])}, rel=0.01
    )
    (says,) = [one.evidence.says for one in diagnosis.findings if one.rule.key == "slow device"]
    assert "device 2 is slow" in says
    assert not [one for one in diagnosis.findings if "link" in one.rule.key]
