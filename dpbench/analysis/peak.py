"""Peak: the seconds that GPUs need for the operations of a step at the peaks of their data sheet.

Over the step time, they give the share of peak, which others call MFU. The operations are those of
the model's products, as torch counts them: not those of the optimizer, nor of a strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpbench.records import Source, Trial
from dpbench.records.data_sheets import DataSheet
from dpbench.records.grouping import summed

FLOAT32 = {"ieee": "fp32", "tf32": "tf32"}
"""The names in data sheets of the formats of float32 products (`records.facts.Products`)."""
HALF = {"bfloat16": "bf16", "float16": "fp16"}
"""The names in data sheets of torch's types of 16 bits."""


@dataclass(frozen=True, kw_only=True)
class AtPeak:
    """A step at the peaks of its GPUs: its seconds, its operations, and the GPUs' data sheet.

    `formats` are the formats of the operations, as the data sheet names them, and `gpus` is the
    number of GPUs.
    """

    seconds: float
    operations: float
    formats: tuple[str, ...]
    gpus: int
    sheet: DataSheet

    @property
    def flop_per_s(self) -> float:
        """Return the peak of one GPU with the formats of the step's parts, in FLOP/s."""
        return self.operations / self.seconds / self.gpus

    @property
    def source(self) -> str:
        """Return the peaks of one GPU with their source as text."""
        peaks = " and ".join(
            f"{self.sheet.flop_per_s[name] / 1e12:g} TFLOP/s in {name}" for name in self.formats
        )
        return f"{self.sheet.gpu} has {peaks} ({self.sheet.source})"


def at_peak(trial: Trial) -> AtPeak | None:
    """Return a trial's step at the peaks of its GPUs.

    None if the operations, the GPUs, a format or its peak is unknown, for fake GPUs, and for hosts
    that are one machine, which may share GPUs.
    """
    case, facts = trial.case, trial.facts
    counted, sheet, float32 = facts.operations, facts.data_sheet, facts.float32
    if counted is None or sheet is None or float32 is None:
        return None
    if trial.source is not Source.MEASURED or trial.on_fake_gpus or facts.hosts_share:
        return None
    every = counted.forward + (counted.backward if case.trains else 0.0)
    convolutions = counted.forward_convolutions
    convolutions += counted.backward_convolutions if case.trains else 0.0
    parts = ((float32.convolution, convolutions), (float32.matmul, every - convolutions))
    used = summed(
        (_format(case.precision, counted.dtype, product), of_sample * case.batch_size)
        for product, of_sample in parts
        if of_sample > 0
    )
    if not case.batch_size or not used.keys() <= sheet.flop_per_s.keys():
        return None
    on_one_s = sum(amount / sheet.flop_per_s[name] for name, amount in used.items())
    return AtPeak(
        seconds=on_one_s / case.gpu_count,
        operations=sum(used.values()),
        formats=tuple(used),
        gpus=case.gpu_count,
        sheet=sheet,
    )


def _format(precision: str, dtype: str, product: str | None) -> str:
    """Return the data sheet's name of the format of products; "" if it is unknown.

    `dtype` is torch's type of their factors, and `product` the format of float32 products. Autocast
    rounds float32, and either type of 16 bits, to its own.
    """
    if precision in HALF.values() and dtype in ("float32", *HALF):
        return precision
    known = FLOAT32.get(product or "") if dtype == "float32" else HALF.get(dtype)
    return known or ""
