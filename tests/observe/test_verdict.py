"""Answers about observed loops: the rule, and each finding on both sides of its threshold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dpbench.analysis.answer import Answer
from dpbench.analysis.decision import Choice
from dpbench.analysis.findings import Diagnosis
from dpbench.analysis.findings.rule import Finding
from dpbench.analysis.report import Report
from dpbench.cli.own import loaders
from dpbench.observe import findings as observing
from dpbench.observe import verdict
from dpbench.observe.verdict import Ground
from dpbench.records import Phase, Sample, Source, Trial
from dpbench.records.activity import EXPOSED
from dpbench.records.estimate import Estimate
from dpbench.records.observed import WITHOUT_LOADER, Held, Unknown
from dpbench.records.registry import Parallelism
from tests import observed_loops as made
from tests.amounts import amounts
from tests.observe.test_reports import report

STEP = Estimate(0.01, 0.0098, 0.0102, 5)


def cost(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, low, high, 5, signed=True)


SURE, MORE, SMALL = cost(0.41, 0.38, 0.44), cost(0.6, 0.6, 0.6), cost(0.03, 0.02, 0.04)
MAYBE = cost(0.06, 0.04, 0.08)
SITUATIONS: Sequence[
    tuple[str, Estimate | None, Sequence[Estimate], float, Choice, Ground, int | None]
] = (
    ("no step has a result", None, (), 0.0, Choice.UNKNOWN, Ground.NO_RESULT, None),
    (
        "no result, whatever the problems",
        None,
        (SURE,),
        0.0,
        Choice.UNKNOWN,
        Ground.NO_RESULT,
        None,
    ),
    ("two steps", Estimate(0.01, 0.009, 0.011, 2), (), 0.0, Choice.UNKNOWN, Ground.FEW, None),
    (
        "two steps with a problem",
        Estimate(0.01, 0.009, 0.011, 2),
        (SURE,),
        0.0,
        Choice.UNKNOWN,
        Ground.FEW,
        0,
    ),
    (
        "steps too unlike",
        Estimate(0.01, 0.001, 0.02, 5),
        (SURE,),
        0.0,
        Choice.UNKNOWN,
        Ground.FEW,
        None,
    ),
    ("no problem", STEP, (), 0.0, Choice.KEEP, Ground.CLEAR, None),
    ("one large problem", STEP, (SURE,), 0.0, Choice.CHANGE, Ground.COST, 0),
    ("one small problem", STEP, (SMALL,), 0.0, Choice.KEEP, Ground.CLEAR, None),
    ("undecided around the threshold", STEP, (MAYBE,), 0.0, Choice.UNKNOWN, Ground.OPEN, 0),
    (
        "the value below, the interval across",
        STEP,
        (cost(0.04, 0.01, 0.07),),
        0.0,
        Choice.UNKNOWN,
        Ground.OPEN,
        0,
    ),
    (
        "exactly the threshold",
        STEP,
        (cost(0.06, verdict.WORTH, 0.07),),
        0.0,
        Choice.CHANGE,
        Ground.COST,
        0,
    ),
    ("the largest of two", STEP, (MORE, SURE), 0.0, Choice.CHANGE, Ground.COST, 0),
    (
        "undecided first, then sure",
        STEP,
        (cost(0.5, 0.01, 0.9), SURE),
        0.0,
        Choice.CHANGE,
        Ground.COST,
        1,
    ),
    ("small first, then undecided", STEP, (SMALL, MAYBE), 0.0, Choice.UNKNOWN, Ground.OPEN, 1),
    (
        "evaluation longer than all steps",
        STEP,
        (cost(1.5, 1.5, 1.5), SURE),
        0.0,
        Choice.CHANGE,
        Ground.COST,
        0,
    ),
    ("most steps not understood", STEP, (), 0.9, Choice.UNKNOWN, Ground.UNCLEAR, None),
    ("not understood, but a problem is sure", STEP, (SURE,), 0.9, Choice.CHANGE, Ground.COST, 0),
    (
        "not understood, and a problem is open",
        STEP,
        (MAYBE,),
        0.9,
        Choice.UNKNOWN,
        Ground.UNCLEAR,
        None,
    ),
    ("a few steps not understood", STEP, (SMALL,), 0.1, Choice.KEEP, Ground.CLEAR, None),
    (
        "a cost whose interval includes 0",
        STEP,
        (cost(0.0, -0.02, 0.02),),
        0.0,
        Choice.KEEP,
        Ground.CLEAR,
        None,
    ),
)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda one: one[0])
def test_each_situation_has_its_verdict(situation: tuple[Any, ...]) -> None:
    _, step, costs, unclear, *expected = situation
    found = verdict.decide(step, costs, unclear)
    assert [found.choice, found.ground, found.cost] == expected


def read(
    trials: Sequence[Trial], facts: Mapping[str, Any] = made.FACTS
) -> tuple[Answer, Diagnosis, Report]:
    found = report(trials, dict(facts))
    (answer,), (diagnosis,) = found.answers, found.diagnoses
    return answer, diagnosis, found


def finding(
    trials: Sequence[Trial], name: str, facts: Mapping[str, Any] = made.FACTS
) -> Finding | None:
    _, diagnosis, _ = read(trials, facts)
    return next((one for one in diagnosis.findings if one.rule.key == name), None)


def on_gpu(groups: Sequence[made.Group] = made.PLAIN, **about: Any) -> list[Trial]:
    return made.loop(groups, made.case(device_kind="cuda"), **about)


def test_a_loop_that_waits_for_its_loader_is_told_its_share_and_how_many_workers_to_try() -> None:
    answer, diagnosis, _ = read(made.loop(made.with_part(Phase.DATA, 0.00674), loader_workers=2))
    assert (answer.choice, answer.basis, answer.problem) == (Choice.CHANGE, Ground.COST, "loading")
    assert [answer.cost.low, answer.cost.high] == pytest.approx([0.41, 0.41], abs=0.001)
    dpbench, name, *options = answer.command.split()
    assert (dpbench, name) == ("dpbench", loaders.name)
    asked = loaders.make_context(name, options, resilient_parsing=True).params
    assert (asked["batch_size"], asked["step_ms"]) == (64, 9.7)
    (found,) = (one for one in diagnosis.findings if one.rule.key == "loading")
    assert "num_workers=4" in found.code
    assert "per step with 2 workers" in found.evidence.numbers
    assert answer.labels == ("MEASURED", "CPU-ONLY")


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("dpbench watch --name 'a b' nets/train.py --lr 1", "nets/train.py"),
        ("torchrun --nproc-per-node 2 nets/train.py", "nets/train.py"),
        ("dpbench watch -m nets.train", "train.py"),
        # no shell could run it: an earlier version stored the paths of traces so
        ("/home/d'arcy/train.py", "train.py"),
    ],
)
def test_a_command_for_the_dataset_of_a_script_has_its_folder(command: str, script: str) -> None:
    waits = made.with_part(Phase.DATA, 0.00674)
    answer, _, _ = read(made.loop(waits, loader_workers=2, command=command))
    asked = loaders.make_context(loaders.name, answer.command.split()[2:], resilient_parsing=True)
    assert asked.params["dataset"] == f"{script}:{observing.TO_FILL_IN}"


def test_a_script_without_a_loader_is_not_told_that_it_waits_for_one() -> None:
    groups = made.with_part(Phase.DATA, 0.00674)
    answer, diagnosis, _ = read(made.loop(groups, loader_workers=WITHOUT_LOADER))
    assert (answer.choice, answer.problem) == (Choice.CHANGE, "between")
    assert answer.cost.value == pytest.approx(0.41, abs=0.001)
    (found,) = diagnosis.findings
    assert found.rule.key == "between"
    assert "worker" not in found.evidence.numbers
    assert not found.evidence.command, "there is no dataset to measure"
    # a trace has data where its user named it
    traced = finding(
        made.loop(groups, loader_workers=WITHOUT_LOADER, source=Source.IMPORTED), "between"
    )
    assert traced is not None
    assert traced.evidence.says == "the loop waits for data"


def test_a_loader_whose_number_of_workers_is_unknown_is_a_loader() -> None:
    found = finding(made.loop(made.with_part(Phase.DATA, 0.00674), loader_workers=None), "loading")
    assert found is not None
    assert "unknown number of workers" in found.evidence.numbers
    assert "num_workers=2" in found.code


def test_a_healthy_loop_has_nothing_that_stands_out_and_no_strategy_is_recommended() -> None:
    answer, diagnosis, _ = read(made.loop())
    assert (answer.choice, answer.basis) == (Choice.KEEP, Ground.CLEAR)
    assert (answer.problem, answer.cost, diagnosis.findings) == ("", None, ())
    assert answer.settled
    assert "5 parts of one execution" in answer.certainty
    assert "this says nothing about GPUs" in answer.certainty
    for word in ("single", "ddp", "use ", "stay"):
        assert word not in answer.text
    assert answer.command == "dpbench watch train.py"


def test_two_steps_and_noise_are_not_enough() -> None:
    few, _, _ = read(made.loop(rounds=1, steps=2))
    assert (few.choice, few.basis, few.problem) == (Choice.UNKNOWN, Ground.FEW, "")
    assert amounts(few.headline) == ["2"]
    assert not few.settled
    # the first three parts wait for 1 % of the step, the others for 15 %
    other = made.loop(made.with_part(Phase.DATA, 0.0017), seed=1)
    across, _, _ = read([*made.loop()[:3], *other[3:]])
    assert (across.choice, across.basis) == (Choice.UNKNOWN, Ground.OPEN)
    assert across.problem == "loading"
    assert across.cost.low < verdict.WORTH < across.cost.high
    assert amounts(across.headline) == ["0.0%", "17%"]


def test_a_disturbance_that_slows_whole_steps_leaves_the_share_of_a_phase_as_it_is() -> None:
    answer, diagnosis, _ = read(made.loop(made.with_part(Phase.DATA, 0.00674), noise=0.2))
    assert answer.problem == "loading"
    assert [answer.cost.low, answer.cost.high] == pytest.approx([0.41, 0.41], abs=0.001)
    size = diagnosis.findings[0].evidence.size_s
    assert size
    assert size.high / size.low > 1.05


def test_a_loop_of_unknown_parts_names_them() -> None:
    unknown = Unknown(problem="autograd.grad was called", steps=40)
    answer, diagnosis, found = read(made.loop(unknown=(unknown,)))
    assert (answer.choice, answer.basis) == (Choice.UNKNOWN, Ground.UNCLEAR)
    assert unknown.problem in answer.headline
    assert unknown.problem in diagnosis.unjudged[0]
    assert amounts(diagnosis.unjudged[0]) == ["40"]
    (warning,) = (one for one in found.warnings if one.key == "not_understood")
    assert warning.text == str(unknown)


def test_an_unknown_fact_that_affects_no_step_leaves_the_verdict_as_it_is() -> None:
    unknown = Unknown(problem="the number of workers is unknown", steps=0)
    answer, _, _ = read(made.loop(unknown=(unknown,)))
    assert (answer.choice, answer.basis) == (Choice.KEEP, Ground.CLEAR)
    assert f"{unknown.problem};" in answer.certainty


def test_reads_each_step_are_found_with_their_lines() -> None:
    places = {
        "train.py:31 item": 50,
        "train.py:40 cpu": 50,
        "log.py:7 print": 25,
        "log.py:9 item": 5,
    }
    one = finding(on_gpu(made.with_part(Phase.READ, 0.003), reads=places), "reads", made.GPU_FACTS)
    assert one
    named = [place for place in places if place in one.evidence.numbers]
    assert named == [*places][:3], "the most frequent"
    assert amounts(one.evidence.numbers.partition(named[1])[2])[:2] == ["50", "50"]
    assert amounts(one.evidence.numbers)[-1] == "1", "one more place"
    assert 0.22 < one.share < 0.25
    assert one.code == observing.SELDOM
    assert not finding(on_gpu(reads=places), "reads", made.GPU_FACTS)


def test_pageable_copies_are_found_only_if_the_batches_were_not_pinned() -> None:
    copies = made.with_part(Phase.SCATTER, 0.002, 0)
    one = finding(on_gpu(copies, pinned=False), "pageable", made.GPU_FACTS)
    assert one
    assert "for 192 KiB" in one.evidence.numbers
    assert "pin_memory=True" in one.code
    for pinned in (True, None):
        assert not finding(on_gpu(copies, pinned=pinned), "pageable", made.GPU_FACTS)


def test_launch_bound_needs_the_kernels_of_a_gpu_and_a_host_that_does_not_wait() -> None:
    one = finding(on_gpu(busy={0: 0.003}), "launches", made.GPU_FACTS)
    assert one
    assert 0.67 < one.share < 0.7
    assert "64" in amounts(one.evidence.numbers), "the batch"
    assert not finding(on_gpu(busy={0: 0.0096}), "launches", made.GPU_FACTS), "a busy GPU"
    assert not finding(on_gpu(), "launches", made.GPU_FACTS), "unknown kernels"
    beside = [
        replace(
            one,
            samples=(*one.samples, *(Sample(s.end_s, 0, EXPOSED, 0.0066) for s in one.steps)),
        )
        for one in on_gpu(busy={0: 0.003})
    ]
    assert not finding(beside, "launches", made.GPU_FACTS), "collectives fill the GPU"
    waits = on_gpu(made.with_part(Phase.DATA, 0.02), busy={0: 0.0096})
    assert not finding(waits, "launches", made.GPU_FACTS), "the host waits for its loader"
    assert not finding(made.loop(busy={0: 0.003}), "launches"), "a CPU has no launches"


def test_data_parallel_shows_the_phases_that_it_adds_and_how_much_fuller_device_0_is() -> None:
    four = made.case(devices=4, device_kind="cuda")
    groups, busy = made.parallel(), {0: 0.045, 1: 0.02, 2: 0.02, 3: 0.02}
    trials = made.loop(
        groups, four, wrapper="DataParallel", memory=(9 * 2**30, *(3 * 2**30,) * 3), busy=busy
    )
    answer, diagnosis, _ = read(trials, made.GPU_FACTS)
    names = {one.rule.key for one in diagnosis.findings}
    assert {"replicate", "imbalance", "memory"} <= names
    assert amounts(answer.memory) == ["0", "9.00 GiB", "24.0 GiB", "0", "3.00×"]
    assert answer.subject == "train.py under DataParallel"
    assert not any(one.command.startswith("dpbench run") for one in diagnosis.findings), (
        "train.py is no model"
    )


def test_a_reduction_that_outlasts_backward_is_found_for_ranks_only() -> None:
    groups = [*made.PLAIN[:4], [(Phase.REDUCE, d, 0.004) for d in range(2)], made.PLAIN[4]]
    ranks = made.case(devices=2, device_kind="cuda", parallelism=Parallelism.RANKS)
    one = finding(
        made.loop(groups, ranks, wrapper="DistributedDataParallel"), "reduction", made.GPU_FACTS
    )
    assert one
    assert "3.81 MiB of gradients" in one.evidence.numbers
    threads = made.case(devices=2, device_kind="cuda")
    assert not finding(made.loop(groups, threads), "reduction", made.GPU_FACTS)


def test_the_loader_of_a_rank_has_its_own_rows_and_a_sampler() -> None:
    """Of 64 rows, each of 4 ranks loads 16 in 2 batches, whose steps are half of the update."""
    ranks = made.case(devices=4, device_kind="cuda", parallelism=Parallelism.RANKS)
    about = {"loader_workers": 2, "batches": 2, "pinned": False}
    waiting = made.loop(made.with_part(Phase.DATA, 0.00674), ranks, **about)
    loading = finding(waiting, "loading", made.GPU_FACTS)
    pageable = finding(
        made.loop(made.with_part(Phase.SCATTER, 0.00674), ranks, **about),
        "pageable",
        made.GPU_FACTS,
    )
    for one in (loading, pageable):
        assert one
        assert "batch_size=8," in one.code
        # its sampler shares out the rows already, or a library such as accelerate does
        assert "sampler=" not in one.code
    assert loading
    words = loading.evidence.command.split()
    assert words[words.index("--batch-size") + 1] == "8"
    assert float(words[words.index("--step-ms") + 1]) == pytest.approx(9.68 / 2, rel=0.01)
    (alone,) = (finding(made.loop(made.with_part(Phase.DATA, 0.00674)), "loading"),)
    assert alone
    assert "batch_size=64," in alone.code
    assert "Sampler" not in alone.code


def test_what_lies_outside_of_the_steps_is_no_fraction_of_them() -> None:
    given, _, _ = read(made.loop(checkpoint_s=100.0))
    assert given.problem == "checkpoints"
    assert given.cost is None


def test_only_one_rank_is_told_to_save() -> None:
    ranks = made.case(devices=2, parallelism=Parallelism.RANKS)
    for case, once in ((ranks, True), (made.case(), False)):
        found = finding(made.loop(of=case, checkpoint_s=100.0), "checkpoints")
        assert found
        assert ("get_rank() == 0" in found.code) is once


def test_fewer_bytes_are_no_remedy_of_a_reduction_that_has_few() -> None:
    groups = [*made.PLAIN[:4], [(Phase.REDUCE, d, 0.004) for d in range(2)], made.PLAIN[4]]
    ranks = made.case(devices=2, device_kind="cuda", parallelism=Parallelism.RANKS)
    for gradients, name in ((84, "reduction of few bytes"), (4e6, "reduction")):
        facts = {"model": {"parameter_bytes": gradients}}
        _, diagnosis, _ = read(made.loop(groups, ranks, facts=facts), made.GPU_FACTS)
        (found,) = (one for one in diagnosis.findings if "reduction" in one.rule.key)
        assert found.rule.key == name
        assert ("bf16" in found.code + found.rule.remedy) is (name == "reduction")


def held(rank: int, gpu: int, mib: int, home: int | None = None) -> Held:
    return Held(
        rank=rank,
        gpu=gpu,
        uuid=f"GPU-{gpu}",
        held_bytes=mib * 2**20,
        own=gpu == (rank if home is None else home),
    )


def test_ranks_that_hold_memory_on_the_gpu_of_another_rank_are_found_with_their_bytes(
    tmp_path,
) -> None:
    ranks = made.case(devices=4, device_kind="cuda", parallelism=Parallelism.RANKS)
    homes = [held(rank, rank, 4096) for rank in range(4)]
    strays = [held(1, 0, 512), held(2, 0, 512), held(3, 0, 300)]
    one = finding(
        made.loop(of=ranks, held=(*homes, *strays)), "memory of other ranks", made.GPU_FACTS
    )
    assert one
    assert amounts(one.evidence.says) == ["1", "2", "3", "1.29 GiB", "0", "0"]
    ranks_of_gpu = ["1", "512 MiB", "2", "512 MiB", "3", "300 MiB"]
    assert amounts(one.evidence.numbers)[:7] == ["0", *ranks_of_gpu]
    assert "torch.cuda.set_device(local_rank)" in one.rule.remedy
    with mock.patch("torch.cuda.set_device") as bound, mock.patch("torch.load") as loaded:
        exec(
            one.code,
            {"os": mock.Mock(environ={"LOCAL_RANK": "2"}), "torch": torch, "path": tmp_path},
        )
    bound.assert_called_once_with(2)
    loaded.assert_called_once_with(tmp_path, map_location="cuda:2")
    two = finding(
        made.loop(of=ranks, held=(*homes, held(3, 0, 2), held(0, 7, 1))),
        one.rule.key,
        made.GPU_FACTS,
    )
    assert two
    assert amounts(two.evidence.says) == ["3", "2.00 MiB", "0", "0", "1"]
    assert amounts(two.evidence.numbers)[:6] == ["0", "3", "2.00 MiB", "7", "0", "1.00 MiB"]


def test_memory_of_other_ranks_is_no_finding_without_the_processes_of_the_ranks() -> None:
    ranks = made.case(devices=2, device_kind="cuda", parallelism=Parallelism.RANKS)
    rule = "memory of other ranks"

    def judged(*found: Held, **changes: Any) -> tuple[bool, bool]:
        _, diagnosis, _ = read(made.loop(held=found, **{"of": ranks, **changes}), made.GPU_FACTS)
        silent = any("NVML" in one and amounts(one) == ["1", "2"] for one in diagnosis.unjudged)
        return rule in [one.rule.key for one in diagnosis.findings], silent

    assert judged(held(0, 0, 9), held(1, 1, 9)) == (False, False)
    assert judged(held(0, 0, 9)) == (False, True)
    assert judged(held(0, 0, 9), held(1, 0, 9, home=5)) == (
        False,
        True,
    ), "the GPU of rank 1 is unknown, as with MIG"
    assert judged(held(0, 0, 9), held(1, 1, 9), held(1, 0, 9)) == (True, False)
    assert judged(held(0, 0, 9), source=Source.IMPORTED) == (False, False)
    threads = made.case(devices=2, device_kind="cuda")
    assert judged(held(0, 0, 9), held(0, 1, 9, home=0), of=threads) == (
        False,
        False,
    ), "one process of two GPUs"


def test_evaluation_and_checkpoints_are_compared_with_the_seconds_of_all_steps() -> None:
    steps_s = 52 * made.HEALTHY_S
    answer, diagnosis, _ = read(made.loop(evaluation_s=2 * steps_s, noise=0.0))
    assert (answer.basis, answer.problem) == (Ground.COST, "evaluation")
    assert answer.cost is None, "it is no part of the steps"
    assert amounts(answer.headline) == ["1.02 s", "510 ms"]
    assert answer.command == observing.EVALUATE
    assert diagnosis.findings[0].rule.key == "evaluation"
    assert not finding(made.loop(evaluation_s=0.1 * steps_s), "evaluation")
    assert finding(made.loop(checkpoint_s=0.5 * steps_s), "checkpoints")
    both, _, _ = read(made.loop(made.with_part(Phase.DATA, 0.02), evaluation_s=0.3 * 52 * 0.0297))
    assert both.problem == "loading", "the larger of the two comes first"
    both, _, _ = read(made.loop(made.with_part(Phase.DATA, 0.02), evaluation_s=3 * 52 * 0.0297))
    assert both.problem == "evaluation", "the larger of the two comes first"


def test_skipped_updates_waste_their_steps() -> None:
    one = finding(made.loop(skipped_updates=13), "skipped updates")
    assert one
    assert amounts(one.evidence.says) == ["13", "52"]
    assert one.share == pytest.approx(0.25)
    assert not finding(made.loop(skipped_updates=1), "skipped updates"), (
        "a GradScaler looks for its scale"
    )


def test_time_that_no_phase_covers_is_found() -> None:
    one = finding(made.loop(gap_s=0.005), "unattributed")
    assert one
    assert 0.3 < one.share < 0.36


@pytest.mark.parametrize(("synchronized", "saved"), [(1.0, 0.75), (0.5, 0.5), (0.25, None)])
def test_gradients_added_more_than_once_per_update_cost_the_needless_part(
    synchronized: float, saved: float | None
) -> None:
    ranks = made.case(devices=2, parallelism=Parallelism.RANKS)
    groups = [*made.PLAIN[:4], [(Phase.REDUCE, 0, 0.008)], *made.PLAIN[4:]]
    trials = made.loop(groups, ranks, synchronized=synchronized, updates=4)
    found = finding(trials, "accumulation")
    assert (found is not None) == (saved is not None)
    if found and saved:
        assert found.evidence.size_s is not None
        assert found.evidence.size_s.value == pytest.approx(saved * 0.008, rel=0.05)


def test_an_imported_trace_names_its_gpu_and_asks_for_more_steps_if_it_has_few() -> None:
    trace = made.case(model="trace.json.gz", batch_size=0, device_kind="cuda")
    facts = {"gpu": "Tesla V100-SXM2-16GB"}
    slow, _, _ = read(
        made.loop(
            made.with_part(Phase.DATA, 0.07), trace, source=Source.IMPORTED, rounds=1, facts=facts
        )
    )
    assert slow.problem == "loading"
    assert slow.cost.value == pytest.approx(0.88, abs=0.005)
    assert facts["gpu"] in slow.certainty
    assert slow.labels == ("IMPORTED",)
    few, _, _ = read(made.loop(of=trace, source=Source.IMPORTED, rounds=1, steps=2))
    assert few.command == verdict.PROFILE_MORE


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings(
    "ignore:.*deprecated:DeprecationWarning", "ignore:.*CUDA is not available"
)
@pytest.mark.parametrize("line", [*observing.CODE, verdict.PROFILE_MORE])
def test_the_line_of_code_of_a_remedy_runs(line: str, tmp_path, one_rank: None) -> None:
    seen: list[Any] = []
    model: Any = nn.Linear(4, 2)
    model.register_comm_hook = lambda state, hook: seen.append(hook)
    model.no_sync = contextlib.nullcontext
    names = {
        "torch": torch,
        "dataset": torch.utils.data.TensorDataset(torch.ones(8, 4)),
        "model": model,
        "epoch": 5,
        "step": 1000,
        "loss": torch.tensor(1.0),
        "evaluate": seen.append,
        "path": tmp_path / "model.pt",
        "x": torch.ones(8, 4),
        "y": torch.ones(8, 2),
        "loss_fn": nn.functional.mse_loss,
    }
    exec(line, names)
    changed = {*names} - {
        "__builtins__",
        "torch",
        "dataset",
        "epoch",
        "step",
        "loss",
        "evaluate",
        "path",
        "x",
        "y",
        "loss_fn",
    }
    assert (
        changed > {"model"}
        or seen
        or names["path"].exists()
        or model.weight.grad is not None
        or line in (observing.SELDOM, observing.COMPILED)
    )


def test_a_watched_loop_with_long_steps_is_not_without_problems() -> None:
    """No rule knows why the optimizer is slow in some steps, but the steps differ."""
    found = verdict.decide(Estimate(1, 1, 1, 5), [Estimate(0.01, 0.0, 0.02, 5)], uneven=True)
    assert (found.choice, found.ground) == (Choice.CHANGE, Ground.UNEVEN)
    even_steps = verdict.decide(Estimate(1, 1, 1, 5), [Estimate(0.01, 0.0, 0.02, 5)])
    assert even_steps.ground is Ground.CLEAR
    loaded = verdict.decide(Estimate(1, 1, 1, 5), [], noisy=True)
    assert (loaded.choice, loaded.ground) == (Choice.UNKNOWN, Ground.NOISY)
