"""Plant faults that only streams, events and NCCL can show; find them on fake GPUs in deferred mode.

    python -m tests.fakegpu.planted [NAME...]

See `tests/faults.py`, which plants them and runs their tests. The environment must have fake GPUs.
"""

from __future__ import annotations

import os
import sys

from tests.faults import Fault, main

DEFERRED = {"FAKECUDA_DEFERRED": "1", "FAKECUDA_SEED": "1"}

STEP = "tests/test_deferred.py::test_a_schedule_trains_as_the_host_does"
OWN = "tests/test_deferred.py::test_a_step_follows_the_callers_streams"
WRAPPER = "tests/test_deferred.py::test_a_wrapper_gives_the_hosts_outputs_and_gradients"
VERB = "tests/test_deferred.py::test_what_a_verb_returns_is_ready_for_the_callers_stream"
MARK = "tests/test_deferred.py::test_a_mark_times_the_work_of_its_replica"

ALL = ("tests/test_deferred.py",)
FAULTS = (
    Fault(
        "borrow",
        "memory that another stream reads is not reused before it has read",
        "tensor.record_stream(self.stream)",
        "None",
        ALL,
    ),
    Fault(
        "wait",
        "a replica waits for the work of another whose results it uses",
        "self.stream.wait_stream(stream)",
        "None",
        ALL,
    ),
    Fault(
        "follow",
        "a copy waits for the work that makes its source",
        "self.stream.wait_stream(source)",
        "None",
        ALL,
    ),
    Fault(
        "nccl-follow",
        "a collective waits for the work that makes its inputs",
        "self._streams[i].wait_stream(torch.cuda.current_stream(self._ordinals[i]))",
        "None",
        ALL,
    ),
    Fault(
        "nccl-lead",
        "what uses a collective's results waits for it",
        "torch.cuda.current_stream(self._ordinals[i]).wait_stream(self._streams[i])",
        "None",
        ALL,
    ),
    Fault(
        "background-wait",
        "a replica waits for the copy of its inputs in the background stream",
        "self.stream.wait_stream(self._background)",
        "None",
        ALL,
    ),
    Fault(
        "background-borrow",
        "memory of a copy in the background stream is kept while the replica reads it",
        "self.borrow([copy])",
        "None",
        ALL,
    ),
    Fault(
        "hold",
        "all threads of a step use the caller's streams",
        "before, self._held = self._held, self.stream",
        "before = self._held",
        ALL,
    ),
    Fault(
        "guard",
        "a worker's thread uses the stream of the thread that started the work",
        "stream = torch.cuda.stream(self.stream)",
        "stream = torch.cuda.device(self.ordinal)",
        ALL,
    ),
    Fault(
        "reduce-add-wait",
        "torch's reduction waits on every GPU for the gradients that autograd announced on one",
        "device.wait(cast(Device, self))",
        "None",
        ALL,
    ),
    Fault(
        "gather-wait",
        "the gathered output waits for every replica",
        "for device in devices:\n    target.wait(device)",
        "pass",
        ALL,
        where="engine.gather",
    ),
    Fault(
        "gather-borrow",
        "outputs are kept until they are gathered",
        "target.borrow(tensors)",
        "None",
        ALL,
    ),
    Fault(
        "buffers-read",
        "replica 0 writes its buffers after the others have copied them",
        "root.wait(device)",
        "None",
        ALL,
        where="engine.persistent",
    ),
    Fault(
        "refresh-wait",
        "a replica copies weights after replica 0 has updated them",
        "device.wait(self._devices[0])",
        "None",
        ALL,
    ),
    Fault(
        "copy-wait",
        "a device copies weights after their owner has updated them",
        "device.wait(self._devices[j])",
        "None",
        ALL,
    ),
    Fault(
        "collect-wait",
        "gradients are added after the replicas have computed them",
        "device.wait(other)",
        "None",
        ALL,
        where="engine.update",
    ),
    Fault(
        "collect-borrow",
        "gradients are kept until they have been added",
        "device.borrow([g for g in gradients if g is not None])",
        "None",
        ALL,
    ),
    Fault(
        "reduce-borrow",
        "gradients of the verb are kept until they have been added",
        "root.borrow(one)",
        "None",
        ALL,
    ),
    Fault(
        "staged-order",
        "a collective starts after the copy of the gradients into its buffers",
        "self._collectives.follow(i)",
        "None",
        ALL,
        where="engine.collectives.Exchange.stage",
    ),
    Fault(
        "spread-order",
        "a collective of weights starts after every device has updated its part",
        "for i in range(len(self._devices)):\n    self._collectives.follow(i)",
        "pass",
        ALL,
        where="engine.collectives.Exchange._together",
    ),
    Fault(
        "locked-groups",
        "two threads do not queue NCCL groups at the same time",
        "with self._lock, torch.no_grad():\n    for bucket in buckets:\n        self._reduce(bucket)",
        "with torch.no_grad():\n    for bucket in buckets:\n        self._reduce(bucket)",
        ALL,
    ),
    Fault(
        "event-stream",
        "a mark's event is recorded on the stream of its replica",
        "event.record(self.stream)",
        "event.record()",
        ALL,
    ),
)

if __name__ == "__main__":
    os.environ |= DEFERRED
    sys.exit(main(sys.argv[1:], FAULTS))
