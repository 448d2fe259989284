"""The search for the largest batch: on made-up limits, and on emulated devices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dpbench.cli import tables
from dpbench.measure import batch_search
from dpbench.measure.worker import trial as trials
from dpbench.records import Case, Status, Trial, plan
from dpbench.records.options import OPTIONS, Options
from dpbench.store import Store
from tests.exported import Command

LIMIT = 2_000_000
CASE = Case(
    model="mlp",
    strategy="dp",
    schedule="reference",
    batch_size=600,
    devices=2,
    device_kind="emulated",
    device_memory_bytes=LIMIT,
)
SINGLE = replace(CASE, strategy="single", schedule="", devices=1, batch_size=320)


# ---------------------------------------------------------------- the bracket


@given(st.integers(0, 5000), st.integers(1, 4000), st.integers(1, 8))
def test_the_bracket_closes_on_the_limit(limit: int, start: int, unit: int) -> None:
    asked: list[int] = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= limit

    good, bad = batch_search.bracket(fits, start=start, unit=unit, most=2**20)
    assert good == limit // unit * unit
    assert bad == good + unit
    assert len(asked) == len(set(asked)) <= 2 * math.log2(2 * max(limit, start, 2)) + 2
    assert all(batch % unit == 0 for batch in asked)


def test_without_a_limit_the_search_ends_at_the_most() -> None:
    assert batch_search.bracket(lambda batch: True, start=3, unit=2, most=100) == (100, None)
    assert batch_search.bracket(lambda batch: False, start=64, unit=2, most=100) == (0, 2)


def test_what_is_not_monotone_ends_between_neighbours() -> None:
    holes = {5, 9, 13}
    good, bad = batch_search.bracket(
        lambda batch: batch not in holes and batch < 16, start=1, unit=1, most=64
    )
    assert good not in holes
    assert bad == good + 1


# ---------------------------------------------------------------- on emulated devices


def peaks(case: Case, folder: Path) -> dict[int, int]:
    """Return what a trial without a bound holds at most."""
    folder.mkdir()
    done = trials.run(replace(case, device_memory_bytes=0), batch_search.EFFORT, folder)
    assert done.status is Status.OK
    return {m.device: m.peak_bytes for m in done.memory if m.device >= 0 and not m.phase}


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
def test_the_answer_is_the_last_batch_whose_bytes_fit(tmp_path: Path) -> None:
    heard: list[Trial] = []
    with Store.create(tmp_path / "a.db") as store:
        outcome = batch_search.run([CASE, SINGLE], store, listen=heard.append)
        stored = store.trials(outcome.run_id)
    for case, found in zip([CASE, SINGLE], outcome.found, strict=True):
        assert found.largest is not None
        assert found.failed == found.largest + case.devices
        assert found.reason == ""
        fitting = peaks(replace(case, batch_size=found.largest), tmp_path / f"{case.strategy}-fits")
        failing = peaks(replace(case, batch_size=found.failed), tmp_path / f"{case.strategy}-fails")
        assert max(fitting.values()) <= LIMIT < max(failing.values())
        assert found.device == max(failing, key=lambda device: failing[device]) == 0
    # every try is an ordinary trial of the store
    assert [(t.case, t.status) for t in stored] == [(t.case, t.status) for t in heard]
    assert {t.status for t in stored} == {Status.OK, Status.OOM}
    assert (
        sum(found.tries for found in outcome.found) == len(stored) == len({t.case for t in stored})
    )
    assert {t.failed_device for t in stored if t.status is Status.OOM} == {0}


@pytest.mark.usefixtures("one_server")
def test_an_interrupted_search_goes_on_from_its_tries(tmp_path: Path) -> None:
    heard: list[Case] = []

    def interrupt(trial: Trial) -> None:
        heard.append(trial.case)
        if len(heard) == 4:
            raise KeyboardInterrupt

    case = replace(SINGLE, device_memory_bytes=900_000, batch_size=64)
    with Store.create(tmp_path / "a.db") as store:
        with pytest.raises(KeyboardInterrupt):
            batch_search.run([case], store, listen=interrupt)
        outcome = batch_search.run([case], store, listen=lambda trial: heard.append(trial.case))
        assert outcome.resumed
        stored = store.trials(outcome.run_id)
        assert not any(peak.phase for trial in stored for peak in trial.memory)
        assert (
            len(store.trials(outcome.run_id))
            == outcome.found[0].tries
            == len(heard)
            == len(set(heard))
        )


# ---------------------------------------------------------------- what is not memory


class FakeServer:
    """Answers each try by its batch."""

    answer: Callable[[int], tuple[Status, str]]

    def __init__(self, scratch: Path) -> None:
        assert scratch.is_dir()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, case: Case, *rest: Any) -> Trial:
        status, reason = type(self).answer(case.batch_size)
        return Trial(
            case=case,
            status=status,
            reason=reason,
            failed_device=1 if status is Status.OOM else None,
        )


@pytest.mark.parametrize(
    ("answer", "largest", "failed", "reason"),
    [
        (lambda b: (Status.OK, "") if b < 40 else (Status.OOM, "x"), 38, 40, ""),
        (lambda b: (Status.OOM, "x"), None, 2, ""),
        (
            lambda b: (Status.OK, ""),
            1024,
            None,
            "no try ran out of memory; the largest batch size tried was 1024",
        ),
        (lambda b: (Status.SKIPPED, "not here"), None, None, "skipped at batch 2: not here"),
        (
            lambda b: (Status.OK, "") if b < 8 else (Status.TIMEOUT, "ran\nhang"),
            4,
            None,
            "timeout at batch 8: hang",
        ),
        (
            lambda b: (
                (Status.OK, "")
                if b < 8
                else (Status.FAILED, "odd")
                if b == 12
                else (Status.OOM, "x")
            ),
            6,
            8,
            "",
        ),
        (
            lambda b: (
                (Status.OK, "")
                if b < 17
                else (Status.FAILED, "odd")
                if b == 24
                else (Status.OOM, "x")
            ),
            16,
            32,
            "failed at batch 24: odd",
        ),
    ],
)
def test_what_says_nothing_of_memory_ends_one_case_with_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    largest: int,
    failed: int,
    reason: str,
) -> None:
    monkeypatch.setattr(FakeServer, "answer", staticmethod(answer), raising=False)
    monkeypatch.setattr(batch_search, "Server", FakeServer)
    with Store.create(tmp_path / "a.db") as store:
        outcome = batch_search.run(
            [replace(CASE, batch_size=2, model=m) for m in ("mlp", "lstm")], store, most=1024
        )
        assert store.runs()[0].status == "finished"
    assert [(f.largest, f.failed, f.reason) for f in outcome.found] == [
        (largest, failed, reason)
    ] * 2
    assert outcome.found[0].device == (1 if failed else None)
    table = tables.searches(outcome.found)
    assert str(largest or "none") in table
    assert reason in table
    assert ("device 1" in table) == bool(failed)


# ---------------------------------------------------------------- what is refused


def test_a_search_needs_a_limit() -> None:
    with pytest.raises(
        ValueError,
        match=r"share the host's memory; use emulated devices, .* give device_kind='emulated'",
    ):
        batch_search.check([replace(CASE, device_kind="cpu", device_memory_bytes=0)])
    with pytest.raises(ValueError, match="give device_memory=, such as 8GiB"):
        batch_search.check([replace(CASE, device_memory_bytes=0)])
    batch_search.check([CASE, replace(CASE, device_kind="cuda", device_memory_bytes=0)])


@pytest.mark.parametrize(
    ("kind", "said"), [("cpu", "give device_kind='emulated'"), ("cuda", "leave out device_memory=")]
)
def test_only_emulated_devices_can_be_bounded(kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan.sweep(
            models=["mlp"],
            strategies=["dp"],
            devices=[2],
            batch_sizes=[8],
            device_kind=kind,
            device_memory_bytes=1,
        )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ladder": True}, "leave out ladder=True"),
        ({"budget": 5.0}, "leave out budget="),
        ({"rounds": 5}, "leave out rounds="),
        ({"paired": True}, "leave out paired=True"),
        ({"profile": True}, "leave out profile=True"),
        ({"batch_per_device": (4,)}, "leave out batch_per_device="),
        ({"batch_sizes": (4, 8)}, "one number"),
    ],
)
def test_axes_that_contradict_a_search_are_refused(changed: dict[str, Any], said: str) -> None:
    assert batch_search.axes(Options()).batch_sizes == (1,)
    with pytest.raises(ValueError, match=said):
        batch_search.axes(Options(**changed))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("512MiB", 2**29),
        ("1.5KiB", 1536),
        ("1000", 1000),
        ("2GB", 2 * 10**9),
        ("64K", 64000),
        ("10B", 10),
    ],
)
def test_bytes_have_units(text: str, size: int) -> None:
    assert OPTIONS["device_memory"].read(text) == size


@pytest.mark.parametrize("text", ["", "many", "8GiBs", "-1", "8.GiB", "iB"])
def test_what_is_no_number_of_bytes_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="such as 8GiB"):
        OPTIONS["device_memory"].read(text)


# ---------------------------------------------------------------- the command


@pytest.mark.usefixtures("one_server")
def test_the_command_prints_a_line_a_case(tmp_path: Path, dpbench: Command) -> None:
    code, out, err = dpbench(
        "run",
        "--find-max-batch",
        "--device-kind",
        "emulated",
        "--device-memory",
        "1300KB",
        "--models",
        "mlp",
        "--strategies",
        "dp",
        "--devices",
        "2",
        "--batch-sizes",
        "128",
    )
    assert code == 0, err
    line = r"^mlp +dp +2 +\d+ +\d+ +\d+ +device 0 +\d+$"
    assert re.search(line, out, re.MULTILINE), out
    code, _, err = dpbench("run", "--find-max-batch", "--device-kind", "cpu", "--store", "other.db")
    assert code == 64
    assert "--device-kind emulated --device-memory 8GiB" in err
    assert not (tmp_path / "other.db").exists()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the batch sizes of the tries, of which the third is killed, and 20 is the limit."""
    batch_sizes: list[int] = []

    def answer(batch: int) -> tuple[Status, str]:
        batch_sizes.append(batch)
        if len(batch_sizes) == 3:
            return Status.KILLED, "planted"
        return Status.OK if batch <= 20 else Status.OOM, ""

    monkeypatch.setattr(FakeServer, "answer", staticmethod(answer), raising=False)
    monkeypatch.setattr(batch_search, "Server", FakeServer)
    return batch_sizes


def test_a_search_that_was_killed_goes_on_with_the_killed_try(
    store: Store, tried: list[int]
) -> None:
    case = replace(SINGLE, batch_size=4)
    first = batch_search.run([case], store)
    assert "killed at batch 16" in first.found[0].reason
    assert store.runs()[0].status == "interrupted"
    second = batch_search.run([case], store)
    assert (second.run_id, second.resumed) == (first.run_id, True)
    assert (second.found[0].largest, second.found[0].failed) == (20, 21)
    assert tried[:4] == [4, 8, 16, 16]
    assert len(tried) == len({*tried}) + 1
    assert store.runs()[0].status == "finished"


def test_a_try_takes_no_step_but_those_that_show_whether_the_batch_fits(
    store: Store, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    efforts: list[Any] = []
    original = batch_search.Server.run

    def run(self: Any, case: Case, effort: Any, number: int, limit_s: float) -> Trial:
        efforts.append(effort)
        return original(self, case, effort, number, limit_s)

    monkeypatch.setattr(batch_search.Server, "run", run)
    batch_search.run([replace(SINGLE, batch_size=4)], store)
    assert efforts
    for effort in efforts:
        extra = (effort.memory_by_phase, effort.profile, effort.marks, effort.links)
        assert extra == (False,) * 4
        # a slow case would be profiled too
        assert effort.slow is False


@pytest.mark.parametrize("edited", [False, True])
def test_an_interrupted_search_begins_anew_when_the_users_file_was_edited(
    store: Store,
    tried: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edited: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    net = tmp_path / "net.py"
    net.write_text("big = 1\n")
    case = replace(SINGLE, model="net.py:big", batch_size=4)
    first = batch_search.run([case], store)
    assert store.runs()[0].status == "interrupted"
    if edited:
        net.write_text("big = 2\n")
    second = batch_search.run([case], store)
    assert second.resumed is not edited
    assert (second.run_id == first.run_id) is not edited
    assert (tried.count(4), tried.count(8)) == ((2, 2) if edited else (1, 1))
