"""The probe: figures of work whose cost is known, a file that is a machine, and the command that writes it."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dpbench import probe
from dpbench.cli import cli
from dpbench.hardware import foreign_load, processes
from dpbench.hardware.processes import CORES
from dpbench.predict import cpu_model
from dpbench.probe import Probe, collective, engine, gpu, host, to_toml
from dpbench.probe.figures import (  # fmt: skip
    Figure,
    Timing,
    figure,
    over_passes,
    rate,
    ratio,
    time_call,
    time_new_threads,
    time_steps,
    time_together,
    timing,
    typical,
)
from dpbench.records import UNATTRIBUTED, Case, Step, Trial, machine
from tests.simulated.backend import LINK_BYTES, running
from tests.simulated.machine import Machine
from tests.simulated.timeline import Gpu


def test_a_call_takes_as_long_as_it_does() -> None:
    calls, began_s = [], time.perf_counter()
    spent = time_call(lambda: calls.append(time.sleep(0.01)), 5)  # type: ignore[func-returns-value]
    assert 0.01 <= spent.low_s <= spent.seconds <= spent.high_s
    assert spent.low_s <= (time.perf_counter() - began_s) / len(calls), "the quickest round is no slower than the mean"


def test_short_calls_are_repeated_within_a_reading_of_the_clock() -> None:
    calls = []
    spent = time_call(lambda: calls.append(1), 3)
    assert len(calls) > 1000
    assert spent.seconds < 1e-5


def test_works_run_at_once() -> None:
    """Each function waits for the other: run one after the other, they would never end."""
    meeting = threading.Barrier(2, timeout=10)
    assert time_together([meeting.wait, meeting.wait], 3).seconds > 0
    assert time_new_threads([meeting.wait, meeting.wait], 3).seconds > 0


def test_settings_are_entered_in_every_thread() -> None:
    seen: list[bool] = []
    time_together([lambda: seen.append(torch.is_inference_mode_enabled())] * 2, 1, setting=torch.inference_mode)
    assert all(seen)


def test_figures_know_their_amounts() -> None:
    spent, alone = Timing(2.0, 1.0, 3.0), Timing(1.0, 0.5, 2.0)
    assert figure("a_s", spent, "how", per=4) == Figure("a_s", 0.5, "how", 0.25, 0.75)
    assert rate("b", spent, "how", amount=6) == Figure("b", 3, "how", 2, 6)
    assert ratio("c", spent, alone, "how", share=2) == Figure("c", 1.0, "how", 0.25, 3.0)


def test_a_timing_has_the_spread_of_its_repetitions() -> None:
    assert timing([float(n) for n in range(101)]) == Timing(50.0, 10.0, 90.0)
    assert timing([3.0]) == Timing(3.0, 3.0, 3.0)


def test_a_line_has_the_spread_of_the_lines_through_low_and_high_timings() -> None:
    points = [(work, Timing(1 + work, 0.5 + work, 1 + 2 * work)) for work in (1.0, 100.0, 10_000.0)]
    starts, slopes = host.lines(points)
    assert starts == pytest.approx((1.0, 0.5, 1.0))
    assert slopes == pytest.approx((1.0, 1.0, 2.0))


def test_a_few_disturbed_repetitions_do_not_count() -> None:
    assert typical([1.0, 2.0, 3.0, 1000.0]) == 2.5
    assert typical([3.0]) == 3.0


def test_a_figure_is_the_median_of_the_passes_with_their_range() -> None:
    passes = [[Figure("a_s", value, "how"), Figure("b_s", 1.0, "how")] for value in (3.0, 1.0, 2.0)]
    assert over_passes(passes) == (Figure("a_s", 2.0, "how", 1.0, 3.0, 3), Figure("b_s", 1.0, "how", 1.0, 1.0, 3))


def test_the_spread_within_passes_is_in_the_range_over_them() -> None:
    passes = [[Figure("a_s", value, "how", value - 0.5, value + 2.0)] for value in (3.0, 1.0)]
    assert over_passes(passes) == (Figure("a_s", 2.0, "how", 0.5, 5.0, 2),)


def test_a_figure_that_one_pass_measured_once_has_no_range_and_one_that_it_repeated_has_that() -> None:
    once, repeated = Figure("a_s", 2.0, "how"), Figure("b_s", 1.0, "how", 0.5, 1.5)
    assert over_passes([[once, repeated]]) == (once, repeated)
    lines = list(probe._table(once))
    assert not [line for line in lines if line.startswith(("low", "high"))]
    assert "passes = 1" in lines
    assert "stopped_early = true" in lines
    assert "stopped_early = true" not in list(probe._table(replace(once, passes=probe.PASSES)))


def test_a_line_is_found_again() -> None:
    start, slope = host.line([(n, 3.0 + 0.5 * n) for n in (1.0, 10.0, 100.0)])
    assert (start, slope) == (pytest.approx(3.0), pytest.approx(0.5))


def test_durations_that_do_not_grow_give_the_best_measured_rate() -> None:
    """Noise made the largest all-reduce the quickest once; its line had no slope, and its inverse no value."""
    start, slope = host.line([(1.0, 3.0), (10.0, 2.5), (100.0, 2.0)])
    assert slope == 2.0 / 100.0
    assert 1.0 < start < 3.0, "the intercept is fitted to this slope"
    noisy = [(size, {"seconds": s, "low_s": s, "high_s": s}) for size, s in ((32 * 1024, 3e-3), (2**20, 2e-3))]
    found = {one.name: one.value for one in collective._of_reductions(noisy, 2, "gloo")}
    assert found["all_reduce_bytes_per_s"] == pytest.approx(2**20 / 2e-3)


@pytest.mark.parametrize("part", [host.calls, host.replication, host.threads])
def test_every_figure_of_the_host_is_a_positive_number(part: object) -> None:
    found = list(part())  # type: ignore[operator]
    assert found
    assert all(one.value > 0 and one.how for one in found)
    assert all(one.low < one.value < one.high for one in found if one.low is not None)
    assert all(one.low is not None for one in found)


@pytest.mark.alone
def test_an_all_reduce_takes_longer_for_more() -> None:
    found = {one.name: one.value for one in collective.all_reduce(sizes=(32 * 1024, 2**24))}
    assert found["all_reduce_16384_kib_s"] > found["all_reduce_32_kib_s"] > 0
    assert found["all_reduce_bytes_per_s"] > 0


def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="magic"):
        collective._measured(2, "magic", {"reduce": [4]})


QUIET = foreign_load.Load(foreign=0.01, steal=0.0, cores=2, seconds=0.5)
BUSY = foreign_load.Load(foreign=0.4, steal=0.0, cores=2, seconds=0.5)
FAKE = Probe(
    name='A "quoted" processor', cores=2, memory_bytes=8 * 2**30, gpus=(), gpu_memory_bytes=0, seconds=12.0,
    load=QUIET,
    figures=tuple(
        Figure(name, 0.00002 * (n + 1), "how", 0.00001, 0.00003)
        for n, name in enumerate(
            ("memory_bytes_per_s", "flop_per_s", "module_replica_s", "op_graph_s", "tensor_s", "thread_s",
             "long_ops_2_threads_ratio", "copy_16384_kib_bytes_per_s", "all_reduce_bytes_per_s", "all_reduce_start_s")
        )
    ),
)  # fmt: skip


def test_the_file_is_toml_with_every_figure() -> None:
    data = tomllib.loads(to_toml(FAKE))
    assert data["gpu"]["count"] == data["host"]["cores"] == 2
    assert data["gpu"]["memory_bytes"] == 8 * 2**30
    assert data["host"]["factor"] == pytest.approx(FAKE["module_replica_s"] / 16e-6, rel=1e-3)
    assert set(data["probe"]) == {one.name for one in FAKE.figures}
    assert all(row["how"] and row["value"] and row["low"] and row["high"] for row in data["probe"].values())


def test_an_unknown_figure_lists_the_known() -> None:
    with pytest.raises(LookupError, match="thread_s"):
        FAKE["warp_s"]


QUICK = """#!{python}
# in the place of Python: runs a module as it does, with fewer and shorter measurements
import gc
gc.disable()  # collections take a fifth of the time of the imports
import runpy
import sys

from dpbench.probe import collective, engine, figures, host

gc.enable()
sys.executable = __file__
figures.LOOP_S, host.NETS, host.repeats = 2e-4, {{"mlp": 32}}, lambda name, rows: 5
engine.LAYERS, engine.STEPS, collective.COMPUTED_S, collective.SIZES = (6, 18), 12, 1e-4, collective.SIZES[::2]
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_the_command_measures_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of it: a second one would not fit into this budget."""
    quick = tmp_path / "python"
    quick.write_text(QUICK.format(python=sys.executable))
    quick.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(quick))
    monkeypatch.setattr(probe, "BUDGET_S", 1.0)
    path = tmp_path / "here.toml"
    done = CliRunner().invoke(cli, ["probe", "--anyway", "--output", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout == ""
    assert "measuring memory, pass 1 of 3" in done.stderr
    assert "pass 2" not in done.stderr
    data = tomllib.loads(path.read_text())
    assert f"stopped early: {len(data['probe'])} of {len(data['probe'])} figures are from 1 of 3 passes" in done.stderr
    assert all(row["passes"] == 1 and row["stopped_early"] for row in data["probe"].values())
    alike = [name for name, row in data["probe"].items() if row["value"] and row["low"] == row["high"]]
    assert alike == [], "a range that is none"
    assert data["source"].startswith("measured by dpbench probe in ")
    assert data["gpu"]["memory_bytes_per_s"] > 1e8
    for name in ("gemm_2_threads_ratio", "memory_2_threads_ratio", "mlp_forward_2_threads_ratio"):
        assert data["probe"][name]["value"] > 0, name  # other processes may slow down either side without bound
    found = {name: row["value"] for name, row in data["probe"].items()}
    for phase in ("scatter", "forward_more", "loss_more", "backward_more", "reduce", "optimizer_more", UNATTRIBUTED):
        assert found[f"ddp_{phase}_s"] >= 0
        assert found[f"ddp_{phase}_tensor_s"] >= 0
    # of the short chain's 12 tensors: disturbances may move all of the time into one part
    reduced_s = [found[f"ddp_{phase}_s"] + 12 * found[f"ddp_{phase}_tensor_s"] for phase in ("reduce", "backward_more")]
    assert sum(reduced_s) > 1e-5, "an all-reduce between processes"
    assert found["mlp_forward_2_processes_ratio"] > 0


@pytest.mark.gpu
def test_a_gpus_figures_are_those_of_a_gpu() -> None:
    found = {one.name: one.value for one in gpu.figures()}
    assert found["gpu_memory_bytes_per_s"] > 5e10
    assert found["fp32_flop_per_s"] > 1e12
    assert found["pinned_to_device_bytes_per_s"] > found["pageable_to_device_bytes_per_s"] * 0.8
    assert 1e-7 < found["kernel_s"] < 1e-4


class SentBytes:
    """NVML's counter of a GPU whose copies to other GPUs all use NVLink, with `share` 1, or not."""

    def __init__(self, machine: Machine, ordinal: int, share: float | None) -> None:
        self.machine, self.ordinal, self.share = machine, ordinal, share

    def read(self, metric: str) -> float | None:
        assert metric == "nvlink_sent_bytes"
        copies = [one for one in self.machine.timeline.work if (one.device, one.kind) == (self.ordinal, "peer")]
        return None if self.share is None else 5.0 + self.share * len(copies) * LINK_BYTES


def test_the_links_of_gpus_have_their_true_rates_and_nvlinks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Machine([Gpu(i, offset_s=10.0 * i) for i in range(3)], slow_links={(0, 1): 0.25, (-1, 2): 0.5})
    counters: dict[int, Any] = {i: SentBytes(simulated, i, share) for i, share in enumerate((1.0, None, 0.0))}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} == {0, 1})
    with running(simulated) as devices:
        found = {one.name: one for one in gpu.links(devices, counters)}
    assert found.pop("peer_access_ratio").value == pytest.approx(2 / 6)
    shares = {name: found.pop(name).value for name in list(found) if name.endswith("nvlink_ratio")}
    assert shares == {f"link_{i}_{j}_nvlink_ratio": share for i, share in ((0, 1.0), (2, 0.0)) for j in {0, 1, 2} - {i}}
    seconds = {("host", j): simulated.host_s(j, LINK_BYTES) for j in range(3)}
    seconds |= {pair: simulated.link_s(*pair, LINK_BYTES) for pair in permutations(range(3), 2)}
    true = {f"link_{i}_{j}_bytes_per_s": LINK_BYTES / s for (i, j), s in seconds.items()}
    assert {name: one.value for name, one in found.items()} == pytest.approx(true, rel=0.01)
    assert all(one.low is not None and one.low <= one.value for one in found.values())


@pytest.mark.parametrize(
    ("count", "access", "share", "links", "said"),
    [
        (2, 1.0, 1.0, [("pcie", 2e-5), ("nvlink", 2e10)], False),
        (2, 1.0, 0.0, [("pcie", 2e-5)], False),
        (2, 0.5, None, [("pcie", 2e-5)], True),
        (4, 1.0, 1.0, [("pcie", 2e-5)], True),
    ],
)
def test_a_file_has_the_peer_access_and_the_nvlink_that_were_measured(
    count: int, access: float, share: float | None, links: list[tuple[str, float]], said: bool
) -> None:
    """Of more than two GPUs, pairs may share a link: the rates of pairs are in the file, but as no links."""
    names = ("gpu_memory_bytes_per_s", "fp32_flop_per_s", "launch_s", "pinned_to_device_bytes_per_s")
    more = [Figure(name, 0.00002, "how") for name in names] + [Figure("peer_access_ratio", access, "how")]
    for i, j in permutations(range(count), 2):
        more.append(Figure(f"link_{i}_{j}_bytes_per_s", 2e10 * (1 + i), "how"))
        more += [Figure(f"link_{i}_{j}_nvlink_ratio", share, "how")] if share is not None else []
    text = to_toml(replace(FAKE, gpus=("A100",) * count, gpu_memory_bytes=1, figures=(*FAKE.figures, *more)))
    described = machine.read(tomllib.loads(text), "here")
    assert described.peer_access is (access == 1)
    assert sorted({(one.kind, one.bytes_per_s) for one in described.links}, key=lambda one: one[1]) == links
    assert described.probe["link_1_0_bytes_per_s"] == 4e10
    assert ("# Add the NVLinks" in text) is said


def test_steps_run_at_once_and_count_from_the_first_to_begin_to_the_last_to_end() -> None:
    meeting = threading.Barrier(2, timeout=10)

    def step(*times: float) -> tuple[float, ...]:
        meeting.wait()
        return times

    steps = [lambda: step(10.0, 11.0, 14.0), lambda: step(10.5, 12.5, 13.0)]
    forward, whole = time_steps(steps, repeats=3)  # type: ignore[arg-type]
    assert (forward, whole) == (Timing(2.5, 2.5, 2.5), Timing(4.0, 4.0, 4.0))


def test_two_points_have_a_start_and_a_slope_that_are_not_negative() -> None:
    assert engine._two_parts({12: 5.0, 96: 89.0}) == (0.0, pytest.approx(1.0))
    assert engine._two_parts({12: 20.0, 96: 104.0}) == (pytest.approx(8.0), pytest.approx(1.0))
    assert engine._two_parts({12: 20.0, 96: 10.0}) == (20.0, 0.0)
    assert engine._two_parts({12: -1.0, 96: 84.0}) == (0.0, 1.0)


def test_a_pass_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_load, "measure", lambda: QUIET)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="a pass of the probe ended with exit status 1"):
        probe.probe()


@pytest.mark.skipif(not CORES, reason="threads cannot be bound to cores here")
def test_parts_on_the_host_keep_to_a_core_each_and_those_on_gpus_roam(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    def part() -> Iterator[Figure]:
        seen.append(os.sched_getaffinity(0))
        time_new_threads([lambda: seen.append(os.sched_getaffinity(0))] * 2, 1)
        yield Figure("a_s", 1.0, "how")

    monkeypatch.setattr(probe, "_on_the_host", lambda: iter([("threads", part)]))
    monkeypatch.setattr(probe, "_on_gpus", lambda: iter([("GPU 0", part)]))
    monkeypatch.setattr(processes, "keep", lambda: None)
    assert list(probe.measure()) == ["threads", Figure("a_s", 1.0, "how"), "GPU 0", Figure("a_s", 1.0, "how")]
    own, other = {CORES[0]}, {CORES[1 % len(CORES)]}
    twice = sorted([own, other] * 2, key=min)  # the first call is for warmth
    assert (seen[0], sorted(seen[1:5], key=min)) == (own, twice)
    assert (seen[5], sorted(seen[6:], key=min)) == (set(CORES), twice)


def test_chains_sweep_once_on_the_way_there_and_once_on_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []
    total = torch.Tensor.sum
    model = engine.chain(6)
    assert len(list(model.module.modules())) == 6 + cpu_model.CHAIN_MODULES
    monkeypatch.setattr(torch.Tensor, "sum", lambda self: (swept.append(self.numel() * 4), total(self))[1])
    inputs, target = model.batch(4, 0)
    model.loss(model.module(inputs), target).backward()
    assert [size for size in swept if size] == [engine.SHORT] * 2


def test_gpus_reduce_in_the_place_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given: list[object] = []
    monkeypatch.setattr(collective, "figures", lambda nets, sizes: given.append(sizes) or iter(()))
    parts = dict(probe._on_the_host())
    list(parts["two processes"]())
    assert given == [()]
    assert [*dict(probe._on_gpus())] == ["GPU 0", "links between GPUs", "all-reduce between GPUs"]


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
    assert said == ["measuring 1 1, pass 1 ..."]


def test_what_ranks_take_from_each_other_is_not_charged_to_ddp_again() -> None:
    """Forward and backward are compared with ranks that step at once, short phases with a rank alone."""
    names = ("scatter", "forward", "loss", "backward", "reduce", "optimizer", UNATTRIBUTED)
    sides = {"alone": 1.0, "beside": 2.0, "ddp": 5.0, "ddp_long": 9.0}
    blocks = (1.0, 0.5, 1.5)  # of all steps, and of two parts of them
    found = [
        (layers, {side: [dict.fromkeys(names, value * part) for part in blocks] for side, value in sides.items()})
        for layers in (6, 48)
    ]
    every = {one.name: one for one in collective._of_chains(found, 2)}
    figures = {name: one.value for name, one in every.items()}
    assert (every["ddp_reduce_s"].low, every["ddp_reduce_s"].high) == (2.5, 7.5)
    assert (figures["ddp_forward_more_s"], figures["ddp_backward_more_s"]) == (3.0, 3.0)
    assert (figures["ddp_loss_more_s"], figures["ddp_optimizer_more_s"]) == (4.0, 4.0)
    assert (figures["ddp_reduce_s"], figures["ddp_long_reduce_s"]) == (5.0, 9.0)
    assert figures["ddp_forward_more_tensor_s"] == 0.0


def test_a_chain_has_the_seconds_of_all_its_timed_steps_and_of_each_block_of_them() -> None:
    """Steps of 1, 2, 3 and 4 seconds in blocks, after one of warm-up that does not count."""
    steps = [Step(99.0, True, 99.0)]
    for block in range(engine.BLOCKS):
        steps += [Step(block + 1.0, False, steps[-1].end_s + (block + 1) * (i + 1)) for i in range(10)]
    case = Case(model="chain", strategy="single", batch_size=8)
    found = engine.seconds_of(Trial(case=case, steps=tuple(steps)))
    assert [one[UNATTRIBUTED] for one in found] == [pytest.approx(2.5), 1.0, 2.0, 3.0, 4.0]


# -- a busy machine, and passes that are not made


def passing(monkeypatch: pytest.MonkeyPatch, before: foreign_load.Measured, during: foreign_load.Measured) -> list[str]:
    """Replace passes by figures made up, and the load by these; return where what was said goes."""
    monkeypatch.setattr(foreign_load, "measure", lambda: before)
    monkeypatch.setattr(foreign_load, "since", lambda snapshot: during)
    monkeypatch.setattr(probe, "_pass", lambda name, say: list(FAKE.figures))
    return []


def test_a_busy_machine_is_not_probed_and_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passing(monkeypatch, BUSY, QUIET)
    done = CliRunner().invoke(cli, ["probe", "--patience", "0", "--output", str(tmp_path / "here.toml")])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: the machine is too busy for a probe: other processes took 40%")
    assert "--patience" in done.stderr
    assert "--anyway" in done.stderr
    assert not (tmp_path / "here.toml").exists()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_file_of_a_busy_machine_is_labelled_and_read_back(
    when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passing(monkeypatch, BUSY if when == "before" else QUIET, BUSY if when == "during" else QUIET)
    path = tmp_path / "here.toml"
    options = ["--anyway"] if when == "before" else []
    done = CliRunner().invoke(cli, ["probe", "--patience", "0", *options, "--output", str(path)])
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
    assert "stopped_early" not in text, "three passes"


def test_a_load_that_cannot_be_told_is_not_called_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    said = passing(monkeypatch, foreign_load.UnknownLoad("no counts here"), QUIET)
    text = to_toml(probe.probe(said.append))
    assert "is unknown: no counts here" in tomllib.loads(text)["source"]
    assert any("no counts here" in line for line in said)


def test_passes_that_the_budget_leaves_out_are_told_for_each_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    said = passing(monkeypatch, QUIET, QUIET)
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(probe, "BUDGET_S", 60.0)
    data = tomllib.loads(to_toml(probe.probe(said.append)))
    assert said == [
        "stopped early: 10 of 10 figures are from 2 of 3 passes, because another pass would have exceeded the probe's "
        "budget of 60 s"
    ]
    assert all(row["passes"] == 2 and row["stopped_early"] for row in data["probe"].values())
