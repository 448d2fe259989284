"""Loaders, worker side: feed a training loop from a DataLoader, and time the batches of one DataLoader.

In a training loop, the DataLoader yields the same batches in the same order as are used without a DataLoader. A rank
loads its own rows only, as with torch's DistributedSampler. The wait for a batch is the phase `data` of the host. If
the DataLoader has no workers, this wait includes the loading itself.

A DataLoader is timed by a consumer that only waits for batches:

    0  1  2  3  4  5     6  7  8  9  10 11     12 13 14 15       next epoch: 0
    fill                 steady part           surplus           first batch only

The numbers above are those of the batches. With n workers, batches arrive n at a time, so the number of batches in the
steady part is a multiple of n. The fill consists of the first batch of each worker, and of the batches that the workers
load ahead while the last worker starts. The surplus keeps all workers busy until the steady part ends. Of the next
epoch, only the first batch is timed. If loading fails, the error names the example.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from dpbench.analysis.loaders import LoaderReading
from dpbench.hardware import processes
from dpbench.measure.failures import of_error
from dpbench.measure.loaders import READING, LoaderProgress, Unfit, lost, stacks
from dpbench.measure.request import Loading, Synthetic
from dpbench.measure.scratch import write_whole
from dpbench.models import rows_in
from dpbench.records import HOST, Case, Mark, Phase, Status, registry

RAISED = "raised"
"""The name of the file in a measurement's folder that has the dataset's first failure as text."""
TRIAL_S, TRIAL_BATCHES = 0.5, 1000
"""The limits of a trial measurement: its duration in seconds, and its number of batches."""
LENGTH = 2**20
"""The number of examples of the synthetic dataset."""
Batch = tuple[Any, Any]
"""A pair (inputs, target) on the host."""
StepOfBatch = Callable[[Any, Any], Any]


def work(loading: Loading, folder: Path) -> None:
    """Make one measurement and write its reading to `folder`; if it fails, the reading has the reason."""
    reading = _caught(loading, folder)
    write_whole(folder / READING, json.dumps(asdict(reading)))


def _caught(loading: Loading, folder: Path) -> LoaderReading:
    try:
        return measure(loading, folder)
    except Unfit as error:
        return lost(loading, Status.SKIPPED, str(error))
    except Exception as error:
        raised, failure = folder / RAISED, of_error(error)
        return lost(loading, failure.status, raised.read_text(encoding="utf-8") if raised.exists() else failure.reason)


def measure(loading: Loading, folder: Path) -> LoaderReading:
    """Time the batches of one DataLoader, and return the reading with the wait for each batch.

    A trial measurement (`loading.examples` is 0) ends after `TRIAL_S` seconds. Raises Unfit for a dataset that cannot
    be measured, and the errors of the dataset.
    """
    torch.set_num_threads(1)
    setting = loading.setting
    dataset = opened(loading)
    check(dataset, loading.batch_size, pin_memory=setting.pin_memory, start=multiprocessing.get_start_method())
    length, timed = len(dataset), loading.examples > 0
    batches = setting.batches(loading.batch_size, loading.examples)
    if not timed:
        batches = min(length // loading.batch_size, TRIAL_BATCHES)
    progress = LoaderProgress.created(folder, setting.turn)
    loader = _loader(dataset, loading, batches, folder)
    waits = list(_waits(loader, progress, float("inf") if timed else TRIAL_S))
    next_epoch = next(_waits(loader, progress)) if timed else 0.0
    return LoaderReading(
        setting=setting, round=loading.round, batch_size=loading.batch_size, status=Status.OK, length=length,
        waits_s=tuple(waits[: len(waits) - setting.ahead]), next_epoch_s=next_epoch,
    )  # fmt: skip


def _waits(loader: DataLoader[Any], progress: LoaderProgress, longest_s: float = float("inf")) -> Iterator[float]:
    """Yield the seconds that the consumer waits for each batch of an epoch; the first wait starts the workers.

    The first batch that arrives more than `longest_s` seconds after the start is the last one.
    """
    began = before = time.perf_counter()
    for _ in loader:
        now = time.perf_counter()
        yield now - before
        progress.received()
        before = time.perf_counter()
        if before - began > longest_s:
            return


def opened(loading: Loading) -> Any:
    """Return the dataset of a measurement; if the user's object is a function, call it and return its result.

    Raises Unfit if the object cannot be imported, or if the call raises an error.
    """
    name = loading.dataset
    if isinstance(name, Synthetic):
        return SyntheticDataset(name)
    if ":" not in name:
        raise Unfit(f"dataset {name}: give file.py:name or package.module:name")
    try:
        dataset = registry.outside("dataset", name)
    except LookupError as error:
        raise Unfit(error.args[0]) from error
    if isinstance(dataset, Dataset) or not callable(dataset):
        return dataset
    try:
        return dataset()
    except Exception as error:
        raise Unfit(f"dataset {name}: the call without arguments failed: {of_error(error).reason}") from error


def check(dataset: Any, batch_size: int, *, pin_memory: bool, start: str) -> None:
    """Raise Unfit, with the remedy, if a dataset cannot be measured; `start` is the workers' start method."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise Unfit(
            f"{kind} is an IterableDataset, which divides its examples among the workers by its own code; dpbench "
            "measures map-style datasets only: wrap one shard in a Dataset with __len__ and __getitem__"
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        lacks = " and no ".join(missing)
        raise Unfit(
            f"{kind} has no {lacks}; give a map-style Dataset, or a callable without arguments that returns one"
        )
    length = len(dataset)
    if length == 0:
        raise Unfit(f"{kind} has no examples: its __len__ returns 0")
    if length < batch_size:
        raise Unfit(f"{kind} has length {length}, less than one batch of {batch_size}; give a smaller --batch-size")
    if pin_memory and not torch.accelerator.is_available():
        raise Unfit("torch finds no accelerator here, so --pin-memory on would have no effect; leave it out")
    if start != "fork":
        try:
            ForkingPickler.dumps(dataset)
        except RuntimeError:
            pass  # locks of multiprocessing can be pickled only while a worker starts
        except Exception as error:
            raise Unfit(
                f"{kind} cannot be pickled for the workers, which this system starts by {start}: "
                f"{type(error).__name__}: {error}; open files and connections in __getitem__, and use functions of a "
                "module instead of lambdas"
            ) from error


def _loader(dataset: Any, loading: Loading, batches: int, folder: Path) -> DataLoader[Any]:
    """Return a DataLoader of `batches` batches, whose examples are drawn at random; each round draws other examples."""
    setting = loading.setting
    kind = _WatchedBatches if hasattr(dataset, "__getitems__") else _Watched
    watched = kind(dataset, folder, loading.dataset if isinstance(loading.dataset, str) else "")
    indices = random.Random(loading.round).sample(range(len(dataset)), batches * loading.batch_size)
    return DataLoader(
        watched, batch_size=loading.batch_size, sampler=indices, num_workers=setting.workers,
        pin_memory=setting.pin_memory, prefetch_factor=setting.prefetch_factor, collate_fn=watched.collate,
        persistent_workers=setting.persistent_workers, worker_init_fn=partial(_dump_stacks, folder),
    )  # fmt: skip


def _dump_stacks(folder: Path, worker: int) -> None:
    """Make a worker of the DataLoader write its Python stacks to a separate file in `folder` on SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, file=stacks(folder, worker).open("w", encoding="utf-8"), all_threads=True)


class _Watched(Dataset[Any]):
    """A dataset that notes the index of each example before it is loaded, and records the first failure."""

    def __init__(self, dataset: Any, folder: Path, name: str) -> None:
        self._dataset, self._folder, self._name = dataset, folder, name
        self._at: memoryview | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        at = self._at or self._started()
        at[0] = index
        try:
            return self._dataset[index]
        except Exception as error:
            self._record(error, f"example {index}")
            raise

    def collate(self, examples: list[Any]) -> Any:
        """Collate a batch as a DataLoader does without a `collate_fn`."""
        try:
            return default_collate(examples)
        except Exception as error:
            at = self._at or self._started()
            self._record(error, f"collating the batch with example {at[0]}")
            raise

    def _started(self) -> memoryview:
        info = get_worker_info()
        self._progress = LoaderProgress(self._folder)
        self._at = self._progress.last(info.id if info else 0)
        return self._at

    def _record(self, error: Exception, what: str) -> None:
        """Write the first failure to the file `RAISED`, because torch reports the exception of a worker only as text.

        `what` names the part that failed, such as "example 3".
        """
        info = get_worker_info()
        where = f"worker {info.id}" if info else "the main process"
        part = self._folder / f"{RAISED}-{os.getpid()}"
        with suppress(OSError):  # the disk is full, or another worker failed first
            part.write_text(f"{what} in {where}: {of_error(error).reason}", encoding="utf-8")
            os.link(part, self._folder / RAISED)
            part.unlink()  # or the next failure of this process would overwrite the record

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self._name, bytes(ForkingPickler.dumps(self._dataset)), self._folder)


class _WatchedBatches(_Watched):
    """A `_Watched` dataset that loads all examples of a batch in one call."""

    def __getitems__(self, indices: list[int]) -> Any:
        at = self._at or self._started()
        at[0] = indices[0]
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            self._record(error, f"__getitems__ of examples {', '.join(map(str, indices))}")
            raise


def _rebuilt(kind: type[_Watched], name: str, pickled: bytes, folder: Path) -> _Watched:
    """Return the watched dataset, unpickled in a worker that was not forked.

    `name` is the user's `file.py:name`, whose file is executed first, because unpickling needs its classes.
    It is empty for the synthetic dataset.
    """
    if name:
        registry.outside("dataset", name)
    return kind(ForkingPickler.loads(pickled), folder, name)


class SyntheticDataset(Dataset[Tensor]):
    """Examples of known cost; see `Synthetic`."""

    def __init__(self, cost: Synthetic) -> None:
        self._cost = cost
        self._next = multiprocessing.Value("d", 0.0)
        """The earliest time of the next example on the clock of `time.monotonic`, which all processes share."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        if self._cost.examples_per_s:
            self._wait_for_turn(1 / self._cost.examples_per_s)
        if self._cost.wait_s:
            time.sleep(self._cost.wait_s)
        done = time.thread_time() + self._cost.cpu_s
        while time.thread_time() < done:
            pass
        return torch.full((self._cost.example_bytes,), index % 256, dtype=torch.uint8)

    def _wait_for_turn(self, each_s: float) -> None:
        with self._next.get_lock():
            now = time.monotonic()
            turn = max(now, self._next.value)
            self._next.value = turn + each_s
        time.sleep(turn - now)


class Examples(Dataset[list[torch.Tensor]]):
    """A dataset of the rows of several batches; an example is a list with one row of each tensor of a batch."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        leaves = [[leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)] for batch in batches]
        self._columns = [torch.cat(column) for column in zip(*leaves, strict=True)]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [column[index] for column in self._columns]


class _InOrder:
    """An endless batch sampler that yields the indices of each batch's examples, batch by batch, over and over again.

    `batches` is the number of batches, each of `rows` examples.
    """

    def __init__(self, batches: int, rows: int) -> None:
        self._batches, self._rows = batches, rows

    def __iter__(self) -> Iterator[list[int]]:
        for number in count():
            first = number % self._batches * self._rows
            yield list(range(first, first + self._rows))


@contextmanager
def fed(case: Case, step: StepOfBatch, batches: Sequence[Batch], mark: Mark) -> Iterator[StepOfBatch]:
    """Yield a step that takes its batch from a DataLoader and ignores its arguments; without a loader, yield `step`.

    `batches` have the rows of this process, on the host. On exit, the workers of the loader end.
    """
    if case.loader < 0:
        yield step
        return
    feed = _Feed(case, step, batches, mark)
    try:
        yield feed
    finally:
        feed.close()


class _Feed:
    """A step that takes its batch from a DataLoader."""

    def __init__(self, case: Case, step: StepOfBatch, batches: Sequence[Batch], mark: Mark) -> None:
        self._step, self._mark, self._taken = step, mark, 0
        self._flat = [tree_flatten(batch) for batch in batches]
        self.observe = getattr(step, "observe", list)
        with warnings.catch_warnings():
            # torch warns if workers outnumber this thread's cores; the thread may be bound to one, the workers are not
            warnings.simplefilter("ignore", UserWarning)
            loader = DataLoader(
                Examples(batches), batch_sampler=_InOrder(len(batches), rows_in(batches[0])), num_workers=case.loader,
                pin_memory=case.device_kind == "cuda" and case.inputs == "pinned",
                worker_init_fn=partial(_unbind, processes.CORES),
            )  # fmt: skip
            self._loaded: Iterator[Any] | None = iter(loader)

    def __call__(self, inputs: Any, target: Any) -> Any:
        """Wait for the next batch, and take a step with it; the arguments have no effect. Return the step's result."""
        assert self._loaded is not None
        with self._mark(Phase.DATA, HOST):
            loaded = iter(next(self._loaded))
            leaves, structure = self._flat[self._taken % len(self._flat)]
            given = [next(loaded) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            batch = tree_unflatten(given, structure)
        self._taken += 1
        return self._step(*batch)

    def close(self) -> None:
        """End the workers of the DataLoader."""
        self._loaded = None


def _unbind(cores: Sequence[int], worker: int) -> None:
    """Let a worker of the DataLoader use all of `cores`, because the thread that started it may be bound to one core.

    If `cores` is empty, nothing changes. The argument `worker`, the worker's number, has no effect.
    """
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
