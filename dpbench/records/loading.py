"""Loading: the cases of `dpbench loaders`, each of which is a DataLoader with some number of
workers.

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
FIRST_BATCH, NEXT_EPOCH = "first_batch_s", "next_epoch_s"
"""The keys of a trial's setup for two waits: for the first batch, which includes the start of the
workers, and for the first batch of the next epoch.
"""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a DataLoader is measured, without its dataset, its batch size and its number of workers.

    `examples` is the least number of examples whose loading is timed. `prefetch_factor` and
    `persistent_workers` have no effect without workers. `step_s` are the seconds of the step to
    compare with, 0 without such a step.
    """

    examples: int = 1024
    pin_memory: bool = False
    prefetch_factor: int = 2
    persistent_workers: bool = False
    step_s: float = 0.0

    def case(self, dataset: str, workers: int, batch_size: int) -> Case:
        """Return the case that measures a DataLoader of `dataset`, which is `file.py:name` or
        `package.module:name`.
        """
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
        """Return the number of batches in one turn, in which each worker delivers one batch."""
        return max(1, workers)

    def ahead(self, workers: int) -> int:
        """Return the number of batches that workers load ahead."""
        return workers * self.prefetch_factor

    def fill(self, workers: int) -> int:
        """Return the number of batches before the steady part, from which the rate is computed.

        They are the first turn and the batches loaded ahead in the meantime. The first turn ends
        when the last worker has started. Until then, the other workers have loaded batches ahead,
        which arrive at once.
        """
        return self.turn(workers) + self.ahead(workers)

    def steady(self, workers: int, batch_size: int) -> int:
        """Return the number of batches of the steady part: whole turns with at least `examples`
        examples.
        """
        turn = self.turn(workers)
        return turn * -(-self.examples // (batch_size * turn))


def workers_default(cores: int) -> tuple[int, ...]:
    """Return 0 and the powers of two up to the number of cores, at least up to 4."""
    return 0, *(2**power for power in range(max(cores, 4).bit_length()))
