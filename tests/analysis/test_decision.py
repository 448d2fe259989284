"""The rule that makes a run's answers, on a table of situations written before the rule."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dpbench.analysis import answer as answering
from dpbench.analysis import commands, stats, summary
from dpbench.analysis.answer import Answer
from dpbench.analysis.decision import Basis, Choice
from dpbench.analysis.summary import Row
from dpbench.cli.running import run
from dpbench.hardware import gpus
from dpbench.measure.selection import cases_of
from dpbench.predict.commands import predict
from dpbench.records import CASE_FIELDS, Case, Fault, Source, Status, Trial, disturbance, plan
from dpbench.records.estimate import Estimate
from dpbench.records.facts import RunFacts
from dpbench.records.resources import Resources
from tests.amounts import amounts
from tests.records.test_options import parsed

USE, STAY, UNKNOWN = Choice.USE, Choice.STAY, Choice.UNKNOWN
GPU = {"device_kind": "cuda"}
CPU = {"device_kind": "cpu"}
GIB = 2**30


@pytest.fixture(autouse=True)
def _eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        {"index": i, "name": "T4", "uuid": str(i), "memory_bytes": GIB, "capability": [7, 5]}
        for i in range(8)
    ]
    monkeypatch.setattr(gpus, "of_torch", lambda: gpus.TorchGpus(gpus=tuple(listed)))


def row(
    strategy: str,
    devices: int = 1,
    value: float = 0.0,
    off: float = 0.03,
    n: int = 10,
    **changes: object,
) -> Row:
    """Return the row of a case.

    `value` is its speed-up (0 for none), and the interval is `off` to each side.
    """
    fields = {f.name for f in CASE_FIELDS} - {"strategy", "devices"}
    setting = {"model": "resnet18", "batch_size": 64, **GPU}
    setting |= {name: changes.pop(name) for name in fields & changes.keys()}
    if strategy == "dp" and "schedule" not in setting:
        setting["schedule"] = "reference"
    case = Case(strategy=strategy, devices=devices, **setting)
    source = changes.pop("source", Source.MEASURED)
    step_s = 0.1 / (value or 1.0) * case.batch_size / 64
    speedup = Estimate(value, value * (1 - off), value * (1 + off), n) if value else None
    labels = summary.labels(Trial(case=case, source=source))
    found = Row(
        case=case,
        source=source,
        status=Status.OK,
        rounds=n,
        step=Estimate(step_s, step_s, step_s, n),
        mean=Estimate(step_s, step_s, step_s, n),
        throughput=Estimate(*[case.batch_size / step_s] * 3, n),
        speedup=speedup,
        scaling="strong" if speedup else "",
        labels=labels,
        phases={"forward": step_s * 0.3, "backward": step_s * 0.3, "reduce": step_s * 0.4},
    )
    return replace(found, **changes)


def lost(strategy: str, devices: int = 1, status: Status = Status.OOM, **setting: object) -> Row:
    """Return the row of a case without a result."""
    found = row(strategy, devices, **setting)
    return replace(
        found,
        status=status,
        reason="it failed",
        step=None,
        throughput=None,
        phases={},
        rounds=0,
        lost=(status,),
    )


def noisy(one: Row, *, carries: bool = True) -> Row:
    """Return the row with the label NOISY.

    If `carries`, its speed-up has too few rounds without this label.
    """
    speedup = replace(one.speedup, noisy=carries) if one.speedup else None
    return replace(one, labels=(*one.labels, disturbance.NOISY), speedup=speedup)


def predicted(strategy: str, devices: int = 1, value: float = 0.0, off: float = 0.2) -> Row:
    return row(strategy, devices, value, off, n=0, source=Source.PREDICTED)


SINGLE = replace(row("single"), phases={"forward": 0.05, "backward": 0.05})


@dataclass(frozen=True)
class Situation:
    """A run's rows, the expected choice, and the recommended case (strategy, devices) or None.

    `basis` is the expected reason, None for the usual one of the choice (`USUAL`).
    """

    rows: Sequence[Row]
    choice: Choice
    case: tuple[str, int] | None
    says: Sequence[str] = ()
    facts: dict[str, object] = field(default_factory=dict)
    basis: Basis | None = None


USUAL = {USE: Basis.GAIN, STAY: Basis.NO_GAIN, UNKNOWN: Basis.OPEN}
SITUATIONS = {
    # -- a gain
    "ddp gains, dp does not": Situation(
        [SINGLE, row("dp", 2, 0.93), row("ddp", 2, 1.34)],
        USE,
        ("ddp", 2),
        ["use ddp on 2 GPUs: 1.34× (1.30–1.38)", "DataParallel gives 0.930×", "reduce"],
    ),
    "dp gains and ddp gains more": Situation(
        [SINGLE, row("dp", 2, 1.5), row("ddp", 2, 1.9)],
        USE,
        ("ddp", 2),
        ["1.90×", "DataParallel gives 1.50×"],
    ),
    "dp alone was measured": Situation([SINGLE, row("dp", 2, 1.7)], USE, ("dp", 2)),
    "torch's wrapper is DataParallel": Situation(
        [SINGLE, row("torch_dp", 2, 0.8), row("dp", 2, 0.81), row("ddp", 2, 1.6)],
        USE,
        ("ddp", 2),
        ["DataParallel gives 0.800×"],
    ),
    "a rung is the best": Situation(
        [SINGLE, row("dp", 2, 1.2), row("dp", 2, 1.7, schedule="local"), row("ddp", 2, 1.5)],
        USE,
        ("dp", 2),
        ["dpbench.TrainStep", "local"],
    ),
    "more devices gain more": Situation(
        [SINGLE, row("ddp", 2, 1.8), row("ddp", 4, 3.3)], USE, ("ddp", 4)
    ),
    "more devices gain less than 5 % more": Situation(
        [SINGLE, row("ddp", 2, 1.28), row("ddp", 4, 1.30), row("ddp", 8, 1.33)],
        USE,
        ("ddp", 2),
        ["on 2 GPUs"],
    ),
    "ddp is as good as a rare strategy": Situation(
        [SINGLE, row("ddp", 2, 1.60), row("fsdp", 2, 1.63)], USE, ("ddp", 2)
    ),
    "the faster one of two schedules": Situation(
        [
            SINGLE,
            row("dp", 2, 1.60, schedule="local"),
            row("dp", 2, 1.62, schedule="allreduce"),
            row("ddp", 4, 1.61),
        ],
        USE,
        ("dp", 2),
        ["use dp[allreduce] on 2 GPUs (dpbench.TrainStep): 1.62×"],
    ),
    "one is decided and a better one is not": Situation(
        [SINGLE, row("ddp", 2, 1.3), row("fsdp", 2, 1.5, off=0.5)],
        USE,
        ("ddp", 2),
        ["fsdp on 2 GPUs"],
    ),
    "the runner-up is close": Situation(
        [SINGLE, row("dp", 2, 1.5, off=0.1), row("ddp", 2, 1.6, off=0.1)],
        USE,
        ("ddp", 2),
        ["undecided whether dp on 2 GPUs is faster"],
    ),
    "the gain is weak scaling": Situation(
        [SINGLE, row("ddp", 2, 1.8, batch_size=128, scaling="weak")],
        USE,
        ("ddp", 2),
        ["weak scaling"],
    ),
    "enough rounds were quiet": Situation(
        [noisy(SINGLE), noisy(row("ddp", 2, 1.8), carries=False)],
        USE,
        ("ddp", 2),
        ["leaves these rounds out"],
    ),
    "a faster case has only noisy rounds": Situation(
        [SINGLE, row("dp", 2, 1.3), noisy(row("ddp", 2, 1.9))],
        USE,
        ("dp", 2),
        ["undecided whether ddp on 2 GPUs is faster"],
    ),
    "a slower case has only noisy rounds": Situation(
        [SINGLE, row("dp", 2, 1.3), noisy(row("ddp", 2, 0.8))],
        USE,
        ("dp", 2),
        ["undecided whether ddp on 2 GPUs is faster"],
    ),
    "only several devices have the memory": Situation(
        [lost("single"), row("ddp", 2)], USE, ("ddp", 2), basis=Basis.ONLY_FITS
    ),
    "dp runs out of memory": Situation(
        [SINGLE, lost("dp", 4), row("ddp", 4, 3.0)],
        USE,
        ("ddp", 4),
        ["DataParallel runs out of memory"],
    ),
    "several machines": Situation(
        [SINGLE, row("ddp", 4, 3.0, hosts=2)], USE, ("ddp", 4), ["on 2 hosts"]
    ),
    # -- no gain
    "everything is slower": Situation(
        [SINGLE, row("dp", 2, 0.6), row("ddp", 2, 0.8)],
        STAY,
        ("single", 1),
        ["ddp on 2 GPUs"],
    ),
    "the gain is real and tiny": Situation(
        [SINGLE, row("ddp", 2, 1.02, off=0.005)], STAY, ("single", 1), ["1.02×"]
    ),
    "the same": Situation([SINGLE, row("ddp", 2, 1.0, off=0.004)], STAY, ("single", 1)),
    "undecided, but at most 4 %": Situation(
        [SINGLE, row("ddp", 2, 1.0, off=0.04)], STAY, ("single", 1), ["1.04"]
    ),
    "a wrapper on one device is no case of several": Situation(
        [SINGLE, row("dp", 1, 0.9), row("dp", 2, 0.7)], STAY, ("single", 1)
    ),
    # -- on a CPU
    "all cores win on a CPU": Situation(
        [row("single", **CPU), row("single_all_cores", 1, 1.57, **CPU), row("ddp", 2, 1.38, **CPU)],
        STAY,
        ("single_all_cores", 1),
        ["with all cores", "1.57×", "nothing about GPUs"],
        basis=Basis.GAIN,
    ),
    "ddp wins on a CPU": Situation(
        [row("single", **CPU), row("single_all_cores", 1, 1.1, **CPU), row("ddp", 2, 1.6, **CPU)],
        USE,
        ("ddp", 2),
        ["on this CPU", "nothing about GPUs"],
    ),
    "a CPU decides nothing for GPUs": Situation(
        [row("single", **CPU), row("dp", 2, 0.4, **CPU), row("ddp", 2, 0.4, **CPU)],
        STAY,
        ("single", 1),
        ["on this CPU", "nothing about GPUs"],
    ),
    "more logical devices than cores": Situation(
        [row("single", **CPU), row("dp", 4, 0.4, **CPU)],
        STAY,
        ("single", 1),
        ["4 devices share 2 cores"],
        {"host": {"cores": 2}},
    ),
    # -- no answer
    "undecided for lack of rounds": Situation(
        [SINGLE, row("dp", 2, 0.9), row("ddp", 2, 1.2, off=0.3)],
        UNKNOWN,
        None,
    ),
    "two rounds": Situation([SINGLE, row("ddp", 2, 1.8, n=2)], UNKNOWN, None, ["2 rounds"]),
    "the interval spans everything": Situation(
        [SINGLE, row("ddp", 2, 1.8, off=0.9)], UNKNOWN, None
    ),
    "undecided on a busy machine": Situation(
        [noisy(SINGLE), noisy(row("ddp", 2, 1.2, off=0.3))],
        UNKNOWN,
        None,
        ["NOISY"],
    ),
    "decided on a busy machine": Situation(
        [noisy(SINGLE), noisy(row("ddp", 2, 1.8))],
        UNKNOWN,
        None,
        ["NOISY", "--patience"],
    ),
    "no gain on a busy machine": Situation(
        [noisy(SINGLE), noisy(row("ddp", 2, 0.7, off=0.1))],
        UNKNOWN,
        None,
        ["NOISY"],
    ),
    "no gain, but for one case on a busy machine": Situation(
        [SINGLE, row("dp", 2, 0.5), noisy(row("ddp", 2, 0.7, off=0.1))],
        UNKNOWN,
        None,
        ["NOISY"],
    ),
    "single was not measured": Situation(
        [row("ddp", 2), row("dp", 2)], UNKNOWN, None, ["single"], basis=Basis.NO_BASELINE
    ),
    "single failed": Situation(
        [lost("single", status=Status.FAILED), row("ddp", 2)],
        UNKNOWN,
        None,
        ["single", "failed"],
        basis=Basis.NO_BASELINE,
    ),
    "one device only": Situation([SINGLE], UNKNOWN, None, basis=Basis.ONE_DEVICE),
    "nothing on several devices has a result": Situation(
        [SINGLE, lost("dp", 2), lost("ddp", 2, status=Status.FAILED)],
        UNKNOWN,
        None,
        ["dp on 2 GPUs", "out of memory", "ddp on 2 GPUs"],
        basis=Basis.NO_RESULT,
    ),
    "nothing has a result": Situation(
        [lost("single"), lost("dp", 2)], UNKNOWN, None, basis=Basis.NO_RESULT
    ),
    "replicas share a GPU": Situation(
        [SINGLE, row("dp", 2, 0.8, placement="colocated")], UNKNOWN, None, basis=Basis.COLOCATED
    ),
    "replicas that would share a GPU have no result": Situation(
        [SINGLE, lost("dp", 2, placement="colocated")], UNKNOWN, None, basis=Basis.NO_RESULT
    ),
    "colocated replicas are never recommended": Situation(
        [SINGLE, row("dp", 2, 1.4, placement="colocated")], UNKNOWN, None, basis=Basis.COLOCATED
    ),
    "emulated devices": Situation(
        [row("single", device_kind="emulated"), row("dp", 2, device_kind="emulated")],
        UNKNOWN,
        None,
        basis=Basis.EMULATED,
    ),
    # -- cases that failed, and limits of a result
    "wrong gradients are never recommended": Situation(
        [SINGLE, row("dp", 2, 1.5), row("ddp", 2, 1.9, lost=(Fault.UNVERIFIED,))],
        USE,
        ("dp", 2),
        ["ddp on 2 GPUs (wrong gradients)"],
    ),
    "no gain, but the best-known strategy failed": Situation(
        [SINGLE, row("dp", 2, 0.5), lost("ddp", 2, status=Status.FAILED)],
        UNKNOWN,
        None,
        ["ddp on 2 GPUs (failed)"],
        basis=Basis.LOST,
    ),
    "no gain, and the rest does not fit": Situation(
        [SINGLE, row("dp", 2, 0.5), row("ddp", 2, 0.6), lost("dp", 4)],
        STAY,
        ("single", 1),
        ["runs out of memory on 4 GPUs"],
    ),
    "some rounds were lost": Situation(
        [SINGLE, row("ddp", 2, 1.7, n=3, lost=(Status.TIMEOUT,) * 2)],
        USE,
        ("ddp", 2),
        ["no result in 2 of 5 rounds of ddp on 2 GPUs (timeout)", "from 3 rounds"],
    ),
    "ddp was not measured": Situation(
        [SINGLE, row("dp", 2, 0.5)], STAY, ("single", 1), ["ddp was not measured"]
    ),
    "hosts on one machine": Situation(
        [SINGLE, row("ddp", 2, 1.6, hosts=2, labels=("MEASURED", "COLOCATED"))],
        UNKNOWN,
        None,
        ["the hosts"],
        basis=Basis.COLOCATED,
    ),
    "only all cores are undecided": Situation(
        [
            row("single", **CPU),
            row("dp", 2, 0.5, **CPU),
            row("ddp", 2, 0.7, **CPU),
            row("single_all_cores", 1, 1.04, off=0.1, **CPU),
        ],
        STAY,
        ("single", 1),
        ["undecided whether one device with all cores is faster"],
    ),
    "the host's memory is shared": Situation(
        [lost("single", **CPU), row("ddp", 2, **CPU)],
        UNKNOWN,
        None,
        ["out of memory"],
        basis=Basis.NO_BASELINE,
    ),
    "what fits is ranked by samples per second": Situation(
        [
            lost("single"),
            replace(row("ddp", 2), speedup=Estimate(1.2, 1.1, 1.3, 9), scaling="weak"),
            replace(row("ddp", 4), throughput=Estimate(533.0, 533.0, 533.0, 9)),
        ],
        USE,
        ("ddp", 2),
        basis=Basis.ONLY_FITS,
    ),
    "most devices are idle": Situation(
        [row("single", batch_size=2), row("ddp", 8, 1.9, batch_size=2)],
        USE,
        ("ddp", 8),
        ["6 of 8 GPUs get no sample"],
    ),
    "another schedule is not DataParallel": Situation(
        [SINGLE, row("dp", 2, 1.2, schedule="local"), row("ddp", 2, 1.6)], USE, ("ddp", 2)
    ),
    "a small gain may be a worthwhile one": Situation(
        [SINGLE, row("ddp", 2, 1.049, off=0.03)],
        UNKNOWN,
        None,
        ["5%"],
    ),
    "a decided gain may be a worthwhile one": Situation(
        [SINGLE, row("ddp", 2, 1.045, off=0.03)],
        UNKNOWN,
        None,
        ["5%"],
    ),
    # -- predictions
    "a predicted gain": Situation(
        [predicted("single"), predicted("dp", 8, 2.0), predicted("ddp", 8, 6.0)],
        USE,
        ("ddp", 8),
        ["predicted", "80% interval"],
    ),
    "a prediction that may be no gain": Situation(
        [predicted("single"), predicted("ddp", 2, 1.1)], UNKNOWN, None, ["predicted"]
    ),
    "a predicted loss": Situation(
        [predicted("single"), predicted("dp", 2, 0.5)], STAY, ("single", 1), ["predicted"]
    ),
    "only predictions that were never compared": Situation(
        [predicted("single"), predicted("fsdp", 8, 7.0)],
        UNKNOWN,
        None,
        ["never compared"],
        basis=Basis.NO_RESULT,
    ),
    "predictions that were never compared are not recommended": Situation(
        [predicted("single"), predicted("ddp", 8, 5.0), predicted("fsdp", 8, 7.0)], USE, ("ddp", 8)
    ),
}


def only(rows: Sequence[Row], facts: dict[str, object]) -> Answer:
    (answer,) = answering.answers(rows, Resources.of(RunFacts.of(facts)))
    return answer


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_rule_decides_each_situation(name: str) -> None:
    situation = SITUATIONS[name]
    answer = only(situation.rows, situation.facts)
    recommended = (answer.row.case.strategy, answer.row.case.devices) if answer.row else None
    assert (answer.choice, recommended) == (situation.choice, situation.case), answer.text
    assert answer.basis is (situation.basis or USUAL[situation.choice])
    for said in situation.says:
        assert said.lower() in answer.text.lower()
    assert answer.text.startswith("resnet18: ")
    assert answer.labels


@pytest.mark.parametrize(
    "name", ["two rounds", "undecided on a busy machine", "decided on a busy machine"]
)
def test_rounds_that_decide_nothing_give_no_probability(name: str) -> None:
    answer = only(SITUATIONS[name].rows, {})
    assert answer.ranked
    assert "probability" not in answer.ranked


def test_a_speed_up_over_another_batch_size_is_no_reason() -> None:
    """The baseline at batch 64 is lost, so that DataParallel is compared at equal work a device."""
    rows = [
        lost("single", status=Status.TIMEOUT),
        row("single", batch_size=32),
        row("dp", 2, 1.85, scaling="weak"),
    ]
    answer = only(rows, {})
    assert answer.choice is UNKNOWN
    assert answer.reason == ""
    assert "at batch 64" in answer.headline


@pytest.mark.parametrize(("off", "settled"), [(0.02, True), (0.2, False)])
def test_a_choice_that_a_rival_may_still_beat_holds_so_far(off: float, settled: bool) -> None:
    """The rival's interval reaches 1.63, more than 5 % above the choice, or 1.39."""
    rows = [row("single"), row("ddp", 2, 1.5), row("dp", 2, 1.36, off)]
    answer = only(rows, {})
    assert answer.choice is USE
    assert answer.row is not None
    assert answer.row.case.strategy == "ddp"
    assert answer.settled is settled
    assert answer.headline.startswith("so far, ") is not settled


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_next_command_selects_the_cases_of_the_answer(name: str) -> None:
    situation = SITUATIONS[name]
    answer = only(situation.rows, situation.facts)
    if any(row.case.hosts > 1 for row in situation.rows):
        # a command cannot start ranks on several machines
        assert not answer.command.startswith("dpbench run")
        return
    _, verb, *arguments = shlex.split(answer.command)
    command = {"run": run, "predict": predict}[verb]
    chosen = command.make_context(verb, [*arguments]).params  # click empties the list
    assert chosen["models"] == ("resnet18",)
    if verb == "run":
        cases, _ = cases_of(parsed(*arguments))
        wanted = {row.case for row in situation.rows if answer.row is None or row is answer.row}
        found = {(case.strategy, case.devices, case.schedule) for case in cases}
        if answer.row is None or answer.row.case.devices > 1:
            assert found >= {(case.strategy, case.devices, case.schedule) for case in wanted}
        assert any(case.devices > 1 for case in cases)


@pytest.mark.parametrize(
    ("schedules", "wanted"), [(("reference",), "fastest"), (("reference", "sharded"), "128")]
)
def test_on_gpus_the_fastest_schedule_is_measured_before_a_bigger_batch(
    schedules: tuple[str, ...], wanted: str
) -> None:
    engine = [row("dp", 2, 1.2, schedule=schedule) for schedule in schedules]
    asked = only([SINGLE, *engine, row("ddp", 2, 1.8)], {}).command.split()
    assert {"fastest", "128"} & {*asked} == {wanted}


def test_settings_of_a_case_are_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("net = None\n")
    monkeypatch.chdir(tmp_path)
    setting = {
        "model": "mine:net",
        "size": "full",
        "precision": "bf16",
        "read_loss": 10,
        "zero_grad": "zero",
        "compile": True,
        "device_ids": (1, 3),
        "schedule": "local",
    }
    rows = [row("single", **{**setting, "schedule": ""}), row("dp", 2, 1.2, off=0.3, **setting)]
    _, _, *arguments = shlex.split(only(rows, {"gpus": {"gpus": [{}, {}]}}).command)
    asked = replace(parsed(*arguments), device_kind="cuda")  # the default where there are GPUs
    cases, _ = cases_of(asked)
    assert {one.case for one in rows} <= {*cases}


def test_questions_are_told_apart_and_the_usual_one_comes_first() -> None:
    rows = [
        row("single", read_loss=1),
        row("ddp", 2, 1.1, read_loss=1),
        SINGLE,
        row("ddp", 2, 1.8),
        row("single", batch_size=128),
        row("ddp", 2, 1.9, batch_size=128),
        row("dp", 2, device_kind="emulated"),
    ]
    found = answering.answers(rows, Resources())
    assert [one.subject for one in found] == [
        "resnet18 (batch 64)",
        "resnet18 (batch 128)",
        "resnet18 (batch 64, loss read)",
    ]


def test_the_limit_of_a_ladder_is_no_baseline() -> None:
    limit = row("single", batch_size=32, options=plan.LIMIT)
    (answer,) = answering.answers([limit, SINGLE, row("ddp", 2, 1.8)], Resources())
    assert answer.baseline is SINGLE


def test_another_schedule_of_the_engine_is_not_called_data_parallel() -> None:
    situation = SITUATIONS["another schedule is not DataParallel"]
    assert "DataParallel" not in only(situation.rows, {}).text


def test_strong_and_weak_scaling_are_two_questions() -> None:
    """As in --batch-per-device 32,64 --devices 1,2."""
    rows = [
        row("single", batch_size=32),
        SINGLE,
        row("ddp", 2, 0.97),
        row("ddp", 2, 1.75, batch_size=128, scaling="weak"),
    ]
    found = {one.subject: one.choice for one in answering.answers(rows, Resources())}
    assert found == {"resnet18 (batch 64)": STAY, "resnet18 (batch 64 per device)": USE}


def test_more_rounds_are_more_than_there_are() -> None:
    rounds = {"off": 0.35, "n": 3}
    answer = only(
        [SINGLE, *(row(name, 2, 1.4, **rounds) for name in ("dp", "ddp", "torch_dp"))], {}
    )
    assert answer.choice is UNKNOWN
    assert int(answer.command.split()[-1]) > 3


def test_a_busy_machine_is_waited_for_in_the_next_command() -> None:
    answer = only([noisy(SINGLE), noisy(row("ddp", 2, 0.7, n=7))], {})
    asked = parsed(*shlex.split(answer.command)[2:])
    assert (asked.patience, asked.rounds) == (600.0, 7)


def test_an_undecided_small_gain_needs_the_rounds_that_separate_it_from_a_worthwhile_one() -> None:
    """The interval already excludes 1: no further rounds are needed for this."""
    small = row("ddp", 2, 1.02, off=0.09)
    needed = commands.rounds_needed([small])
    assert small.speedup.n < stats.rounds_to_decide(small.speedup, against=1.05) == needed


def test_an_open_run_says_that_rounds_are_missing_and_which_cases_are() -> None:
    left_out = replace(row("dp", 2, 0.9), left_out=True)

    def clauses(*rows: Row) -> list[str]:
        (answer,) = answering.answers([SINGLE, *rows], Resources(), again="dpbench run")
        return answer.certainty.split("; ")

    undecided, decided = row("ddp", 2, 1.01, off=0.3), row("ddp", 2, 1.8, off=0.01)
    spent, goes_on = clauses(undecided)
    assert clauses(undecided, left_out)[0] == spent
    assert not {spent, goes_on} & {*clauses(decided), *clauses(decided, left_out)}
    named = {
        (with_it, any("dp on 2 GPUs" in one for one in clauses(first, *[left_out] * with_it)))
        for first in (undecided, decided)
        for with_it in (True, False)
    }
    assert named == {(True, True), (False, False)}


def test_ddp_alone_is_not_promised_that_pairs_help() -> None:
    answer = only([SINGLE, row("ddp", 2, 1.01, off=0.3)], {})
    assert "--paired" not in answer.command


def test_the_order_of_device_ids_is_kept() -> None:
    rows = [row("single", device_ids=(3, 1)), row("ddp", 2, 1.2, off=0.3, device_ids=(3, 1))]
    assert "--device-ids 3,1" in only(rows, {}).command


def test_the_memory_is_that_of_the_gpus_of_the_case() -> None:
    full = row("ddp", 2, 1.8, memory={0: 60 * GIB, 1: 50 * GIB}, device_ids=(1, 2))
    facts = {"gpus": {"gpus": [{"memory_bytes": size * GIB} for size in (24, 80, 80)]}}
    answer = only([row("single", device_ids=(1, 2)), full], facts)
    assert amounts(answer.memory) == ["0", "60.0 GiB", "80.0 GiB"]
    assert answer.command.endswith("--find-max-batch")  # twice the batch would not fit


def test_memory_names_the_capacity_of_the_gpu() -> None:
    full = row("ddp", 2, 1.8, memory={0: 5 * GIB, 1: 4 * GIB})
    answer = only([SINGLE, full], {"gpus": {"gpus": [{"memory_bytes": 24 * GIB}] * 2}})
    assert amounts(answer.memory) == ["0", "5.00 GiB", "24.0 GiB"]


def test_the_schedules_of_train_step_are_measured_before_other_batches() -> None:
    rows = [SINGLE, row("dp", 2, 1.5), row("ddp", 2, 1.8)]
    answer = only(rows, {})
    cases, _ = cases_of(parsed(*shlex.split(answer.command)[2:]))
    assert {(case.strategy, case.schedule) for case in cases if case.devices == 2} == {
        ("ddp", ""),
        ("dp", "fastest"),
    }
    assert {case.batch_size for case in cases} == {SINGLE.case.batch_size}
    tried = only([*rows, row("dp", 2, 1.7, schedule="fastest")], {})
    assert "--schedules" not in tried.command
    assert f"--batch-sizes {2 * SINGLE.case.batch_size}" in tried.command


def test_a_model_that_only_predictions_know_has_no_command_to_measure_it() -> None:
    rows = [
        replace(one, case=replace(one.case, model="resnet50"))
        for one in (predicted("single"), predicted("ddp", 2, 2))
    ]
    assert only(rows, {}).command == ""


def test_an_epoch_is_computed_from_the_throughputs() -> None:
    answer = only([SINGLE, row("ddp", 2, 2.0)], {})  # 640 and 1,280 samples per second
    now, then = answer.epoch_s(768_000)
    assert (now.value, then.value) == (pytest.approx(1200), pytest.approx(600))
    one, both = ["768,000", "20.0 min", "20.0", "20.0"], ["10.0 min", "10.0", "10.0", "10.0 min"]
    assert amounts(answer.epoch(768_000)) == [*one, *both]
    stays = only([SINGLE, row("ddp", 2, 0.5)], {})
    assert amounts(stays.epoch(768_000)) == one


def test_rounds_of_real_series_are_compared_pairwise() -> None:
    """Of two cases decidedly faster than one device, the ratio of their own rounds decides."""
    rounds = range(8)
    base = {n: [0.100 * (1 + 0.01 * n)] * 5 for n in rounds}
    fast = {n: [seconds / 2 for seconds in base[n]] for n in rounds}
    slow = {n: [seconds / 1.5 for seconds in base[n]] for n in rounds}
    rows = [
        replace(SINGLE, series=stats.Timed(base)),
        replace(
            row("dp", 2, 1.5, off=0.4), series=stats.Timed(slow), speedup=stats.ratio(base, slow)
        ),
        replace(
            row("ddp", 2, 2.0, off=0.4), series=stats.Timed(fast), speedup=stats.ratio(base, fast)
        ),
    ]
    answer = only(rows, {})
    assert "undecided" not in answer.text
    assert answer.row is rows[2]


@pytest.mark.parametrize(
    ("busy_s", "source", "begins"),
    [
        (0.02, summary.KERNELS, True),
        (0.07, summary.KERNELS, False),
        (0.02, "thread CPU time", False),
    ],
)
def test_an_answer_begins_with_a_gpu_that_is_idle_for_most_of_a_step(
    busy_s: float, source: str, begins: bool
) -> None:
    baseline = row("single", 1, 1.0, busy={0: busy_s}, busy_source=source)
    (found,) = answering.answers(
        [baseline, row("ddp", 2, 1.6)], Resources(gpu_memory_bytes=(GIB,) * 2)
    )
    assert found.choice is USE
    assert ("idle for 80%" in found.headline.partition(";")[0]) is begins
