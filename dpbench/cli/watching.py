"""Watching: the command `dpbench watch`, which runs a training script unchanged and records its steps."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from dpbench.cli.config import Documented
from dpbench.cli.options import EXIT_FAILED, EXIT_USAGE, STORE, Tag
from dpbench.cli.showing import choose, print_answers, print_notes, print_table, print_warnings, report_of, try_report


@click.command(
    cls=Documented,
    short_help="Run a training script unchanged, and record its steps.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    exits={
        0: "the script ended",
        EXIT_FAILED: "dpbench detected no training step, or the page cannot be written",
        EXIT_USAGE: "wrong usage",
    },
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as for python -m.")
@click.option(
    "--output", "--store", "store", type=click.Path(path_type=Path), default=STORE, show_default=True,
    help="The results file.",
)  # fmt: skip
@click.option("--name", default="", help="A name for the run, with which other commands find it: @NAME.")
@click.option("--tag", type=Tag(), multiple=True, help="A tag that is stored with the run; may be repeated.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def watch(
    script: str, arguments: tuple[str, ...], module: bool, store: Path, name: str, tag: tuple[tuple[str, str], ...]
) -> None:
    """Run a training script in this process, unchanged, and store its steps and their phases as a run.

    Options for dpbench come before SCRIPT; all words after SCRIPT are the script's arguments. If the script fails, the
    exit code is that of the script.
    """
    from dpbench.observe.script import run
    from dpbench.observe.watching import watch as watching

    if not module and not Path(script).is_file():
        raise click.UsageError(f"the script {script} does not exist; for a module, give -m and its name")
    command = shlex.join(["dpbench", "watch", *(["-m"] if module else []), script, *arguments])
    live = sys.stderr if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0" else None
    with watching(store, name=name, tags=dict(tag), script=Path(script).name, command=command, live=live) as result:
        code = run(script, arguments, module=module)
    if result.rank:
        sys.exit(code)
    shown = bool(result.run_id) and _show(store, result.run_id)
    if not result.run_id:
        for problem in result.unknown:
            click.echo(f"note: {problem}", err=True)
        click.echo("error: dpbench detected no training step, so it stored no run", err=True)
    sys.exit(code or (0 if shown else EXIT_FAILED))


def _show(store: Path, run_id: str) -> bool:
    """Print the answers and the table of a run, and write its page; return whether the page was written."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        chosen = choose(opened.runs(), run_id)
        shown = report_of(chosen, opened.summaries(run_id))
    print_warnings(shown)
    where = [] if store == STORE else ["--store", str(store)]
    print_answers(shown.answers, shlex.join(["dpbench", "explain", "--run", chosen.id[:8], *where]))
    print_table(shown)
    print_notes(shown)
    return try_report(None, shown, store)
