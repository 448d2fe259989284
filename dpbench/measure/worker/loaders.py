"""Loaders, worker side: time the batches of a DataLoader for a consumer that only waits.

    0  1  2  3  4  5     6  7  8  9  10 11     12 13 14 15       next epoch: 0
    fill                 steady part           surplus           first batch only

The numbers above are those of the batches. With n workers, batches arrive n at a time, so the
number of batches in the steady part is a multiple of n. The fill consists of the first batch of
each worker, and of the batches that the workers load ahead while the last worker starts. The
surplus keeps all workers busy until the steady part ends. Of the next epoch, only the first batch
is timed.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dpbench.measure.failures import of_error
from dpbench.measure.worker.facts import process_facts
from dpbench.records import HOST, Case, Phase, Span, Status, Step, Trial, registry
from dpbench.records.facts import stated
from dpbench.records.loading import FIRST_BATCH, NEXT_EPOCH, Loading
from dpbench.records.spelling import dashed


class Unfit(ValueError):
    """The dataset cannot be measured; the message has the reason and the remedy."""


class BatchFailed(RuntimeError):
    """A batch could not be loaded; the message names its examples and its worker."""


def check(case: Case) -> Trial:
    """Load one batch without workers, and return a trial without steps."""
    dataset = opened(case.model, pin_memory=Loading.of(case).pin_memory)
    loader = DataLoader(dataset, batch_size=case.batch_size)
    _batches(case, loader, range(case.batch_size), 1)
    return Trial(case=case, status=Status.OK)


def measure(case: Case, round_number: int, folder: Path) -> Trial:
    """Time the batches of one DataLoader, and return the trial; each round loads other examples.

    Raises Unfit for a dataset that cannot be measured, and BatchFailed if the dataset raises.
    """
    workers = case.loader
    batch_size = case.batch_size
    loading = Loading.of(case)
    dataset = opened(case.model, pin_memory=loading.pin_memory)
    fill = loading.fill(workers)
    steady = loading.steady(workers, batch_size)
    ahead = loading.ahead(workers)
    wanted = (fill + steady + ahead) * batch_size
    drawn = random.Random(round_number).sample(range(len(dataset)), min(wanted, len(dataset)))
    indices = list(islice(cycle(drawn), wanted))
    with_workers: dict[str, Any] = {
        "prefetch_factor": loading.prefetch_factor,
        "persistent_workers": loading.persistent_workers,
        "worker_init_fn": partial(_dump_stacks, folder),
        # a class of the user's file cannot be pickled by its name
        "multiprocessing_context": "fork",
    }
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=indices,
        num_workers=workers,
        pin_memory=loading.pin_memory,
        **(with_workers if workers else {}),
    )
    ends = _batches(case, loader, indices, fill + steady + ahead)
    next_epoch = _batches(case, loader, indices, 1)
    steps, spans = [], []
    turn = loading.turn(workers)
    for batch in range(fill + steady):
        # the batches of a turn arrive together: each of them gets an equal share of the time of the
        # turn
        first = batch - (batch - fill) % turn if batch >= fill else batch
        last = first + turn if batch >= fill else batch + 1
        each_s = (ends[last] - ends[first]) / (last - first)
        end_s = ends[first] + each_s * (batch + 1 - first)
        steps.append(Step(each_s, warmup=batch < fill, end_s=end_s))
        spans.append(Span(batch, Phase.DATA, HOST, "host", end_s - each_s, end_s))
    return Trial(
        case=case,
        status=Status.OK,
        steps=tuple(steps),
        spans=tuple(spans),
        setup={FIRST_BATCH: ends[1] - ends[0], NEXT_EPOCH: next_epoch[1] - ends[-1]},
        provenance={**process_facts(), **stated(batches_per_epoch=-(-len(dataset) // batch_size))},
    )


def _batches(
    case: Case, loader: DataLoader[Any], indices: Sequence[int], count: int
) -> list[float]:
    """Return the times of an epoch's start and of the arrivals of its first `count` batches."""
    ends = [time.perf_counter()]
    try:
        for _ in islice(loader, count):
            ends.append(time.perf_counter())
    except Exception as error:
        raise BatchFailed(_named(case, error, len(ends) - 1, indices)) from error
    return ends


def _named(case: Case, error: Exception, batch: int, indices: Sequence[int]) -> str:
    examples = indices[batch * case.batch_size : (batch + 1) * case.batch_size]
    batch_name = f"the batch of examples {', '.join(map(str, examples))}"
    if not case.loader:
        return f"{batch_name} cannot be loaded: {of_error(error).reason}"
    text = str(error).strip()  # torch passes the traceback of a worker as text
    summary = text.splitlines()[-1]
    worker = batch % case.loader  # batches arrive in order, and workers take turns
    return f"{batch_name} cannot be loaded in worker {worker}: {summary}\n{text}"


def _dump_stacks(folder: Path, worker: int) -> None:
    """Make a worker write its Python stacks to a separate file in `folder` on SIGUSR1."""
    stacks = (folder / f"stacks-worker-{worker}").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def opened(name: str, *, pin_memory: bool = False) -> Any:
    """Return the dataset `name`; if the user's object is a function, call it.

    Raises Unfit if the result is not a map-style dataset with examples, or if `pin_memory` would
    have no effect.
    """
    dataset = registry.outside("dataset", name)
    if callable(dataset) and not isinstance(dataset, Dataset):
        dataset = dataset()
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise Unfit(
            f"{kind} is an IterableDataset, which divides its examples among the workers by its own"
            " code; dpbench measures map-style datasets only: wrap one shard in a Dataset with"
            " __len__ and __getitem__"
        )
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
    if missing:
        raise Unfit(
            f"{kind} has no {' and no '.join(missing)}; give a map-style Dataset, or a callable"
            " without arguments that returns one"
        )
    if len(dataset) == 0:
        raise Unfit(f"{kind} has no examples: its __len__ returns 0")
    if pin_memory and not torch.accelerator.is_available():
        raise Unfit(
            f"torch finds no accelerator here, so {dashed('pin_memory')} would have no effect;"
            " leave it out"
        )
    return dataset
