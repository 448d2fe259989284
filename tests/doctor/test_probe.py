"""The probe: figures of work of known cost, a file that is a machine, and its command."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dpbench.cli import cli
from dpbench.doctor import probe, transfers
from dpbench.doctor.examination import DIRECT, PAGEABLE, PINNED
from dpbench.doctor.probe import Probe, all_reduce, gpu, host, to_toml
from dpbench.doctor.probe.figures import Figure, line, time_call, time_together, typical
from dpbench.doctor.transfers import Copy, Transfer
from dpbench.hardware import foreign_load, nvml, processes
from dpbench.hardware.nvml import SWITCH
from dpbench.hardware.processes import CORES
from dpbench.predict import machine, profiles
from dpbench.records.facts import Gpu, NvLinks
from dpbench.records.load import Load, Measured, OfCores, UnknownLoad
from tests.amounts import amounts
from tests.doctor import machines
from tests.exported import command


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor find nothing wrong."""
    monkeypatch.setattr("dpbench.doctor.examine.examine", lambda say: machines.healthy())


def test_a_call_takes_as_long_as_it_does() -> None:
    calls, began_s = [], time.perf_counter()
    spent = time_call(lambda: calls.append(time.sleep(0.01)), 5)  # type: ignore[func-returns-value]
    assert 0.01 <= spent <= time.perf_counter() - began_s
    assert len(calls) >= 5


def test_short_calls_are_repeated_within_a_reading_of_the_clock() -> None:
    calls = []
    spent = time_call(lambda: calls.append(1), 3)
    assert len(calls) > 1000
    assert spent < 1e-5


def test_works_run_at_once() -> None:
    """Each function waits for the other: run one after the other, they would never end."""
    meeting = threading.Barrier(2, timeout=10)
    assert time_together([meeting.wait, meeting.wait], 3) > 0


def test_settings_are_entered_in_every_thread() -> None:
    seen: list[bool] = []
    time_together(
        [lambda: seen.append(torch.is_inference_mode_enabled())] * 2,
        1,
        setting=torch.inference_mode,
    )
    assert all(seen)


def test_a_few_disturbed_repetitions_do_not_count() -> None:
    assert typical([1.0, 2.0, 3.0, 1000.0]) == 2.5


def test_a_line_is_found_again() -> None:
    start, slope = line([(n, 3.0 + 0.5 * n) for n in (1.0, 10.0, 100.0)])
    assert (start, slope) == (pytest.approx(3.0), pytest.approx(0.5))


def test_durations_that_do_not_grow_give_the_best_measured_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise made the largest all-reduce the quickest once.

    Its line had no slope, and its inverse no value.
    """
    start, slope = line([(1.0, 3.0), (10.0, 2.5), (100.0, 2.0)])
    assert slope == 2.0 / 100.0
    assert 1.0 < start < 3.0, "the intercept is fitted to this slope"
    noisy = [(32 * 1024, 3e-3), (2**20, 2e-3)]
    monkeypatch.setattr(all_reduce, "_measured", lambda *_: noisy)
    found = dict(all_reduce.figures(2))
    assert found["all_reduce_bytes_per_s"] == pytest.approx(2**20 / 2e-3)


def test_every_figure_of_the_host_is_a_positive_number() -> None:
    found = dict(host.figures())
    assert [*found] == ["module_replica_s", "tensor_s", "thread_s", "long_ops_2_threads_ratio"]
    assert all(value > 0 for value in found.values())


@pytest.mark.alone
def test_all_reduces_take_longer_for_more_and_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, float]] = []
    measured = all_reduce._measured

    def kept(*given: Any) -> list[tuple[int, float]]:
        taken.extend(measured(*given))
        return taken

    monkeypatch.setattr(all_reduce, "_measured", kept)
    found = dict(all_reduce.figures(2, "gloo", (32 * 1024, 2**24)))
    (_, short_s), (_, long_s) = taken
    assert long_s > short_s > 0
    assert found["all_reduce_bytes_per_s"] > 0
    assert found["all_reduce_start_s"] >= 0


def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(all_reduce.NoResult, match="magic") as failed:
        list(all_reduce.figures(2, "magic", [4]))
    assert len(str(failed.value).splitlines()) == 1


def test_ranks_that_are_slow_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "LIMIT_S", 0.01)
    with pytest.raises(all_reduce.NoResult, match=r"within 0\.01 s"):
        list(all_reduce.figures(2, "gloo", [4]))


def test_ranks_that_hang_are_named_with_their_collectives(tmp_path: Path) -> None:
    def entry(number: int, state: str) -> dict[str, Any]:
        names = {"profiling_name": "nccl:all_reduce", "input_sizes": [[2, 8]], "state": state}
        return {"collective_seq_id": number, **names}

    recorded = {
        0: [entry(6, "completed"), entry(7, "started")],
        1: [entry(6, "completed")],
        2: [],
        4: None,
    }
    for rank, entries in recorded.items():
        (tmp_path / f"joined-{rank}").touch()
        (tmp_path / f"recorded-{rank}").write_text(json.dumps(entries))
    none, absent, unrecorded, first, last = all_reduce._stages(tmp_path, 5).split("; ")
    assert [amounts(one) for one in (none, absent, unrecorded)] == [["2"], ["3"], ["4"]]
    assert "not joined" in absent
    assert "recorder" in unrecorded
    assert amounts(first) == ["0", "7", "2", "8"], "the collective, and its elements"
    assert amounts(last) == ["1", "7", "6", "2", "8"], "the one that it lacks, and its last"
    for said, state in ((first, "(started)"), (last, "(completed)")):
        assert "nccl:all_reduce" in said
        assert said.endswith(state)


def test_what_a_rank_recorded_is_read_when_the_time_is_over() -> None:
    with pytest.raises(all_reduce.NoResult) as failed:
        list(all_reduce.figures(2, "gloo", [4] * 5000, limit_s=5.0))
    assert re.search(r"rank [01] [^;]* \d+, gloo:all_", str(failed.value))


QUIET = Load(foreign=0.01, steal=0.0, cores=2, seconds=0.5)
BUSY = Load(foreign=0.4, steal=0.0, cores=2, seconds=0.5)
FAKE = Probe(
    name='A "quoted" processor',
    cores=2,
    gpus=("A100",),
    gpu_memory_bytes=8 * 2**30,
    passes=3,
    seconds=12.0,
    load=Measured(QUIET),
    figures={
        name: 0.00002 * (n + 1)
        for n, name in enumerate(
            (
                "gpu_memory_bytes_per_s",
                "fp32_flop_per_s",
                "module_replica_s",
                "launch_s",
                "tensor_s",
                "thread_s",
                "long_ops_2_threads_ratio",
                "pinned_host_0_bytes_per_s",
                "pageable_host_0_bytes_per_s",
                "bf16_flop_per_s",
            )
        )
    },
)


def test_the_file_is_toml_of_the_measured_machine() -> None:
    data = tomllib.loads(to_toml(FAKE))
    assert (data["gpu"]["count"], data["host"]["cores"]) == (1, 2)
    assert "collective" not in data, "a single GPU reduces with nobody"
    assert data["gpu"]["memory_bytes"] == 8 * 2**30
    assert data["host"]["factor"] == pytest.approx(
        FAKE.figures["module_replica_s"] / 16e-6, rel=1e-3
    )


@pytest.mark.parametrize(
    ("gil", "ratio", "hand_off"),
    [(True, 1.0, 0.0), (True, 1.2, 0.2), (False, 0.5, 0.0), (False, 0.6, 0.2), (False, 0.4, 0.0)],
)
def test_the_file_says_whether_there_is_an_interpreter_lock_and_what_threads_cost_each_other(
    gil: bool, ratio: float, hand_off: float
) -> None:
    """Two threads need twice the time of one if they take turns, and as long as one if not."""
    figures = {**FAKE.figures, "long_ops_2_threads_ratio": ratio}
    host = machine.read(
        tomllib.loads(to_toml(replace(FAKE, gil=gil, figures=figures))), "here"
    ).host
    assert host.gil is host.measured_gil is gil
    assert host.hand_off == pytest.approx(hand_off)


def test_a_prediction_has_the_rates_of_the_format_and_of_the_hosts_memory() -> None:
    described = machine.read(tomllib.loads(to_toml(FAKE)), "here")
    assert {*described.gpu.flop_per_s} == {"fp32", "bf16"}, "no other format was measured"
    assert profiles.peaks(described, "bf16")[0] == pytest.approx(FAKE.figures["bf16_flop_per_s"])
    assert described.host.pageable_bytes_per_s == pytest.approx(
        FAKE.figures["pageable_host_0_bytes_per_s"]
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("healthy")
def test_the_command_measures_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of it: a second one would not fit into this budget."""
    monkeypatch.setattr(probe, "BUDGET_S", 1.0)
    path = tmp_path / "here.toml"
    done = CliRunner().invoke(
        cli, ["doctor", "--anyway", "--output", str(path)], catch_exceptions=False
    )
    assert done.exit_code == 0
    data = tomllib.loads(path.read_text())
    assert "in 1 of 3 passes" in data["source"]
    assert data["gpu"]["memory_bytes_per_s"] > 5e10
    assert machine.load(str(path)).devices == torch.cuda.device_count()


def test_without_gpus_the_command_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, _, said = command(tmp_path, monkeypatch, capfd)("doctor", "--output", "here.toml")
    assert code == 64
    assert said.startswith("error: ")
    assert "dpbench run" in said
    assert not (tmp_path / "here.toml").exists()


@pytest.mark.gpu
def test_a_gpus_figures_are_those_of_a_gpu() -> None:
    found = dict(gpu.figures())
    assert found["gpu_memory_bytes_per_s"] > 5e10
    assert found["fp32_flop_per_s"] > 1e12
    assert 1e-7 < found["launch_s"] < 1e-3


RATES = {PINNED: 2e10, PAGEABLE: 5e9, DIRECT: 4e10}


def test_copies_from_the_host_and_between_all_pairs_are_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        transfers, "measured", lambda wanted: [Transfer(one, RATES[one.way]) for one in wanted]
    )
    found = dict(probe._copies(3))
    expected = {f"pinned_host_{gpu}_bytes_per_s": 2e10 for gpu in range(3)}
    expected |= {f"pageable_host_{gpu}_bytes_per_s": 5e9 for gpu in range(3)}
    expected |= {f"direct_{i}_{j}_bytes_per_s": 4e10 for i, j in permutations(range(3), 2)}
    assert found == expected


def test_a_copy_that_hangs_is_an_error_with_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging(wanted: list[Copy]) -> list[Transfer]:
        return [Transfer(one, failure="silent" if one.way == DIRECT else "") for one in wanted]

    monkeypatch.setattr(transfers, "measured", hanging)
    with pytest.raises(RuntimeError, match="GPU 0 -> GPU 1 direct: silent"):
        list(probe._copies(2))


def linked(*ends: dict[str, int]) -> tuple[Gpu, ...]:
    """Return what NVML says about GPUs at the addresses "0", "1" and so on, by their NVLinks."""
    return tuple(
        Gpu(pci_address=str(gpu), nvlinks=NvLinks(active=sum(each.values()), ends=each))
        for gpu, each in enumerate(ends)
    )


@pytest.mark.parametrize(
    ("facts", "links"),
    [
        (linked({"1": 4}, {"0": 4}), {("gpu0", "gpu1"): 1.5e10}),
        (linked({}, {}), {}),
        ((), {}),
        (
            linked({"1": 4}, {"0": 4}, {"3": 4}, {"2": 4}),
            {("gpu0", "gpu1"): 1.5e10, ("gpu2", "gpu3"): 3.5e10},
        ),
        (linked(*[{SWITCH: 18}] * 3), {(f"gpu{i}", "nvswitch"): 1e10 * (1 + i) for i in range(3)}),
    ],
)
def test_a_file_has_the_nvlinks_that_nvml_shows_with_their_measured_rates(
    facts: tuple[Gpu, ...], links: dict[tuple[str, str], float]
) -> None:
    count = max(2, len(facts))
    more = dict.fromkeys(("all_reduce_bytes_per_s", "all_reduce_start_s"), 0.00002)
    more |= {
        f"direct_{i}_{j}_bytes_per_s": 1e10 * (1 + i) for i, j in permutations(range(count), 2)
    }
    found = replace(
        FAKE,
        gpus=("A100",) * count,
        figures={**FAKE.figures, **more},
        facts=facts,
        peer_access=True,
    )
    described = machine.read(tomllib.loads(to_toml(found)), "here")
    assert described.peer_access
    over = {(one.a, one.b): one.bytes_per_s for one in described.links if one.kind == "nvlink"}
    assert over == links
    pcie = [one.bytes_per_s for one in described.links if one.kind == "pcie"]
    assert pcie == [1.6e-4] * count


def on_two_gpus(monkeypatch: pytest.MonkeyPatch, *ends: dict[str, Any]) -> list[str]:
    """Replace what a probe asks two GPUs by the NVLinks `ends`; they have peer access."""
    said = passing(monkeypatch, QUIET, QUIET)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: True)
    facts = [{"nvlinks": each} for each in ends]
    monkeypatch.setattr(nvml, "describe", lambda: {"physical_gpus": 2, "gpus": facts})
    return said


def test_gpus_have_peer_access_if_each_pair_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = on_two_gpus(monkeypatch, {}, {})
    assert probe.probe(said.append).peer_access
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair == (0, 1))
    assert not probe.probe(said.append).peer_access
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not probe.probe(said.append).peer_access
    assert said == []


@pytest.mark.parametrize("ends", [[{"active": 4}, {"active": 4}], []])
def test_nvlinks_that_nvml_does_not_tell_are_left_out_with_the_reason(
    ends: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = on_two_gpus(monkeypatch, *ends)
    probe.probe(said.append)
    why = "left out: NVLinks between GPUs, because NVML does not tell where they end"
    assert said == [why]


def test_a_first_pass_that_fails_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(foreign_load, "measure", lambda: QUIET)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    done = CliRunner().invoke(cli, ["doctor", "--output", "here.toml"])
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit), "no traceback"
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert amounts(line) == ["1"], "the exit status"


def test_all_reduces_that_are_too_slow_are_left_out_and_all_other_figures_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(count: int) -> Iterator[Figure]:
        yield from ()
        raise all_reduce.NoResult("the probe's ranks did not end within 60 s")

    monkeypatch.setattr(host, "figures", lambda: iter(FAKE.figures.items()))
    monkeypatch.setattr(gpu, "figures", lambda: iter(()))
    monkeypatch.setattr(all_reduce, "figures", slow)
    monkeypatch.setattr(probe, "_copies", lambda count: iter(()))
    monkeypatch.setattr(processes, "keep", lambda: None)
    said = on_two_gpus(monkeypatch, {}, {})
    monkeypatch.setattr(
        probe, "_pass", lambda *_: [one for one in probe.measure() if not isinstance(one, str)]
    )
    found = probe.probe(said.append)
    data = tomllib.loads(to_toml(found))
    why = "left out: all-reduces between GPUs, because the probe's ranks did not end within 60 s"
    assert said == [why]
    assert why in data["source"]
    assert "collective" not in data
    assert (found.figures, found.passes) == (FAKE.figures, 3)
    assert machine.read(data, "here").collective is None


def test_what_a_pass_leaves_out_comes_from_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho \'{"left_out": "it, because"}\'\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert probe._pass("pass 1", lambda line: None) == [probe.LeftOut("it, because")]


def test_a_figure_is_the_median_of_the_passes_that_measured_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = passing(monkeypatch, QUIET, QUIET)
    passes = [[("a_s", 3.0)], [("a_s", 1.0), ("b_s", 4.0)], [("a_s", 2.0), ("b_s", 2.0)]]
    monkeypatch.setattr(probe, "_pass", lambda name, say: passes.pop())
    assert probe.probe(said.append).figures == {"a_s": 2.0, "b_s": 3.0}


def test_a_later_pass_that_fails_leaves_the_figures_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, passes = passing(monkeypatch, QUIET, QUIET), [[*FAKE.figures.items()]]
    error = probe.PassFailed("no pass ended")

    def failing(name: str, say: transfers.Say) -> list[Figure]:
        if passes:
            return passes.pop()
        raise error

    monkeypatch.setattr(probe, "_pass", failing)
    found = probe.probe(said.append)
    (line,) = said
    assert amounts(line) == ["2", "3"]
    assert line.endswith(str(error))
    assert (found.passes, found.figures) == (1, FAKE.figures)
    assert "in 1 of 3 passes" in tomllib.loads(to_toml(found))["source"]


@pytest.mark.parametrize(("pass_s", "passes"), [(1.0, 3), (36.0, 3), (60.0, 2), (200.0, 1)])
def test_no_pass_begins_after_the_budget(
    monkeypatch: pytest.MonkeyPatch, pass_s: float, passes: int
) -> None:
    """A pass on four GPUs takes 36 s."""
    said, now = passing(monkeypatch, QUIET, QUIET), [0.0]

    def lasting(name: str, say: transfers.Say) -> list[Figure]:
        now[0] += pass_s
        return [*FAKE.figures.items()]

    monkeypatch.setattr(probe, "_pass", lasting)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    data = tomllib.loads(to_toml(probe.probe(said.append)))
    assert f"in {passes} of 3 passes" in data["source"]
    spent = f"left out: {3 - passes} of 3 passes, because the probe's budget of 120 s was spent"
    assert said == ([spent] if passes < 3 else [])
    assert all(line in data["source"] for line in said)


@pytest.mark.skipif(not CORES, reason="threads cannot be bound to cores here")
def test_parts_on_the_host_keep_to_a_core_each_and_those_on_gpus_roam(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[set[int]] = []

    def part() -> Iterator[Figure]:
        seen.append(os.sched_getaffinity(0))
        time_together([lambda: seen.append(os.sched_getaffinity(0))] * 2, 1)
        yield "a_s", 1.0

    monkeypatch.setattr(host, "figures", part)
    monkeypatch.setattr(gpu, "figures", part)
    monkeypatch.setattr(probe, "_copies", lambda count: iter(()))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(processes, "keep", lambda: None)
    measured = [*probe.measure()]
    assert [one for one in measured if isinstance(one, tuple)] == [("a_s", 1.0)] * 2
    own, other = {CORES[0]}, {CORES[1 % len(CORES)]}
    second = seen.index(set(CORES))
    of_threads = [*seen[1:second], *seen[second + 1 :]]
    assert (seen[0], seen[second]) == (own, set(CORES))
    assert {frozenset(cores) for cores in of_threads} == {frozenset(own), frozenset(other)}


def test_each_gpu_has_copies_and_several_have_all_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {host: "host", gpu: "gpu", all_reduce: "all_reduce"}
    for module, name in parts.items():
        monkeypatch.setattr(module, "figures", lambda *_, name=name: iter([(name, 1.0)]))
    monkeypatch.setattr(probe, "_copies", lambda count: iter([(f"copies of {count}", 1.0)]))
    monkeypatch.setattr(processes, "keep", lambda: None)
    for count, last in ((1, ["copies of 1"]), (2, ["copies of 2", "all_reduce"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        names = [one[0] for one in probe.measure() if isinstance(one, tuple)]
        assert names == ["host", "gpu", *last]


def test_a_pass_has_one_thread_an_operation_whatever_the_parent_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of Python, a script that says what it was given."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "\\"$OMP_NUM_THREADS $MKL_NUM_THREADS\\""\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("MKL_NUM_THREADS")
    said: list[str] = []
    assert probe._pass("pass 1", said.append) == []
    (line,) = said
    assert amounts(line) == ["1", "1", "1"], "both variables, and the name of the pass"


# -- a busy machine, and passes that are not made


def passing(monkeypatch: pytest.MonkeyPatch, before: OfCores, during: OfCores) -> list[str]:
    """Replace passes by figures made up, and the load by these; return where what was said goes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "A100")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=8 * 2**30)
    )
    monkeypatch.setattr(foreign_load, "measure", lambda: before)
    monkeypatch.setattr(foreign_load, "since", lambda snapshot: during)
    monkeypatch.setattr(probe, "_pass", lambda name, say: list(FAKE.figures.items()))
    return []


def test_a_busy_machine_is_not_probed_and_the_way_out_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passing(monkeypatch, BUSY, QUIET)
    done = CliRunner().invoke(
        cli, ["doctor", "--patience", "0", "--output", str(tmp_path / "here.toml")]
    )
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert amounts(done.stderr)[0] == "40%"
    assert "--patience" in done.stderr
    assert "--anyway" in done.stderr
    assert not (tmp_path / "here.toml").exists()


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_file_of_a_busy_machine_is_labelled_and_read_back(
    when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passing(monkeypatch, BUSY if when == "before" else QUIET, BUSY if when == "during" else QUIET)
    path = tmp_path / "here.toml"
    options = ["--anyway"] if when == "before" else []
    done = CliRunner().invoke(cli, ["doctor", "--patience", "0", *options, "--output", str(path)])
    assert done.exit_code == 0
    assert "NOISY: other processes took 40%" in done.stderr
    data = tomllib.loads(path.read_text())
    assert "NOISY: other processes took 40%" in data["source"]
    assert "(NOISY)" in machine.load(str(path)).description, "predictions print it"


def test_a_quiet_machine_is_waited_for_and_its_file_has_no_label(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said, loads = passing(monkeypatch, QUIET, QUIET), [BUSY, QUIET]
    monkeypatch.setattr(foreign_load, "measure", lambda: loads.pop(0))
    text = to_toml(probe.probe(said.append, patience_s=1e6))
    assert said[0].startswith("busy machine: ")
    assert "NOISY" not in text


def test_a_load_that_cannot_be_told_is_not_called_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    said = passing(monkeypatch, UnknownLoad("no counts here"), QUIET)
    text = to_toml(probe.probe(said.append))
    assert "is unknown: no counts here" in tomllib.loads(text)["source"]
    assert any("no counts here" in line for line in said)
