"""Functions: measure cases, and read stored or exported runs.

The functions raise ValueError for a wrong argument, LookupError for an unknown name, and StoreError
for a results file that cannot be used. The messages are those of the command line, and name its
options, such as --devices for `devices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpbench.api import STORE, stored
from dpbench.api.progress import Detail, Progress
from dpbench.api.runs import Run
from dpbench.measure import launch, selection
from dpbench.records.options import Options
from dpbench.store import Store, export

Names = str | Sequence[str]
Numbers = int | Sequence[int]


def run(
    *,
    models: Names = (),
    model: Names = (),
    strategies: Names = (),
    strategy: Names = (),
    schedules: Names = (),
    ladder: bool = False,
    scenario: str = "",
    together: Names = (),
    devices: Numbers = (),
    device_ids: int | str | Sequence[int | str] = (),
    device_kind: str = "",
    placement: str = "",
    batch_sizes: Numbers = (),
    batch_per_device: Numbers = (),
    size: str = "small",
    precision: str = "fp32",
    optimizer: str = "sgd",
    unverified: bool = False,
    inputs: Names = ("pinned",),
    read_loss: Numbers = (0,),
    zero_grad: Names = ("none",),
    compile: bool | Sequence[bool] = (False,),
    loader: Numbers = (-1,),
    mode: Names = ("train",),
    rounds: int | str = "auto",
    paired: bool = False,
    budget: float | None = None,
    limit: float = 120.0,
    patience: float | None = None,
    retry: Names = (),
    profile: bool = False,
    device_memory: int = 0,
    name: str = "",
    tag: Names = (),
    store: str | Path = STORE,
    quiet: bool = False,
    verbose: bool = False,
) -> Run:
    """Measure cases in fresh processes, store every trial in the file `store`, and return the run.

    The arguments are the options of `dpbench run`, with the same defaults; `dpbench run --help`
    explains them. An empty value means the default on this machine. Without arguments that select
    cases, dpbench selects cases that fit this machine. Times are in seconds and sizes in bytes.
    `model` and `strategy` take the names of your own objects, such as "package.module:name",
    because the measuring processes import them by name. `tag` takes texts such as "driver=550".
    Progress is printed to stderr unless `quiet` is True. After a KeyboardInterrupt, the finished
    trials are stored, and the same call resumes the run.

    Raises ValueError for a wrong argument, LookupError for an unknown name, and RuntimeError under
    torchrun or srun, where only the command `dpbench run` can measure.
    """
    arguments = dict(locals())
    del arguments["store"], arguments["quiet"], arguments["verbose"]
    detail = Detail.of(quiet=quiet, verbose=verbose)
    options = Options.of(**{name: value for name, value in arguments.items() if value != ()})
    if launch.of_environment():
        raise RuntimeError(
            "dpbench.run measures on one machine: under torchrun or srun, use the command `dpbench"
            " run` instead"
        )
    cases, budget_s = selection.cases_of(options)
    path = Path(store)
    store_option = [] if path == STORE else ["--store", str(path)]
    naming = selection.naming(options, options.command(*store_option, config=False))
    with Store.create(path, naming) as opened, Progress(detail) as progress:
        try:
            outcome = selection.measure(
                options, cases, opened, budget_s=budget_s, listen=progress.listen
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; the finished trials are stored in {path}; to resume the run, call"
                " dpbench.run with the same arguments again"
            ) from None
    return load(path, outcome.run_id)


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
