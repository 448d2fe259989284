"""Functions: measure cases, and read stored or exported runs.

The functions raise UsageError for a wrong argument, LookupError for an unknown name, and StoreError
for a results file that cannot be used.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

from dpbench.api import STORE, stored
from dpbench.api.progress import Detail, Progress
from dpbench.api.runs import Run
from dpbench.measure import handing, launch, selection
from dpbench.records import session
from dpbench.records.errors import UsageError
from dpbench.records.options import OPTIONS, Options
from dpbench.store import Store, export


def run(
    *, store: str | Path = STORE, quiet: bool = False, verbose: bool = False, **options: Any
) -> Run:
    """Measure cases in fresh processes, store every trial in the file `store`, and return the run.

    `options` are those of `dpbench run`, such as batch_sizes for --batch-sizes, with the same
    defaults; `dpbench run --help` explains them. A list may be one value. Times are in seconds and
    sizes in bytes. `models` and `strategies`, or `model` and `strategy`, take names such as
    "package.module:name", because the measuring processes import your objects by name. `model` may
    be an object with `build`, `batch` and `loss`, such as one of a notebook's cell, which
    cloudpickle sends to these processes. Progress is printed to stderr unless `quiet` is True.
    After a KeyboardInterrupt, the finished trials are stored, and the same call resumes the run,
    unless its model is an object.

    Raises TypeError for an unknown argument, ValueError for a wrong one, LookupError for an unknown
    name, and RuntimeError under torchrun or srun, where only the command `dpbench run` can measure.
    """
    if launch.of_environment():
        raise RuntimeError(
            "dpbench.run measures on one machine: under torchrun or srun, use the command `dpbench"
            " run` instead"
        )
    detail = Detail.of(quiet=quiet, verbose=verbose)
    with handing.named(options) as given:
        return load(store, _measured(Options.of(**given), Path(store), detail))


def _measured(selected: Options, path: Path, detail: Detail) -> str:
    """Measure the cases that the options select, and return the id of the run."""
    if selected.find_max_batch:
        raise UsageError("a search returns no run: use the command `dpbench run --find-max-batch`")
    cases, budget_s = selection.cases_of(selected)
    store_option = [] if path == STORE else ["--store", str(path)]
    naming = selection.naming(selected, selected.command(*store_option, config=False))
    again = (
        "a run of a session's model cannot be resumed"
        if any(map(session.is_of, selected.models))
        else "to resume the run, call dpbench.run with the same arguments again"
    )
    with Store.create(path, naming) as opened, Progress(detail) as progress:
        try:
            outcome = selection.measure(
                selected, cases, opened, budget_s=budget_s, listen=progress.listen
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; the finished trials are stored in {path}; {again}"
            ) from None
    return outcome.run_id


_WRITTEN = inspect.signature(run, eval_str=True)
_LISTED = [
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default, annotation=kind
    )
    for name, kind in get_type_hints(Options).items()
    if name != "find_max_batch"
]
run.__signature__ = _WRITTEN.replace(  # type: ignore[attr-defined]
    parameters=[*_LISTED, *[*_WRITTEN.parameters.values()][:-1]]
)


def load(store: str | Path = STORE, run: str | None = None) -> Run:
    """Return a run of a results file.

    `run` is @NAME or the beginning of an id; @last and None mean the newest run. Raises StoreError
    if the file is not a results file, and ValueError if it has no such run.
    """
    path = Path(store)
    chosen, trials, unreadable = stored.read(path, run)
    return Run(chosen, trials, path, unreadable)


def open_trials(path: str | Path, run: str = "") -> Run:
    """Return a run from a file that `dpbench export jsonl` wrote, also if it is compressed (.gz).

    `run` is the beginning of the run's id, and may be empty if the file has one run. The file has
    the seconds of each step by phase, but no spans, no samples, no start time of the run and no
    facts on the machine; results that depend on these are missing. Raises ValueError if the file is
    not an export, or if `run` matches none or several of its runs.
    """
    return Run(*export.read_run(Path(path), run), None)
