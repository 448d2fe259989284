"""Plant faults of streams, events and NCCL, which only GPUs in deferred mode can show.

    python -m tests.fakegpu.planted [NAME...]

See `tests/faults.py`, which plants them and runs their tests. The environment must have fake GPUs.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from tests.faults import Fault, main

DEFERRED = {"FAKECUDA_DEFERRED": "1", "FAKECUDA_SEED": "1"}


def _test(name: str, parameters: str, ids: str) -> str:
    """Return a test with these parameters on GPUs of these ids."""
    return f"{FILE}::{name}[{parameters}-{ids}]"


FILE = "tests/test_deferred.py"
STEP = partial(_test, "test_a_schedule_trains_as_the_host_does")
OWN = partial(_test, "test_a_step_follows_the_callers_streams")
WRAPPER = partial(_test, "test_a_wrapper_gives_the_hosts_outputs_and_gradients")
PIECES = f"{FILE}::test_pieces_are_ready_for_the_replicas_streams"
KEPT = f"{FILE}::test_memory_that_a_verb_reads_on_another_stream_is_not_reused"
MARK = f"{FILE}::test_a_mark_times_the_work_of_its_replica"
APART, SHARED = "[0, 1, 2, 3]", "[0, 0, 0]"

FAULTS = (
    Fault(
        "borrow",
        "memory that another stream reads is not reused before it has read",
        "part.record_stream(self.stream)",
        "None",
        (
            STEP("mlp-cached", SHARED),
            KEPT,
        ),
    ),
    Fault(
        "wait",
        "a replica waits for the work of another whose results it uses",
        "self.stream.wait_stream(stream)",
        "None",
        (STEP("mlp-reference", SHARED),),
    ),
    Fault(
        "follow",
        "a copy waits for the work that makes its source",
        "self.stream.wait_stream(source)",
        "None",
        (STEP("mlp-reference", SHARED),),
    ),
    Fault(
        "nccl-follow",
        "a collective waits for the work that makes its inputs",
        "self._streams[i].wait_stream(torch.cuda.current_stream(self._ordinals[i]))",
        "None",
        (STEP("mlp-zero1", APART),),
    ),
    Fault(
        "nccl-lead",
        "what uses a collective's results waits for it",
        "torch.cuda.current_stream(self._ordinals[i]).wait_stream(self._streams[i])",
        "None",
        (STEP("mlp-zero1", APART),),
    ),
    Fault(
        "background-wait",
        "a replica waits for the copy of its inputs in the background stream",
        "self.stream.wait_stream(self._background)",
        "None",
        (PIECES,),
    ),
    Fault(
        "background-borrow",
        "memory of a copy in the background stream is kept while the replica reads it",
        "self.borrow([copy])",
        "None",
        (
            STEP("mlp-reference", APART),
            STEP("mlp-zero1", SHARED),
        ),
    ),
    Fault(
        "hold",
        "all threads of a step use the caller's streams",
        "before, self._held = self._held, self.stream",
        "before = self._held",
        (
            STEP("mlp-persistent", SHARED),
            OWN("local_backward-conv", SHARED),
        ),
    ),
    Fault(
        "guard",
        "a worker's thread uses the stream of the thread that started the work",
        "return torch.cuda.stream(self.stream)",
        "return torch.cuda.device(self.ordinal)",
        (OWN("reference-mlp", SHARED),),
    ),
    Fault(
        "reduce-add-wait",
        "torch's reduction waits on every GPU for the gradients that autograd announced on one",
        "device.wait(cast(Device, self))",
        "None",
        (
            WRAPPER("reference-conv-own_streams", APART),
            WRAPPER("cached-conv-own_streams", APART),
        ),
    ),
    Fault(
        "gather-wait",
        "the gathered output waits for every replica",
        "for device in devices:\n    target.wait(device)",
        "pass",
        (
            KEPT,
            STEP("mlp-reference", SHARED),
        ),
        where="engine.gather",
    ),
    Fault(
        "gather-borrow",
        "outputs are kept until they are gathered",
        "target.borrow(tensors)",
        "None",
        (KEPT,),
    ),
    Fault(
        "buffers-read",
        "replica 0 writes its buffers after the others have copied them",
        "root.wait(device)",
        "None",
        (
            STEP("conv-persistent", SHARED),
            STEP("conv-overlap", SHARED),
        ),
        where="engine.persistent",
    ),
    Fault(
        "refresh-wait",
        "a replica copies weights after replica 0 has updated them",
        "device.wait(self._devices[0])",
        "None",
        (
            STEP("conv-persistent", SHARED),
            STEP("conv-overlap", SHARED),
        ),
        where="engine.persistent",
    ),
    Fault(
        "copy-wait",
        "a device copies weights after their owner has updated them",
        "device.wait(self._devices[j])",
        "None",
        (
            STEP("conv-zero1", SHARED),
            OWN("zero1-tied", SHARED),
        ),
    ),
    Fault(
        "collect-wait",
        "gradients are added after the replicas have computed them",
        "device.wait(other)",
        "None",
        (
            STEP("conv-overlap", SHARED),
            STEP("conv-zero1", SHARED),
        ),
        where="engine.update",
    ),
    Fault(
        "collect-borrow",
        "gradients are kept until they have been added",
        "device.borrow([g for g in gradients if g is not None])",
        "None",
        (
            OWN("allreduce-tied", SHARED),
            OWN("flat_optimizer-tied", SHARED),
        ),
    ),
    Fault(
        "reduce-borrow",
        "gradients of the verb are kept until they have been added",
        "root.borrow(one)",
        "None",
        (KEPT,),
    ),
    Fault(
        "staged-order",
        "a collective starts after the copy of the gradients into its buffers",
        "self._collectives.follow(i)",
        "None",
        (
            STEP("mlp-persistent", APART),
            STEP("mlp-zero1", APART),
        ),
        where="engine.collectives.Exchange.stage",
    ),
    Fault(
        "spread-order",
        "a collective of weights starts after every device has updated its part",
        "for i in range(len(self._devices)):\n    self._collectives.follow(i)",
        "pass",
        (
            STEP("mlp-zero1", APART),
            OWN("zero1-mlp", APART),
        ),
        where="engine.collectives.Exchange._together",
    ),
    Fault(
        "event-stream",
        "a mark's event is recorded on the stream of its replica",
        "event.record(self.stream)",
        "event.record()",
        (MARK,),
    ),
)

if __name__ == "__main__":
    os.environ |= DEFERRED
    sys.exit(main(sys.argv[1:], FAULTS))
