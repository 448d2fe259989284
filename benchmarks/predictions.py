"""Seconds to predict one case, 1,000 cases, and one case on 4,096 GPUs.

Predictions do not load torch.
"""

from __future__ import annotations

from typing import Any

from . import module


def _cases(
    strategies: tuple[str, ...], devices: tuple[int, ...], batches: tuple[int, ...]
) -> list[Any]:
    found: list[Any] = module("predict.cases").sweep(
        ["resnet50", "bert-base"],
        strategies=strategies,
        devices=devices,
        batch_per_device=batches,
        schedules=("reference", "sharded"),
    )
    return found


class Predictions:
    """The benchmarks of predictions.

    The time of a prediction includes the computation of its interval.
    """

    timeout = 60.0

    def setup(self) -> None:
        predictor_of, load = module("predict.cases").Predictor, module("predict.machine").load
        self.box = predictor_of(load("rtx-3090-x8"))
        self.cluster = predictor_of(load("dgx-a100-x512"))
        self.one = _cases(("torch_dp",), (8,), (32,))[0]
        self.many = _cases(("ddp",), (4096,), (32,))[0]
        batches = tuple(range(4, 4 + 2 * 32, 2))
        self.thousand = _cases(("torch_dp", "dp", "ddp"), (2, 4, 6, 8), batches)[:1000]
        assert len(self.thousand) == 1000
        for predictor in (self.box, self.cluster):
            predictor.predict(self.one)

    def time_one_case(self) -> None:
        self.box.predict(self.one)

    def time_4096_gpus(self) -> None:
        self.cluster.predict(self.many)

    def time_1000_cases(self) -> None:
        for case in self.thousand:
            self.box.predict(case)
