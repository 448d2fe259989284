"""The command line: parse, call, print. Computes nothing, and imports what it needs when it needs it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dpbench import __version__
from dpbench.predicting import predict

if TYPE_CHECKING:
    from dpbench.store import Run

EXIT_WORSE, EXIT_FAILED, EXIT_UNDECIDED, EXIT_USAGE = 1, 2, 3, 64
EXIT_CLOSED = 128 + signal.SIGPIPE
RESUMES = "what was measured is stored, the same command goes on from there"
REPORT = Path("reports/latest/index.html")
QUICK_BUDGET_S = {"cpu": 60.0, "cuda": 180.0, "emulated": 60.0}
"""What `dpbench run` without arguments spends on measuring, so that it ends within 90 s on two cores; every trial on
a GPU has a context to open and libraries to load."""

store_option = click.option(
    "--store", type=click.Path(path_type=Path), default=Path("dpbench.db"), show_default=True, help="The results file."
)
run_option = click.option("--run", "run_id", help="The run to take, by the beginning of its id.  [default: the newest]")


class Names(click.ParamType[tuple[str, ...]]):
    """A comma-separated list of names."""

    name = "a,b,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Split at commas."""
        return value if isinstance(value, tuple) else tuple(part.strip() for part in value.split(",") if part.strip())


class Schedules(click.ParamType[tuple[str, ...]]):
    """A list of schedules, each a rung's name or switches."""

    name = "rung,switch=position,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Split at commas, and at `;` where two schedules of switches meet."""
        from dpbench import plan

        return value if isinstance(value, tuple) else tuple(plan.split_schedules(value))


class Numbers(click.ParamType[tuple[int, ...]]):
    """A comma-separated list of whole numbers."""

    name = "1,2,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Split at commas; fail on what is no number."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is no comma-separated list of whole numbers, such as 1,2,4", param, ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dpbench")
def cli() -> None:
    """Measure single-machine data parallelism in PyTorch, phase by phase.

    Start with `dpbench run`: it measures what this machine can do, prints a verdict and leaves a report.
    """


@cli.command()
@click.option("--models", type=Names(), help="Reference models.  [default: mlp,resnet18]")
@click.option("--model", "own", multiple=True, help="Your own model, package.module:name; may be repeated.")
@click.option("--strategies", type=Names(), help="Ways to train.  [default: all that this machine can do]")
@click.option(
    "--schedules",
    type=Schedules(),
    multiple=True,
    help="Schedules of the strategy dp: rungs, or switches such as workers=pool,replicas=cached, of which neighbours "
    "make one schedule; a ';' between two, or the option twice, keeps them apart.  [default: reference]",
)
@click.option(
    "--ladder",
    is_flag=True,
    help="Measure every rung of the ladder, and the best without each of its switches, beside single and ddp. On the "
    "most devices that are here, unless --devices says more; two models take about five minutes.",
)
@click.option("--devices", type=Numbers(), help="Device counts.  [default: what is here]")
@click.option("--device-ids", type=Numbers(), default=(), help="GPUs to use, in order.  [default: the first ones]")
@click.option("--device-kind", type=click.Choice(["cpu", "cuda", "emulated"]), help="[default: cuda if there is a GPU]")
@click.option("--placement", type=click.Choice(["spread", "colocated"]), help="colocated: replicas share one GPU.")
@click.option("--batch-sizes", type=Numbers(), help="Global batch sizes (strong scaling).  [default: 64]")
@click.option("--batch-per-device", type=Numbers(), help="Batch sizes per device (weak scaling).")
@click.option("--size", type=click.Choice(["small", "full"]), default="small", show_default=True, help="Model size.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Fresh processes per case.")
@click.option(
    "--budget", type=click.FloatRange(1), help="Seconds for the whole run.  [without axes: 60, or 180 on GPUs]"
)
@click.option("--limit", type=click.FloatRange(1), default=120.0, show_default=True, help="Seconds a trial may take.")
@click.option("--retry", type=Names(), default=(), help="Final statuses to measure again on resume: failed,oom,...")
@click.option("--report", type=click.Path(path_type=Path), default=REPORT, show_default=True, help="The page to write.")
@store_option
def run(store: Path, report: Path, **options: Any) -> None:
    """Measure cases in fresh processes, store every trial, print a table and a verdict.

    Without axes it picks what this machine can do. The same command again resumes a run that was interrupted.
    """
    from dpbench import run as runner
    from dpbench.progress import Progress
    from dpbench.store import Store

    cases, budget_s = _cases(options)
    retry = runner.statuses(options["retry"])
    with Store.create(store) as opened:
        try:
            with Progress() as progress:
                outcome = runner.run(
                    cases, opened, rounds=options["rounds"], budget_s=budget_s, limit_s=options["limit"],
                    retry=retry, listen=progress.listen,
                )  # fmt: skip
        except KeyboardInterrupt:
            click.echo(f"interrupted; {RESUMES}", err=True)
            sys.exit(130)
        except BrokenPipeError:  # nobody reads on, as in `dpbench run 2>&1 | head`
            _last_words(f"the output was closed; {RESUMES}")
        chosen = _choose(opened.runs(), outcome.run_id)
        content = _content(chosen, opened.trials(outcome.run_id))
    # the page first: what follows may have no reader left
    _write_report(report, content)
    try:
        _print_table(content)
        _print_verdict(content)
        click.echo(f"report: {report}   store: {store}   run: {outcome.run_id[:8]}", err=True)
    except BrokenPipeError:
        _last_words(f"the output was closed; the run is complete: `dpbench report --run {outcome.run_id[:8]}` shows it")
    sys.exit(EXIT_FAILED if any(outcome.counts.get(bad) for bad in ("failed", "oom", "timeout")) else 0)


def _last_words(text: str) -> NoReturn:
    """End as a command does whose output was closed, with a word on stderr if that is still open."""
    with suppress(OSError):
        click.echo(text, err=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # what is left in their buffers is for nobody
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    sys.exit(EXIT_CLOSED)


def _cases(options: dict[str, Any]) -> tuple[list[Any], float | None]:
    """Turn options into cases, filling in what this machine can do where nothing is said."""
    from dpbench import plan, registry
    from dpbench.nvml import cuda_device_count
    from dpbench.provenance import torch_has_cuda, usable_cores

    axes = ("models", "own", "strategies", "schedules", "ladder", "devices", "batch_sizes", "batch_per_device")
    quick = not any(options[axis] for axis in axes)
    for axis in ("strategies", "schedules"):
        if options["ladder"] and options[axis]:
            raise click.UsageError(f"--ladder chooses strategies and schedules itself: leave out --{axis}")
    gpus = len(options["device_ids"]) or cuda_device_count()
    kind = options["device_kind"] or ("cuda" if gpus and torch_has_cuda() else "cpu")
    # more processes than that are no first look
    available = {"cuda": gpus, "cpu": min(usable_cores(), 4), "emulated": 4}[kind]
    placement = options["placement"] or ("colocated" if kind == "cuda" and gpus == 1 else "spread")
    for name in options["own"]:
        registry.check_module(name)
    devices = options["devices"] or plan.default_devices(available, placement)
    swept = {
        "models": (*(options["models"] or (() if options["own"] else ("mlp", "resnet18"))), *options["own"]),
        "devices": devices, "device_ids": options["device_ids"], "device_kind": kind, "placement": placement,
        "batch_sizes": options["batch_sizes"] or (() if options["batch_per_device"] else (64,)),
        "batch_per_device": options["batch_per_device"] or (), "size": options["size"],
        "precision": options["precision"],
    }  # fmt: skip
    if options["ladder"]:
        cases = plan.ladder(**swept | {"devices": options["devices"] or (max(2, *devices),)})
    else:
        schedules = tuple(one for given in options["schedules"] for one in given)
        cases = plan.sweep(
            strategies=options["strategies"] or plan.default_strategies(kind), schedules=schedules or ("reference",),
            **swept,
        )  # fmt: skip
    return cases, options["budget"] or (QUICK_BUDGET_S[kind] if quick else None)


@cli.command()
@click.option("--html", type=click.Path(path_type=Path), default=REPORT, show_default=True, help="The page to write.")
@click.option("--md", is_flag=True, help="Print Markdown for a pull request instead.")
@run_option
@store_option
def report(store: Path, run_id: str | None, html: Path, md: bool) -> None:
    """Make the report of a run: one HTML file that needs no network, or Markdown."""
    chosen, trials = _read(store, run_id)
    content = _content(chosen, trials)
    if md:
        from dpbench.report import markdown

        click.echo(markdown.render(**content))
        return
    _write_report(html, content)
    click.echo(str(html))


@cli.command("list")
@click.argument("kind", type=click.Choice(["models", "strategies", "schedules", "machines", "metrics", "runs"]))
@store_option
def list_(kind: str, store: Path) -> None:
    """List what there is to choose from, or the runs of the store; one name first on each line."""
    from dpbench import listing

    rows = listing.runs(_runs(store)) if kind == "runs" else listing.rows(kind)
    width = max((len(name) for name, _ in rows), default=0)
    if sys.stdout.isatty():
        click.echo(f"{kind}:")
    for name, words in rows:
        click.echo(f"{name:<{width}}  {words}".rstrip())


def _runs(store: Path) -> list[tuple[Run, int]]:
    """Return the runs of a store, the newest first, and how many cases each has."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        return [(run, opened.cases(run.id)) for run in opened.runs()]


@cli.command()
@click.argument("format", type=click.Choice(["jsonl", "csv"]))
@click.option("--output", type=click.Path(path_type=Path), help="A file.  [default: stdout]")
@click.option("--all", "everything", is_flag=True, help="Every run of the store, not just one.")
@run_option
@store_option
def export(format: str, output: Path | None, everything: bool, run_id: str | None, store: Path) -> None:
    """Export trials: jsonl is one trial a line with the phases of each step, csv one row per case and run."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        chosen = opened.runs()[::-1] if everything else [_choose(opened.runs(), run_id)]
        runs = [(run.id, opened.trials(run.id)) for run in chosen]
    if format == "jsonl":
        from dpbench.export import jsonl

        lines = itertools.chain.from_iterable(jsonl(run, trials) for run, trials in runs)
    else:
        from dpbench import analyse

        tables = [(run, row) for run, trials in runs for row in analyse.rows(trials)]
        found = analyse.frame([row for _, row in tables], [run for run, _ in tables])
        lines = itertools.chain([found.to_csv(index=False).rstrip("\n")])
    if output:
        output.write_text("".join(f"{line}\n" for line in lines))
    else:
        for line in lines:
            click.echo(line)


@cli.command()
@click.argument("before")
@click.argument("after")
@click.option("--margin", type=click.FloatRange(0, 1), default=0.01, show_default=True, help="What counts as the same.")
@store_option
def compare(before: str, after: str, margin: float, store: Path) -> None:
    """Compare two runs case by case: how many times as fast AFTER is as BEFORE.

    Each is the beginning of a run's id in the store, or a store file, whose newest run is taken. Exit code 0: no
    case got slower; 1: one did; 3: none did, but some are undecided.
    """
    from dpbench import analyse

    first, second = (_side(store, name) for name in (before, after))
    lines = analyse.compare(first, second, margin=margin)
    if not lines:
        raise click.UsageError(f"{before} and {after} have no measured case in common")
    for line in lines:
        e = line.ratio
        click.echo(f"{line.verdict:<9}  {e.value:6.3f}x [{e.low:.3f}-{e.high:.3f}]  {line.case.label}")
    verdicts = {line.verdict for line in lines}
    sys.exit(EXIT_WORSE if "slower" in verdicts else EXIT_UNDECIDED if "undecided" in verdicts else 0)


def _side(store: Path, name: str) -> Any:
    """Return the trials that one side of a comparison names."""
    path = Path(name)
    return _read(path, None)[1] if path.is_file() else _read(store, name)[1]


def _read(store: Path, run_id: str | None) -> tuple[Run, Any]:
    """Return a run of a store and its trials."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        chosen = _choose(opened.runs(), run_id)
        return chosen, opened.trials(chosen.id)


def _choose(runs: Any, run_id: str | None) -> Run:
    """Return the newest run, or the one whose id begins so."""
    found = [run for run in runs if run.id.startswith(run_id or "")]
    if not found:
        known = ", ".join(run.id[:8] for run in runs) or "none"
        raise click.UsageError(f"no run {run_id or ''} in the store; it has: {known}")
    if run_id and len(found) > 1:
        raise click.UsageError(f"{run_id} fits {len(found)} runs: {', '.join(run.id[:12] for run in found)}")
    chosen: Run = found[0]
    return chosen


def _content(chosen: Run, trials: Any) -> dict[str, Any]:
    """Return what every form of the report shows."""
    from dpbench import analyse, diagnose, ladder

    table = analyse.rows(trials)
    ladders = ladder.ladders(table)
    return {
        "rows": table, "trials": trials, "provenance": chosen.provenance, "run_id": chosen.id,
        "started": chosen.started, "ladders": ladders, "verdict": diagnose.verdict(table, ladders),
        "tiles": diagnose.tiles(table, ladders),
        "warnings": [*_unfinished(chosen), *diagnose.warnings(table, trials, chosen.provenance)],
    }  # fmt: skip


def _unfinished(chosen: Run) -> list[str]:
    """Warn of a run that has not measured all it was asked to."""
    if chosen.status == "finished":
        return []
    return [f"incomplete: this run is {chosen.status}; the same `dpbench run` command goes on where it is"]


def _write_report(path: Path, content: dict[str, Any]) -> None:
    from dpbench.report import page

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.render(**content))


def _print_table(content: dict[str, Any]) -> None:
    """Print one line a case to stdout."""
    from dpbench.progress import table

    click.echo(table(content["rows"], content["ladders"]))


def _print_verdict(content: dict[str, Any]) -> None:
    """Print the verdict to stdout, the warnings to stderr."""
    for warning in content["warnings"]:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"\n{content['verdict']}")


cli.add_command(predict)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors say what, where and the way out, and exit as the design says."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is tidied up on the way out
    try:
        cli.main(arguments, prog_name="dpbench", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except (ValueError, LookupError) as error:
        click.echo(f"error: {error.args[0] if error.args else error}", err=True)
        sys.exit(EXIT_USAGE)
    except RuntimeError as error:
        from dpbench.store import StoreError

        if not isinstance(error, StoreError):
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
