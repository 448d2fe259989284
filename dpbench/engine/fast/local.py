"""The schedule `local`: each device keeps its replica, and computes its own loss and backward.

What it changes in `step.step`: `replicate` copies the weights into the replicas in place, so that
they are leaf tensors with gradients of their own. There is no gather: each device computes the loss
over its own rows and runs its own backward, in the thread of its forward. The gradients are summed
in a phase of their own, after backward.

It relies on a loss that is a sum over rows with a known divisor, and on gradients that reach the
parameters only through the replicas. A step without such a loss gathers the outputs, and computes
the loss as `step.step` does; gradients that reach the parameters on other ways are added to the
sums. Changes of the module are noticed at the start of a step, and replicas are then built again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dpbench.engine.containers import device_of, mapped, tensors_in
from dpbench.engine.errors import Refused
from dpbench.engine.fast import local_loss
from dpbench.engine.fast.local_loss import LocalLoss
from dpbench.engine.fast.losses import ROUNDED, Summed, summed_form
from dpbench.engine.fast.notice import Snapshot
from dpbench.engine.fast.parameter_gradients import ParameterGradients, set_gradients
from dpbench.engine.fast.pool import Pool
from dpbench.engine.fast.replica_weights import ReplicaWeights
from dpbench.engine.fast.stages import in_stages, run_on_devices
from dpbench.engine.gather import gather
from dpbench.engine.parallel_apply import parallel_apply
from dpbench.engine.reduce import reduce
from dpbench.engine.runner import Runner
from dpbench.engine.scatter import scatter
from dpbench.engine.settings import without_cast_cache
from dpbench.engine.training import Arguments, Training, place_target, wrong_target
from dpbench.engine.turn import AT_ONCE, Turn
from dpbench.hardware.device import Device
from dpbench.hardware.devices import holding
from dpbench.records import Phase, marked
from dpbench.records.schedule import Schedule

NO_DIVISOR = "loss_fn now has hooks, another forward or reduction, and thus no known divisor"
OTHER_ROWS = "the rows of the output and of the target do not correspond one to one"


class Local(Runner):
    """The schedule `local`, and what those above it have in common.

    If TrainStep has `selected` the schedule, a step whose loss cannot be computed locally is
    allowed; otherwise it raises Refused.
    """

    @torch.inference_mode(mode=False)  # training and in-place writes need ordinary tensors
    def __init__(
        self, training: Training, schedule: Schedule, note: str, *, selected: bool
    ) -> None:
        super().__init__(schedule, note, Pool())
        self._selected_because = note
        self._selected = selected
        self._training = training
        self._devices = training.devices
        self._mark = training.mark
        self._pairs = 0  # steps with a pair (sum_fn, weight_fn) so far
        self._checked = False
        self._weights = self._replica_weights()
        self._gradients = ParameterGradients(self._weights.originals)
        self._snapshot = Snapshot(self._weights.originals, training.optimizer)
        self._stepped = [p for group in training.optimizer.param_groups for p in group["params"]]
        self._used = len(self._devices)

    def _replica_weights(self) -> ReplicaWeights:
        training = self._training
        return ReplicaWeights(training.module, self._devices, None, self._mark)

    def changed(self) -> bool:
        """Return whether the parameters or the optimizer have changed."""
        return not self._weights.notice() or self._snapshot.changed() or bool(self.unfit)

    def run(self, inputs: Arguments, target: Any, *, first: bool, last: bool) -> torch.Tensor:
        """Run one training step, and return the loss, detached, on the first device."""
        self.note = self._selected_because
        summed = self._summed(inputs, target)
        with holding(self._devices):  # a device's thread waits for the work of other devices
            if first:
                with self._mark(Phase.OPTIMIZER, self._devices[0].index):
                    self._clear()
            with without_cast_cache():
                loss = (
                    self._gathered(inputs, target)
                    if summed is None
                    else self._local(inputs, target, summed)
                )
            self._weights.undo_forward(self._used)
            self._finish(last=last)
        return loss

    # -- how the loss can be computed

    def _summed(self, inputs: Arguments, target: Any) -> Summed | None:
        """Return this step's loss as sums over the replicas' rows, or None if it must be gathered.

        Raises Refused instead of returning None if the user has named the schedule.
        """
        summed = summed_form(self._training.loss_fn)
        if summed is None:
            reason = NO_DIVISOR
        elif summed.rule is not None and not isinstance(target, torch.Tensor):
            reason = f"the target must be a tensor, but its type is {type(target).__name__}"
        elif not _same_rows(inputs, target):
            reason = (
                "the target cannot be cut as the inputs are, because it has another number of rows"
            )
        elif _has_history(inputs, target):
            reason = (
                "an input or the target has an autograd history (detach it if you need no gradient"
                " of it); each replica would run its own backward through this history, but"
                " autograd allows only one"
            )
        elif self._selected and not summed.keeps_bits(powers=self._training.powers):
            reason = ROUNDED
        else:
            return summed
        self._gather_loss(reason)
        return None

    def _gather_loss(self, reason: str) -> None:
        """Say in this step's note why its loss is gathered; raise Refused for a named schedule."""
        if not self._selected:
            raise Refused(
                f"schedule {self.schedule}: each device computes its part of the loss, but"
                f" {reason}; use the schedule cached"
            )
        self.note = "; ".join(filter(None, [self._selected_because, reason]))

    # -- scatter and replicate

    def _clear(self) -> None:
        """Drop the gradients of the parameters that the optimizer steps."""
        if self._snapshot.watched:
            self._training.optimizer.zero_grad()
        else:
            set_gradients(self._stepped, [None] * len(self._stepped))

    def _scatter(self, value: Any, inputs: Arguments) -> list[Any]:
        rows, say = self._training.rows_of(inputs), self._training.say
        return scatter(value, self._devices, chunk_sizes=rows, say=say, mark=self._mark)

    def _replicas(self, count: int) -> list[nn.Module]:
        """Return the first `count` replicas, with current weights and buffers."""
        self._used = count
        for i in range(1, count):
            self._weights.refresh(i)
        self._gradients.set_aside()
        return self._weights.modules(count)

    # -- forward, loss and backward on each device

    def _local(self, inputs: Arguments, target: Any, summed: Summed) -> torch.Tensor:
        """Compute each replica's loss over its own rows; return the batch's loss."""
        root = self._devices[0]
        pieces = self._scatter((inputs, _checked_target(target, root)), inputs)
        replicas = self._replicas(len(pieces))
        with self._training.watch.forwards(replicas) as turn:
            parts = self._run(summed, pieces, replicas, target, turn)
        if parts.split:
            return parts.loss
        self._gather_loss(OTHER_ROWS)
        return self._joint(parts.outputs, target)

    def _run(
        self,
        summed: Summed,
        pieces: Sequence[tuple[Arguments, Any]],
        replicas: Sequence[nn.Module],
        target: Any,
        turn: Turn | None,
    ) -> LocalLoss:
        """Run the replicas with their parts of the loss and, if these exist, their backwards.

        `turn` says when forwards may begin; None leaves it to the threads.
        """
        used = self._devices[: len(pieces)]
        on_host = used[0].torch_device.type == "cpu"
        parts = LocalLoss(
            summed,
            pieces,
            replicas,
            used,
            self._mark,
            scale=self._training.scaled,
            turn=turn or (self.workers.turn if on_host else AT_ONCE),
            weight=summed.weight_of(target) if on_host else None,
        )
        # the divisor is known: no device waits for another, unless forwards run in turns
        if parts.split and turn is None and not self.workers.turn.taken:
            run_on_devices(parts.alone, used, self.workers)
            parts.add()
            return parts

        def meet() -> None:
            parts.meet()
            if parts.split and summed.rule is None:
                self._check(parts, target)
            if parts.split:
                parts.outputs = []  # free their memory for backward

        in_stages(parts.forward, meet, parts.backward, used, self.workers)
        return parts

    def _check(self, parts: LocalLoss, target: Any) -> None:
        """Compare the sums of a pair of functions with the loss of the whole batch, now and then.

        That is in the first step, until the loss is finite, and in step 2, 4, 8, 16, ...
        """
        self._pairs += 1
        if self._checked and self._pairs & (self._pairs - 1):
            return
        root = self._devices[0]
        outputs = [mapped(output, torch.Tensor.detach) for output in parts.outputs]
        whole = gather(outputs, root, self._devices[: self._used])
        placed = place_target(target, whole, root, self._mark)
        self._checked = local_loss.check(self._training.loss, parts.loss, whole, placed)

    # -- or, where the loss cannot be computed so, as in `step.step`

    def _gathered(self, inputs: Arguments, target: Any) -> torch.Tensor:
        """Run the replicas, and the loss and backward over the gathered batch; return the loss."""
        pieces = self._scatter(inputs, inputs)
        replicas = self._replicas(len(pieces))
        arguments, keywords = zip(*pieces, strict=True)
        with self._training.watch.forwards(replicas) as turn:
            outputs = parallel_apply(
                replicas,
                arguments,
                keywords,
                self._devices[: self._used],
                workers=self.workers,
                turn=turn,
                mark=self._mark,
            )
        return self._joint(outputs, target)

    def _joint(self, outputs: Sequence[Any], target: Any) -> torch.Tensor:
        root = self._devices[0]
        used = self._devices[: self._used]
        output = gather(outputs, root, used, mark=self._mark)
        target = place_target(target, output, root, self._mark)
        with self._mark(Phase.LOSS, root.index):
            loss = self._training.loss(output, target)
            scaled = self._training.scaled(loss)
        with marked(self._mark, Phase.BACKWARD, (device.index for device in used)):
            scaled.backward()
        return loss.detach()

    # -- reduce and optimizer

    def _finish(self, *, last: bool) -> None:
        """Sum the gradients into those of the module's parameters, and run the optimizer."""
        self._reduce()
        if last:
            with self._mark(Phase.OPTIMIZER, self._devices[0].index):
                self._training.update()

    def _reduce(self) -> None:
        """Move the replicas' gradients, summed, into the `.grad` of the module's parameters."""
        gradients = self._weights.gradients(self._used)
        originals = self._weights.originals
        used = range(len(originals))
        if any(g is None for one in gradients for g in one):
            columns = enumerate(zip(*gradients, strict=True))
            used = [n for n, column in columns if any(g is not None for g in column)]  # type: ignore[assignment]
        with torch.no_grad():
            # a replica that did not use a parameter adds zeros, as in the backward of Broadcast
            filled = [
                [self._zeros(i, n) if (g := one[n]) is None else g for n in used]
                for i, one in enumerate(gradients)
            ]
            sums = reduce(filled, self._devices[: self._used], mark=self._mark)
            root = self._devices[0]
            with self._mark(Phase.REDUCE, root.index), root.guard():
                of_parameters = dict(zip(used, sums, strict=True))
                if len(sums) < len(originals):  # parameters that no replica used get zeros
                    for n, parameter in enumerate(originals):
                        if parameter.requires_grad and n not in of_parameters:
                            of_parameters[n] = self._zeros(0, n)
                self._gradients.accumulate(of_parameters)
        self._weights.clear()

    def _zeros(self, i: int, number: int) -> torch.Tensor:
        with self._devices[i].guard():
            return torch.zeros_like(self._weights.parameters[i][number], requires_grad=False)

    # -- after a step, or the last one

    def abandon(self) -> None:
        """Restore the gradients that the module's parameters had before the failed call."""
        self._gradients.restore()

    def close(self) -> None:
        """End the threads; leave the module as an ordinary loop would."""
        super().close()
        # after a failed step, queued work may still use the memory freed here
        for device in self._devices[1:]:
            self._devices[0].wait(device)
        self._gradients.release()


def _same_rows(inputs: Arguments, target: Any) -> bool:
    """Return whether every tensor of the target has as many rows as the inputs."""
    tensors = [target] if isinstance(target, torch.Tensor) else tensors_in(target)
    rows = max((tensor.size(0) for tensor in tensors_in(inputs) if tensor.dim()), default=0)
    return all(
        tensor.dim() and tensor.layout is torch.strided and tensor.size(0) == rows
        for tensor in tensors
    )


def _checked_target(target: Any, root: Device) -> Any:
    """Return the target; raise RuntimeError if it is on an accelerator other than `root`."""
    where = device_of(target)
    if where is not None and where.type != "cpu" and where != root.torch_device:
        raise wrong_target(where, root.torch_device)
    return target


def _has_history(inputs: Arguments, target: Any) -> bool:
    """Return whether the target requires gradients, or an input is a recorded result."""
    values = (*inputs[0], *inputs[1].values())
    if isinstance(target, torch.Tensor) and all(isinstance(one, torch.Tensor) for one in values):
        return target.requires_grad or any(one.grad_fn is not None for one in values)
    return any(tensor.requires_grad for tensor in tensors_in(target)) or any(
        tensor.grad_fn is not None for tensor in tensors_in(inputs)
    )
