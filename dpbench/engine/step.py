"""Step: the training step of torch.nn.DataParallel, in eight phases that follow each other.

Whoever has read this function and the verbs that it calls knows what DataParallel does in a step.
Everything in `dpbench.engine.fast` is this step with some of its work left out or moved.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from dpbench.engine.gather import gather
from dpbench.engine.parallel_apply import Spawn, Workers, parallel_apply
from dpbench.engine.reduce import Gradients, reduce
from dpbench.engine.replicate import Replicate, check_placement, replicate
from dpbench.engine.scatter import scatter
from dpbench.engine.training import Arguments, Training, place_target
from dpbench.records import Phase, marked


def step(
    training: Training,
    inputs: Arguments,
    target: Any,
    *,
    first: bool = True,
    last: bool = True,
    workers: Workers = Spawn(),  # noqa: B008  it has no state
    replicate: Replicate = replicate,
) -> torch.Tensor:
    """Train the module on one batch, and return the loss, detached, on the first device.

    Gradients are dropped before the `first` call of an update, and the optimizer runs in the
    `last`. `workers` and `replicate` may be others that keep threads and replicas between steps.
    """
    module, devices, mark = training.module, training.devices, training.mark
    root = devices[0]
    if first:
        with mark(Phase.OPTIMIZER, root.index):
            training.optimizer.zero_grad()

    # scatter: cut the batch as torch.chunk does (10 rows on 4 devices: 3, 3, 3, 1), unless the user
    # has set row weights; a short batch has fewer pieces, and the last devices then do nothing
    rows = training.rows_of(inputs)
    pieces = scatter(inputs, devices, chunk_sizes=rows, say=training.say, mark=mark)
    used = devices[: len(pieces)]

    # replicate: copy the weights from the first device to the others; autograd records the copies,
    # and calls `reducer` when the backward of all replicas has ended
    backward_marks = ExitStack()

    def reducer(gradients: Gradients) -> list[torch.Tensor]:
        backward_marks.close()
        return reduce(gradients, used, mark=mark)

    if len(devices) > 1:
        replicas = replicate(module, used, reducer=reducer, mark=mark)
    else:
        check_placement(module, root)
        replicas = [module]

    # forward: each device runs its replica on its piece, all at the same time, unless the replicas
    # share a container that forward writes: they then take turns
    arguments, keywords = zip(*pieces, strict=True)
    with training.watch.forwards(replicas) as turn:
        outputs = parallel_apply(
            replicas, arguments, keywords, used, workers=workers, turn=turn, mark=mark
        )

    # gather: join the outputs on the first device, which needs the memory for all of them
    output = gather(outputs, root, used, mark=mark) if len(devices) > 1 else outputs[0]

    # loss: the first device computes the loss of the whole batch, while the others are idle
    target = place_target(target, output, root, mark)
    with mark(Phase.LOSS, root.index):
        loss = training.loss(output, target)
        scaled = training.scaled(loss)

    # backward: autograd runs the replicas' backwards, those of different GPUs at the same time, in
    # one thread of its own per GPU; on a CPU it runs them one after the other, in this thread
    # reduce: it then calls `reducer`, which adds the gradients on the first device, and adds the
    # sums to the `.grad` of the module's parameters
    with backward_marks:
        backward_marks.enter_context(marked(mark, Phase.BACKWARD, (one.index for one in used)))
        scaled.backward()
    loss = loss.detach()
    # free memory before the optimizer runs
    del pieces, arguments, keywords, replicas, outputs, output, target, scaled

    # optimizer: the first device alone updates the weights; the next step copies them again
    if last:
        with mark(Phase.OPTIMIZER, root.index):
            training.update()
    return loss
