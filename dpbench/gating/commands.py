"""Commands: `dpbench gate`, which decides whether a commit made a training step slower."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dpbench.cli import shapes
from dpbench.cli.options import (
    EXIT_FAILED,
    EXIT_UNDECIDED,
    EXIT_USAGE,
    EXIT_WORSE,
    Documented,
    ParamType,
    json_option,
    option_of,
)
from dpbench.cli.shapes import EstimateFacts
from dpbench.gating import BUDGET_S, LIMIT
from dpbench.records.errors import told

if TYPE_CHECKING:
    from dpbench.gating.judge import Finding

CASES = ("models", "strategies", "devices", "batch_sizes", "device_kind", "size", "precision")
"""The options of a run that select the cases of a gate."""
HELP = {
    "models": "Your models as file.py:name or package.module:name, or reference models.",
    "strategies": "Strategies of one process, such as dp or dp[local].  [default: single]",
    "devices": "Numbers of devices.  [default: 1]",
}
"""The help of those whose defaults are not those of a run."""


class GateFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The finding on one step in the JSON of `dpbench gate`: the values of `gating.judge.Finding`.

    Ratios are those of the present step to that of the base, above 1 if it takes more. `phase_s` is
    the change of the phase that became longer by most, in seconds per step.
    """

    name: str
    answer: str
    pairs: int
    wall: EstimateFacts
    cpu: EstimateFacts
    memory: EstimateFacts
    more_memory: bool
    by_cpu: bool
    phase: str
    phase_s: float
    reason: str


class GateVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `dpbench gate`: its answer is "slower", "not slower" or "cannot tell"."""

    base: str
    head: str
    limit: float
    answer: str
    worse: bool
    findings: Sequence[GateFinding]
    notes: Sequence[str]
    schema: int = shapes.SCHEMA


class _Share(ParamType):
    """The type of a share between 0 and 1, such as 5% or 0.05."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the share of a text; fail for a wrong text."""
        text, share = str(value).strip(), 0.0
        with suppress(ValueError):
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if not 0 < share < 1:
            self.fail(f"{text} is no share between 0 and 1, such as 5% or 0.05", param, ctx)
        return share


def _case_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(CASES):
        changed: dict[str, Any] = {"help": HELP[name]} if name in HELP else {}
        command = option_of(name, **changed)(command)
    return command


@click.command(
    cls=Documented,
    short_help="Decide whether a commit made your training step slower.",
    context_settings={"allow_interspersed_args": False},
    exits={
        0: "no step became slower, and none is known to need more memory",
        EXIT_WORSE: "at least one step became slower, or needs more memory",
        EXIT_FAILED: "a step failed, or a file cannot be written",
        EXIT_UNDECIDED: "no step is known to have become slower, but for some it cannot tell",
        EXIT_USAGE: "wrong usage, such as an unknown commit",
    },
)
@click.option("--base", default="main", show_default=True, help="A branch, a tag or a commit.")
@click.option("--script", default="", help="A training script; its arguments come last, after --.")
@_case_options
@click.option(
    "--limit",
    type=_Share(),
    default=f"{LIMIT:.0%}",
    show_default=True,
    help="Accept a slow-down, or a growth of memory, that is surely below this share.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=1),
    default=BUDGET_S,
    show_default=True,
    help="The seconds within which pairs of processes begin; it ends as soon as it is decided.",
)
@click.option(
    "--link",
    multiple=True,
    help="A path that git ignores and the steps read, such as data; it is in both copies a link to"
    " that of your checkout. May be repeated.",
)
@click.option("--md", is_flag=True, help="Print Markdown for a pull request.")
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def gate(
    base: str,
    script: str,
    limit: float,
    budget: float,
    link: tuple[str, ...],
    md: bool,
    as_json: bool,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Decide whether your project's training step became slower since the commit BASE.

    Give a model (--models model.py:net) or a script (--script train.py -- 1000). dpbench
    copies your checkout twice, as it was in BASE and as it is now with its uncommitted changes, and
    lets processes of both take blocks of steps in turn, in the same environment. The answer is
    "slower", "not slower" or "cannot tell". The copies are removed at the end; what git ignores is
    in no copy, so that no step writes to your checkout, but for what --link names.
    """
    if md and as_json:
        raise click.UsageError("--md and --json are two formats of stdout: leave out one of them")
    if bool(script) == bool(options["models"]):
        raise click.UsageError("give either a model (--models) or a script (--script)")
    if arguments and not script:
        raise click.UsageError(f"there is no script that takes the arguments {arguments}")
    from dpbench.gating.judge import Answer
    from dpbench.gating.pairs import cases, decided
    from dpbench.gating.sides import SideFailed, watched
    from dpbench.gating.verdict import line

    given = {name: value for name, value in options.items() if value}
    works = [watched(script, arguments)] if script else cases(given)

    def listen(finding: Finding) -> None:
        click.echo(line(finding), err=True)

    try:
        verdict = decided(
            base,
            works,
            limit=limit,
            budget_s=budget,
            link=link,
            folder=Path.cwd(),
            listen=listen,
        )
    except SideFailed as failed:
        click.echo(f"error: {told(failed)}", err=True)
        sys.exit(EXIT_FAILED)
    if as_json:
        shapes.show(shapes.made(GateVerdict, verdict))
    else:
        click.echo(verdict.markdown if md else verdict)
    sys.exit(
        EXIT_WORSE if verdict.worse else EXIT_UNDECIDED if verdict.answer is Answer.UNKNOWN else 0
    )
