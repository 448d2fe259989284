"""What the doctor reads from a store and keeps in it: the steps of a share, and its result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.doctor import stored
from dpbench.doctor.examination import read
from dpbench.doctor.faults import STANDARD
from dpbench.doctor.result import result
from dpbench.records import Case, Trial
from dpbench.records.work import Shapes
from dpbench.store import Store
from tests.doctor import machines
from tests.exported import STEP_S, made
from tests.exported import stored as put

HERE = "h"
"""The host key of the runs in these stores."""
SHAPES = Shapes(
    parameter_tensors=2,
    parameter_bytes=int(8e6),
    trainable_bytes=int(8e6),
    buffer_bytes=0,
    input_bytes=4.0,
    target_bytes=8.0,
    output_bytes=4.0,
)
ON_A100 = {"host": {"name": "x"}, "gpus": {"driver": "570.1", "gpus": [{"name": "A100"}] * 2}}


def trials(strategy: str, devices: int = 2, **changes: Any) -> list[Trial]:
    case = Case(
        model="mlp",
        strategy=strategy,
        devices=devices,
        batch_size=64,
        schedule="reference" if strategy == "dp" else "",
        device_kind="cuda",
    )
    facts = {"torch": "2.13.0", "model": vars(SHAPES), "gpu": "A100"}
    rounds = range(3)
    return [made(case, number=i, steps=30, provenance=facts, **changes) for i in rounds]


def test_the_steps_are_those_of_the_last_run_on_several_gpus_of_this_machine(
    tmp_path: Path,
) -> None:
    path = tmp_path / "dpbench.db"
    put(path, *trials("dp", 4), *trials("dp", 2), *trials("ddp", 4), provenance=ON_A100)
    put(path, *trials("single", 1), provenance=ON_A100)
    found = stored.steps(path, HERE)
    assert found.weights_bytes == 8e6
    assert found.parallel_s == pytest.approx(STEP_S)
    assert found.ddp_s == pytest.approx(STEP_S)
    assert "mlp" in found.name
    assert stored.steps(path, "another machine") == STANDARD


def test_a_run_with_one_wrapper_gives_one_share(tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    put(path, *trials("ddp"), provenance=ON_A100)
    found = stored.steps(path, HERE)
    assert (found.parallel_s, found.ddp_s > 0) == (0.0, True)


@pytest.mark.parametrize("what", ["no store", "on CPUs", "on fake GPUs", "no store of dpbench"])
def test_without_a_run_on_gpus_the_standard_is_used(what: str, tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    if what == "on CPUs":
        put(path, made(number=0), made(number=1), made(number=2))
    if what == "on fake GPUs":
        put(path, *trials("dp"), provenance={"gpus": {"driver": "580.fake", "gpus": [{}]}})
    if what == "no store of dpbench":
        path.write_text("text")
    assert stored.steps(path, HERE) == STANDARD
    assert path.exists() is (what != "no store")


def test_a_store_that_exists_keeps_the_result(tmp_path: Path) -> None:
    machine = machines.with_bridges(machines.examined(tmp_path, "2x3090"))
    examination = result(replace(machine, steps=STANDARD), 1.7e9)
    path = tmp_path / "dpbench.db"
    stored.keep(path, HERE, examination)
    assert not path.exists()
    put(path, made())
    stored.keep(path, HERE, examination)
    with Store.read(path) as store:
        (run,) = store.runs()
    assert read(run.machine_result) == examination


def test_a_store_that_cannot_be_written_does_not_end_the_examination(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "dpbench.db"
    path.write_text("text")
    stored.keep(path, HERE, result(machines.healthy(), 0.0))
    assert "not kept" in caplog.text
    assert path.read_text() == "text"


def test_the_host_key_is_that_of_the_runs() -> None:
    from dpbench.hardware import provenance

    facts = provenance.collect({"gpus": []})
    assert stored.host_of(machines.healthy()) == provenance.host_key(facts)
