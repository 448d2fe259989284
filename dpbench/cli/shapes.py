"""Shapes: the JSON that commands print with --json, one record per command.

The records of comparisons are in `comparing`, those of imports and predictions in the packages
`observe` and `predict`, and all others here.

Times are seconds, memory is bytes, and shares are fractions. A number that is missing, NaN or
infinite is null. Keys are never removed or changed in meaning without a higher `schema`; new keys
may appear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from dpbench.records import Case

if TYPE_CHECKING:
    from dpbench.analysis.answer import Answer
    from dpbench.analysis.findings import Diagnosis, Finding
    from dpbench.analysis.report import Report
    from dpbench.measure.batch_search import Found
    from dpbench.measure.selection import RunForecast
    from dpbench.store import StoredRun

_Shape = TypeVar("_Shape", bound=msgspec.Struct)
SCHEMA = 3
"""The version of the JSON of all commands."""


def show(record: object) -> None:
    """Print the JSON of a command to stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(record), indent=1).decode())


def made(shape: type[_Shape], result: object) -> _Shape:
    """Return a result as a record: `shape` has its attributes, some under other names in JSON."""
    return msgspec.convert(result, shape, from_attributes=True)


def optional(shape: type[_Shape], result: object) -> _Shape | None:
    """Return a result as a record, and None for None."""
    return None if result is None else made(shape, result)


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a stored run, in the JSON of every command that shows runs or results.

    `started` is in ISO 8601, in UTC. `cases` is the number of started cases. `rounds` is the number
    of planned rounds, 0 for --rounds auto. `commit` is the commit of dpbench; `dirty` is True if
    its files had uncommitted changes.
    """

    id: str
    name: str
    tags: Mapping[str, str]
    command: str
    status: str
    started: str
    rounds: int
    cases: int
    models: Sequence[str]
    host: str
    cpu: str
    gpus: Sequence[str]
    commit: str
    dirty: bool
    torch: str

    @classmethod
    def of(cls, run: StoredRun, cases: Sequence[Case]) -> RunFacts:
        """Return the facts of a stored run that has started these cases."""
        facts = run.facts
        naming = run.naming
        return cls(
            id=run.id,
            name=naming.name,
            tags=dict(naming.tags),
            command=naming.command,
            status=run.status,
            started=datetime.fromtimestamp(run.started, UTC).isoformat(timespec="seconds"),
            rounds=run.rounds,
            cases=len(cases),
            models=list(dict.fromkeys(case.model for case in cases)),
            host=facts.host.name,
            cpu=facts.host.cpu or "",
            gpus=[gpu.name or "" for gpu in facts.gpus.gpus or ()],
            commit=facts.dpbench.commit or "",
            dirty=bool(facts.dpbench.dirty),
            torch=facts.packages.get("torch", ""),
        )


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench list runs`: the newest run first."""

    runs: Sequence[RunFacts]
    schema: int = SCHEMA


class Name(msgspec.Struct, frozen=True, kw_only=True):
    """A name that options accept, and its description."""

    name: str
    description: str


class NameList(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench list` for models, strategies, schedules, machines and metrics."""

    kind: str
    names: Sequence[Name]
    schema: int = SCHEMA


class StartedCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case that a run has started, with its number of trials by status, such as "ok".

    `labels` qualify its results, such as "NOISY".
    """

    label: str
    case: Case
    trials: Mapping[str, int]
    labels: Sequence[str] = ()


class ShownRun(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench show`: the facts of a run, and its cases in the order of their start."""

    run: RunFacts
    cases: Sequence[StartedCase] = ()
    schema: int = SCHEMA


class EstimateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A number with its interval over `rounds` rounds; a prediction has 0 rounds.

    `level` is the probability with which the interval of a measurement contains the true value:
    0.95, and more for numbers that are judged together, so that all of their intervals hold with 95
    % (99 % for the ratios of two runs); 0.8 for a prediction. `withheld` is the reason why dpbench
    does not show the number as a result; it is empty for a usable number.
    """

    value: float
    low: float
    high: float
    n: int = msgspec.field(name="rounds")
    withheld: str
    coverage: float = msgspec.field(name="level")


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one case; `analysis.summary.Row` and docs/measuring.md define them.

    `outcome` is "ok" if the case has a result; otherwise, it names what happened, such as "oom",
    "timeout" or "unverified", and `reason` gives the cause. Keys of `busy_s` and `memory_bytes` are
    device indices, those of `percentiles_s` are 95 and 99.
    """

    label: str
    labels: Sequence[str]
    case: Case
    outcome: str
    reason: str
    rounds: int
    steps: int
    verified: str | None
    step: EstimateFacts | None = msgspec.field(name="step_s")
    mean: EstimateFacts | None = msgspec.field(name="mean_s")
    throughput: EstimateFacts | None = msgspec.field(name="samples_per_s")
    percentiles: Mapping[int, EstimateFacts] = msgspec.field(name="percentiles_s")
    speedup: EstimateFacts | None
    scaling: str
    efficiency: EstimateFacts | None
    peak_share: EstimateFacts | None
    peak_source: str
    phases: Mapping[str, float] = msgspec.field(name="phases_s")
    busy: Mapping[int, float] = msgspec.field(name="busy_s")
    memory: Mapping[int, int] = msgspec.field(name="memory_bytes")
    host_bytes: int
    imbalance: EstimateFacts | None
    energy: EstimateFacts | None = msgspec.field(name="j_per_sample")


class AnswerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, as `analysis.answer.Answer` defines it.

    `ranked` has the speed-ups over one device, the fastest first; it is empty for a single case.
    `case` is the label of the recommended case, null if none. `settled` is whether further rounds
    could not change the choice. `choice` is "use", "stay with one device", "predicted from one GPU"
    or "cannot tell"; for an observed loop, "change the loop", "nothing stands out" or "cannot
    tell". `basis` is the reason for the choice, such as "gain" or "open". `problem` is the
    rule of the finding that decides about an observed loop, "" if none, and `cost` the finding's
    cost as a fraction of the step. `epoch` states the time of an epoch, if `dpbench explain` was
    given its number of samples; `epoch_s` has its seconds on one device (for an observed loop, in
    this loop), and `epoch_choice_s` those with the recommended case. They are null if unknown.
    """

    subject: str
    choice: str
    basis: str
    problem: str
    cost: EstimateFacts | None
    headline: str
    ranked: str
    settled: bool
    reason: str
    certainty: str
    memory: str
    energy: str
    earlier: str
    command: str
    labels: Sequence[str]
    recommended: str | None = msgspec.field(name="case")
    epoch_text: str = msgspec.field(name="epoch", default="")
    now: EstimateFacts | None = msgspec.field(name="epoch_s", default=None)
    chosen: EstimateFacts | None = msgspec.field(name="epoch_choice_s", default=None)

    @classmethod
    def of(cls, answer: Answer, samples: int = 0) -> AnswerFacts:
        """Return an answer as a record; `samples` is those of an epoch, 0 if unknown."""
        facts = made(cls, answer)
        if not samples:
            return facts
        now, chosen = (optional(EstimateFacts, one) for one in answer.epoch_s(samples))
        return msgspec.structs.replace(
            facts, epoch_text=answer.epoch(samples), now=now, chosen=chosen
        )


class LoaderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts of `dpbench loaders` on the number of workers of a DataLoader.

    `shape` is "knee", "flat", "rising" or "cannot tell". `knee` is the least number with nearly the
    best rate, null if unknown, and `possible` has every number that it may be. `bounds` is the
    slower one of the DataLoader and the step, by number of workers; empty without a step. `epochs`
    are the seconds of an epoch of `batches` batches, by number of workers; empty if the number of
    batches is unknown, 0. `advised` is the number to use, null if unknown. `failed` has the outcome
    of each number of workers without a result, such as "timeout".
    """

    shape: str
    knee: int | None
    possible: Sequence[int]
    bounds: Mapping[int, str]
    epochs: Mapping[int, EstimateFacts]
    batches: int
    advised: int | None
    failed: Mapping[int, str]


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench run`, `report` and `loaders`: the answers and the cases' results.

    `warnings` may change what an answer says; `remarks` explain figures. `loading` is null except
    for `dpbench loaders`.
    """

    run: RunFacts
    answers: Sequence[AnswerFacts]
    notes: Sequence[str]
    warnings: Sequence[str]
    remarks: Sequence[str]
    cases: Sequence[CaseResult]
    loading: LoaderFacts | None = None
    schema: int = SCHEMA

    @classmethod
    def of(cls, run: StoredRun, report: Report) -> RunResult:
        """Return the results of a run."""
        cases = [*dict.fromkeys(row.case for row in report.rows)]
        return cls(
            run=RunFacts.of(run, cases),
            answers=[AnswerFacts.of(one) for one in report.answers],
            notes=report.notes,
            warnings=[*map(str, report.warnings)],
            remarks=[*map(str, report.remarks)],
            cases=[made(CaseResult, row) for row in report.rows],
            loading=made(LoaderFacts, report.loading) if report.loading else None,
        )


class CureFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A measured case that applies a remedy.

    `ratio` is its speed relative to the diagnosed case, and `gain_s` the seconds saved per step.
    """

    label: str
    ratio: EstimateFacts | None
    gain_s: EstimateFacts | None
    verdict: str


class FindingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A problem of the diagnosed case.

    `cost_s` is in seconds per step, null for a problem that costs memory only. `share` is the cost
    as a fraction of the step.
    """

    rule: str
    problem: str
    evidence: str
    labels: Sequence[str]
    cost_s: EstimateFacts | None
    share: float
    remedy: str
    code: str
    command: str
    cures: Sequence[CureFacts]

    @classmethod
    def of(cls, finding: Finding) -> FindingFacts:
        """Return a finding as a record."""
        cures = [
            CureFacts(
                label=cure.row.case.label,
                ratio=made(EstimateFacts, cure.ratio),
                gain_s=made(EstimateFacts, cure.gain_s),
                verdict=cure.verdict,
            )
            for cure in finding.cures
        ]
        return cls(
            rule=finding.rule.key,
            problem=finding.evidence.says,
            evidence=finding.evidence.numbers,
            labels=finding.labels,
            cost_s=optional(EstimateFacts, finding.evidence.size_s),
            share=finding.share,
            remedy=finding.rule.remedy,
            code=finding.code,
            command=finding.command,
            cures=cures,
        )


class DiagnosisFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The explanation of one case; `unjudged` has the questions that the run cannot answer."""

    label: str
    labels: Sequence[str]
    findings: Sequence[FindingFacts]
    unjudged: Sequence[str]

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> DiagnosisFacts:
        """Return a diagnosis as a record."""
        return cls(
            label=diagnosis.row.case.label,
            labels=diagnosis.labels,
            unjudged=diagnosis.unjudged,
            findings=[FindingFacts.of(found) for found in diagnosis.findings],
        )


class WithoutResult(msgspec.Struct, frozen=True, kw_only=True):
    """A case without a result, and the reason."""

    label: str
    reason: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench explain`: answers, diagnoses, cases without a result, and statements."""

    run: RunFacts
    answers: Sequence[AnswerFacts]
    diagnoses: Sequence[DiagnosisFacts]
    without_result: Sequence[WithoutResult]
    warnings: Sequence[str]
    remarks: Sequence[str]
    schema: int = SCHEMA

    @classmethod
    def of(cls, run: StoredRun, report: Report, samples: int = 0) -> Explanation:
        """Return the explanation of a run; `samples` is those of an epoch, 0 if unknown."""
        return cls(
            run=RunFacts.of(run, [*dict.fromkeys(row.case for row in report.rows)]),
            answers=[AnswerFacts.of(one, samples) for one in report.answers],
            diagnoses=[DiagnosisFacts.of(one) for one in report.diagnoses],
            without_result=[
                WithoutResult(label=row.case.label, reason=f"{row.outcome}: {row.reason}")
                for row in report.rows
                if row.step is None
            ],
            warnings=[*map(str, report.warnings)],
            remarks=[*map(str, report.remarks)],
        )


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench run --dry-run`.

    `trials` is the least number of trials to measure. `seconds` is their expected duration, and
    `basis` the origin of this expectation. `left_out` has the labels of the cases for which the
    budget has no time.
    """

    forecast: RunForecast
    trials: int
    seconds: float
    basis: str
    left_out: Sequence[str]
    schema: int = SCHEMA

    @classmethod
    def of(cls, planned: RunForecast) -> RunPlan:
        """Return the plan of a run as a record."""
        return cls(
            forecast=planned,
            trials=planned.trials,
            seconds=planned.seconds,
            basis=planned.basis,
            left_out=[case.label for case in planned.left_out],
        )


class Searches(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench run --find-max-batch`."""

    run_id: str
    found: Sequence[Found]
    schema: int = SCHEMA
