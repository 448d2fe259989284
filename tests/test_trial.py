"""The status and the reason of an error."""

from __future__ import annotations

import pytest
import torch

from dpbench.engine import parallel_apply
from dpbench.measure.failures import of_error
from dpbench.records import Status


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (KeyError("a"), Status.FAILED, "KeyError: 'a'; in replica 1 on device cpu:1 [test_trial.py:"),
        (
            torch.OutOfMemoryError("GPU 0 has a total capacity of"),
            Status.OOM,
            "out of memory on replica 1 on device cpu:1; use a smaller batch, or more devices; OutOfMemoryError: GPU 0",
        ),
    ],
    ids=repr,
)
def test_an_error_in_a_replica_is_told_as_it_was_raised(error: Exception, status: Status, told: str) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        parallel_apply([lambda: None, fail], [(), ()], None, ["cpu", "cpu"])
    failure = of_error(caught.value)
    assert failure.status == status
    assert failure.reason.startswith(told)
    assert "\n" not in failure.reason
