"""The schedule `sharded`: parameters lie in flat buffers, and each device updates a share of them.

What it changes in `allreduce`: the parameters are views of one buffer per optimizer group and
dtype. Each device sums only its share of the gradients, updates this share, and sends it to the
others (ZeRO, stage 1). Distinct GPUs use NCCL's reduce-scatter and all-gather.

It relies on parameters that can be views of a buffer, and on an optimizer that steps every element
independently. What it costs when a step is unusual is as in `allreduce`.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.graph import increment_version

from dpbench.engine.fast.allreduce import AllReduce
from dpbench.engine.fast.flat_storage import FlatWeights
from dpbench.engine.fast.replica_weights import ReplicaWeights
from dpbench.engine.fast.stages import ONE_BY_ONE, in_stages, run_on_devices
from dpbench.engine.fast.stepper import groups_of
from dpbench.engine.replicate import check_placement, parameters_of
from dpbench.engine.training import Training
from dpbench.records.schedule import Schedule


class Sharded(AllReduce):
    """The schedule `sharded`."""

    def __init__(
        self, training: Training, schedule: Schedule, note: str, *, selected: bool
    ) -> None:
        self._buffers: FlatWeights | None = None
        try:
            super().__init__(training, schedule, note, selected=selected)
        except BaseException:
            self._release()
            raise

    def _replica_weights(self) -> ReplicaWeights:
        """Move the trained parameters into flat buffers, and return replicas that use them.

        Parameters that the optimizer does not step form a further group.
        """
        training = self._training
        check_placement(training.module, self._devices[0])
        parameters = parameters_of(training.module)
        groups = [group.parameters for group in groups_of(training.optimizer, parameters)]
        taken = {number for group in groups for number in group}
        rest = [n for n, p in enumerate(parameters) if p.requires_grad and n not in taken]
        self._buffers = FlatWeights(
            parameters, [*groups, rest], self._devices[0], len(self._devices)
        )
        return ReplicaWeights(training.module, self._devices, self._buffers, self._mark)

    def _flat(self) -> FlatWeights | None:
        return self._buffers

    def _refresh(self) -> None:
        exchange = self._update.exchange
        if exchange:
            exchange.broadcast(self._weights.flats)
        for i in range(1, len(self._devices)):
            self._weights.refresh(i, flats=exchange is None)
        self._same_at = self._weights.versions()

    def _update_all(self, step: Any) -> None:
        update = self._update
        if update.exchange:
            run_on_devices(step, self._devices, self.workers)
            update.spread()
        elif update.one_by_one:
            run_on_devices(step, self._devices, ONE_BY_ONE)
            run_on_devices(update.copy, self._devices, ONE_BY_ONE)
        else:
            in_stages(step, None, update.copy, self._devices, self.workers)
            # later writes of weights wait for device 0, so it waits here for all
            for device in self._devices[1:]:
                self._devices[0].wait(device)
        # torch does not see that a step of a flat buffer writes the parameters
        increment_version(self._weights.originals)

    def close(self) -> None:
        """End the threads; parameters get separate storage, and `.grad` and state are complete."""
        if self._same_at:
            self._update.gather_gradients()
        super().close()
        self._release()

    def _release(self) -> None:
        if self._buffers is not None:
            self._buffers.release()
