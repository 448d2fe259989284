"""The schedule `allreduce`: every device sums all gradients and updates its own weights.

What it changes in `local`: there is no copy of the weights from the first device, because each
device has the sums of all gradients and an optimizer of its own, whose steps are bitwise equal.
Distinct GPUs sum by NCCL's all-reduce.

It relies on noticing every other write to the weights, by torch's counts of in-place writes: after
one, the next step copies the first device's weights to the others. Writes that torch does not count
need `TrainStep.sync()`, unless forward makes them from the first step on. It also relies on
gradients that are the sums of the replicas' gradients, and on an optimizer that nothing watches; a
step with other gradients, such as sparse ones, is finished as in `local`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dpbench.engine.fast.local import Local
from dpbench.engine.fast.replica_weights import ReplicaGradients
from dpbench.engine.fast.stages import ONE_BY_ONE, run_on_devices
from dpbench.engine.fast.update import Update
from dpbench.engine.training import Training
from dpbench.records import Phase
from dpbench.records.schedule import Schedule


class AllReduce(Local):
    """The schedule `allreduce`, and what `sharded` has in common with it."""

    @torch.inference_mode(mode=False)
    def __init__(
        self, training: Training, schedule: Schedule, note: str, *, selected: bool
    ) -> None:
        super().__init__(training, schedule, note, selected=selected)
        self._update = Update(
            training.optimizer, self._weights, self._flat(), self._devices, self._mark
        )
        # torch's counts of writes when all replicas last had the same weights; empty: they may not
        self._same_at: list[int] = []
        self._written_in_forward = False
        self._compares = True

    def _flat(self) -> Any:
        return None

    def changed(self) -> bool:
        """Return whether the parameters, their hooks or the optimizer have changed."""
        return super().changed() or self._gradients.hooked or self._update.state.regrouped

    def stale(self) -> list[int]:
        """Return the indices of the parameters whose values differ between replicas and module.

        The list is empty if the next step copies the weights anyway.
        """
        return [] if self._weights.versions() != self._same_at else self._weights.stale()

    def sync(self) -> None:
        """Make the next step copy the weights to all replicas."""
        self._same_at = []

    def _clear(self) -> None:
        super()._clear()
        self._update.shown.hide()

    def _replicas(self, count: int) -> list[nn.Module]:
        self._used = count
        self._update.state.begin()
        if self._weights.versions() != self._same_at:
            self._refresh()
        return self._weights.modules(count)

    def _refresh(self) -> None:
        for i in range(1, len(self._devices)):
            self._weights.refresh(i)
        self._same_at = self._weights.versions()

    def _finish(self, *, last: bool) -> None:
        gradients = self._weights.gradients(self._used)
        # in this step, only forwards can have written weights so far
        self._written_in_forward = self._weights.versions() != self._same_at or self._uncounted()
        if self._is_unusual(gradients[0]):
            self._reduce()
            self._step_plainly()
        else:
            self._step(gradients)
        self._update.state.end()

    def _uncounted(self) -> bool:
        """Return whether a forward has written weights in ways that torch does not count.

        The first step compares the weights, and so do the next ones as long as they differ.
        """
        self._compares = self._compares and bool(self._weights.stale())
        return self._compares

    def _is_unusual(self, first: Sequence[torch.Tensor | None]) -> bool:
        """Return whether only the user's optimizer, on the module's parameters, can step.

        It must if a forward has written weights, because each device then has weights of its own,
        and if there are gradients that shards cannot represent: a sparse gradient, or one that did
        not come through the replicas, for example that of a penalty on `module.parameters()` in the
        loss. `first` are the gradients of replica 0.
        """
        return (
            self._written_in_forward
            or any(g is not None and g.is_sparse for g in first)
            or any(p.grad is not None for p in self._weights.originals)
        )

    def _step_plainly(self) -> None:
        """Run the user's optimizer on the module's own parameters and their `.grad`."""
        with self._mark(Phase.OPTIMIZER, self._devices[0].index), self._devices[0].guard():
            self._update.state.step_plainly()
        if self._selected and not self._written_in_forward:
            self.unfit = (
                "replicas are not kept, because some gradients are sparse or computed outside the"
                " replicas"
            )
        self._same_at = []

    def _step(self, gradients: ReplicaGradients) -> None:
        """Reduce the gradients, and run the optimizers, on all devices."""
        update = self._update
        if update.exchange and self._used > 1:
            self._exchange(gradients)

        def step(i: int) -> None:
            if not update.exchange or self._used == 1:
                update.collect(i, gradients)
            update.step(i)

        self._update_all(step)
        self._weights.clear()
        update.shown.show()
        self._same_at = self._weights.versions()

    def _exchange(self, gradients: ReplicaGradients) -> None:
        """Sum the gradients by collectives."""
        exchange = self._update.exchange
        assert exchange is not None
        idle = [None] * (len(self._devices) - self._used)
        each = [*gradients, *idle]
        run_on_devices(lambda i: exchange.stage(i, each[i]), self._devices, self.workers)
        exchange.reduce()

    def _update_all(self, step: Any) -> None:
        workers = ONE_BY_ONE if self._update.one_by_one else self.workers
        run_on_devices(step, self._devices, workers)

    def abandon(self) -> None:
        """Do nothing but make the next step copy the weights: `.grad` is as in an ordinary loop."""
        super().abandon()
        self._same_at = []

    def close(self) -> None:
        """End the threads; leave module and optimizer as an ordinary loop would."""
        super().close()
        self._update.state.close()
