"""The changes a training loop may make between two steps: functions of a side and a number `k`."""

from __future__ import annotations

import copy
import functools
import io
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from tests.engine.law.sides import Loop

Change = Callable[[Loop, int], Any]


def pick(loop: Loop, k: int) -> nn.Parameter:
    """Return one trainable parameter."""
    trainable = [p for p in loop.module.parameters() if p.requires_grad]
    return trainable[k % len(trainable)]


# ---------------------------------------------------------------- the optimizer


def change_rates(loop: Loop, k: int) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= (0.5, 2.0, 0.9)[k % 3]
        group["weight_decay"] = (0.0, 0.01)[k % 2]
        if "momentum" in group:
            group["momentum"] = (0.9, 0.5)[k % 2]


def add_group(loop: Loop, k: int) -> None:
    if loop.held is not None and not loop.extra:
        loop.extra = True
        loop.optimizer.add_param_group({"params": [loop.held], "lr": 1e-3})


def clear_state(loop: Loop, k: int) -> None:
    loop.optimizer.state.clear()


def write_state(loop: Loop, k: int) -> None:
    for p in loop.module.parameters():
        for name, value in loop.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor) and name != "step":
                value.mul_((0.5, 0.75)[k % 2])


def replace_state(loop: Loop, k: int) -> None:
    p = pick(loop, k)
    if state := loop.optimizer.state.get(p):
        loop.optimizer.state[p] = {
            name: value * 0.5 if isinstance(value, Tensor) and name != "step" else value
            for name, value in state.items()
        }


def read_state(loop: Loop, k: int) -> dict[str, Any]:
    names = loop.names()
    return {
        names[p]: copy.deepcopy(dict(state)) for p, state in loop.optimizer.state.items() if state
    }


def hook_the_optimizer(loop: Loop, k: int) -> None:
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        loop.log.append(("optimizer", "before", torch.zeros(())))
        for p in loop.module.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        loop.log.append(("optimizer", "after", torch.zeros(())))

    register = (
        loop.optimizer.register_step_pre_hook if k % 2 else loop.optimizer.register_step_post_hook
    )
    loop.optimizer_hooks.append(register(before if k % 2 else after))


# ---------------------------------------------------------------- parameters


def freeze_layer(loop: Loop, k: int) -> None:
    layers = [child for name, child in loop.module.named_children() if name != "last"]
    layers[k % len(layers)].requires_grad_(False)


def freeze_all_but_one(loop: Loop, k: int) -> None:
    loop.module.requires_grad_(False)
    loop.module.last.weight.requires_grad_(True)


def thaw(loop: Loop, k: int) -> None:
    loop.module.requires_grad_(True)


def freeze_one(loop: Loop, k: int) -> None:
    p = pick(loop, k)
    if p is not loop.module.last.weight:
        p.requires_grad_(False)


def write_under_no_grad(loop: Loop, k: int) -> None:
    with torch.no_grad():
        pick(loop, k).mul_(0.9)


def assign_data(loop: Loop, k: int) -> None:
    p = pick(loop, k)
    p.data = p.data * 0.9


def reads_memory_order(loop: Loop) -> bool:
    """Return whether fused kernels step the weights: on the CPU they ignore gradients' strides."""
    return any(group.get("fused") for group in loop.optimizer.param_groups)


def assign_transposed(loop: Loop, k: int) -> None:
    if reads_memory_order(loop):
        return
    p = loop.module.first.weight
    p.data = p.data.t()


def assign_resized(loop: Loop, k: int) -> None:
    if "nodes" in loop.copies:  # they keep the shape of their parameter, in torch too
        return
    if (table := getattr(loop.module, "table", None)) and len(table.weight) < 20:
        table.weight.data, table.weight.grad = (
            torch.cat([table.weight.data, table.weight.data[:1] * 2]),
            None,
        )
        loop.optimizer.state.pop(table.weight, None)


def clamp_data(loop: Loop, k: int) -> None:
    loop.touch(pick(loop, k).data.clamp_(-0.3, 0.3))


def write_numpy(loop: Loop, k: int) -> None:
    pick(loop, k).detach().numpy()[...] *= 0.9
    loop.touch()


def hook_parameter(loop: Loop, k: int) -> None:
    loop.hooked = True
    p = pick(loop, k)
    name = loop.names()[p]

    def changed(gradient: Tensor) -> Tensor | None:
        loop.log.append((name, "hook", gradient.detach().clone()))
        return gradient * 0.5 if k % 2 else None

    loop.handles.append(p.register_hook(changed))


def hook_accumulation(loop: Loop, k: int) -> None:
    loop.hooked = True
    p = pick(loop, k)
    name = loop.names()[p]

    def fired(parameter: Tensor) -> None:
        assert parameter.grad is not None
        loop.log.append((name, "accumulated", parameter.grad.detach().clone()))
        if k % 2:
            parameter.grad.mul_(0.5)

    loop.handles.append(p.register_post_accumulate_grad_hook(fired))


def hook_node(loop: Loop, k: int) -> None:
    loop.hooked = True
    p = pick(loop, k)
    name = loop.names()[p]
    node = get_gradient_edge(p).node
    loop.copies.setdefault("nodes", []).append(node)  # a parameter does not keep its node

    def changed(gradients: Any) -> Any:
        loop.log.append((name, "node", gradients[0].detach().clone()))
        return tuple(gradient * 0.5 for gradient in gradients) if k % 2 else gradients

    loop.handles.append(node.register_prehook(changed))


def hook_all(loop: Loop, k: int) -> None:
    loop.hooked = True
    names = loop.names()
    wanted = [p for p in names if p.requires_grad]

    def seen(gradients: Any) -> None:
        for p, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                loop.log.append((names[p], "all", gradient.detach().clone()))

    loop.copies.setdefault("nodes", []).append(wanted)  # the handle keeps the parameters' nodes
    loop.handles.append(register_multi_grad_hook(wanted, seen))


def transpose_gradients(loop: Loop, k: int) -> None:
    if reads_memory_order(loop):
        return
    for p in loop.module.parameters():
        if p.grad is not None and p.dim() == 2:
            p.grad = p.grad.t().contiguous().t()


def step_other_optimizer(loop: Loop, k: int) -> None:
    """Let another optimizer's fused kernels step the weights; torch does not count the writes."""
    wanted = [p for p in loop.module.parameters() if p.requires_grad]
    kept = [p.grad for p in wanted]
    for p in wanted:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(wanted, lr=0.01 * (1 + k), fused=True).step()
    for p, gradient in zip(wanted, kept, strict=True):
        p.grad = gradient
    loop.touch()


def wrap_step(loop: Loop, k: int) -> None:
    """Replace `step` by one that halves the gradients, before or after a scheduler wraps it."""
    if "step" in vars(loop.optimizer):
        return
    if k % 2:
        torch.optim.lr_scheduler.ConstantLR(loop.optimizer, factor=1.0)
    step = loop.optimizer.step

    @functools.wraps(step)
    def halved(_: Any, *args: Any) -> Any:
        loop.log.append(("optimizer", "step", torch.zeros(())))
        for p in loop.module.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        return step(*args)

    loop.wrapped = loop.optimizer
    loop.optimizer.step = types.MethodType(halved, loop.optimizer)  # type: ignore[method-assign]
    if not k % 2:
        torch.optim.lr_scheduler.ConstantLR(loop.optimizer, factor=1.0)


# ---------------------------------------------------------------- the module and the criterion


def hook_module(loop: Loop, k: int) -> None:
    def halved(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * 0.5

    loop.handles.append(loop.module.last.register_forward_hook(halved))


def remove_hooks(loop: Loop, k: int) -> None:
    while loop.handles:
        loop.handles.pop().remove()
    loop.hooked = False


def evaluate(loop: Loop, k: int) -> Tensor:
    was, _ = loop.module.training, loop.module.eval()
    with torch.no_grad():
        out: Tensor = loop.module(
            torch.ones(2, 4, dtype=loop.module.last.weight.dtype), torch.zeros(2)
        )
    loop.module.train(was)
    return out


def set_mode(loop: Loop, k: int) -> None:
    loop.module.train(k % 3 > 0)


def set_attributes(loop: Loop, k: int) -> None:
    loop.module.scale = 1.0 + k % 3
    if hasattr(loop.module, "drop"):
        loop.module.drop.p = float(k % 2)
    if hasattr(loop.module, "writes"):
        loop.module.writes = ("never", "sometimes", "always")[k % 3]


def edit_criterion(loop: Loop, k: int) -> None:
    criterion = loop.criterion
    if isinstance(criterion, nn.CrossEntropyLoss):
        criterion.label_smoothing = (0.0, 0.1, 0.2)[k % 3]
        criterion.ignore_index = (-100, 1)[k % 2]
        dtype = loop.module.last.weight.dtype
        criterion.weight = None if k % 2 else torch.tensor([1.0, 2.0, 0.5], dtype=dtype)
    if isinstance(criterion, nn.SmoothL1Loss):
        criterion.beta = (1.0, 0.5, 0.1)[k % 3]
    if hasattr(criterion, "strength"):
        criterion.strength = (1e-2, 1e-3)[k % 2]


def toggle_reduction(loop: Loop, k: int) -> None:
    if hasattr(loop.criterion, "reduction"):
        loop.criterion.reduction = "sum" if loop.criterion.reduction == "mean" else "mean"


# ---------------------------------------------------------------- checkpoints


def save(loop: Loop, k: int) -> None:
    """Keep a checkpoint, as a file would."""
    file = io.BytesIO()
    torch.save(loop.state_dict(), file)
    loop.copies["state"], loop.copies["extra"] = file.getvalue(), loop.extra


def restore(loop: Loop, k: int) -> None:
    """Load the checkpoint, or its part for the module or the optimizer."""
    if "state" not in loop.copies or loop.copies["extra"] != loop.extra:
        return
    state = torch.load(io.BytesIO(loop.copies["state"]))
    if any(
        value.shape != state["module"][name].shape
        for name, value in loop.module.state_dict().items()
    ):
        return
    if k % 3 == 0:
        loop.reload(state)
    elif k % 3 == 1:
        loop.module.load_state_dict(state["module"])
    else:
        loop.optimizer.load_state_dict(state["optimizer"])


def sync(loop: Loop, k: int) -> None:
    loop.sync()


OF_OPTIMIZERS: tuple[Change, ...] = (
    change_rates,
    add_group,
    clear_state,
    write_state,
    replace_state,
    read_state,
    hook_the_optimizer,
    assign_transposed,
    assign_resized,
    transpose_gradients,
    wrap_step,
)
"""The changes that need the groups or the state of a torch.optim.Optimizer."""

CHANGES: list[Change] = [
    *OF_OPTIMIZERS,
    freeze_layer,
    freeze_all_but_one,
    thaw,
    freeze_one,
    write_under_no_grad,
    assign_data,
    clamp_data,
    write_numpy,
    hook_parameter,
    hook_accumulation,
    hook_module,
    remove_hooks,
    evaluate,
    set_mode,
    set_attributes,
    edit_criterion,
    toggle_reduction,
    save,
    sync,
    hook_node,
    hook_all,
    step_other_optimizer,
]
