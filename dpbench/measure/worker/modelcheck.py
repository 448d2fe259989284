"""The check of a model before a run: an error here would be one in every trial."""

from __future__ import annotations

import torch

from dpbench import models
from dpbench.hardware.devices import open_devices
from dpbench.records import Case, Trial, no_mark
from dpbench.strategies import load

ROWS = 2
"""Of the batch that the step takes: BatchNorm refuses a single one."""


def check(case: Case) -> Trial:
    """Build the case's model, draw its batch, and take one step of a few rows on its one device.

    Returns a trial without steps. Raises any error of the model.
    """
    torch.set_num_threads(1)
    model = models.load(case.model, case.size, case.seed)
    model.batch(case.batch_size, case.seed)
    devices = open_devices(case.device_kind, 1, ids=case.device_ids)
    with load(case.strategy).start(case, model, devices, no_mark) as step:
        step(*model.batch(ROWS, case.seed))
    return Trial(case=case)
