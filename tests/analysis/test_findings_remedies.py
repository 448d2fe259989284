"""Remedies of findings: commands select the cases that apply them, and lines of code run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import dpbench
from dpbench.analysis import commands, findings
from dpbench.analysis.findings import text
from dpbench.analysis.findings.rule import FindingRule
from dpbench.measure.selection import cases_of
from dpbench.records.resources import Resources
from dpbench.records.schedule import Schedule
from tests.analysis.test_findings import LEVEL, case, dp, found, measured, one
from tests.records.test_options import parsed
from tests.trials import report_on


def rules() -> list[FindingRule]:
    return [rule for rule in findings.RULES if rule.remedies(case(devices=4, batch=66))]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.key)
def test_the_command_of_a_remedy_selects_the_cases_that_apply_it(rule: FindingRule) -> None:
    of = case(devices=4, batch=66)
    _, _, *arguments = shlex.split(commands.measure([of, *rule.remedies(of)], machine=Resources()))
    cases, _ = cases_of(parsed(*arguments))
    assert {of, *rule.remedies(of)} <= {*cases}


def test_most_rules_have_a_remedy_to_run() -> None:
    without = {rule.key for rule in findings.RULES} - {rule.key for rule in rules()}
    # their remedies were measured in the same run, or are in the code of the user
    assert without == {"unattributed", "bigger batch", "slow device", "late rank", "late in turn"}


@pytest.mark.parametrize("schedule", Schedule)
def test_the_line_of_code_of_a_remedy_runs(schedule: str) -> None:
    names = {
        "dpbench": dpbench,
        "model": nn.Linear(4, 2),
        "loss_fn": nn.functional.mse_loss,
        "device_ids": ["cpu", "cpu"],
        "optimizer_fn": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    exec(findings.TRAIN_STEP.format(schedule), names)
    assert names["step"](torch.ones(4, 4), torch.zeros(4, 2)) > 0


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_a_remedy_gives_no_code_of_what_the_case_already_is(strategy: str) -> None:
    """A batch that all devices can share equally needs neither another schedule nor DDP."""
    uneven = measured(case(strategy, devices=4, batch=65), LEVEL)
    alone = measured(case("single", devices=1, batch=65), {"forward": 0.001, "backward": 0.001})
    finding = found(alone, uneven)["uneven"]
    assert (finding.code, finding.code_for) == ("", "")


def test_the_line_of_code_for_ddp_runs(process_group: None) -> None:
    names = {"torch": torch, "model": nn.Linear(4, 2)}
    exec(findings.DDP, names)
    names["model"](torch.ones(4, 4)).sum().backward()
    assert names["model"].module.weight.grad is not None


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_three_bullets_explain_an_answer_and_the_command_is_one_line() -> None:
    trials = [trial for group in (one(), dp(replicate=0.015)) for trial in group]
    report = report_on(trials, {"host": {"cores": 8}})
    lines = text.explain(report.answers, report.diagnoses, samples=6400).splitlines()
    (answer,), (diagnosis,) = report.answers, report.diagnoses
    said = " ".join(" ".join(lines).split())
    assert [line.partition(":")[0] for line in lines if line.startswith("  - ")] == [
        "  - certainty",
        "  - cause",
        "  - change",
    ]
    (replicate,) = diagnosis.findings
    assert replicate.rule.key == "replicate"
    for part in (*answer.verdict, answer.epoch(6400), text.headline(replicate)):
        assert part in said
    now, then = answer.epoch_s(6400)
    assert (now.value, then.value) == (pytest.approx(5, rel=0.01), pytest.approx(4, rel=0.01))
    code = findings.TRAIN_STEP.format("cached")
    assert [line for line in lines if line.endswith(f": {code}")]
    assert lines.count(f"  next: {answer.command}") == 1
