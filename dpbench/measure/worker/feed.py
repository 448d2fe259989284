"""Feed: take the batches of a training loop from a DataLoader.

It yields the same batches in the same order as are used without a DataLoader. A rank loads its own
rows only, as with torch's DistributedSampler. The wait for a batch is the phase `data` of the host;
without workers, it includes the loading itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset

from dpbench.hardware import processes
from dpbench.models import rows_in
from dpbench.records import HOST, Case, Mark, Phase
from dpbench.strategies import ObservedSpan, Step

Batch = tuple[Any, Any]
"""A pair (inputs, target) on the host."""


class Examples(Dataset[list[torch.Tensor]]):
    """A dataset of the rows of several batches.

    An example is a list with one row of each tensor of a batch.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        leaves = [
            [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
            for batch in batches
        ]
        self._columns = [torch.cat(column) for column in zip(*leaves, strict=True)]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [column[index] for column in self._columns]


@contextmanager
def fed(case: Case, step: Step, batches: Sequence[Batch], mark: Mark) -> Iterator[Step]:
    """Yield a step that ignores its arguments and takes its batch from the case's DataLoader.

    Without a loader, yield `step`. `batches` have the rows of this process, on the host. On exit,
    the workers of the loader end.
    """
    if case.loader < 0:
        yield step
        return
    feed = _Feed(case, step, batches, mark)
    try:
        yield feed
    finally:
        feed.close()


class _Feed(Step):
    def __init__(self, case: Case, step: Step, batches: Sequence[Batch], mark: Mark) -> None:
        self._step = step
        self._mark = mark
        self._taken = 0
        self._flat = [tree_flatten(batch) for batch in batches]
        rows = rows_in(batches[0])
        indices = [[*range(i * rows, (i + 1) * rows)] for i in range(len(batches))]
        with warnings.catch_warnings():
            # torch warns if workers outnumber this thread's cores; the thread may be bound to one,
            # the workers are not
            warnings.simplefilter("ignore", UserWarning)
            loader = DataLoader(
                Examples(batches),
                batch_sampler=cycle(indices),
                num_workers=case.loader,
                pin_memory=case.device_kind == "cuda" and case.inputs == "pinned",
                worker_init_fn=partial(_unbind, processes.CORES),
                # as before Python 3.14, whose default would import torch again
                multiprocessing_context="fork" if case.loader else None,
            )
            self._loaded: Iterator[Any] | None = iter(loader)

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return self._step.settled

    def observe(self) -> Sequence[ObservedSpan]:
        return self._step.observe()

    def __call__(self, inputs: Any, target: Any) -> Any:
        assert self._loaded is not None
        with self._mark(Phase.DATA, HOST):
            loaded = iter(next(self._loaded))
            leaves, structure = self._flat[self._taken % len(self._flat)]
            given = [next(loaded) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            batch = tree_unflatten(given, structure)
        self._taken += 1
        return self._step(*batch)

    def close(self) -> None:
        self._loaded = None


def _unbind(cores: Sequence[int], worker: int) -> None:
    """Let a DataLoader's worker use all of `cores`: its starting thread may be bound to one core.

    If `cores` is empty, nothing changes.
    """
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
