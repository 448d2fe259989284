"""Launches without their processes: environments, clocks, and sentences about machines."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.analysis import hosts, validity
from dpbench.analysis.report import Report
from dpbench.analysis.summary import labels, rows
from dpbench.measure import launch
from dpbench.measure.cluster import Cluster, Offset, names
from dpbench.measure.group import Answer, Crossing, Group, Member, Part, Task
from dpbench.measure.launch import Launch
from dpbench.measure.merging import merge, shifted
from dpbench.measure.request import Request
from dpbench.records import (
    HOST,
    Case,
    Effort,
    Memory,
    Phase,
    Sample,
    Span,
    Status,
    Step,
    Trial,
    host_device,
    words,
)
from dpbench.records.environment import HIDDEN
from dpbench.records.facts import Machine, RunFacts, TrialHost
from dpbench.records.load import Load
from dpbench.records.trial import ALONE, Failure
from dpbench.report import markdown, page
from tests import environments
from tests.amounts import amounts
from tests.trials import of_run, report_on

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "LOCAL_RANK": "1",
}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu1,gpu2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu2",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
CASE = Case(model="mlp", strategy="ddp", batch_size=8, devices=2, hosts=2)


def test_the_environment_of_torchrun_and_srun_says_who_a_process_is() -> None:
    torchrun = launch.of_environment(TORCHRUN)
    assert torchrun is not None
    assert (torchrun.rank, torchrun.size, torchrun.node) == (3, 4, 1)
    assert torchrun.variables == {}
    srun = launch.of_environment(SRUN)
    assert srun is not None
    assert (srun.rank, srun.size, srun.node, srun.host) == (1, 2, 1, "gpu2")
    assert srun.variables.items() >= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "gpu1"}.items()


def port(**variables: str) -> str:
    found = launch.of_environment(SRUN | variables)
    assert found is not None
    return found.variables["MASTER_PORT"]


def test_the_tasks_of_a_job_step_meet_at_one_port_and_those_of_two_steps_do_not() -> None:
    assert port() == port(SLURM_PROCID="0", SLURM_NODEID="0", SLURMD_NODENAME="gpu1")
    assert len({port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="8")}) == 3
    assert port(MASTER_PORT="29500") == "29500"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[01-04,07],login", "gpu01"),
        ("login,gpu[01-04]", "login"),
        ("rack[2-3]node[5,9]", "rack2node5"),
    ],
)
def test_the_tasks_of_srun_meet_on_the_first_node(nodes: str, first: str) -> None:
    found = launch.of_environment(SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert found is not None
    assert found.variables["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        TORCHRUN | {"WORLD_SIZE": "1"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["none", "batch script", "one rank", "one task"],
)
def test_a_single_process_is_no_launch(environ: dict[str, str]) -> None:
    assert launch.of_environment(environ) is None


@pytest.mark.parametrize("environ", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_an_incomplete_environment_is_an_error_that_names_the_variable(
    environ: dict[str, str],
) -> None:
    name = "GROUP_RANK" if environ is TORCHRUN else "SLURM_NODEID"
    with pytest.raises(ValueError, match=name):
        launch.of_environment({key: value for key, value in environ.items() if key != name})


def member(rank: int, node: int, host: str) -> Member:
    return Member(
        rank=rank,
        node=node,
        host=host,
        machine=f"boot {host}",
        pid=1,
        sees="",
        cores=(0, 1),
        facts={},
    )


def test_equal_host_names_of_two_machines_are_told_apart() -> None:
    assert names([member(0, 0, "a"), member(1, 0, "a"), member(2, 1, "b")]) == {0: "a", 1: "b"}
    assert names([member(0, 0, "vm"), member(1, 1, "vm")]) == {0: "vm#0", 1: "vm#1"}


# -- parts of several machines


def part(rank: int, late_s: float = 0.0) -> Trial:
    """Return a rank's part: ten steps of a second.

    Backward is followed by a reduction that ends with the step.
    """
    steps = tuple(Step(1.0, False, 10.0 + i) for i in range(10))
    spans = [
        span
        for i, step in enumerate(steps)
        for span in (
            Span(i, Phase.BACKWARD, rank, "host", step.start_s, step.end_s - 0.5 + late_s),
            Span(i, Phase.REDUCE, rank, "host", step.end_s - 0.5 + late_s, step.end_s),
        )
    ]
    samples = (Sample(12.0, rank, "busy_s", 0.5), Sample(0.0, rank, "kernel_busy_s", 0.25))
    return Trial(
        case=CASE,
        steps=steps,
        spans=tuple(spans),
        samples=samples,
        memory=(Memory(HOST, 100 + rank, "rss"),),
    )


TWO = (TrialHost("a", "boot a", (0,)), TrialHost("b", "boot b", (1,)))


def test_parts_are_merged_on_rank_0s_clock() -> None:
    ahead = shifted(part(1, late_s=0.25), 1000.0)
    assert ahead.steps[0].end_s == 1010.0
    assert [sample.time_s for sample in ahead.samples] == [
        1012.0,
        0.0,
    ], "a reading outside the series keeps time 0"
    merged = merge([part(0), shifted(ahead, -1000.0)], TWO)
    assert merged.steps == part(0).steps
    assert {
        (s.device, round(s.end_s - s.start_s, 6)) for s in merged.spans if s.phase is Phase.REDUCE
    } == {
        (0, 0.25),
        (1, 0.25),
    }, "the reduction begins when the last rank arrives"
    assert {m.device: m.peak_bytes for m in merged.memory} == {HOST: 100, host_device(1): 101}


def test_the_error_of_a_clocks_offset_covers_its_drift() -> None:
    found = Offset(1.0, 0.001).between(Offset(1.01, 0.002))
    assert found.seconds == pytest.approx(1.005)
    assert found.error_s == pytest.approx(0.002 + 0.005)


def test_the_offset_of_a_clock_is_never_wrong_by_more_than_its_error() -> None:
    """Ranks enter barriers at random times, and leave at random times after the last entry."""
    chance = random.Random(0)
    for _ in range(100):
        passed: list[list[Crossing]] = [[], []]
        for number in range(20):
            entered = [number + chance.expovariate(100) for _ in range(2)]
            for rank, at_s in enumerate(entered):
                left_s = max(entered) + chance.expovariate(1000)
                passed[rank].append(Crossing(left_s + 1000.0 * rank, left_s - at_s))
        found = Offset.of(*passed)
        assert abs(found.seconds - 1000.0) <= found.error_s < 0.01


def crossings(ahead_s: float, spread_s: float) -> list[Crossing]:
    """Return the passages through two barriers of a rank whose clock is ahead.

    The first barrier is slow.
    """
    return [Crossing(5.0 + ahead_s, 1.0), Crossing(6.0 + ahead_s, spread_s)]


class Standing(Group):
    """Two ranks whose answers are known: rank 1 is on another machine, whose clock is ahead."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__(Launch(rank=0, size=2, node=0, host="a"))
        self.members = [member(0, 0, "a"), member(1, 1, "b")]
        self.ahead_s, self.spread_s = ahead_s, 0.001
        self.asked: Task | None = None
        self.failures: dict[int, Failure] = {}

    def ask(self, task: Task) -> dict[int, Answer]:
        self.asked = task
        return {rank: self.answer(rank) for rank in range(2)}

    def answer(self, rank: int) -> Answer:
        clock_s = self.ahead_s * rank
        passed = crossings(clock_s, self.spread_s)
        if rank in self.failures:
            return Answer(
                failure=replace(self.failures[rank], rank=rank), before=passed, after=passed
            )
        return Answer(
            trials=(shifted(part(rank, late_s=0.25 * rank), clock_s),),
            samples=(Sample(clock_s + 13.0, HOST, "cpu_ratio", 0.5),),
            load=Load(foreign=0.5 * rank, steal=0.0, cores=2, seconds=1.0),
            before=passed,
            after=passed,
        )


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(Standing(1000.0))


def test_a_trial_over_two_machines_has_one_clock_and_the_facts_of_both(cluster: Cluster) -> None:
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    assert trial.steps == part(0).steps, "rank 1's times are on rank 0's clock"
    assert {one.device for one in trial.spans} == {0, 1}
    assert [one for one in trial.samples if one.metric == "cpu_ratio"] == [
        Sample(13.0, host_device(1), "cpu_ratio", 0.5)
    ], "the run samples the first machine itself"
    assert trial.facts.foreign_load.foreign == 0.5, "the busiest machine counts"
    assert trial.provenance["clock_error_s"] == 0.001, "the barrier with the smallest spread counts"
    assert [(host.name, host.ranks) for host in trial.facts.hosts] == [("a", (0,)), ("b", (1,))]
    assert cluster._group.asked is not None
    seats = [one.request.seat for one in cluster._group.asked.parts.values()]
    assert [(seat.rank, seat.size, seat.place) for seat in seats] == [(0, 2, 0), (1, 2, 0)]


def test_the_trial_of_rank_0_needs_no_other_clock(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When another rank is lost, rank 0 has not passed the barriers after the task."""
    monkeypatch.setattr(cluster._group, "ask", lambda task: {0: Answer(trials=(part(0),))})
    (trial,) = cluster.run_together([replace(CASE, devices=1, hosts=1)], Effort(), 0, 30.0)
    assert trial.status is Status.OK
    assert trial.provenance["clock_error_s"] == 0.0


def test_a_poor_clock_is_a_warning(cluster: Cluster) -> None:
    cluster._group.spread_s = 0.06
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    assert [one.key for one in validity.check(trial, 2) if not one.ok and one.key == "clock_error"]


def test_a_rank_that_fails_is_named_with_its_host(cluster: Cluster) -> None:
    secondary = Failure(
        status=Status.FAILED, reason="connection closed", perhaps_secondary=True, exception="E"
    )
    cluster._group.failures = {
        0: secondary,
        1: (ended := Failure(status=Status.FAILED, reason="its process has ended")),
    }
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    assert trial.status is Status.FAILED
    assert trial.reason.startswith(f"rank 1 on b: {ended.reason}")


def test_a_machine_that_cannot_run_the_baseline_does_not_fail_that_of_rank_0(
    cluster: Cluster,
) -> None:
    cluster._group.failures = {1: Failure(status=Status.FAILED, reason="no memory")}
    case = Case(model="mlp", strategy="single", batch_size=8)
    (trial,) = cluster.run_together([case], Effort(), 0, 30.0)
    assert trial.status is Status.OK
    assert set(trial.readings(ALONE)) == {HOST}
    (warning,) = hosts.failures([trial])
    assert "no memory" in warning


def test_memory_of_another_host_is_not_memory_of_a_device(cluster: Cluster) -> None:
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    (row,) = rows([trial])
    assert row.memory == {}
    assert row.host_bytes == 101


def test_each_machines_ranks_are_compared_with_its_own_cores(cluster: Cluster) -> None:
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    checks = {one.key: one for one in validity.check(trial, 1)}
    assert checks["oversubscribed"].ok, (
        "one rank on the two cores of each machine, whatever rank 0 sees"
    )
    same = [asdict(replace(host, machine="boot", cores=1)) for host in TWO]
    one = replace(trial, provenance={**trial.provenance, "hosts": same})
    assert not {check.key: check for check in validity.check(one, 8)}["oversubscribed"].ok


def test_a_case_of_more_ranks_than_the_launch_has_says_so(cluster: Cluster) -> None:
    (trial,) = cluster.run_together([replace(CASE, devices=4)], Effort(), 0, 30.0)
    assert trial.status is Status.FAILED
    assert amounts(trial.reason) == ["4", "2"]
    assert trial.reason.endswith("start more processes")


def test_default_cases_use_one_rank_one_machine_and_all(cluster: Cluster) -> None:
    assert cluster.counts() == (1, 2)
    assert [cluster.placed(replace(CASE, devices=n, hosts=1)).hosts for n in (1, 2)] == [1, 2]
    assert cluster.placed(Case(model="mlp", strategy="single", batch_size=8)).hosts == 1


# -- sentences


def alone(number: int, *ratios: float) -> Trial:
    """Return a trial of the baseline: others take `ratios` times as long as machine a."""
    hosts = [TrialHost(f"{at}", f"boot {at}", (at,)) for at in range(2, 1 + len(ratios))]
    samples = [
        Sample(1.0 + i, host_device(at), ALONE, 0.01 * ratio)
        for i in range(9)
        for at, ratio in enumerate((1.0, *ratios))
    ]
    return Trial(
        case=Case(model="mlp", strategy="single", batch_size=8),
        steps=tuple(Step(0.01, False, i) for i in range(9)),
        samples=tuple(samples),
        round=number,
        provenance={"hosts": [asdict(host) for host in (*TWO, *hosts)]},
    )


def test_of_many_equal_machines_none_is_called_slow() -> None:
    """The fastest is so by chance: each of 16 varies by 10 % between rounds."""
    generator = random.Random(1)
    for _ in range(10):
        trials = [alone(n, *(generator.gauss(1, 0.1) for _ in range(15))) for n in range(5)]
        assert not hosts.sentences(trials)


def test_a_slow_machine_is_named_with_its_ratio_and_interval() -> None:
    trials = [alone(n, ratio) for n, ratio in enumerate((1.49, 1.5, 1.5, 1.51))]
    (pace,) = hosts.paces(trials)
    assert (pace.host, pace.fastest, pace.case.model, pace.slow) == ("b", "a", "mlp", True)
    assert pace.ratio.value == pytest.approx(1.5, rel=0.01)
    assert pace.ratio.low < pace.ratio.value < pace.ratio.high
    assert hosts.sentences(trials) == [f"{pace}."]


@pytest.mark.parametrize(
    "ratios",
    [(1.0, 1.01, 0.99, 1.0), (1.5, 1.5), (0.7, 1.5, 0.8, 1.6)],
    ids=["equal", "few", "noisy"],
)
def test_no_machine_is_called_slow_without_evidence(ratios: tuple[float, ...]) -> None:
    assert hosts.sentences([alone(n, ratio) for n, ratio in enumerate(ratios)]) == []


def test_hosts_on_one_machine_are_labelled_colocated() -> None:
    apart = alone(0, 1.0)
    together = replace(
        apart, provenance={"hosts": [asdict(replace(host, machine="boot")) for host in TWO]}
    )
    assert "COLOCATED" not in labels(apart)
    assert "COLOCATED" in labels(together)


def facts(**host: Any) -> dict[str, Any]:
    return {
        "host": {"cpu": "X", "cores": 8, "memory_bytes": 10**10, **host},
        "gpus": {},
        "software": {"torch": "2.13"},
    }


def machines(*described: dict[str, Any]) -> tuple[Machine, ...]:
    return RunFacts.of({"hosts": {"machines": described}}).hosts.machines


def test_unlike_machines_are_said_to_be_unlike_and_equal_ones_to_be_one() -> None:
    a, b = (
        {"name": "a", "machine": "1", "facts": facts()},
        {"name": "b", "machine": "2", "facts": facts(cores=4)},
    )
    (unlike,) = hosts.warnings(machines(a, b))
    assert (unlike[0], amounts(unlike)) == ("b", ["4", "8"])
    assert "cores" in unlike
    (same,) = hosts.warnings(machines(a, {**a, "name": "c"}))
    assert same.startswith("COLOCATED: a and c ")
    assert list(hosts.warnings(())) == []


@pytest.mark.parametrize("form", [page.render, markdown.render])
def test_a_report_of_a_launch_has_its_machines(form: Callable[[Report], str]) -> None:
    machines = [{"name": name, "machine": name * 9, "facts": facts()} for name in "ab"]
    trials = [alone(n, ratio) for n, ratio in enumerate((1.49, 1.5, 1.5, 1.51))]
    found = report_on(trials, {"hosts": {"machines": machines}})
    text = form(found)
    assert "Hosts<" in text
    (pace,) = hosts.paces(trials)
    assert f"{pace.case.model}: {words.times(pace.ratio)}" in text
    assert "Hosts<" not in form(of_run(found, provenance={}))


@pytest.mark.parametrize("name", environments.CHANGED)
def test_each_fact_of_another_machine_of_a_launch_is_compared(name: str) -> None:
    a = {"name": "a", "machine": "1", "facts": environments.FACTS}
    b = {"name": "b", "machine": "2", "facts": environments.facts(name)}
    (warning,) = hosts.warnings(machines(a, b))
    assert warning.startswith("b is unlike a: ")
    assert "instead of" in warning
    provenances = [environments.FACTS, environments.facts(name)]
    mixed = [Trial(case=CASE, provenance=one) for one in provenances]
    assert bool(list(hosts.unlike(mixed))) is (name in environments.FORBIDS)


def test_a_variable_whose_value_no_machine_recorded_makes_none_of_them_unlike() -> None:
    """Launches of earlier versions stored no hash of such a value."""
    facts = {**environments.FACTS, "variables": {"LD_PRELOAD": HIDDEN}}
    a, b = ({"name": name, "machine": name, "facts": facts} for name in "ab")
    assert list(hosts.warnings(machines(a, b))) == []


def test_trials_of_unlike_machines_are_said_to_compare_machines() -> None:
    here = [
        Trial(case=CASE, provenance=facts()),
        Trial(case=Case(model="mlp", strategy="dp", batch_size=8), provenance=facts(cpu="Y")),
    ]
    (warning,) = hosts.unlike(here)
    assert amounts(warning) == ["1"]
    assert warning.endswith("processor Y instead of X")
    assert list(hosts.unlike(here[:1])) == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.ENOSPC, "no space left"), Status.KILLED),
        (LookupError("a bug"), Status.FAILED),
    ],
)
def test_a_rank_without_a_place_for_its_files_says_so_and_the_case_has_not_failed(
    error: Exception, status: Status
) -> None:
    def unusable(*_: object) -> None:
        raise error

    group = Group(Launch(rank=1, size=2, node=0, host="a"))
    group._server = SimpleNamespace(stop=unusable, answer=unusable)  # type: ignore[assignment]
    work = Part(request=Request(cases=(CASE,), effort=Effort(), round=0))
    for task in (Task(renew=True), Task(parts={1: work})):
        failure = group._answer(task).failure
        assert failure is not None
        assert (failure.status, failure.rank) == (status, 1)
        assert str(error.args[-1]) in failure.reason
