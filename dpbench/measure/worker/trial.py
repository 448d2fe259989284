"""Trial: measure one case in one process, or in one per rank with the results merged.

Each process verifies a step, builds the model and its batches, and takes blocks of steps until it
has enough timed steps after the warm-up. The ranks of a case stop together.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from dpbench import models, strategies
from dpbench.hardware import processes
from dpbench.hardware.device import Device
from dpbench.hardware.devices import float32, open_devices
from dpbench.hardware.provenance import usable_cores
from dpbench.measure import ranks, verification
from dpbench.measure.failures import Unverified, of_error, of_rank
from dpbench.measure.merging import merge
from dpbench.measure.ranks import RanksFailed
from dpbench.measure.request import RemoteRank, Request, WorkKind
from dpbench.measure.turns import Turns
from dpbench.measure.verification import Verification
from dpbench.measure.worker import loaders, memory, model_check, neighbour
from dpbench.measure.worker.bench import PreparedCase, run_timers, start_timer
from dpbench.measure.worker.facts import (
    data_sheet,
    described_moves,
    of_model,
    torch_facts,
    with_links,
    with_operations,
)
from dpbench.models import Model
from dpbench.records import HOST, Case, Effort, Memory, Status, Trial, Verified
from dpbench.records.facts import stated
from dpbench.records.spelling import dashed
from dpbench.records.trial import Failure, cause_of
from dpbench.strategies import Strategy, rows_of

BATCHES = 4
"""The number of distinct batches in turn, so that results do not depend on a single one."""


@dataclass(frozen=True)
class RankPlace:
    """A rank, and its position among the ranks that see the same cores and GPUs."""

    rank: int
    place: int


def measure(case: Case, effort: Effort, strategy: Strategy, rank: RankPlace | None = None) -> Trial:
    """Verify and time one case in this process, and return its trial.

    `rank` is the rank of this process, whose measurements alone the trial has; None for strategies
    without ranks.
    """
    prepared = prepare(case, strategy, rank)
    with memory.bound(case):
        with start_timer(prepared, effort) as timer:
            run_timers([timer])
            check_threads(strategy)
            timed = timer.trial(_memory(case, prepared.devices))
            if effort.trace:
                timer.trace(
                    effort.trace if rank is None else f"{effort.trace[:-5]}-rank{rank.rank}.json"
                )
        _check_weights(prepared)
        del timer  # release the step function and the clock before memory is measured
        timed = _with_memory(timed, prepared) if effort.memory_by_phase else timed
        if effort.memory_by_phase and (rank is None or rank.rank == 0):
            batch = prepared.batches[0]
            timed = with_operations(timed, prepared.model, batch, prepared.devices)
        return with_links(timed, prepared.devices) if effort.links else timed


def measure_together(prepared_cases: Sequence[PreparedCase], effort: Effort) -> list[Trial]:
    """Time prepared cases in this process in alternating blocks of steps; return trials in order.

    An error in any case ends the timing of all cases. All cases share the memory layout of the
    process, its cores and the load from other processes. Ratios between the cases therefore vary
    much less than if each case had a separate process. Memory is not measured, because the cases'
    memory cannot be told apart.
    """
    with ExitStack() as stack:
        timers = [stack.enter_context(start_timer(prepared, effort)) for prepared in prepared_cases]
        run_timers(timers)
        for prepared in prepared_cases:
            check_threads(prepared.strategy)
        trials = [timer.trial() for timer in timers]
    for prepared in prepared_cases:
        _check_weights(prepared)
    return trials


def _check_weights(prepared: PreparedCase) -> None:
    if prepared.case.trains and not prepared.case.unverified:
        verification.check_weights(prepared.model.module)


def _with_memory(timed: Trial, prepared: PreparedCase) -> Trial:
    """Return the trial with memory peaks by phase from two more steps, or why they are absent."""
    began_s = time.perf_counter()
    by_phase, absent = memory.by_phase(
        prepared.case, prepared.strategy, prepared.model, prepared.devices, prepared.batches[0]
    )
    facts = {"no_memory_by_phase": absent} if absent else {}
    timed = timed.adding(facts, memory_s=time.perf_counter() - began_s)
    return replace(timed, memory=(*timed.memory, *by_phase))


def prepare(case: Case, strategy: Strategy, rank: RankPlace | None = None) -> PreparedCase:
    """Verify the strategy of a case, and build all that timing needs.

    `rank` is the rank of this process; None for strategies without ranks. Raises Unverified if the
    gradients or buffers are wrong, or the outputs of a case that does not train.
    """
    threads = threads_of(strategy)
    torch.set_num_threads(threads)
    devices = _devices(case, strategy, rank)
    _allow_tf32(case, devices[0])
    if threads == 1:  # a strategy that uses all cores must not be bound to one of them
        devices[0].settle()
    times_s = [time.perf_counter()]
    leads = rank is None or rank.rank == 0
    verdict = _verify(case, strategy, devices, rank)
    times_s.append(time.perf_counter())
    check_threads(strategy)
    _forget(devices)
    model = models.load(case.model, case.size, case.seed)
    batches = _placed_batches(case, model, devices[0])
    drawn = _batches(case, model) if case.loader >= 0 else []
    examples = [rows_of(batch, case, rank.rank) if rank else batch for batch in drawn]
    times_s.append(time.perf_counter())
    facts = torch_facts(case, devices[0]) | data_sheet(case, devices)
    if leads:
        sizes = of_model(model, batches[0])
        facts |= {"model": sizes, **described_moves(case, sizes)}
    if verdict.averaging:
        facts |= stated(averaging=verdict.averaging)
    compiling = {"compile_s": verdict.steps_s} if case.compile else {}
    if case.compile:
        torch.compiler.reset()  # the shapes of verification must not make the graphs dynamic
        models.compile_forward(model.module)
    return PreparedCase(
        case=case,
        strategy=strategy,
        devices=devices,
        model=model,
        batches=batches,
        examples=examples,
        verified=verdict.verified,
        facts=facts,
        setup={
            "verify_s": times_s[1] - times_s[0] - sum(compiling.values()),
            "build_s": times_s[2] - times_s[1],
            **compiling,
        },
    )


def threads_of(strategy: Strategy) -> int:
    """Return an operator's threads: one per core with the trait `all_cores`, otherwise one."""
    return usable_cores() if strategy.traits.all_cores else 1


def check_threads(strategy: Strategy) -> None:
    """Raise RuntimeError if the user's code has changed torch's threads: it changes all times."""
    if (found := torch.get_num_threads()) != (meant := threads_of(strategy)):
        raise RuntimeError(
            f"the model has changed the number of torch's threads from {meant} to {found}, so its"
            " times could not be compared: remove torch.set_num_threads from its code"
        )


def _allow_tf32(case: Case, device: Device) -> None:
    """Let the GPU round matrix products' and convolutions' inputs to TF32 if the case asks for it.

    Raises ValueError if TF32 has no effect, which would leave the products in fp32.
    """
    if case.precision != "tf32":
        return
    if reason := float32.impediment(device.torch_device):
        raise ValueError(
            f"tf32 cannot be used: {reason}: give {dashed('precision', 'fp32')} or fp16"
        )
    float32.allow_tf32()


def _devices(case: Case, strategy: Strategy, rank: RankPlace | None) -> list[Device]:
    each = strategy.traits.devices_per_replica
    devices = open_devices(
        case.device_kind,
        case.devices if rank is None else (rank.place + 1) * each,
        ids=case.device_ids,
        placement=case.placement,
        shared_stream=strategy.traits.shared_stream,
        own_processes=rank is not None,
    )
    if rank is None:
        return devices
    mine = devices[rank.place * each :]
    for number, device in enumerate(mine, start=rank.rank * each):
        # phases and memory are recorded under the index among the devices of all ranks
        device.index = number
    return mine


def _verify(
    case: Case, strategy: Strategy, devices: Sequence[Device], rank: RankPlace | None
) -> Verification:
    """Compare gradients and buffers (without training, outputs) with the reference.

    Raises Unverified if a compared value is wrong. An unverified case compares nothing.
    """
    if case.unverified:
        return Verification(Verified.NOT_APPLICABLE)
    model = models.load(case.model, case.size, case.seed)
    if case.trains:
        buffers = strategy.compares_buffers(case) and (rank is None or rank.rank == 0)
        verdict = verification.check(
            strategy.start, case, model, devices, split=strategy.split, buffers=buffers
        )
    else:
        verdict = verification.check_outputs(
            partial(strategies.begin, strategy),
            case,
            model,
            devices,
            split=strategy.split,
            rank=rank.rank if rank else None,
        )
    if verdict.verified is Verified.NO:
        wrong = "gradients or buffers" if case.trains else "outputs"
        hint = f"; {verification.UNVERIFIED}" if verdict.random else ""
        raise Unverified(f"the case was not timed, because its {wrong} are wrong: {verdict}{hint}")
    return verdict


def _forget(devices: Sequence[Device]) -> None:
    gc.collect()
    processes.release()
    for device in devices:
        device.reset_memory()
    with suppress(OSError):  # on Linux, writing 5 resets the peak of the resident set
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _memory(case: Case, devices: Sequence[Device]) -> tuple[Memory, ...]:
    source = "ledger" if case.device_kind == "emulated" else "allocator"
    peaks = [
        Memory(d.index, peak, source, kind=kind)
        for d in devices
        for kind, peak in d.take_peaks().items()
    ]
    return (*peaks, Memory(HOST, processes.resident_peak(), "rss"))


def _batches(case: Case, model: Model) -> list[tuple[Any, Any]]:
    # a second batch on the device would count as its memory
    count = 1 if case.inputs == "device" else BATCHES
    return [model.batch(case.batch_size, case.seed + i) for i in range(count)]


def _placed_batches(case: Case, model: Model, device: Device) -> list[tuple[Any, Any]]:
    return [_placed(batch, case, device) for batch in _batches(case, model)]


def _neighbour_batches(case: Case, model: Model, device: Device) -> list[tuple[Any, Any]]:
    _allow_tf32(case, device)
    return _placed_batches(case, model, device)


def _placed(batch: tuple[Any, Any], case: Case, device: Device) -> tuple[Any, Any]:
    """Return the batch in the memory that `case.inputs` names: pageable, pinned, or `device`'s.

    For logical CPU devices, the batch stays in pageable memory.
    """
    if case.device_kind == "cpu" or case.inputs == "pageable":
        return batch

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if case.inputs == "device":
            return tensor.to(device.torch_device)
        return tensor.pin_memory() if case.device_kind == "cuda" else tensor

    placed: tuple[Any, Any] = tree_map_only(torch.Tensor, place, batch)
    return placed


def work(request: Request) -> list[Trial] | Failure:
    """Carry out a request and return one trial per case, also for cases that fail.

    If the request is for one rank (it has a `seat`), return this rank's part of the trial, or the
    record of the rank's failure.
    """
    if request.seat:
        return _take(request.seat, request.cases[0], request.effort)
    case = request.cases[0]
    loads = case.traits.loads
    if request.job is WorkKind.CHECK_MODEL:
        return [_caught(case, lambda: loaders.check(case) if loads else model_check.check(case))]
    if loads:
        return [_caught(case, lambda: loaders.measure(case, request.round, request.folder))]
    if request.turns:
        return [_caught(case, lambda: _in_turns(case, request.effort, request.turns))]
    return run_together(request.cases, request.effort, request.folder)


def _in_turns(case: Case, effort: Effort, path: str) -> Trial:
    """Take the blocks of steps that the gate asks for, and return their trial."""
    prepared = prepare(case, strategies.load(case.strategy))
    with start_timer(prepared, effort) as timer:
        timer.take_turns(Turns(path))
        return timer.trial(_memory(case, prepared.devices))


def run(case: Case, effort: Effort, folder: Path) -> Trial:
    """Run one case and return its trial, even if the case fails.

    `folder` is a temporary folder for this trial.
    """
    return _caught(case, lambda: _run(case, effort, folder))


def _caught(case: Case, do: Callable[[], Trial]) -> Trial:
    try:
        return do()
    except RanksFailed as failed:
        return _failed(case, replace(cause_of(failed.failures, case), reason=str(failed)))
    except BaseException as error:
        return _failed(case, of_error(error, device_ids=case.gpus))


def _run(case: Case, effort: Effort, folder: Path) -> Trial:
    strategy = strategies.load(case.strategy)
    if reason := strategies.refusal(strategy, case):
        return Trial(case=case, status=Status.SKIPPED, reason=reason)
    if not strategy.traits.ranks:
        with neighbour.running(case, _neighbour_batches) as facts:
            timed = measure(case, effort, strategy)
        return timed.adding(facts)

    def entry(rank: int) -> dict[str, Any]:
        # one file per rank: ranks that write their stacks to the same file overwrite each other
        faulthandler.register(
            signal.SIGUSR1,
            file=(folder / f"stacks-{rank}").open("w", encoding="utf-8"),
            all_threads=True,
        )
        return measure(case, effort, strategy, RankPlace(rank, rank)).to_dict()

    parts = ranks.run(entry, len(case.rows), folder, strategy.backend(case))
    return merge([Trial.from_dict(part) for part in parts])


def _take(seat: RemoteRank, case: Case, effort: Effort) -> list[Trial] | Failure:
    """Act as one rank of a trial; return its part of the trial, or its failure."""
    strategy = strategies.load(case.strategy)
    if reason := strategies.refusal(strategy, case):
        return [Trial(case=case, status=Status.SKIPPED, reason=reason)]
    try:
        ranks.join(
            ranks.store_of_launch(seat.key),
            strategy.backend(case),
            seat.rank,
            seat.size,
            local_rank=seat.place,
            timeout=timedelta(seconds=seat.timeout_s),
        )
        part = measure(case, effort, strategy, RankPlace(seat.rank, seat.place))
        dist.destroy_process_group()  # only after success: it would wait for peers that failed
    except BaseException as error:
        return of_rank(error, seat.rank, time.perf_counter())
    return [part]


def run_together(cases: Sequence[Case], effort: Effort, folder: Path) -> list[Trial]:
    """Run cases in this process in alternating blocks of steps, and return their trials in order.

    If a case cannot be prepared, only its trial fails. If a step of one case raises an error, the
    trials of all prepared cases fail. `folder` is a temporary folder for the trials.
    """
    if len(cases) == 1:
        return [run(cases[0], effort, folder)]
    done = {}
    prepared_cases = []
    for case in cases:
        try:
            strategy = strategies.load(case.strategy)
            if reason := strategies.refusal(strategy, case):
                done[case] = Trial(case=case, status=Status.SKIPPED, reason=reason)
                continue
            prepared_cases.append(prepare(case, strategy))
        except BaseException as error:
            done[case] = _failed(case, of_error(error, device_ids=case.gpus))
    try:
        done |= {trial.case: trial for trial in measure_together(prepared_cases, effort)}
    except BaseException as error:
        for case in (prepared.case for prepared in prepared_cases):
            failure = of_error(error, device_ids=case.gpus)
            reason = (
                f"{failure.reason} [this error ended the timing of all cases in the same process;"
                f" number of other cases that failed too: {len(prepared_cases) - 1}]"
            )
            done[case] = _failed(case, replace(failure, reason=reason))
    return [done[case] for case in cases]


def _failed(case: Case, failure: Failure) -> Trial:
    return Trial(
        case=case,
        status=failure.status,
        reason=failure.reason,
        verified=failure.verified,
        failed_device=failure.device if failure.status is Status.OOM else None,
    )
