"""Selection: select a run's cases from its options, forecast its duration, and measure them."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.hardware import shared_memory
from dpbench.measure import run
from dpbench.measure.budget import SHARED, assumed_s, first_of, fitting, on_gpus
from dpbench.measure.rounds import needed_rounds
from dpbench.measure.stopping import Fixed, RoundsRule, UntilDecided
from dpbench.records import HABITS, Case, Effort, objects, plan, registry, words
from dpbench.records.errors import UsageError
from dpbench.records.options import AUTO, Options, tags
from dpbench.records.registry import Role
from dpbench.records.schedule import Schedule
from dpbench.records.spelling import dashed
from dpbench.store import Growth, Naming, Store

if TYPE_CHECKING:
    from dpbench.measure.cluster import Cluster

log = logging.getLogger(__name__)

QUICK_BUDGET_S = {"cpu": 110.0, "cuda": 600.0, "emulated": 80.0}
"""The budget in seconds of a run without options that select cases, by device kind.

On a CPU, such a run ends within two minutes, with its start and its page. The budget for GPUs is
larger, because each trial creates a context on each of its GPUs and loads libraries.
"""
ONE_GPU_BUDGET_S = 150.0
"""That of such a run on one GPU, where no answer depends on further rounds."""
SETTLE_S = 300.0
"""The seconds from which on a run without a budget begins no round that only some answers need."""
GPU_MODELS = {"resnet18": "tf32", "transformer": "bf16"}
"""The models of such a run on GPUs, in full size, each with the precision in which it is trained.

Where a GPU lacks the precision, it is fp32: NVIDIA's before Ampere lack both. On AMD's GPUs, tf32
would say little, because torch's convolutions do not use it there.
"""
GPU_BATCH, SMALL_GPU_BATCH, SMALL_GPU_BYTES = 64, 16, 8e9
"""The samples per device of such a run, and those on GPUs with less memory than the third value.

In fp32, the strategy that needs most memory needs 7.1 GiB with 64 samples on each of 4 GPUs, and
3.5 GiB with 16, as `dpbench predict` says.
"""
SHORT_S = 0.75
"""The seconds of timed steps of a trial on a CPU, in a run that ends with its answers settled."""
LEFT_OUT = (
    "the check of each model, the start of the workers' server in each round, and the wait for idle"
    " cores"
)
"""The work of a run that is not part of its trials, but of its budget."""


def cases_of(options: Options, cluster: Cluster | None = None) -> tuple[list[Case], float | None]:
    """Return the cases that the options select, and the run's time budget in seconds or None.

    Options that are not given have defaults for this machine. `cluster` has the ranks of a launch
    by torchrun or srun, and its `counts` are then the default numbers of devices. Raises ValueError
    for options that exclude each other, or that this machine cannot run, and LookupError for
    unknown names.
    """
    from dpbench.hardware.gpus import of_torch
    from dpbench.hardware.provenance import usable_cores

    _check_together(options, cluster)
    kind = options.device_kind or ("cuda" if options.device_ids else default_kind())
    ids = _gpu_ids(options, cluster) if kind == "cuda" else options.device_ids
    gpus = len(ids) or (len(of_torch().gpus) if kind == "cuda" else 0)
    # the default sweep has four devices at most: its time grows with their number
    available = {"cuda": gpus, "cpu": min(usable_cores(), 4), "emulated": 4}[kind]
    placement = options.placement or (
        "colocated" if kind == "cuda" and gpus == 1 and not cluster else "spread"
    )
    one_gpu = options.quick and placement == "colocated"
    if one_gpu:
        log.warning(
            "this machine has one GPU, which cannot show a speed-up: this run measures a step on it"
            " and what DataParallel's schedule costs, and predicts what more such GPUs would give"
        )
    devices = options.devices or (
        cluster.counts() if cluster else plan.default_devices(available, placement)
    )
    on_gpus = options.quick and kind == "cuda" and not cluster
    only_deciding = options.quick and kind != "emulated" and not cluster
    swept: dict[str, Any] = {
        "models": options.models or ("mlp", "resnet18"),
        "devices": devices,
        "device_ids": ids,
        "device_kind": kind,
        "placement": placement,
        "batch_sizes": options.batch_sizes or (() if options.batch_per_device else (64,)),
        "batch_per_device": options.batch_per_device,
        "size": options.size,
        "precision": options.precision,
        "device_memory_bytes": options.device_memory,
        **{name: getattr(options, name) for name in HABITS if hasattr(options, name)},
    }
    if options.together:
        cases = _two_models(options, swept)
    elif options.ladder:
        swept["devices"] = options.devices or (max(2, *devices),)
        cases = plan.ladder(**swept)
    else:
        usual = plan.default_strategies("launch" if cluster else "one GPU" if one_gpu else kind)
        strategies = _strategies(options, usual)
        cases = [
            case
            for changed in (_trained_on_gpus(options, ids) if on_gpus else ({},))
            for case in plan.sweep(
                strategies=strategies, schedules=_schedules(options), **swept | changed
            )
            if not only_deciding or _decides(case)
        ]
    if cluster:
        cases = list(dict.fromkeys(cluster.placed(case) for case in cases))
    elif kind == "cuda" and not ids:
        _check_seen(cases, devices, gpus)
    optimizer = options.optimizer
    unverified = options.unverified
    cases = list(
        dict.fromkeys(replace(case, optimizer=optimizer, unverified=unverified) for case in cases)
    )
    most = max((case.devices for case in cases), default=0)
    if kind == "cpu" and most > usable_cores():
        log.warning(
            "%s on %s: logical devices share cores, so that more of them cannot be faster",
            words.count(most, "device"),
            words.count(usable_cores(), "core"),
        )
    if small := _small_memory(cases):
        log.warning("%s: %s; %s", small, shared_memory.COST, shared_memory.read().change)
    quick_s = ONE_GPU_BUDGET_S if one_gpu else QUICK_BUDGET_S[kind]
    return cases, options.budget or (quick_s if options.quick else None)


def _check_seen(cases: Iterable[Case], devices: Sequence[int], seen: int) -> None:
    """Raise ValueError if a case needs more GPUs than the `seen` ones of torch."""
    most = max((case.gpu_count for case in cases), default=0)
    if most > seen:
        raise UsageError(
            "{} needs {most} GPUs, but torch sees {seen}",
            option="devices",
            value=[*devices],
            remedy="give fewer devices, or {placement:colocated} to put all replicas on one GPU",
            most=most,
            seen=seen,
        )


def _small_memory(cases: Iterable[Case]) -> str:
    """Return that /dev/shm is too small if a case needs it; "" otherwise."""
    needed = any(
        case.loader > 0 or (case.device_kind == "cuda" and case.traits.ranks and case.devices > 1)
        for case in cases
    )
    return shared_memory.read().small if needed else ""


def default_kind() -> str:
    """Return the kind of devices of a run that asks for none.

    A warning says why a run on the CPU leaves this machine's GPUs unused.
    """
    from dpbench.hardware import gpus

    if gpus.of_torch().gpus:
        return "cuda"
    if reason := gpus.unused():
        log.warning("this run measures the CPU: %s", reason)
    return "cpu"


def _gpu_ids(options: Options, cluster: Cluster | None) -> tuple[int, ...]:
    """Return the CUDA numbers of the GPUs to use; empty for all, which are then of one model.

    Without `device_ids`, a run on one machine uses the largest group of equal GPUs. Raises
    ValueError if torch can use no GPU, or none with a given number, or if the group is too small.
    """
    from dpbench.hardware.gpus import of_torch

    usable = of_torch()
    if not usable.gpus:
        raise UsageError(
            "{} needs a GPU, but {missing}",
            option="device_kind",
            value="cuda",
            missing=usable.missing,
        )
    every = [gpu["index"] for gpu in usable.gpus]
    if options.device_ids or cluster:
        ids = tuple(
            usable.ordinals([one])[0] if isinstance(one, str) else one for one in options.device_ids
        )
        if not cluster and (unseen := [one for one in ids if one not in every]):
            raise UsageError(
                "{} names {unseen}, but torch sees the GPUs {every}",
                option="device_ids",
                value=[*ids],
                remedy="give some of these",
                unseen=unseen,
                every=every,
            )
        return ids
    alike = usable.alike()
    others = [one for one in every if one not in alike]
    if not others:
        return ()
    unequal = (
        f"the GPUs of this machine differ: {usable.names(alike)} are alike,"
        f" {usable.names(others)} not"
    )
    if max(options.devices or (1,)) > len(alike) and options.placement != "colocated":
        raise UsageError(
            "{most} devices are requested, but {unequal}",
            option="device_ids",
            value=every,
            remedy="to measure unequal GPUs together, give {}",
            most=max(options.devices),
            unequal=unequal,
        )
    uses_all = dashed("device_ids", every)
    log.warning("%s; this run uses the former, and %s uses all", unequal, uses_all)
    return alike


def _trained_on_gpus(options: Options, ids: Sequence[int | str]) -> list[dict[str, Any]]:
    """Return the settings of a default run on GPUs: what people train on them, by model."""
    from dpbench.hardware.gpus import of_torch

    if (options.size, options.precision) != (Options.size, Options.precision):
        return [{}]
    usable = of_torch()
    gpus = [gpu for gpu in usable.gpus if not ids or gpu["index"] in ids]
    least_bytes = min(gpu["memory_bytes"] for gpu in gpus)
    batch = SMALL_GPU_BATCH if least_bytes < SMALL_GPU_BYTES else GPU_BATCH
    return [
        {
            "models": (model,),
            "size": "full",
            "precision": precision
            if all(usable.vendor.trains_in(precision, gpu) for gpu in gpus)
            else "fp32",
            "batch_sizes": (),
            "batch_per_device": (batch,),
        }
        for model, precision in GPU_MODELS.items()
    ]


def _decides(case: Case) -> bool:
    """Return whether an answer depends on the case: one on several devices, or an alternative.

    The other cases on one device would take a third of a run's time, at the cost of rounds.
    """
    return case.devices > 1 or case.traits.role is Role.BASELINE or case.traits.all_cores


def _check_together(options: Options, cluster: Cluster | None) -> None:
    """Raise ValueError for options that exclude each other, or that a launch does not support."""
    if options.profile and options.paired:
        raise UsageError(
            "{} needs one case per process",
            option="profile",
            value=True,
            remedy="leave out {paired:True}",
        )
    if cluster:
        options.refuse(
            ("ladder", "paired", "profile", "find_max_batch", "together"),
            "{} does not work in a launch by torchrun or srun",
        )
    if options.ladder:
        options.refuse(
            ("strategies", "schedules"),
            "{} selects the strategies and the schedules",
            by="ladder",
        )
    if options.together:
        options.refuse(
            ("models", "ladder", "find_max_batch", "paired"),
            "{} measures its two models in separate processes",
            by="together",
        )
        options.refuse(("loader", "compile", "read_loss"), "{} measures plain loops", by="together")


def _two_models(options: Options, swept: dict[str, Any]) -> list[Case]:
    devices = options.devices or (1,)
    several = [
        name
        for name in plan.default_strategies(swept["device_kind"])
        if not registry.traits(name).alone
    ]
    usual = several if max(devices) > 1 else [registry.of_role(Role.BASELINE)]
    axes = {name: value for name, value in swept.items() if name != "models"}
    return plan.together(
        options.together,
        **axes | {"devices": devices, "strategies": _strategies(options, usual)},
        schedules=_schedules(options),
    )


def _strategies(options: Options, usual: Sequence[str]) -> Sequence[str]:
    """Return the strategies of a run; the user's own alone are compared with the usual ones."""
    alone = all(map(objects.is_own, options.strategies))
    return (*(usual if alone else ()), *options.strategies)


def _schedules(options: Options) -> Sequence[str]:
    return options.schedules or (Schedule.REFERENCE,)


def naming(options: Options, command: str = "") -> Naming:
    """Return the name and the tags that the options give to the run.

    `command` is the command that repeats the run (empty: this process's arguments). Raises
    ValueError for a wrong name or tag.
    """
    return Naming(name=options.name, tags=tags(options.tag), command=command)


def measure(
    options: Options,
    cases: Sequence[Case],
    store: Store,
    *,
    budget_s: float | None,
    listen: run.Listener,
    cluster: Cluster | None = None,
) -> run.Outcome:
    """Measure the cases of `cases_of` in processes of this machine, or by ranks of `cluster`."""
    how = run.How(
        rounds=_rule(options),
        paired=options.paired,
        budget_s=budget_s,
        settle_s=SETTLE_S if budget_s is None else budget_s,
        limit_s=options.limit,
        effort=effort_of(cases, auto=options.rounds == AUTO),
        retry=options.retry,
        patience_s=options.patience,
        traces=store.traces if options.profile else None,
    )
    return run.run(cases, store, how, cluster=cluster, listen=listen)


def effort_of(cases: Iterable[Case], *, auto: bool) -> Effort:
    """Return the limits on a trial; `auto` is whether the run ends when its answers are settled.

    On a CPU, many short rounds then settle an answer sooner: processes differ more from each other
    than the steps of one process do.
    """
    short = auto and all(case.device_kind == "cpu" for case in cases)
    return Effort(budget_s=SHORT_S) if short else Effort()


def _rule(options: Options) -> RoundsRule:
    return Fixed(options.rounds) if isinstance(options.rounds, int) else UntilDecided()


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """A case of the plan, of which `left` trials are to be measured.

    `earlier` is the number of the case's earlier trials, and `trial_s` their median duration in
    seconds (None without earlier trials).
    """

    case: Case
    left: int
    trial_s: float | None
    earlier: int


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """The plan of a run: its cases, their rounds and their expected duration.

    If `auto` is True, a rule adds rounds, and `rounds` is the least number. `resumes` is the id of
    the run to which the trials would be added; it is empty for a new run. `budget_s` is the time
    budget of the run in seconds (None: no budget). If `paired`, one worker measures several cases.
    """

    cases: Sequence[PlannedCase]
    rounds: int
    auto: bool
    resumes: str
    budget_s: float | None
    paired: bool = False

    @property
    def settle_s(self) -> float:
        """Return the seconds from which on no round begins that only some answers need."""
        return self.budget_s or SETTLE_S

    @property
    def trials(self) -> int:
        """Return the number of trials to be measured."""
        return sum(one.left for one in self.cases)

    @property
    def seconds(self) -> float:
        """Return the expected seconds of all trials, with an assumed time for unknown ones."""
        return self._seconds_of([one.case for one in self.cases])

    @property
    def left_out(self) -> list[Case]:
        """Return the cases that do not fit into the budget at the expected time, least needed last.

        A run on GPUs with an open number of rounds leaves them out, unless trials take less time.
        """
        if not (self.auto and self.on_gpus and self.budget_s) or self.paired:
            return []
        units = plan.units([one.case for one in self.cases])
        first = first_of(units, self._seconds_of)
        kept = fitting(units, self._seconds_of, SHARED * self.budget_s, first)
        return [case for unit in units for case in unit if case not in kept]

    @property
    def budget_of_all_s(self) -> int:
        """Return the budget in seconds into which all cases fit at the expected time."""
        return math.ceil(self.seconds / SHARED)

    def _seconds_of(self, cases: Sequence[Case]) -> float:
        return sum(
            one.left * (self._assumed_s(one.case) if one.trial_s is None else one.trial_s)
            for one in self.cases
            if one.case in cases
        )

    @property
    def on_gpus(self) -> bool:
        """Return whether the cases use GPUs."""
        return on_gpus([one.case for one in self.cases])

    def _assumed_s(self, case: Case) -> float:
        effort = effort_of((one.case for one in self.cases), auto=self.auto)
        return assumed_s(case) + effort.budget_s

    @property
    def basis(self) -> str:
        """Return a text on the origin of `seconds` and on the work that it leaves out."""
        measured = sum(one.trial_s is not None for one in self.cases)
        new = [self._assumed_s(one.case) for one in self.cases if one.trial_s is None]
        parts = (
            [f"{words.count(measured, 'case')} with earlier trials on this machine"]
            if measured
            else []
        )
        if new:
            each = " to ".join(words.time(seconds) for seconds in sorted({min(new), max(new)}))
            parts.append(
                f"{words.count(len(new), 'case')} without an earlier trial, for which the planner"
                f" assumes {each} per trial"
            )
        return f"{'; '.join(parts)}; not included: {LEFT_OUT}"


def forecast(
    path: Path,
    options: Options,
    cases: Sequence[Case],
    naming: Naming,
    cluster: Cluster | None,
    budget_s: float | None,
) -> RunForecast:
    """Return the plan of a run whose store is at `path`, for the results of `cases_of`."""
    rule = _rule(options)
    run_id, growth = "", Growth()
    done: set[tuple[str, int]] = set()
    durations: dict[str, list[float]] = {}
    if path.exists() and path.stat().st_size:
        identity = run.identity(cases, rule, run.collect(cluster), paired=options.paired)
        # a row that cannot be read is no reason to measure nothing
        with Store.read(path, lambda row: None) as store:
            if found := store.unfinished(naming, identity, reopen=bool(options.retry)):
                run_id, growth = found
                done = run.measured(store, run_id, options.retry)
            durations = store.durations(identity.host, {case.fingerprint for case in cases})
    planned = []
    for case, numbers in needed_rounds(cases, rule.least, growth.joined).items():
        earlier = durations.get(case.fingerprint, ())
        typical = statistics.median(earlier) if earlier else None
        left = sum((case.fingerprint, number) not in done for number in numbers)
        planned.append(PlannedCase(case=case, left=left, trial_s=typical, earlier=len(earlier)))
    return RunForecast(
        cases=planned,
        rounds=rule.least,
        auto=rule.looks > 1,
        resumes=run_id,
        budget_s=budget_s,
        paired=options.paired,
    )
