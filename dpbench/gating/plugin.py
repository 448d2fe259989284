"""Plugin: the fixture `dpbench_gate` of pytest, with which a test fails if its step became slower.

    def test_step(dpbench_gate):
        model, optimizer, inputs, target = ...

        def step():
            ...

        dpbench_gate(step)

`pytest --dpbench-base main` compares; without the option, the test takes one step. The fixture runs
the same test in copies of both commits, whose processes take blocks of steps in turn. There it runs
with pytest's own defaults: `addopts` and options of the command line do not count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

OPTION = "--dpbench-base"
EXIT_NOT_FOUND = int(pytest.ExitCode.USAGE_ERROR)
NOT_FOUND = "not found: "
"""The exit code of pytest if there is no such test, and what it then prints."""
BUDGET_S = 120.0
Gate = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with the commit to compare with."""
    parser.getgroup("dpbench").addoption(
        OPTION,
        default="",
        metavar="COMMIT",
        help="Let tests with the fixture dpbench_gate compare their steps with this commit.",
    )


@pytest.fixture
def dpbench_gate(request: pytest.FixtureRequest) -> Gate:
    """Return a function that fails the test if a step became slower than in the base commit.

    It takes the step, a function without arguments, the share `limit` below which a slow-down is
    accepted, the seconds `budget` within which pairs of processes begin, and ignored paths `link`
    that both sides read. The test is skipped if the measurement cannot tell, or if the base has no
    such test. A test compares one step.
    """
    from dpbench.gating import LIMIT
    from dpbench.measure.turns import Turns

    base = request.config.getoption(OPTION)
    calls: list[object] = []

    def gate(
        step: Callable[[], object],
        *,
        limit: float = LIMIT,
        budget: float = BUDGET_S,
        link: Sequence[str] = (),
    ) -> None:
        if calls:
            pytest.fail("a test compares one step: call dpbench_gate once in each test")
        calls.append(step)
        if turns := Turns.of_environment():
            for steps in turns:
                for _ in range(steps):
                    step()
        elif base:
            _compare(request, base, limit, budget, link)
        else:
            step()

    return gate


def _compare(
    request: pytest.FixtureRequest, base: str, limit: float, budget: float, link: Sequence[str]
) -> None:
    from dpbench.gating.judge import Answer
    from dpbench.gating.pairs import decided
    from dpbench.gating.sides import CommandWork, SideFailed

    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("other tests run at the same time: compare steps without -n")
    test = request.node.nodeid
    # options of the project's own, such as -n or --cov, would run more than the step
    words = ["-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", __name__]
    mode = f"--import-mode={request.config.getoption('importmode')}"
    work = CommandWork(request.node.name, lambda store: [sys.executable, *words, mode, test])
    folder = Path(request.config.rootpath)
    why = ""
    try:
        verdict = decided(base, [work], limit=limit, budget_s=budget, link=link, folder=folder)
    except SideFailed as failed:
        why = str(failed)
        new = failed.tree.name == base and failed.exit_status == EXIT_NOT_FOUND
        if new and NOT_FOUND in why:
            why = ""
            pytest.skip(f"{base} has no such test, so there is nothing to compare with")
    if why:  # here, pytest shows no traceback of the error
        pytest.fail(why, pytrace=False)
    if verdict.worse:
        pytest.fail(str(verdict), pytrace=False)
    if verdict.answer is Answer.UNKNOWN:
        pytest.skip(str(verdict))
