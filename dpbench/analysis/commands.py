"""Commands: the shell commands `dpbench run` and `dpbench predict`, and the one to run next."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from dpbench.analysis import stats
from dpbench.analysis.decision import WORTH, Basis, Choice, Decision, Question, best_of
from dpbench.analysis.summary import Row
from dpbench.records import (
    HABITS,
    Case,
    Fault,
    Status,
    disturbance,
    registry,
    schedule,
    session,
    siblings,
)
from dpbench.records.estimate import Estimate
from dpbench.records.options import AUTO, Options
from dpbench.records.registry import Role
from dpbench.records.resources import Resources
from dpbench.records.trial import CHECK_FAILED

ROUNDS_MOST = 50
"""The largest number of rounds that a command states; for more, it gives --rounds auto."""
ENOUGH_ROUNDS = 10
"""The number of rounds for cases whose variation between rounds is unknown."""
PATIENT_S = 600.0
"""The seconds that a repeated run waits for other processes to leave the cores."""


def measure(cases: Sequence[Case], *, machine: Resources, **how: Any) -> str:
    """Return the `dpbench run` command that measures `cases`, and perhaps further combinations.

    The cases must differ only in strategy, schedule, devices, batch and habits. `how` are further
    options. Stored cases with schedules or strategies that only another version of dpbench has are
    left out. Return "" if no case is left, for cases on several machines, models known only to
    `dpbench predict` or to a session, a model that shares the machine with another, and other names
    that only another version knows.
    """
    cases = [case for case in cases if _runs_here(case)]
    if not cases:
        return ""
    first = cases[0]
    known = ":" in first.model or first.model in registry.own("models")
    known = known and not session.is_of(first.model)
    if first.neighbour or any(case.hosts > 1 for case in cases) or not known:
        return ""
    shares = {case.batch_size // case.devices for case in cases}
    batches = {case.batch_size for case in cases}
    weak = len(shares) == 1 < len(batches)
    options: dict[str, Any] = {
        "models": (first.model,),
        "strategies": _strategies(cases),
        "schedules": _schedules(cases),
        "devices": _sorted(case.devices for case in cases),
        "device_ids": first.device_ids,
        "size": first.size,
        "precision": first.precision,
        "optimizer": first.optimizer,
        "unverified": first.unverified,
        "device_kind": "" if first.device_kind == machine.device_kind else first.device_kind,
        "placement": "" if first.placement == Case.placement else first.placement,
        "batch_per_device" if weak else "batch_sizes": _sorted(shares if weak else batches),
        "device_memory": first.device_memory_bytes,
        **{name: tuple(dict.fromkeys(getattr(case, name) for case in cases)) for name in LOOP},
        **how,
    }
    try:
        return Options.of(
            **{name: value for name, value in options.items() if value != ()}
        ).command()
    except ValueError:
        # another version of dpbench has stored a name that this version does not know
        return ""


def _runs_here(case: Case) -> bool:
    own = ":" in case.strategy or case.strategy in registry.names("strategies")
    return own and schedule.available(case.schedule)


def predict(case: Case, machine: Resources, *, step_s: float = 0.0) -> str:
    """Return the command that predicts the work of `case` on a described machine.

    If `machine` is not a described one, the sibling chooses one by its GPUs. With the measured
    seconds of its step, each GPU processes the samples of the case. Return "" for a case or GPUs
    that cannot be predicted, such as a session's model, or for an installation without predictions.
    """
    if session.is_of(case.model):
        return ""
    for command in siblings.added("prediction"):
        found: str = command(case, machine, step_s=step_s)
        return found
    return ""


def loaders(dataset: str, *, batch_size: int, step_s: float) -> str:
    """Return the `dpbench loaders` command for a dataset, and a step of `step_s` seconds."""
    words = ["--dataset", dataset, "--batch-size", str(batch_size), "--step-ms"]
    return shlex.join(["dpbench", "loaders", *words, f"{step_s * 1e3:.3g}"])


def at_batch(cases: Iterable[Case], factor: float) -> list[Case]:
    """Return the cases with their batch sizes multiplied by `factor`, rounded down, at least 1."""
    return [replace(case, batch_size=max(1, int(case.batch_size * factor))) for case in cases]


def following(
    question: Question, decision: Decision, machine: Resources, measured: Collection[int]
) -> str:
    """Return the command to run next: a missing measurement, or the most useful further one.

    `measured` are the batch sizes of all baselines of the run for the same model.
    """
    if decision.choice is Choice.UNKNOWN:
        return _lacking(question, decision, machine)
    home = question.home
    several = [row for row in question.candidates if row.case.devices > 1]
    best = decision.row if decision.row in several else best_of(several)
    assert best
    if not question.source.timed:
        return measure([home, best.case], machine=Resources())
    if not has_control(question):
        control = replace(best.case, strategy=registry.of_role(Role.CONTROL), schedule="")
        return measure([home, best.case, control], machine=machine)
    if home.device_kind == "cpu":
        return predict(home, machine)
    full = any(
        2 * peak > machine.memory_of(best.case, device) > 0 for device, peak in best.memory.items()
    )
    if full or decision.basis is Basis.ONLY_FITS:
        return measure([best.case], machine=machine, find_max_batch=True)
    further = [home, best.case]
    if home.trains and _only_reference(question):
        engine = registry.of_role(Role.ENGINE)
        further.append(replace(best.case, strategy=engine, schedule=schedule.FASTEST))
    else:
        factor = next(
            factor for factor in itertools.count(2) if factor * home.batch_size not in measured
        )
        further = at_batch(further, factor)
    return measure(further, machine=machine)


def _lacking(question: Question, decision: Decision, machine: Resources) -> str:
    home = question.home
    basis = decision.basis
    cases = list(dict.fromkeys([home, *(row.case for row in question.rows)]))
    few = home.device_kind == "cuda" and len(machine.gpu_memory_bytes) < 2
    if not question.source.timed and basis is Basis.OPEN:
        return measure([home, best_of(decision.open).case], machine=Resources())
    if (
        basis in (Basis.EMULATED, Basis.FAKE_GPU)
        or not question.source.timed
        or (basis in ELSEWHERE and few)
    ):
        return predict(home, machine)
    if basis in ELSEWHERE:
        spread = replace(home, device_ids=())
        roles = (Role.ENGINE, Role.CONTROL)
        two = [
            replace(spread, strategy=registry.of_role(role), devices=2, schedule="")
            for role in roles
        ]
        return measure([spread, *two], machine=machine)
    if basis in (Basis.OPEN, Basis.UNEVEN):
        loaded = any(disturbance.NOISY in row.labels for row in question.rows)
        return measure(cases, machine=machine, **_more(decision.open, loaded=loaded))
    if basis in (Basis.NO_RESULT, Basis.LOST):
        return _again(question, cases, machine)
    return measure(cases, machine=machine)


ELSEWHERE = (Basis.ONE_DEVICE, Basis.OTHER_VERSION, Basis.COLOCATED)
"""The reasons for a missing answer that only a run on other devices, or a prediction for them, can
remove.
"""


def _more(rows: Sequence[Row], *, loaded: bool) -> dict[str, Any]:
    """Return the options of a run that should suffice for a verdict on each speed-up in `rows`.

    After `loaded` rounds, which say nothing about the spread of quiet ones, it takes as many again,
    and waits until other processes leave the cores.
    """
    if loaded:
        rounds = max((row.speedup.n for row in rows if row.speedup), default=0)
        return {"rounds": min(rounds or ENOUGH_ROUNDS, ROUNDS_MOST), "patience": PATIENT_S}
    needed = rounds_needed(rows)
    if needed <= ROUNDS_MOST:
        return {"rounds": needed}
    # --paired measures cases in one process, and these cases need separate ones
    return {"rounds": AUTO, "paired": not any(row.case.traits.alone for row in rows)}


def _again(question: Question, cases: Sequence[Case], machine: Resources) -> str:
    """Return the command that tries cases again, with half the batch size if memory ran out.

    "" if another try would not help, as after wrong gradients.
    """
    if (
        any(row.status is Status.OOM and not row.step for row in question.several)
        and question.home.batch_size > 1
    ):
        return measure(at_batch(cases, 0.5), machine=machine)
    if any(row.reason.startswith(CHECK_FAILED) for row in question.rows):
        return shlex.join(["dpbench", "check", "--models", question.home.model])
    ended = [
        row.status for row in question.several if not row.step and Fault.UNVERIFIED not in row.lost
    ]
    retry = tuple(status.value for status in (Status.FAILED, Status.TIMEOUT) if status in ended)
    return measure(cases, machine=machine, retry=retry) if retry else ""


def has_control(question: Question) -> bool:
    """Return whether the question has a case of the control, which is ddp."""
    return any(row.case.traits.role is Role.CONTROL for row in question.several)


def _only_reference(question: Question) -> bool:
    """Return whether DataParallel was measured, and no other schedule of the engine."""
    engine = [row.case for row in question.several if row.case.traits.threads]
    schedules = {case.schedule for case in engine}
    return bool(engine) and schedules <= {"", schedule.Schedule.REFERENCE}


def noisy(row: Row) -> bool:
    """Return whether the row's speed-up decides nothing, because it compares NOISY rounds."""
    return row.speedup is not None and row.speedup.noisy


def rounds_needed(rows: Sequence[Row]) -> int:
    """Return how many rounds should suffice for verdicts on each speed-up in `rows`: more than now.

    A speed-up of `WORTH` or more needs an interval above 1, a smaller one an interval below
    `WORTH`.
    """
    known = [row.speedup for row in rows if row.speedup and row.speedup.n >= Estimate.ROUNDS]
    return max(map(_rounds_needed, known), default=ENOUGH_ROUNDS)


def _rounds_needed(speedup: Estimate) -> int:
    against = 1.0 if speedup.value >= WORTH else WORTH
    return max(stats.rounds_to_decide(speedup, against=against), speedup.n + 1)


LOOP = tuple(name for name in HABITS if hasattr(Options, name))
"""The habits of a training loop that are options of a run."""


def _sorted(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _strategies(cases: Sequence[Case]) -> tuple[str, ...]:
    ordered = sorted(cases, key=lambda case: (not case.traits.one_device, case.devices))
    return tuple(dict.fromkeys(case.strategy for case in ordered))


def _schedules(cases: Sequence[Case]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(case.schedule for case in cases if case.schedule))
    return () if found == (schedule.Schedule.REFERENCE,) else found
