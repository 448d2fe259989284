"""The page of `make gpu-check`: each failure, no host name, and no page without GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dpbench.hardware import gpus, provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "scripts"))

import gpu_check

JUNIT = """<testsuites><testsuite>
<testcase name="test_a"/>
<testcase name="test_b"><failure message="assert 3 == 4&#10;where 3 = f()">long</failure></testcase>
<testcase name="test_c"><error message="fixture died"/></testcase>
<testcase name="test_d"><skipped message="needs 2 GPUs"/></testcase>
<testcase name="test_e"><skipped message="needs 2 GPUs"/></testcase>
</testsuite></testsuites>"""


def test_the_page_names_machine_failures_and_run(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(JUNIT)
    gpus = {
        "gpus": [
            {"index": 0, "name": "NVIDIA A2", "memory_bytes": 16_000_000_000, "uuid": "GPU-1"}
        ],
        "driver": "570",
    }
    facts = provenance.collect(gpus)
    found = gpu_check.page(facts, gpu_check.Tests.of(junit), "mlp: use ddp on 2 devices\n")
    assert "0: NVIDIA A2, 16,000,000,000 bytes" in found
    assert "1 passed, 2 skipped, 2 failed" in found
    assert "skipped 2: needs 2 GPUs" in found
    assert "FAILED test_b: assert 3 == 4\nFAILED test_c: fixture died" in found
    assert "mlp: use ddp on 2 devices" in found
    assert f"torch {provenance.version('torch')}" in found
    assert "GPU-1" not in found
    assert facts["host"]["name"] not in found
    assert "did not end" in gpu_check.page(facts, None, "")


def test_without_gpus_there_is_no_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = gpus.TorchGpus(missing="torch 2.14 finds no GPU: no driver")
    monkeypatch.setattr(gpu_check.gpus, "of_torch", lambda: missing)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as raised:
        gpu_check.main()
    assert raised.value.code == 2
    assert missing.missing in capsys.readouterr().err
