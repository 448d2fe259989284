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

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from dpbench.engine.containers import device_of, mapped, tensors_in
from dpbench.engine.errors import Refused
from dpbench.engine.fast import local_loss
from dpbench.engine.fast.local_loss import LocalLoss
from dpbench.engine.fast.losses import ROUNDED, Summed, summed_form
from dpbench.engine.fast.notice import GradientHooks, Identity, Muted
from dpbench.engine.fast.pool import Pool
from dpbench.engine.fast.replica_weights import ReplicaWeights
from dpbench.engine.fast.stages import in_stages, run_on_devices
from dpbench.engine.gather import gather
from dpbench.engine.parallel_apply import NOTHING, parallel_apply
from dpbench.engine.reduce import reduce
from dpbench.engine.scatter import scatter
from dpbench.engine.settings import without_cast_cache
from dpbench.engine.training import Training, place_target, wrong_target
from dpbench.hardware.device import Device
from dpbench.hardware.devices import holding
from dpbench.records import Phase
from dpbench.records.schedule import Schedule

NO_DIVISOR = "loss_fn now has hooks, another forward or reduction, and thus no known divisor"
OTHER_ROWS = "the rows of the output and of the target do not correspond one to one"


class Local:
    """The steps of the schedule `local`.

    If TrainStep has `selected` the schedule, a step whose loss cannot be computed locally is
    allowed; otherwise it raises Refused. `unfit` is then the reason why replicas should not be
    kept.
    """

    schedule = Schedule.LOCAL

    @torch.inference_mode(mode=False)  # training and in-place writes need ordinary tensors
    def __init__(self, training: Training, *, selected: bool, note: str = "") -> None:
        self.note = note
        self.unfit = ""
        self._why = note
        self._selected = selected
        self._training = training
        self._devices = training.devices
        self._mark = training.mark
        self._workers = Pool()
        self._checked = False
        self._weights = self._replica_weights()
        self._identity = Identity(self._weights.originals, training.optimizer)
        self._hooks = GradientHooks(self._weights.originals)
        self._stepped = [p for group in training.optimizer.param_groups for p in group["params"]]
        self._before: list[torch.Tensor | None] = []
        self._muted = Muted([])
        self._used = len(self._devices)

    def _replica_weights(self) -> ReplicaWeights:
        training = self._training
        return ReplicaWeights(training.module, self._devices, None, self._mark)

    def run(self, inputs: tuple[Any, ...], target: Any, *, first: bool, last: bool) -> torch.Tensor:
        """Run one training step, and return the loss, detached, on the first device."""
        self.note = self._why
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

    def _clear(self) -> None:
        """Drop the gradients of the parameters that the optimizer steps."""
        if self._identity.watched:
            self._training.optimizer.zero_grad(set_to_none=True)
        else:
            set_gradients(self._stepped, [None] * len(self._stepped))

    def _replicas(self, count: int) -> list[nn.Module]:
        """Return the first `count` replicas, with current weights and buffers."""
        self._used = count
        for i in range(1, count):
            self._weights.refresh(i)
        # gradients of earlier calls are added after this call's gradients have been summed
        self._before = [p.grad for p in self._weights.originals]
        set_gradients(self._weights.originals, [None] * len(self._before))
        self._muted = Muted(self._hooks.dicts() if self._hooks else [])
        return self._weights.modules(count)

    def _gathered(self, inputs: tuple[Any, ...], target: Any) -> torch.Tensor:
        """Run the replicas, and the loss and backward over the gathered batch; return the loss."""
        pieces = self._scatter(inputs, inputs)
        replicas = self._replicas(len(pieces))
        outputs = parallel_apply(
            replicas,
            pieces,
            None,
            self._devices[: self._used],
            workers=self._workers,
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
        with ExitStack() as backward:
            for device in used:
                backward.enter_context(self._mark(Phase.BACKWARD, device.index))
            scaled.backward()
        return loss.detach()

    def _local(self, inputs: tuple[Any, ...], target: Any, summed: Summed) -> torch.Tensor:
        """Compute each replica's loss over its own rows; return the batch's loss."""
        root = self._devices[0]
        pieces = self._scatter((inputs, _checked_target(target, root)), inputs)
        used = self._devices[: len(pieces)]
        replicas = self._replicas(len(pieces))
        on_host = root.torch_device.type == "cpu"
        parts = LocalLoss(
            summed,
            pieces,
            replicas,
            used,
            self._mark,
            scale=self._training.scaled,
            turn=self._workers.turn if on_host else NOTHING,
            weight=summed.weight_of(target) if on_host else None,
        )
        # the divisor is known: no device waits for another, unless forwards run in turns
        if parts.split and not self._workers.turn.taken:
            run_on_devices(parts.alone, used, self._workers)
            parts.add()
            return parts.loss

        def meet() -> None:
            parts.meet()
            if parts.split and summed.rule is None and not self._checked:
                self._check(parts, target)
            if parts.split:
                parts.outputs = []  # free their memory for backward

        in_stages(parts.forward, meet, parts.backward, used, self._workers)
        return parts.loss if parts.split else self._without_rows(parts, target)

    def _without_rows(self, parts: LocalLoss, target: Any) -> torch.Tensor:
        """Return the loss of outputs whose rows do not correspond to those of the target."""
        self._gather_loss(OTHER_ROWS)
        return self._joint(parts.outputs, target)

    def _check(self, parts: LocalLoss, target: Any) -> None:
        """In the first step with a pair of functions, compare their sums with the whole loss."""
        root = self._devices[0]
        outputs = [mapped(output, torch.Tensor.detach) for output in parts.outputs]
        whole = gather(outputs, root, self._devices[: self._used])
        placed = place_target(target, whole, root, self._mark)
        self._checked = local_loss.check(self._training.loss, parts.loss, whole, placed)

    def _scatter(self, value: Any, inputs: Any) -> list[Any]:
        sizes = self._training.chunk_sizes(inputs)
        return scatter(value, self._devices, chunk_sizes=sizes, mark=self._mark)

    def _summed(self, inputs: tuple[Any, ...], target: Any) -> Summed | None:
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
        self.note = "; ".join(filter(None, [self._why, reason]))

    def _finish(self, *, last: bool) -> None:
        """Sum the gradients into those of the module's parameters, and run the optimizer."""
        self._bring()
        if last:
            with self._mark(Phase.OPTIMIZER, self._devices[0].index):
                self._training.update()

    def _bring(self) -> None:
        """Move the replicas' gradients, summed, into the `.grad` of the module's parameters."""
        self._muted.restore()
        gradients = self._weights.gradients(self._used)
        used = range(len(self._weights.originals))
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
                self._deliver(dict(zip(used, sums, strict=True)))
        self._before = []
        self._weights.clear()

    def _zeros(self, i: int, number: int) -> torch.Tensor:
        with self._devices[i].guard():
            return torch.zeros_like(self._weights.parameters[i][number], requires_grad=False)

    def _deliver(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Add each sum to the gradient of its parameter, given by index, as autograd would.

        A parameter that no replica used gets zeros.
        """
        hooked: list[tuple[torch.Tensor, torch.Tensor]] = []
        watching = bool(self._hooks)
        for n, parameter in enumerate(self._weights.originals):
            gradient = sums.get(n)
            outside = parameter.grad
            if gradient is None and parameter.requires_grad:
                gradient = self._zeros(0, n)
            if outside is not None and gradient is not None:
                gradient = outside + gradient
            parameter.grad = self._before[n] if self._before else None
            if (gradient := outside if gradient is None else gradient) is None:
                continue
            if watching and parameter.requires_grad:
                hooked.append((parameter, gradient))
            else:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if hooked:
            # torch calls no hook on several gradients in a backward whose only root is a leaf: this
            # empty tensor is another root
            empty = torch.zeros(0, device=self._devices[0].torch_device, requires_grad=True)
            hooked.append((empty, empty.detach()))
            # in one backward: a hook on several parameters waits for all of their gradients
            torch.autograd.backward(
                [parameter for parameter, _ in hooked], [gradient for _, gradient in hooked]
            )

    def changed(self) -> bool:
        """Return whether the parameters or the optimizer have changed."""
        return not self._weights.notice() or self._identity.changed() or bool(self.unfit)

    @property
    def settled(self) -> bool:
        """Return whether the threads have chosen how forwards run."""
        return self._workers.turn.settled

    def stale(self) -> list[int]:
        """Return an empty list, because every step copies the weights."""
        return []

    def sync(self) -> None:
        """Do nothing, because every step copies the weights."""

    def abandon(self) -> None:
        """Restore the gradients that the module's parameters had before the failed call."""
        if self._before:
            self._muted.restore()
            set_gradients(self._weights.originals, self._before)
            self._before = []

    def close(self) -> None:
        """End the threads; leave the module as an ordinary loop would."""
        self._workers.close()
        # after a failed step, queued work may still use the memory freed here
        for device in self._devices[1:]:
            self._devices[0].wait(device)
        self._hooks.release()


def _same_rows(inputs: Any, target: Any) -> bool:
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


def _has_history(inputs: tuple[Any, ...], target: Any) -> bool:
    """Return whether the target requires gradients, or an input is a recorded result."""
    if isinstance(target, torch.Tensor) and all(isinstance(one, torch.Tensor) for one in inputs):
        return target.requires_grad or any(one.grad_fn is not None for one in inputs)
    return any(tensor.requires_grad for tensor in tensors_in(target)) or any(
        tensor.grad_fn is not None for tensor in tensors_in(inputs)
    )


def set_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Set the `.grad` of each parameter."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
