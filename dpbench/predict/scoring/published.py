"""Published measurements: match each row of a table with a baseline on one device, or exclude it with a reason.

The columns are id, model, params_M, framework, strategy, gpu, n_gpu, interconnect, precision, batch_per_gpu,
batch_global, metric, value, timed, optimizer, repeats_of and notes. The group of a row is its id up to the last "-".
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import msgspec

from dpbench.predict import counts

TIMES = ("step_ms", "step_s", "samples_per_s", "epoch_s")
"""The metrics from which the duration of a step follows."""
DISTRUSTED = ("SUSPECT", "LOW TRUST")
NAMED = {
    "dp": "dp", "torch_dp": "dp", "dataparallel": "dp", "data_parallel": "dp", "nn.dataparallel": "dp",
    "nn_dataparallel": "dp", "pytorch_dp": "dp", "torch.nn.dataparallel": "dp",
    "pytorch_ddp": "ddp", "torch_ddp": "ddp",
    "ddp": "ddp", "distributeddataparallel": "ddp", "horovod": "horovod", "mirrored": "mirrored",
    "replicated_allreduce": "replicated", "replicated_nccl": "replicated", "replicated": "replicated",
    "parameter_server(cpu)": "server_cpu", "parameter_server": "server_gpu", "parameter_server(gpu)": "server_gpu",
}  # fmt: skip
"""For each name of a strategy in published tables, the strategy that is predicted."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published measurement.

    `parameters` is the number of parameters. `batch` is the batch size per device, or 0 if the table does not state it.
    """

    id: str
    group: str
    model: str
    parameters: float
    framework: str
    strategy: str
    gpu: str
    devices: int
    interconnect: str
    precision: str
    batch: float
    metric: str
    value: float
    timed: str
    optimizer: str
    repeats: str
    notes: str

    @property
    def samples(self) -> float:
        """Return the number of samples per step over all devices; without a batch size, one sample per device."""
        return self.batch * self.devices if self.batch else float(self.devices)

    @property
    def step_s(self) -> float:
        """Return the duration of a step in seconds.

        Some measurements give no absolute duration, for example an epoch without the number of its steps. The returned
        value is then proportional to the duration.
        """
        if self.metric == "samples_per_s":
            return self.samples * self.tokens / self.value
        if self.metric == "epoch_s":  # the more devices share an epoch, the fewer steps it has
            return self.value / self.steps if self.steps else self.value * self.devices
        return self.value * {"step_ms": 1e-3}.get(self.metric, 1.0)

    @property
    def steps(self) -> int:
        """Return the number of steps in a measurement, from the notes; 0 if the notes do not state it."""
        found = re.search(r"for (\d+) (?:optimizer )?(?:steps|iterations)", self.notes)
        return int(found[1]) if found else 0

    @property
    def tokens(self) -> float:
        """Return the number of tokens per sample if the measurement counts tokens, else 1."""
        if "token" not in self.notes.partition(";")[0].lower():
            return 1.0
        return counts.find(self.model).tokens or 64.0


@dataclass(frozen=True)
class Matched:
    """A measurement on several devices with its baseline, a measured step on one device.

    `one_s` and `one_samples` are the seconds and the samples of the baseline's step. `other` is a second baseline at
    another batch size, as (seconds, samples), if the table has one.
    """

    row: PublishedRow
    one_s: float
    one_samples: float
    other: tuple[float, int] | None = None

    @property
    def extrapolated(self) -> bool:
        """Return whether the step on one device must be extrapolated from a single other batch size."""
        return self.other is None and self.row.batch > 0 and self.one_samples != self.row.batch


@dataclass(frozen=True)
class Excluded:
    """The id of a row that is not scored, and the reason."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The columns of one line.

    A number that is not given is 0. A line without a value in one of the first six columns is excluded.
    """

    id: str
    model: str
    strategy: str
    n_gpu: float
    metric: str
    value: float
    params_M: float = 0.0  # noqa: N815  # the column's name
    batch_per_gpu: float = 0.0
    batch_global: float = 0.0
    framework: str = ""
    gpu: str = ""
    interconnect: str = ""
    precision: str = ""
    timed: str = ""
    optimizer: str = ""
    repeats_of: str = ""
    notes: str = ""


REQUIRED = tuple(one.name for one in fields(_Line) if one.default is MISSING)
OPTIONAL_NUMBERS = ("params_M", "batch_per_gpu", "batch_global")
"""Columns in which published tables may have text, such as "n/a", for an unknown number."""


def read(path: Path) -> tuple[list[PublishedRow], list[Excluded]]:
    """Return the rows of a table, and the rows that cannot be parsed. Raises ValueError if a column is missing."""
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        if missing := set(REQUIRED) - set(table.fieldnames or ()):
            raise ValueError(f"{path}: missing columns: {', '.join(sorted(missing))}; the table has {table.fieldnames}")
        rows, excluded = [], []
        for number, line in enumerate(table):
            try:
                rows.append(_row(_line(line)))
            except (ValueError, msgspec.ValidationError) as error:
                excluded.append(Excluded(line.get("id") or f"line {number + 2}", f"not a valid number: {error}"))
    return rows, excluded


def _line(cells: Mapping[str, str | None]) -> _Line:
    """Return a line's cells, converted to their columns' types. Raises ValidationError for a cell of a wrong type."""
    given = {key: cell.strip() for key, cell in cells.items() if isinstance(key, str) and isinstance(cell, str)}
    unknown = {key for key in OPTIONAL_NUMBERS if not _finite(given.get(key, ""))}
    known = {key: cell for key, cell in given.items() if (cell or key in REQUIRED) and key not in unknown}
    return msgspec.convert(known, _Line, strict=False)


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _row(line: _Line) -> PublishedRow:
    devices = int(line.n_gpu)
    batch = line.batch_per_gpu
    if not batch and devices:
        batch = line.batch_global / devices
    if not (math.isfinite(line.value) and line.value > 0 and devices > 0):
        raise ValueError(f"value {line.value} must be positive and finite, and n_gpu {devices} must be positive")
    return PublishedRow(
        id=line.id, group=line.id.rpartition("-")[0] or line.id, model=line.model, parameters=line.params_M * 1e6,
        framework=line.framework.lower(), strategy=line.strategy.lower(), gpu=line.gpu, devices=devices,
        interconnect=line.interconnect, precision=line.precision, batch=batch, metric=line.metric, value=line.value,
        timed=line.timed, optimizer=line.optimizer, repeats=line.repeats_of, notes=line.notes,
    )  # fmt: skip


def match(rows: Iterable[PublishedRow], *, all_rows: bool = False) -> tuple[list[Matched], list[Excluded]]:
    """Return the measurements on several devices with their baselines, and the excluded rows.

    With `all_rows`, rows that repeat other rows or are not trusted are kept.
    """
    rows, matched, excluded = list(rows), [], []
    ones: dict[tuple[str, ...], list[PublishedRow]] = {}
    for row in rows:
        if row.devices == 1 and row.metric in TIMES and (all_rows or _trusted(row)):
            ones.setdefault(_setting(row), []).append(row)
    for row in rows:
        reason = _unfit(row, all_rows)
        if not reason and row.devices > 1:
            found = _baseline(row, ones.get(_setting(row), []))
            if found:
                matched.append(found)
                continue
            reason = "no one-device row of this model, GPU and precision in its group"
        if reason:
            excluded.append(Excluded(row.id, reason))
    return matched, excluded


def _trusted(row: PublishedRow) -> bool:
    return not row.notes.startswith(DISTRUSTED) and not row.repeats


def _unfit(row: PublishedRow, all_rows: bool) -> str:
    """Return the reason why a row is not scored; "" if it may be scored."""
    if not all_rows and row.notes.startswith(DISTRUSTED):
        return "suspect or low trust"
    if not all_rows and row.repeats:
        return "repeats another row"
    if row.metric not in TIMES:
        return f"metric {row.metric} is not the duration of a step"
    if row.devices > 1 and row.strategy not in NAMED:
        return f"strategy {row.strategy} is not predicted"
    return ""


def _setting(row: PublishedRow) -> tuple[str, ...]:
    """Return the values that a row and its baseline must have in common."""
    return (row.group, row.framework, counts.plain(row.model), row.gpu.lower(), row.precision.lower(), row.metric,
            row.timed)  # fmt: skip


def _baseline(row: PublishedRow, ones: Sequence[PublishedRow]) -> Matched | None:
    """Return a row with its baseline, at the same or the nearest batch per device; None without one-device rows.

    Among several candidates, the median of those whose descriptions are most similar to the row's is used.
    """
    if not ones:
        return None
    batches = sorted({one.batch for one in ones}, key=lambda batch: _apart(batch, row.batch))
    at = [one for one in ones if one.batch == batches[0]]
    nearest = max(_alike(row, one) for one in at)
    one_s = statistics.median(one.step_s for one in at if _alike(row, one) == nearest)
    other = None
    if len(batches) > 1 and row.batch:
        second = [one for one in ones if one.batch == batches[1]]
        other = (statistics.median(one.step_s for one in second), int(batches[1]))
    return Matched(row, one_s, batches[0] or 1.0, other)


def _apart(a: float, b: float) -> float:
    return abs(math.log(max(a, 0.5) / max(b, 0.5)))


def _alike(row: PublishedRow, one: PublishedRow) -> int:
    """Return the similarity of two rows: the number of common words, plus 100 for the same interconnect."""

    def words(r: PublishedRow) -> set[str]:
        return set(re.split(r"[\s,;]+", f"{r.interconnect} {r.notes}".lower()))

    return len(words(row) & words(one)) + 100 * (row.interconnect == one.interconnect)
