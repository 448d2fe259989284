"""Plant faults that only GPUs can show, besides calls that are left out; find them on fake GPUs.

    python -m tests.fakegpu.planted [NAME...]

`tests/faults.py` plants them and runs their tests. `tests/gpu/test_deferred_needed.py` leaves out
each call that orders streams or keeps memory: run it in deferred mode; pytest's -k chooses calls.
"""

from __future__ import annotations

import sys

from tests.faults import Fault, main

DEFERRED = ("FAKECUDA_DEFERRED=1", "FAKECUDA_SEED=1")
CLOCK_ALONE = ("FAKECUDA_NUMERICS=0", "FAKECUDA_DATA=0")
CALLER = "tests/gpu/test_deferred.py::test_a_step_follows_the_callers_streams"

FAULTS = (
    Fault(
        "guard-stream",
        "a worker's thread uses the stream of the thread that started the work",
        "return torch.cuda.stream(self.stream)",
        "return torch.cuda.device(self.ordinal)",
        (f"{CALLER}[reference-mlp-[0, 0, 0]]",),
        settings=DEFERRED,
    ),
    Fault(
        "reduce-streams",
        "gradients are added on the streams to which their memory belongs",
        "[device.guard() for device in reversed(devices)]",
        "[]",
        ("tests/gpu/test_deferred_needed.py::test_a_run_is_right_in_every_order",),
        settings=DEFERRED,
    ),
    Fault(
        "event-stream",
        "a mark's event is recorded on the stream of its replica",
        "event.record(self.stream)",
        "event.record()",
        ("tests/gpu/test_deferred.py::test_a_mark_times_the_work_of_its_replica",),
        settings=DEFERRED,
    ),
    Fault(
        "background-copies",
        "inputs are copied from the host in a background stream",
        "torch.cuda.stream(self._background)",
        "torch.cuda.stream(self.stream)",
        ("tests/gpu/test_deferred.py::test_a_copy_from_the_host_is_made_in_a_background_stream",),
        settings=DEFERRED,
    ),
    Fault(
        "background-waits",
        "a copy from the host does not wait for the work of the replica",
        "self._background = self._background or torch.cuda.Stream(self.ordinal)",
        "self._background = self._background or torch.cuda.Stream(self.ordinal)\n"
        "self._background.wait_stream(self.stream)",
        (
            "tests/gpu/test_one_gpu.py::test_a_copy_from_the_host_does_not_wait_for_the_replicas_work",
        ),
        settings=CLOCK_ALONE,
    ),
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FAULTS))
