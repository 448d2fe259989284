"""The foreign load from made-up snapshots, waiting under a made-up load, and one real reading."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpbench.hardware import foreign_load
from dpbench.hardware.foreign_load import Snapshot, between
from dpbench.hardware.processes import TICKS_PER_S, Ticks
from dpbench.records import disturbance
from dpbench.records.load import Load, Measured, UnknownLoad
from tests.amounts import amounts

SECOND = TICKS_PER_S
QUIET = Load(foreign=0.0, steal=0.0, cores=2, seconds=0.5)
BUSY = Load(foreign=0.34, steal=0.02, cores=2, seconds=0.5)


def at(time_s: float, own_s: float, **cores: tuple[float, float]) -> Snapshot:
    """Return a snapshot of cores that exist since second 0: c0=(busy seconds, stolen seconds)."""
    ticks = {
        int(name[1:]): Ticks(round(busy * SECOND), round(steal * SECOND), round(time_s * SECOND))
        for name, (busy, steal) in cores.items()
    }
    return Snapshot(time_s=time_s, ticks=ticks, own_s=own_s)


def test_others_take_what_the_cores_were_busy_with_beyond_our_own_time() -> None:
    load = between(
        at(10, 3.0, c0=(5.0, 0.0), c1=(1.0, 0.0)), at(12, 4.5, c0=(7.0, 0.0), c1=(1.5, 0.0))
    )
    assert isinstance(load, Load)
    assert load.foreign == pytest.approx((2.5 - 1.5) / 4)
    assert (load.steal, load.cores, load.seconds) == (0.0, 2, 2)
    assert disturbance.busy(Measured(load))


def test_steal_counts_as_taken_and_is_told_apart() -> None:
    load = between(
        at(10, 0.0, c0=(0.0, 0.0), c1=(0.0, 0.0)), at(11, 0.0, c0=(0.0, 0.3), c1=(0.0, 0.0))
    )
    assert isinstance(load, Load)
    assert (load.foreign, load.steal) == (0.0, pytest.approx(0.15))
    assert disturbance.busy(Measured(load))


def test_the_load_is_never_negative() -> None:
    """Our own time is exact, the cores' is counted in ticks."""
    load = between(at(10, 0.0, c0=(0.0, 0.5)), at(11, 0.9, c0=(0.8, 0.4)))
    assert load == Load(foreign=0.0, steal=0.0, cores=1, seconds=1)


def test_others_never_take_more_than_the_cores_have() -> None:
    """Ticks are whole: in half a second, two cores may count more than one core-second."""
    before = Snapshot(time_s=10.0, ticks=dict.fromkeys((0, 1), Ticks(0, 0, 0)), own_s=0.0)
    counted = {0: Ticks(52, 0, 52), 1: Ticks(50, 1, 51)}
    load = between(before, Snapshot(time_s=10 + 50 / TICKS_PER_S, ticks=counted, own_s=0.0))
    assert isinstance(load, Load)
    assert load.taken == pytest.approx(1.0)


@pytest.mark.parametrize(("foreign", "found"), [(0.10, False), (0.11, True)])
def test_the_limit_is_a_tenth_of_the_capacity(foreign: float, found: bool) -> None:
    load = between(at(10, 0.0, c0=(0.0, 0.0)), at(20, 0.0, c0=(foreign * 10, 0.0)))
    assert disturbance.busy(Measured(load)) is found


def test_counts_that_stand_still_are_not_quiet_but_unknown() -> None:
    before = at(10, 0.0, c0=(1.0, 0.0))
    now = Snapshot(time_s=11, ticks=before.ticks, own_s=0.0)
    assert isinstance(between(before, now), UnknownLoad)
    assert not disturbance.busy(Measured(between(before, now)))
    assert isinstance(between(at(10, 0.0), at(11, 0.0)), UnknownLoad), "no core at all"


def test_too_short_a_time_is_unknown() -> None:
    assert isinstance(
        between(at(10, 0.0, c0=(1.0, 0.0)), at(10.1, 0.0, c0=(1.1, 0.0))), UnknownLoad
    )


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"job/cpu.max": "150000 100000"}, 1.5),
        ({"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000"}, 1.5),
        ({"job/cpu.max": "max 100000", "job/step/cpu.max": "50000 100000"}, 0.5),
        ({"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"}, 2.0),
        ({"other/cpu.max": "150000 100000"}, None),
        ({}, None),
    ],
)
def test_the_lowest_quota_of_the_groups_of_this_process_holds_in_either_version(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/job/step\n0::/job/step\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert foreign_load.quota(tmp_path) == quota


def test_under_a_quota_and_without_cores_the_load_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreign_load, "CORES", (0, 1))
    monkeypatch.setattr(foreign_load, "quota", lambda: 1.5)
    found = foreign_load.measure(0.0)
    assert isinstance(found, UnknownLoad)
    assert "a quota of 1.5 CPUs" in str(found)
    monkeypatch.setattr(foreign_load, "CORES", ())
    assert isinstance(foreign_load.measure(0.0), UnknownLoad)


def test_waiting_ends_when_it_is_quiet_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, said = [BUSY, BUSY, QUIET, BUSY], list[str]()
    monkeypatch.setattr(foreign_load, "measure", lambda: loads.pop(0))
    assert foreign_load.wait(1e6, said.append) == Measured(QUIET)
    assert loads == [BUSY]
    (line,) = said
    assert amounts(line)[:3] == ["34%", "2%", "2"], "processes, virtual machines, cores"
    assert "--patience" in line


def test_without_patience_it_is_measured_once_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads, said = [BUSY, QUIET], list[str]()
    monkeypatch.setattr(foreign_load, "measure", lambda: loads.pop(0))
    assert foreign_load.wait(0.0, said.append) == Measured(BUSY)
    assert said == []


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(foreign_load, "measure", lambda: BUSY)
    assert foreign_load.wait(5.0, lambda words: None) == Measured(BUSY)
    assert next(clock) == 6, "five more looks, a second each"


@pytest.mark.parametrize(
    ("given", "text", "seconds"), [(5.0, "7", 5.0), (None, "7", 7.0), (None, None, 30.0)]
)
def test_patience_is_as_given_else_from_the_environment(
    given: float | None, text: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(foreign_load.PATIENCE)  # conftest.py sets it
    if text is not None:
        monkeypatch.setenv(foreign_load.PATIENCE, text)
    assert foreign_load.patience(given) == seconds


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", ""])
def test_patience_that_is_no_number_of_seconds_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(foreign_load.PATIENCE, text)
    with pytest.raises(ValueError, match="DPBENCH_PATIENCE must be a number of seconds"):
        foreign_load.patience()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_our_own_time_holds_children_that_run_and_those_that_were_reaped() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    before = foreign_load._own_s([os.getpid()])
    subprocess.run([sys.executable, "-c", burn], check=True)
    reaped_s = foreign_load._own_s([os.getpid()]) - before
    assert reaped_s >= 0.25
    running = subprocess.Popen(
        [sys.executable, "-c", f"{burn}print(flush=True)\ninput()"], stdin=-1, stdout=-1
    )
    assert running.stdout is not None
    running.stdout.readline()
    both_s = foreign_load._own_s([os.getpid()]) - before
    running.communicate(b"\n")
    assert both_s >= reaped_s + 0.25


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_counts_of_this_machine_give_a_load_or_a_reason() -> None:
    found = foreign_load.measure(0.3)
    assert isinstance(found, UnknownLoad) or 0 <= found.taken <= 1.5
    assert isinstance(found, UnknownLoad) or found.cores == len(os.sched_getaffinity(0))
