"""Model check: take a step on one device, then on two, and report a model's properties and faults.

A fault ends the check; its message names the function in the model's file that must be changed. A
note describes a property with which some strategies do not work, or which makes results differ.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from dpbench import models, strategies
from dpbench.engine import DataParallel
from dpbench.hardware import processes
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.measure import failures, verification
from dpbench.measure.reference import all_tensors, averaged, mapped, tensors_by_name
from dpbench.models import Model
from dpbench.records import Case, Status, Trial, Verified, no_mark, registry
from dpbench.records.arguments import call
from dpbench.records.registry import Role
from dpbench.records.schedule import Schedule
from dpbench.records.words import count
from dpbench.records.words import size as in_bytes
from dpbench.strategies import precision_of

ROWS = 2
"""The batch size of the check's step; not 1, because BatchNorm refuses a single row."""
COPIES = 3
"""The least memory of a step per byte of parameters: weights, gradients, SGD's momentum."""


OTHER_SOURCES = (("Python's random", random.getstate), ("numpy.random", np.random.get_state))
"""Random sources that verification does not replay, with the functions that return their states."""


WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, DataParallel)


class ModelFault(ValueError):
    """A fault in a function of the user's model; the message names the function."""


def check(case: Case) -> Trial:
    """Check that a case's model works: build it, make the case's batch, and take one step.

    The step has `ROWS` samples and runs on one device. If the case has several devices, a step on
    two devices is verified too. Return a trial without steps, whose provenance has the facts about
    the model; it has none for one of dpbench's own models on one device. An error of the model's
    code is raised with a note that names the function. Raises ModelFault for a fault that raises no
    error itself.
    """
    torch.set_num_threads(1)
    began_s = time.perf_counter()
    model = models.load(case.model, case.size, case.seed)
    if ":" not in case.model and case.devices == 1:
        return _step(case, model)
    facts = _Facts(case, model)
    facts.parameters()
    facts.batch(model.batch(case.batch_size, case.seed))
    facts.forward()
    facts.loop()
    rebuilt = models.load(case.model, case.size, case.seed)
    facts.built_again(rebuilt.module)
    _step(case, rebuilt)
    if case.devices > 1:
        facts.two_devices()
    facts.seen["memory"] = (
        f"{in_bytes(processes.resident_peak())} at the peak of this process, which includes torch"
        " itself"
    )
    facts.seen["check_s"] = time.perf_counter() - began_s
    return Trial(case=case, provenance={"model_check": {"seen": facts.seen, "notes": facts.notes}})


def _step(case: Case, model: Model) -> Trial:
    model.batch(case.batch_size, case.seed)
    devices = open_devices(case.device_kind, 1, ids=case.device_ids)
    alone = replace(case, devices=1)
    with strategies.load(case.strategy).start(alone, model, devices, no_mark) as step:
        step(*model.batch(ROWS, case.seed))
    return Trial(case=case)


class _Facts:
    """The results of a model's check: `seen` has its properties by name."""

    def __init__(self, case: Case, model: Model) -> None:
        self._case = case
        self._model = model
        self.seen: dict[str, Any] = {}
        self.notes: list[str] = []
        self._draws = False
        self._repeats = True
        """Whether the same seed gives the same batch, as far as it was tried."""

    def parameters(self) -> None:
        """Raises ModelFault if the parameters cannot be trained or exceed the free memory."""
        module = self._model.module
        if isinstance(module, WRAPPERS):
            raise self._fault(
                "build",
                f"returned a {type(module).__name__}: return the module inside it, because each "
                "strategy wraps the module itself",
            )
        parameters = list(module.parameters())
        if any(map(nn.parameter.is_lazy, parameters)):
            raise self._fault(
                "build",
                "returned a module with lazy parameters, which have no shape yet: call its "
                "forward once in build(), or give the sizes of its layers",
            )
        if not parameters:
            raise self._fault(
                "build", "returned a module without parameters, so there is nothing to train"
            )
        if not any(parameter.requires_grad for parameter in parameters):
            raise self._fault(
                "build", "returned a module whose parameters all have requires_grad=False"
            )
        elsewhere = {
            str(parameter.device)
            for parameter in parameters
            if parameter.device.type not in ("cpu", "meta")
        }
        if elsewhere:
            raise self._fault(
                "build",
                f"put parameters on {', '.join(sorted(elsewhere))}; build on the CPU: each "
                "strategy moves the module itself",
            )
        needed = COPIES * sum(parameter.nbytes for parameter in parameters)
        free = psutil.virtual_memory().available
        if needed > free and self._case.device_kind == "cpu":
            raise self._fault(
                "build",
                f"returned a module that needs at least {in_bytes(needed)} for weights, gradients"
                f" and momentum, and this machine has {in_bytes(free)} free: build a smaller model"
                " for this size",
            )
        if any(parameter.is_meta for parameter in parameters):
            raise self._fault(
                "build",
                "left parameters on the meta device, which have no values: build on the CPU",
            )
        numbers = sum(parameter.numel() for parameter in parameters)
        frozen = sum(not parameter.requires_grad for parameter in parameters)
        size = in_bytes(sum(parameter.nbytes for parameter in parameters))
        self.seen["parameters"] = f"{numbers:,} in {count(len(parameters), 'tensor')}, {size}" + (
            f"; frozen: {count(frozen, 'tensor')}" if frozen else ""
        )
        named = [one for _, one in module.named_parameters(remove_duplicate=False)]
        distinct = len({id(one) for one in named})
        if len(named) > distinct:
            self.notes.append(
                f"build(): {len(named)} names of parameters are registered for"
                f" {count(distinct, 'parameter')}; a parameter with several names is one"
                " parameter, and its gradient is the sum over all its uses"
            )
        self.seen["dtypes"] = ", ".join(sorted({str(parameter.dtype) for parameter in parameters}))

    def batch(self, batch: tuple[Any, Any]) -> None:
        """Record the tensors of a batch, and note if a second call with the same seed differs.

        Raises ModelFault if a tensor is not on the CPU or requires gradients.
        """
        for name, part in zip(("inputs", "target"), batch, strict=True):
            told = [
                f"{where} {_told(tensor)}" for where, tensor in tensors_by_name(part, name).items()
            ]
            self.seen[name] = "; ".join(told) or "none"
            for where, tensor in tensors_by_name(part, name).items():
                if tensor.device.type != "cpu":
                    raise self._fault(
                        "batch",
                        f"returned {where} on {tensor.device}: return tensors on the CPU; each "
                        "strategy copies them to its devices",
                    )
                if tensor.requires_grad:
                    raise self._fault(
                        "batch", f"returned {where}, which requires gradients: detach it"
                    )
        again = self._model.batch(self._case.batch_size, self._case.seed)
        if not _equal(all_tensors(batch), all_tensors(again)):
            self._repeats = False
            self.notes.append(
                "batch(): the same seed gave different values; draw from"
                " torch.Generator().manual_seed(seed), because each rank draws the batch itself"
            )

    def forward(self) -> None:
        """Run forward, loss and backward of a module that is built again.

        Raises ModelFault for the first wrong result.
        """
        try:
            models.copied(self._model.module)
        except Exception as error:
            raise self._fault(
                "build",
                "returned a module that copy.deepcopy cannot copy, which verification needs: "
                f"{type(error).__name__}: {error}",
            ) from error
        # a hook of a copy may name the original
        model = models.load(self._case.model, self._case.size, self._case.seed)
        device = open_devices(self._case.device_kind, 1, ids=self._case.device_ids)[0]
        module = model.module.to(device.torch_device).train()
        inputs, target = _moved(model.batch(ROWS, self._case.seed), device.torch_device)
        before = [tensor.clone() for tensor in all_tensors((inputs, target))]
        state = torch.get_rng_state()
        others = [(source, state_of, str(state_of())) for source, state_of in OTHER_SOURCES]
        gpus = torch.cuda.get_rng_state_all()
        with precision_of(self._case):
            with self._inside("the forward of the module from build()", inputs):
                output = call(module, inputs)
            for source, state_of, was in others:
                if str(state_of()) != was:
                    self.notes.append(
                        f"forward draws from {source}, which verification cannot replay: draw with"
                        " torch"
                    )
            self._draws = not (
                torch.equal(torch.get_rng_state(), state)
                and _equal(torch.cuda.get_rng_state_all(), gpus)
            )
            self.seen["random numbers"] = (
                "drawn in forward" if self._draws else "none from torch's default generators"
            )
            if not _equal(before, all_tensors((inputs, target))):
                raise self._fault(
                    "build",
                    "returned a module whose forward modifies its inputs in place, so that the "
                    "next step gets other data: clone them in forward",
                )
            self._output(output)
            with self._inside("loss()", output):
                loss = model.loss(output, target)
        self._loss(loss)
        with self._inside("the backward of loss()", output):
            loss.backward()
        self._gradients(module)
        self._registered(module, loss)
        self.seen["loss"] = f"{loss.item():.4g}"

    def _output(self, output: Any) -> None:
        """Record the tensors of the output, and note those that do not have one row per sample.

        Raises ModelFault if the output has no tensor.
        """
        tensors = tensors_by_name(output)
        if not tensors:
            raise self._fault(
                "build",
                "returned a module whose forward returned no tensor, but an object of type "
                f"{type(output).__name__}: return a tensor, or a structure of tensors",
            )
        self.seen["output"] = "; ".join(
            f"{name} {_told(tensor)}" for name, tensor in tensors.items()
        )
        wrong = [
            f"{name} {_told(tensor)}"
            for name, tensor in tensors.items()
            if tensor.dim() and len(tensor) != ROWS
        ]
        if wrong:
            self.notes.append(
                f"forward returned {', '.join(wrong)} for {ROWS} samples; replicas' outputs are"
                " concatenated along dimension 0: return one row per sample, or return the loss"
            )

    def _loss(self, loss: Any) -> None:
        """Raise ModelFault unless the loss is a finite 0-dim tensor with an autograd history."""
        if not isinstance(loss, torch.Tensor):
            raise self._fault(
                "loss", f"returned a {type(loss).__name__}: return a 0-dim tensor, without .item()"
            )
        if loss.dim():
            raise self._fault(
                "loss",
                f"returned a tensor of shape {tuple(loss.shape)}: return its mean, a 0-dim tensor",
            )
        if not loss.requires_grad:
            raise self._fault(
                "loss",
                "returned a tensor without an autograd history: leave out detach(), no_grad and "
                "operations without a gradient such as argmax",
            )
        if not bool(loss.isfinite()):
            raise self._fault(
                "loss",
                f"returned {loss.item()} for a batch of {ROWS} samples: check the inputs of "
                "batch() and the initial weights of build()",
            )

    def _gradients(self, module: nn.Module) -> None:
        """Note parameters without a gradient.

        Raises ModelFault if all lack one, or if a gradient is not finite.
        """
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        unused = [name for name, one in named if one.grad is None]
        if len(unused) == len(named):
            raise self._fault(
                "loss",
                "gives no parameter a gradient: the loss depends on no parameter, or forward "
                "uses parameters that are not registered in the module",
            )
        if unused:
            self.notes.append(
                f"no gradient for {len(unused)} of {len(named)} parameters (first: {unused[0]}):"
                " strategies with DistributedDataParallel refuse to take a second step; use every"
                " parameter in forward, or set requires_grad=False in build()"
            )
        infinite = [
            name
            for name, one in named
            if one.grad is not None and not bool(one.grad.isfinite().all())
        ]
        if infinite:
            raise self._fault(
                "loss",
                f"gives gradients that are not finite, first that of {infinite[0]}: check the "
                "inputs of batch() and the initial weights of build()",
            )

    def _registered(self, module: nn.Module, loss: torch.Tensor) -> None:
        registered = {id(one) for one in module.parameters()}
        unregistered = dict[int, torch.Tensor]()
        nodes = [loss.grad_fn]
        visited = set[Any]()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in visited:
                visited.add(node)
                nodes += [one for one, _ in node.next_functions]
                leaf = getattr(node, "variable", None)
                if isinstance(leaf, torch.Tensor) and id(leaf) not in registered:
                    unregistered[id(leaf)] = leaf
        if unregistered:
            first = tuple(next(iter(unregistered.values())).shape)
            self.notes.append(
                "the loss depends on trainable tensors that are not registered in the module"
                f" ({len(unregistered)}; shape of the first: {first}): no strategy trains, copies"
                " or reduces them; keep layers in nn.ModuleList or nn.ModuleDict, and weights in"
                " nn.Parameter"
            )

    def loop(self) -> None:
        """Create the model's own optimizer and scheduler, if any.

        Raises ModelFault if either has a wrong type, or if the optimizer has parameters that it was
        not given.
        """
        loop = self._model.loop
        if loop.optimizer is None:
            return
        parameters = list(self._model.module.parameters())
        with self._inside("optimizer()", None):
            optimizer = loop.optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self._fault(
                "optimizer",
                f"returned a {type(optimizer).__name__}: return a torch.optim.Optimizer",
            )
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if not held <= {*map(id, parameters)}:
            raise self._fault(
                "optimizer",
                "returned an optimizer of other parameters than those in its argument: "
                "create the optimizer from the argument",
            )
        with self._inside("scheduler()", None):
            scheduler = None if loop.scheduler is None else loop.scheduler(optimizer)
        if loop.scheduler is not None and not callable(getattr(scheduler, "step", None)):
            raise self._fault(
                "scheduler",
                f"returned a {type(scheduler).__name__}, which has no step(): return a "
                "scheduler of torch.optim.lr_scheduler",
            )

    def built_again(self, module: nn.Module) -> None:
        if not _equal(
            list(self._model.module.state_dict().values()), list(module.state_dict().values())
        ):
            self.notes.append(
                "build(): the same seed gave other weights, but each rank builds the model itself;"
                " draw weights from torch's default generator, which dpbench has seeded, and do not"
                " seed it again"
            )

    def two_devices(self) -> None:
        """Verify a step of the engine on two devices; a failure becomes a note.

        Without batches that repeat, gradients differ for no other reason, and nothing is verified.
        """
        if not self._repeats:
            self.seen["two devices"] = "not verified, because batch() does not repeat its batches"
            return
        two = replace(
            self._case,
            strategy=registry.of_role(Role.ENGINE),
            schedule=Schedule.REFERENCE,
            devices=2,
            batch_size=2 * ROWS + 1,
            placement="colocated" if self._case.device_kind == "cuda" else "spread",
        )
        plug = strategies.load(two.strategy)
        devices = open_devices(two.device_kind, 2, ids=two.device_ids, placement=two.placement)
        self.notes.extend(filter(None, [_written(two, devices)]))
        try:
            model = models.load(two.model, two.size, two.seed)
            verdict = verification.check(plug.start, two, model, devices, split=plug.split)
        except Exception as error:  # the user's module may raise any error
            reason = " ".join(failures.of_error(error).reason.split())
            self.notes.append(f"a step on two devices failed: {reason}")
            self.seen["two devices"] = Status.FAILED.value
            return
        self.seen["two devices"] = verdict.verified.value
        if verdict.verified is Verified.NO:
            self.notes.append(f"a step on two devices does not pass verification: {verdict}")
            return
        if self._draws:  # each chunk draws other numbers than the whole batch
            return
        even = replace(two, batch_size=2 * ROWS)
        tolerance = verification.tolerance_of(even, self._model.module)
        apart = verification.dependence(even, devices[0])
        if apart > tolerance:
            self.notes.append(
                "the gradient of a step on two devices differs from that on one device (by"
                f" {apart:.2g} of its norm), with dpbench and with torch alike: the loss is not a"
                " mean over samples, or samples depend on each other, as with BatchNorm"
            )
            return
        if model.owns_loss:  # each replica of dpbench and torch has a loss of its own, too
            return
        apart = verification.dependence(even, devices[0], averaged)
        if apart > tolerance:
            self.notes.append(
                "ddp and fsdp, whose ranks have a loss each, give another gradient than the whole"
                f" batch (it differs by {apart:.2g} of its norm), because the loss is not a mean"
                " over samples, as with reduction='sum', ignore_index or class weights; for them,"
                " bitwise means: equal to the mean of the ranks' gradients"
            )

    def _fault(self, function: str, told: str) -> ModelFault:
        return ModelFault(f"model {self._case.model}: {function}() {told}")

    @contextmanager
    def _inside(self, part: str, given: Any) -> Iterator[None]:
        """Add to errors of this context a note with `part`, and the tensors' types and shapes."""
        try:
            yield
        except Exception as error:
            tensors = "; ".join(
                f"{name} {_told(one)}" for name, one in tensors_by_name(given, "given").items()
            )
            error.add_note(f"raised in {part} of {self._case.model}{tensors and ': '}{tensors}")
            raise


def _written(case: Case, devices: Sequence[Device]) -> str:
    """Return what the forwards of replicas write that they share or lose: see `engine.writes`.

    Return "" if a forward fails, which the verified step reports.
    """
    model = models.load(case.model, case.size, case.seed)
    inputs, _ = model.batch(case.batch_size, case.seed)
    try:
        wrapped = DataParallel(model.module.to(devices[0].torch_device).train(), list(devices))
        with precision_of(case):
            call(wrapped, inputs)
    except Exception:  # the user's module may raise any error
        return ""
    return wrapped.note


def _moved(batch: tuple[Any, Any], device: torch.device) -> tuple[Any, Any]:
    moved: tuple[Any, Any] = mapped(batch, lambda tensor: tensor.to(device))
    return moved


def _told(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Return whether both have equal tensors in the same order; NaN equals NaN."""
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
        for a, b in zip(ours, theirs, strict=True)
    )
