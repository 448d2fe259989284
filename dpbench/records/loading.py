"""Loading: the cases of `dpbench loaders`, each of which is a DataLoader with some workers.

The model of such a case is the user's dataset, and a step is the wait for a batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from dpbench.records.case import Case
from dpbench.records.registry import Parallelism, Role, Traits

STRATEGY = "loading"
TRAITS = Traits(parallelism=Parallelism.NONE, role=Role.LOADER, strategy=STRATEGY)
FIRST_BATCH = "first_batch_s"
NEXT_EPOCH = "next_epoch_s"
"""The keys of a trial's setup for the waits for the first batch and for that of the next epoch.

The latter begins with the last batch before it: without `persistent_workers`, the workers of the
one epoch end in it, and those of the next start.
"""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a DataLoader is measured, without its dataset, its batch size and its number of workers.

    `examples` is the least number of timed examples. `prefetch_factor` and `persistent_workers`
    have no effect without workers. `step_s` are the seconds of the step to compare with, 0 without
    one.
    """

    examples: int = 1024
    pin_memory: bool = False
    prefetch_factor: int = 2
    persistent_workers: bool = False
    step_s: float = 0.0

    def case(self, dataset: str, workers: int, batch_size: int) -> Case:
        """Return the case of a DataLoader of `dataset`: `file.py:name` or `package.module:name`."""
        options = tuple((name, json.dumps(value)) for name, value in sorted(asdict(self).items()))
        return Case(
            model=dataset,
            strategy=STRATEGY,
            batch_size=batch_size,
            loader=workers,
            options=options,
            declared=TRAITS,
        )

    @classmethod
    def of(cls, case: Case) -> Self:
        """Return the settings in a case that `case` made."""
        return cls(**{name: json.loads(value) for name, value in case.options})

    def turn(self, workers: int) -> int:
        """Return the number of batches in a turn, in which each worker delivers one."""
        return max(1, workers)

    def ahead(self, workers: int) -> int:
        """Return the number of batches that workers load ahead."""
        return workers * self.prefetch_factor

    def fill(self, workers: int) -> int:
        """Return the number of batches before the steady part, from which the rate is computed.

        They are the first turn, which ends when the last worker has started, and the batches that
        were loaded ahead until then, which arrive at once.
        """
        return self.turn(workers) + self.ahead(workers)

    def steady(self, workers: int, batch_size: int) -> int:
        """Return the number of batches of the steady part: whole turns with `examples` or more."""
        turn = self.turn(workers)
        return turn * -(-self.examples // (batch_size * turn))


def workers_default(cores: int) -> tuple[int, ...]:
    """Return 0 and the powers of two up to the number of cores, at least up to 4."""
    return 0, *(2**power for power in range(max(cores, 4).bit_length()))
