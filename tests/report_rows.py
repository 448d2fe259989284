"""Reports, rows and trials made by hand, and the elements of a page, for the tests of reports."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from html.parser import HTMLParser

from dpbench.analysis.answer import Answer
from dpbench.analysis.decision import Basis, Choice
from dpbench.analysis.report import Report
from dpbench.analysis.statements import Statement
from dpbench.analysis.summary import Row, labels
from dpbench.records import (
    UNATTRIBUTED,
    Case,
    Memory,
    Phase,
    Sample,
    Source,
    Span,
    Status,
    Step,
    Trial,
    Verified,
    words,
)
from dpbench.records.estimate import Estimate
from dpbench.report import figures, page
from dpbench.report.section import Section
from tests.trials import finished

PROVENANCE = {
    "host": {"name": "bench-07", "cpu": "AMD EPYC 7763", "cores": 64},
    "gpus": {
        "driver": "550.54",
        "gpus": [{"name": "NVIDIA A100-SXM4-80GB", "index": i} for i in range(4)],
    },
    "packages": {"torch": "2.13.0"},
    "dpbench": {"version": "0.1.0", "commit": "0123456789abcdef0123", "dirty": True},
    "command": "dpbench run --models vgg16 --devices 1,2,4",
}
HOSTILE = "<script>alert(1)</script>"
STACK = (
    'Traceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: "it" & \'that\''
    " </script><b>\n" * 4
)


def spread(value: float, share: float = 0.03, n: int = 3) -> Estimate:
    return Estimate(value, value * (1 - share), value * (1 + share), n)


def made(case: Case, step_s: float, single_s: float = 0.0, **changes) -> Row:
    """Return the row of a case with this step time; its phases sum to the step."""
    many = case.devices > 1
    moving = 0.1 if many else 0.0
    shares = {
        "scatter": 0.02,
        "replicate": moving,
        "forward": 0.3,
        "gather": moving / 4,
        "loss": 0.01,
        "backward": 0.5 - moving,
        "reduce": moving / 2,
        "optimizer": 0.05,
    }
    phases = {name: share * step_s for name, share in shares.items()}
    phases[UNATTRIBUTED] = step_s - sum(phases.values())
    speedup = spread(single_s / step_s) if single_s else None
    row = Row(
        case=case,
        source=Source.MEASURED,
        status=Status.OK,
        rounds=3,
        steps=90,
        verified=Verified.BITWISE,
        step=spread(step_s),
        throughput=spread(case.batch_size / step_s),
        speedup=speedup,
        scaling="strong" if speedup else "",
        efficiency=spread(single_s / step_s / case.devices) if speedup else None,
        phases=phases,
        busy={d: step_s * (0.9 if d == 0 else 0.6) for d in range(case.devices)},
        busy_source="kernels",
        memory=(
            {d: (6 if d == 0 else 2) * 2**30 for d in range(case.devices)}
            if case.device_kind == "cuda"
            else {}
        ),
        memory_source="allocator" if case.device_kind == "cuda" else "",
        host_bytes=2**29,
        imbalance=spread(1.5) if many else None,
        memory_imbalance=3.0 if many and case.device_kind == "cuda" else None,
        labels=labels(Trial(case=case)),
    )
    return dataclasses.replace(row, **changes)


def spans_of(row: Row, number: int, step: Step) -> list[Span]:
    """Return the spans of one step of a row: each device's phases in turn, device 0 the longest."""
    spans = []
    for device in range(row.case.devices):
        at = step.start_s
        for phase in Phase:
            seconds = (
                row.phases.get(phase, 0.0)
                * step.seconds
                / row.step.value
                * (1.0 if device == 0 else 0.8)
            )
            spans.append(Span(number, phase, device, "host", at, at + seconds))
            at += seconds
    return spans


def ran(row: Row, seed: int = 0, *, spans: bool = False) -> list[Trial]:
    """Return one trial per round of a row, with warm-up, utilisation and, if `spans`, spans."""
    draw = random.Random(f"{row.case.label} {seed}")
    trials = []
    for number in range(row.rounds):
        end = 100.0 * number
        steps = []
        for index in range(35):
            seconds = row.step.value * (
                draw.lognormvariate(0, 0.05) if index > 4 else 2.0 / (index + 1) + 1
            )
            end += seconds
            steps.append(Step(seconds, index < 5, end))
        ticks = [
            100.0 * number + (end - 100.0 * number) * i / 40
            for i in range(1, 41)
            if not 18 < i < 25
        ]
        samples = [
            Sample(at, device, "utilization_ratio", draw.uniform(0.3, 1.0))
            for at in ticks
            for device in range(row.case.devices)
        ]
        timed = range(5, 35) if spans else ()
        trials.append(
            Trial(
                case=row.case,
                source=row.source,
                verified=row.verified,
                steps=tuple(steps),
                samples=tuple(samples),
                spans=tuple(span for step in timed for span in spans_of(row, step, steps[step])),
                memory=(Memory(0, 2**30, "allocator"),),
                round=number,
                provenance={"torch": "2.13.0", "threads": 1},
            )
        )
    return trials


def answer(row: Row, **changes) -> Answer:
    """Return an answer that advises a row's case."""
    found = Answer(
        subject=f"{row.case.model} at batch {row.case.batch_size}",
        choice=Choice.USE,
        basis=Basis.GAIN,
        headline=(
            f"use {row.case.strategy} on {row.case.devices} devices: {words.times(row.speedup)}"
        ),
        reason="DataParallel gives 2.24×, because device 0 gathers and reduces",
        certainty="its interval is above 1×",
        memory="device 0 holds 6.00 GiB",
        command=f"dpbench run --ladder --models {row.case.model}",
        labels=row.labels,
        row=row,
        home=row.case,
        source=row.source,
    )
    return dataclasses.replace(found, **changes)


@functools.cache
def gpu_run() -> Report:
    """Return a report with all that can be in one: 20 cases, some of them broken."""
    rows = []
    for model, single_s in (("vgg16", 0.21), ("transformer", 0.084)):
        case = functools.partial(Case, model=model, batch_size=256, device_kind="cuda", size="full")
        rows.append(made(case(strategy="single"), single_s))
        for count in (2, 4):
            for strategy, schedule, gain in (
                ("torch_dp", "", 0.55),
                ("dp", "reference", 0.56),
                ("dp", "cached", 0.7),
                ("ddp", "", 0.93),
            ):
                one = case(strategy=strategy, schedule=schedule, devices=count)
                rows.append(made(one, single_s / count / gain, single_s))
    lost = Case(
        model=HOSTILE,
        strategy="dp",
        schedule="reference",
        batch_size=512,
        devices=4,
        device_kind="cuda",
    )
    rows.append(
        Row(
            case=lost, source=Source.MEASURED, status=Status.OOM, reason=STACK, labels=("MEASURED",)
        )
    )
    gone = dataclasses.replace(lost, model="lstm", strategy="torch_dp", schedule="")
    rows.append(
        Row(
            case=gone,
            source=Source.MEASURED,
            status=Status.SKIPPED,
            reason='needs "spread"',
            labels=("MEASURED",),
        )
    )
    trials = [trial for row in rows if row.step for trial in ran(row, spans=True)]
    return Report(
        rows=rows,
        trials=trials,
        run=finished(PROVENANCE, id="7f3a" * 8),
        ladders=(),
        diagnoses=(),
        notes=["Compilation, which no step includes, took at most 12.0 s."],
        statements=[
            Statement(key="no_result", text="oom: no room", warns=True, cases=((lost, ""),)),
            Statement(key="cpu_only", text="CPU-ONLY", warns=False),
        ],
        answers=[
            answer(row) for row in rows if row.case.strategy == "ddp" and row.case.devices == 4
        ],
    )


def run_of(*rows: Row, trials: list[Trial] | None = None) -> Report:
    found = [trial for row in rows if row.step for trial in ran(row)] if trials is None else trials
    return dataclasses.replace(
        gpu_run(),
        rows=list(rows),
        trials=found,
        statements=[],
        notes=["Nothing."],
        diagnoses=[],
        ladders=[],
        answers=[],
    )


def of_rows(rows: list[Row], trials: list[Trial] | None = None) -> Report:
    return run_of(*rows, trials=trials or [])


@functools.cache
def gpu_page() -> str:
    return page.render(gpu_run())


def badges(text: str) -> list[str]:
    return re.findall(r'class="badge [^"]*">([^<]*)<', text)


def drawings(text: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", text, re.DOTALL)


class Tags(HTMLParser):
    """Collects the elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag

    def all(self, *names: str) -> list[dict]:
        return [attributes for tag, attributes in self.found if tag in names]


@functools.cache
def colocated_cpu_and_weak() -> tuple[Row, ...]:
    case = functools.partial(Case, model="mlp", batch_size=64)
    weak = made(case(strategy="ddp", devices=2, batch_size=128), 0.012, 0.01, scaling="weak")
    return (
        made(case(strategy="single"), 0.01),
        made(case(strategy="single_all_cores"), 0.006, 0.01),
        made(case(strategy="dp", schedule="reference"), 0.011, 0.01),
        made(case(strategy="dp", schedule="reference", devices=2), 0.007, 0.01),
        made(
            case(strategy="dp", schedule="reference", devices=2, placement="colocated"), 0.02, 0.01
        ),
        weak,
    )


def part(run: Report, name: str) -> Section:
    """Return the section of a report that has this id."""
    (found,) = [section for section in figures.sections(run) if section.id == name]
    return found


def many(count: int) -> list[Row]:
    return [
        made(
            Case(model=model, strategy="dp", schedule=f"r{i}", batch_size=64, devices=i % 4 + 1),
            0.01 + i / 1e3,
            0.1,
        )
        for model in ("mlp", "vgg16", "lstm")
        for i in range(count // 3)
    ]
