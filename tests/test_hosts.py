"""Launches without their processes: environments, keys, clocks of several machines, and sentences about machines."""

from __future__ import annotations

import errno
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing import AuthenticationError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.analysis import hosts, validity
from dpbench.analysis.report import Report
from dpbench.analysis.summary import labels, rows
from dpbench.hardware.foreign_load import Load, during
from dpbench.measure import agent as agent_module
from dpbench.measure import launch
from dpbench.measure.agent import Agent, Member, Reply, Work
from dpbench.measure.cluster import Cluster
from dpbench.measure.launch import Launch, LaunchError
from dpbench.measure.merging import merge, shifted
from dpbench.measure.peers import Offset, Peer, Peers
from dpbench.measure.request import Request
from dpbench.records import HOST, Case, Effort, Memory, Phase, Sample, Span, Status, Step, Trial, host_device
from dpbench.records.trial import ALONE, HOSTS, TrialHost
from dpbench.report import markdown, page

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4",
    "GROUP_RANK": "1", "LOCAL_RANK": "1",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu1,gpu2", "SLURM_PROCID": "1", "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
}  # fmt: skip
CASE = Case(model="mlp", strategy="ddp", batch_size=8, devices=2, hosts=2)


def test_the_environment_of_torchrun_and_srun_says_who_a_process_is() -> None:
    torchrun = launch.of_environment(TORCHRUN)
    assert torchrun is not None
    assert (torchrun.rank, torchrun.size, torchrun.node, torchrun.leader) == (3, 4, 1, "10.0.0.1")
    srun = launch.of_environment(SRUN)
    assert srun is not None
    assert (srun.rank, srun.size, srun.node, srun.host, srun.leader) == (1, 2, 1, "gpu2", "gpu1")
    assert launch.of_environment({**SRUN, "SLURM_STEP_ID": "1"}).ports != srun.ports, "two launches do not meet"


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


def test_an_incomplete_environment_is_an_error_that_names_the_variable() -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT"):
        launch.of_environment({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"})


def test_an_unknown_interface_is_refused_with_those_that_exist() -> None:
    with pytest.raises(LaunchError, match=r"no network interface eth99.*127\.0\.0\.1"):
        launch.own_address("eth99")


def test_rank_0_listens_at_the_address_where_the_others_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}
    monkeypatch.setattr(launch, "addresses", lambda: known)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.0.5")
    first = Launch(rank=0, size=2, node=0, host="a", leader="a", id="1", by="torchrun")
    assert launch.leader_address(first, "lo") == "127.0.0.1"
    assert launch.leader_address(first, "ib0") == "10.1.0.5"
    with pytest.raises(LaunchError, match="give --interface ib0"):
        launch.leader_address(first, "eth0")


def test_equal_host_names_of_two_machines_are_told_apart() -> None:
    assert launch.names([(0, "a"), (0, "a"), (1, "b")]) == {0: "a", 1: "b"}
    assert launch.names([(0, "vm"), (1, "vm")]) == {0: "vm#0", 1: "vm#1"}


# -- channels


def meet(mine: bytes, theirs: bytes) -> tuple[Any, Any]:
    """Return what both sides get, rank 0's first: a channel or an error."""
    here, there = socket.socketpair()
    found: dict[str, Any] = {}

    def prove(name: str, end: socket.socket, secret: bytes, first: bool) -> None:
        try:
            found[name] = launch.prove(end, secret, first=first)
        except (AuthenticationError, EOFError, OSError) as error:
            found[name] = error
            end.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_OPTIONS", ())  # a pair of local sockets has no TCP options
        other = threading.Thread(target=prove, args=("theirs", there, theirs, False))
        other.start()
        prove("mine", here, mine, True)
        other.join(10)
    return found["mine"], found["theirs"]


def test_only_who_knows_the_key_gets_a_channel_and_messages_are_data() -> None:
    mine, theirs = meet(b"key", b"key")
    mine.send("work", turn=1, sizes=[1, 2])
    assert theirs.receive() == ("work", {"turn": 1, "sizes": [1, 2]})
    theirs.close()
    with pytest.raises(EOFError):
        mine.receive()
    mine, theirs = meet(b"key", b"another")
    assert isinstance(mine, AuthenticationError)
    assert isinstance(theirs, AuthenticationError | EOFError | OSError)


def test_nobody_between_two_ends_can_insert_change_or_repeat_a_message() -> None:
    mine, theirs = meet(b"key", b"key")
    frames: list[bytes] = []
    mine._end = SimpleNamespace(sendall=frames.append)
    mine.send("work", turn=1)
    mine.send("end")
    for wrong in (frames[1], frames[0][:-4] + b"2}]]", b"\0" * 7 + b"\x02" + b"\0" * 32 + b"[]"):
        here, there = socket.socketpair()
        theirs._end, theirs._received = there, 0
        here.sendall(wrong)
        with pytest.raises(ConnectionError, match="wrong code"):
            theirs.receive()
        here.close()
    here, theirs._end = socket.socketpair()
    theirs._received = 0
    here.sendall(frames[0] * 2)
    assert theirs.receive() == ("work", {"turn": 1})
    with pytest.raises(ConnectionError):
        theirs.receive()
    here.close()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack(">Q", 2) + b"\0" * 32 + b"[]", "its connection failed: a message has a wrong code"),
        (struct.pack(">Q", 1 << 62) + b"\0" * 32, "its connection failed: the other end announced a message of"),
        (struct.pack(">Q", 2), "its connection failed: timed out"),
        (b"", "its process has ended"),
    ],
    ids=["forged", "too long", "late", "ended"],
)
def test_the_reason_why_a_rank_is_lost_is_true(sent: bytes, reason: str) -> None:
    here, there = socket.socketpair()
    to = launch.Channel(here, b"session", first=True)
    to.limit(0.05)
    peer = Peer(1, SimpleNamespace(host="b"), to)
    there.sendall(sent)
    if not sent:
        there.close()
    assert peer.receive("answer") is None
    assert peer.lost.startswith(reason)
    there.close()


def test_the_key_is_made_once_and_nobody_else_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.KEY, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert launch.key() == launch.key()
    assert len(launch.key()) == 64
    assert (tmp_path / "dpbench/key").stat().st_mode & 0o077 == 0
    monkeypatch.setenv(launch.KEY, "given")
    assert launch.key() == b"given"


# -- parts of several machines


def part(rank: int, late_s: float = 0.0) -> Trial:
    """Return a rank's part: ten steps of a second; backward is followed by a reduction that ends with the step."""
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
    return Trial(case=CASE, steps=steps, spans=tuple(spans), samples=samples, memory=(Memory(HOST, 100 + rank, "rss"),))


TWO = (TrialHost("a", "boot a", (0,)), TrialHost("b", "boot b", (1,)))


def test_parts_are_merged_on_rank_0s_clock() -> None:
    ahead = shifted(part(1, late_s=0.25), 1000.0)
    assert ahead.steps[0].end_s == 1010.0
    assert [sample.time_s for sample in ahead.samples] == [1012.0, 0.0], "a reading outside the series keeps time 0"
    merged = merge([part(0), shifted(ahead, -1000.0)], TWO)
    assert merged.steps == part(0).steps
    assert {(s.device, round(s.end_s - s.start_s, 6)) for s in merged.spans if s.phase is Phase.REDUCE} == {
        (0, 0.25), (1, 0.25),
    }, "the reduction begins when the last rank arrives"  # fmt: skip
    assert {m.device: m.peak_bytes for m in merged.memory} == {HOST: 100, host_device(1): 101}


def test_the_error_of_a_clocks_offset_covers_its_drift() -> None:
    found = Offset(1.0, 0.001).between(Offset(1.01, 0.002))
    assert found.seconds == pytest.approx(1.005)
    assert found.error_s == pytest.approx(0.002 + 0.005)


class Standing(Peers):
    """Ranks whose answers are known: rank 1 is on another machine, whose clock is ahead."""

    def __init__(self, ahead_s: float) -> None:
        members = [
            Member(
                rank=n, node=n, host=name, machine=f"boot {name}", pid=1, sees="", cores=(0, 1), version="1", facts={}
            )
            for n, name in enumerate(("a", "b"))
        ]
        super().__init__([standing(member) for member in members])
        self.ahead_s, self.asked = ahead_s, {}

    def ask(self, work: Any, *, timeout_s: float | None = None) -> dict[int, Reply]:
        self.asked = work
        parts = {0: part(0), 1: shifted(part(1, late_s=0.25), self.ahead_s)}
        loads = {
            0: Load(foreign=0.0, steal=0.0, cores=2, seconds=1.0),
            1: Load(foreign=0.5, steal=0.0, cores=2, seconds=1.0),
        }
        seen = {n: (Sample(self.ahead_s * n + 13.0, HOST, "cpu_ratio", 0.5),) for n in parts}
        return {n: Reply(turn=1, trials=(parts[n],), samples=seen[n], load=loads[n]) for n in work}

    def offset(self, peer: Peer) -> Offset:
        assert peer.number == 1, "ranks on rank 0's machine share its clock"
        return Offset(self.ahead_s, 0.001)


def standing(member: Member) -> Peer:
    here, _ = socket.socketpair()
    return Peer(member.rank, member, launch.Channel(here, b"", first=True))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = Cluster.__new__(Cluster)
    found._launch = Launch(rank=0, size=2, node=0, host="a", leader="a", id="1", by="torchrun")
    found._interface, found._address, found._peers = "lo", "127.0.0.1", Standing(1000.0)
    with socket.socket() as found._reserved:
        found._reserved.bind(("127.0.0.1", 0))
        yield found


def test_a_trial_over_two_machines_has_one_clock_and_the_facts_of_both(cluster: Cluster) -> None:
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    assert trial.steps == part(0).steps, "rank 1's times are on rank 0's clock"
    assert {one.device for one in trial.spans} == {0, 1}
    assert [one for one in trial.samples if one.metric == "cpu_ratio"] == [
        Sample(13.0, host_device(1), "cpu_ratio", 0.5)
    ], "the run samples the first machine itself"
    assert during(trial).foreign == 0.5, "the busiest machine counts"
    assert trial.provenance["clock_error_s"] == 0.001
    assert [(host.name, host.ranks) for host in trial.hosts] == [("a", (0,)), ("b", (1,))]
    seats = [work.request.seat for work in cluster._peers.asked.values()]
    assert [(seat.rank, seat.size, seat.place) for seat in seats] == [(0, 2, 0), (1, 2, 0)]


def test_an_unknown_clock_fails_the_trial_and_a_poor_one_is_a_warning(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster._peers, "offset", lambda peer: Offset(1000.0, 0.06))
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    assert [one.name for one in validity.check(trial, 2) if not one.ok and one.name == "clock_error"]
    monkeypatch.setattr(cluster._peers, "offset", lambda peer: Offset(0.0, float("inf")))
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    assert trial.status.value == "failed"
    assert "lost: rank 1 on b" in trial.reason


def test_memory_of_another_host_is_not_memory_of_a_device(cluster: Cluster) -> None:
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    (row,) = rows([trial])
    assert row.memory == {}
    assert row.host_bytes == 101


def test_each_machines_ranks_are_compared_with_its_own_cores(cluster: Cluster) -> None:
    (trial,) = cluster.run_together([CASE], Effort(), 0, 30.0)
    checks = {one.name: one for one in validity.check(trial, 1)}
    assert checks["oversubscribed"].ok, "one rank on the two cores of each machine, whatever rank 0 sees"
    same = [asdict(replace(host, machine="boot", cores=1)) for host in TWO]
    one = replace(trial, provenance={**trial.provenance, HOSTS: same})
    assert not {check.name: check for check in validity.check(one, 8)}["oversubscribed"].ok


def test_a_case_of_more_ranks_than_the_launch_has_says_so(cluster: Cluster) -> None:
    (trial,) = cluster.run_together([replace(CASE, devices=4)], Effort(), 0, 30.0)
    assert (trial.status.value, trial.reason) == (
        "failed", "the case needs 4 ranks, and the launch has 2: start more processes",
    )  # fmt: skip


def test_default_cases_use_one_rank_one_machine_and_all(cluster: Cluster) -> None:
    assert cluster.counts() == (1, 2)
    assert [cluster.placed(replace(CASE, devices=n, hosts=1)).hosts for n in (1, 2)] == [1, 2]
    assert cluster.placed(Case(model="mlp", strategy="single", batch_size=8)).hosts == 1


# -- sentences


def alone(number: int, ratio: float) -> Trial:
    """Return a round's trial of the baseline, in which machine b takes `ratio` times as long as machine a."""
    samples = [Sample(1.0 + i, host_device(at), ALONE, s) for i in range(9) for at, s in ((0, 0.01), (1, 0.01 * ratio))]
    return Trial(
        case=Case(model="mlp", strategy="single", batch_size=8), steps=tuple(Step(0.01, False, i) for i in range(9)),
        samples=tuple(samples), round=number, provenance={HOSTS: [asdict(host) for host in TWO]},
    )  # fmt: skip


def test_a_slow_machine_is_named_with_its_ratio_and_interval() -> None:
    (sentence,) = hosts.sentences([alone(n, ratio) for n, ratio in enumerate((1.49, 1.5, 1.5, 1.51))])
    assert sentence.startswith("b is slow: a step of mlp on one device takes 1.5")
    assert "as long there as on a" in sentence


@pytest.mark.parametrize(
    "ratios", [(1.0, 1.01, 0.99, 1.0), (1.5, 1.5), (0.7, 1.5, 0.8, 1.6)], ids=["equal", "few", "noisy"]
)
def test_no_machine_is_called_slow_without_evidence(ratios: tuple[float, ...]) -> None:
    assert hosts.sentences([alone(n, ratio) for n, ratio in enumerate(ratios)]) == []


def test_hosts_on_one_machine_are_labelled_colocated() -> None:
    apart = alone(0, 1.0)
    together = replace(apart, provenance={HOSTS: [asdict(replace(host, machine="boot")) for host in TWO]})
    assert "COLOCATED" not in labels(apart)
    assert "COLOCATED" in labels(together)


def facts(**host: Any) -> dict[str, Any]:
    return {"host": {"cpu": "X", "cores": 8, "memory_bytes": 10**10, **host}, "gpus": {}, "software": {"torch": "2.13"}}


def test_unlike_machines_are_said_to_be_unlike_and_equal_ones_to_be_one() -> None:
    a, b = {"name": "a", "machine": "1", "facts": facts()}, {"name": "b", "machine": "2", "facts": facts(cores=4)}
    (unlike,) = hosts.warnings({HOSTS: {"machines": [a, b]}})
    assert unlike == "b is unlike a: cores 4 instead of 8"
    (same,) = hosts.warnings({HOSTS: {"machines": [a, {**a, "name": "c"}]}})
    assert same.startswith("COLOCATED: a and c are the same machine")
    assert list(hosts.warnings({})) == []


@pytest.mark.parametrize("form", [page.render, markdown.render])
def test_a_report_of_a_launch_has_its_machines(form: Callable[[Report], str]) -> None:
    machines = [{"name": name, "machine": name * 9, "facts": facts()} for name in "ab"]
    trials = [alone(n, ratio) for n, ratio in enumerate((1.49, 1.5, 1.5, 1.51))]
    found = Report.of(trials, run_id="a" * 32, started_s=0.0, provenance={HOSTS: {"machines": machines}})
    text = form(found)
    assert "Hosts<" in text
    assert re.search(r"mlp: 1\.50× \([^)]*\) the time of a", text)
    assert "Hosts<" not in form(replace(found, provenance={}))


def test_jobs_on_unlike_machines_are_said_to_compare_machines() -> None:
    here = [
        Trial(case=CASE, provenance=facts()),
        Trial(case=Case(model="mlp", strategy="dp", batch_size=8), provenance=facts(cpu="Y")),
    ]
    (warning,) = hosts.unlike(here)
    assert "1 case on X, 8 cores; 1 case on Y, 8 cores" in warning
    assert list(hosts.unlike(here[:1])) == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(OSError(errno.ENOSPC, "no space left"), Status.KILLED), (LookupError("a bug"), Status.FAILED)],
)
def test_an_agent_without_a_place_for_its_files_says_so_and_the_case_has_not_failed(
    error: Exception, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unusable() -> None:
        raise error

    monkeypatch.setattr(agent_module, "folder", unusable)
    sent: list[Reply] = []
    rank_0: Any = SimpleNamespace(send=lambda kind, **data: sent.append(Reply.from_dict(data)))
    one = Agent(Launch(rank=0, size=1, node=0, host="a", leader="a", id="1", by="torchrun"), "lo")
    one._answer(rank_0, 1, one._renew)
    work = Work(request=Request(cases=(CASE,), effort=Effort(), round=0), limit_s=1.0, turn=2)
    one._answer(rank_0, 2, lambda: one._work(work))
    assert [answer.turn for answer in sent] == [1, 2]
    failures = [answer.failure for answer in sent if answer.failure]
    assert [failure.status for failure in failures] == [status] * 2
    assert all(str(error.args[-1]) in failure.reason for failure in failures)
