"""Published measurements, each matched with a baseline on one device or excluded with a reason.

The columns of a table are id, source, model, params_M, framework, strategy, gpu, n_gpu,
interconnect, precision, batch_per_gpu, batch_global, metric, value, timed, optimizer, repeats_of
and notes. The group of a row is its id up to the last "-".
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

from benchmarks.prediction import named_models
from dpbench.predict import counts
from dpbench.records.files import UnreadableFile
from dpbench.records.visible import everywhere

TIMES = ("step_ms", "step_s", "samples_per_s", "epoch_s")
"""The metrics from which the duration of a step can be calculated."""
DISTRUSTED = ("SUSPECT", "LOW TRUST")
NAMED = {
    "dp": "dp",
    "torch_dp": "dp",
    "dataparallel": "dp",
    "data_parallel": "dp",
    "nn.dataparallel": "dp",
    "nn_dataparallel": "dp",
    "pytorch_dp": "dp",
    "torch.nn.dataparallel": "dp",
    "pytorch_ddp": "ddp",
    "torch_ddp": "ddp",
    "ddp": "ddp",
    "distributeddataparallel": "ddp",
    "horovod": "horovod",
    "mirrored": "mirrored",
    "replicated_allreduce": "replicated",
    "replicated_nccl": "replicated",
    "replicated": "replicated",
    "parameter_server(cpu)": "server_cpu",
    "parameter_server": "server_gpu",
    "parameter_server(gpu)": "server_gpu",
}
"""For each name of a strategy in published tables: the kind of strategy that the name means."""
STEPS = (
    re.compile(r"\bfor (\d+) (?:optimizer )?(?:steps|iterations)"),
    re.compile(r"\b(?:mean|median|average) (?:of|over) \d+ epochs? of (\d+) (?:steps|iterations)"),
    re.compile(r"\b(\d+) epochs? (?:x|of) (\d+) (?:steps|iterations)"),
    re.compile(r"\b(\d+) (?:optimizer )?(?:steps|iterations)\b(?! per second)"),
)
"""Match notes that state the number of steps in the measured time; the first match counts.

The mean of several epochs is the time of one. The numbers of a match are multiplied.
"""
DATA_SETS = {
    "cifar": (50_000, 3 * 32 * 32),
    "mnist": (60_000, 28 * 28),
    "imagenet": (1_281_167, 3 * 224 * 224),
}
"""The training samples of data sets, and the values in one of them, by a part of their names."""
_SAMPLES = re.compile(r"\bepoch(?: of|:) (\d{4,}) (?:rows|samples|images|training|examples)")
"""Matches a text that states the number of training samples in an epoch."""
_LOADER = re.compile(r"loader[- ]bound|loader [^;]*\b(?<!may )limits\b|limited by [^;]*load", re.I)
"""Matches notes that say that the loading of batches limits a measurement, not that it may."""
_COUNTS_TOKENS = re.compile(
    r"\bunits?[ :=]+(?:is |are )?tok(?:en)?s?\b|\btok(?:en)?s? ?(?:/|per) ?s(?:ec|econd)?\b", re.I
)
"""Matches notes that state tokens as the unit of a throughput, but not notes that mention tokens
otherwise.
"""


_HOST = re.compile(r"^(?:https?://)?(?:www\.)?(?:(?:github|gitlab|bitbucket)\.(?:com|org)/)?")
"""Matches the beginning of a source that says where a repository is, not whose it is."""
_THREAD = re.compile(r"^\S+ (?:issue|pull request|PR|discussion) #\d+", re.I)
"""Matches a thread in a repository, whose author is seldom the repository's."""
_TITLE = re.compile(r"^[^@(,;]+")
"""Matches the title of a source that is neither a repository nor a site."""
SAME_OWNER = {
    "CS336 LM training benchmark matrix README": "RoyYu0509",
    "'The Impact of GPU Networking' parts 1 and 2": "tomaslaz",
}
"""The accounts of owners that published under a title."""


def owner_of(source: str) -> str:
    """Return the owner of a published source, "" if there is none.

    The owner of a repository is its account, because rows of one account come from the same
    machines and harnesses. A thread of an issue has its own owner. Of a site, the owner is its
    host, and of all else the title.
    """
    place = _HOST.sub("", source.strip())
    if found := _THREAD.match(place):
        return found[0]
    first = place.split(" ")[0]
    if "/" in first or "." in first:
        return first.split("/")[0]
    found = _TITLE.match(place.lstrip("("))
    title = found[0].strip(" )") if found else ""
    return SAME_OWNER.get(title, title)


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published measurement.

    `source` tells where it was published. `parameters` is the number of parameters of the model,
    and `batch` the batch size per device; both are 0 if the table does not state them. `value` is
    in the unit of `metric`. `timed` describes the parts of the step that were measured. `repeats`
    is the id of the row that this row repeats, "" if there is none.
    """

    id: str
    group: str
    source: str
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
    def owner(self) -> str:
        """Return who published the row: an account, a thread, a site or a title, else the group."""
        return owner_of(self.source) or self.group

    @property
    def samples(self) -> float:
        """Return the number of samples per step on all devices.

        If the batch size is unknown, one sample per device.
        """
        return self.batch * self.devices if self.batch else float(self.devices)

    @property
    def step_s(self) -> float:
        """Return the duration of a step in seconds; `value` has a metric in `TIMES`.

        If a throughput is given without the batch size, it is that of one sample per device.
        """
        if self.metric == "samples_per_s":
            return self.samples * self.tokens / self.value
        if self.metric == "epoch_s":
            return self.value / self.steps
        return self.value * {"step_ms": 1e-3}.get(self.metric, 1.0)

    @property
    def steps(self) -> int:
        """Return the number of steps in the measured time, or 0 if it is unknown.

        The notes state it, or else it is the number of samples of a known data set, divided by
        those of a step and rounded up.
        """
        for pattern in STEPS:
            if found := pattern.search(self.notes):
                return math.prod(int(number) for number in found.groups() if number)
        words = f"{self.model} {self.timed} {self.notes}"
        found = _SAMPLES.search(words)
        samples = int(found[1]) if found else 0
        samples = samples or (self.data_set or (0, 0))[0]
        return math.ceil(samples / self.samples) if self.batch else 0

    @property
    def data_set(self) -> tuple[int, int] | None:
        """Return the training samples of the named data set, and the values in one of them."""
        words = f"{self.model} {self.timed} {self.notes}".lower()
        return next((sizes for name, sizes in DATA_SETS.items() if name in words), None)

    @property
    def tokens(self) -> float:
        """Return the tokens per sample (64 if unknown) if the metric counts tokens, else 1.

        Any clause of the notes may state the unit, as "unit tokens/s" or "tokens per second".
        """
        return (
            named_models.find(self.model).tokens or 64.0
            if _COUNTS_TOKENS.search(self.notes)
            else 1.0
        )


@dataclass(frozen=True)
class Matched:
    """A measurement on several devices with its baseline, a measured step on one device.

    `row` is the measurement on several devices. `one_s` and `one_samples` are the seconds and the
    samples of the baseline's step. `other` is a second baseline at another batch size as (seconds,
    samples), None if the table has none.
    """

    row: PublishedRow
    one_s: float
    one_samples: float
    other: tuple[float, int] | None = None

    @property
    def extrapolated(self) -> bool:
        """Return whether the only baseline has another batch size per device than the row."""
        return self.other is None and self.row.batch > 0 and self.one_samples != self.row.batch


@dataclass(frozen=True)
class Excluded:
    """A row that is not scored: its id in the table, and the reason for the exclusion."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The cells of one line of a table, by column.

    A missing number is 0, and a missing text "". The first six fields are required: a line without
    one of these cells, or without a number in `n_gpu` or `value`, is excluded.
    """

    id: str
    model: str
    strategy: str
    n_gpu: float
    metric: str
    value: float
    source: str = ""
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
"""The columns in which published tables may contain text, such as "n/a", in place of an unknown
number.
"""


def read(path: Path) -> tuple[list[PublishedRow], list[Excluded]]:
    """Return the rows of a CSV table, and those excluded because they cannot be parsed.

    Raises UnreadableFile if the file is not such a table, or if a required column is missing.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            columns = table.fieldnames or ()
            lines = [everywhere(line) for line in table]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableFile(
            f"{path} is not a CSV table in UTF-8 ({error}); save the table in this format"
        ) from None
    if missing := set(REQUIRED) - set(columns):
        raise UnreadableFile(
            f"{path}: these required columns are missing: {', '.join(sorted(missing))}; the table"
            f" has the columns {', '.join(columns) or 'none'}; add or rename columns"
        )
    rows, excluded = [], []
    for number, line in enumerate(lines):
        try:
            rows.append(_row(_line(line)))
        except (ValueError, OverflowError) as error:  # msgspec's ValidationError is a ValueError
            excluded.append(
                Excluded(line.get("id") or f"line {number + 2}", f"the row cannot be read: {error}")
            )
    return rows, excluded


def _line(cells: Mapping[str, str | None]) -> _Line:
    """Return the cells of a line, converted to the types of the columns.

    Raises ValidationError for a wrong type.
    """
    given = {
        key: cell.strip()
        for key, cell in cells.items()
        if isinstance(key, str) and isinstance(cell, str)
    }
    unknown = {key for key in OPTIONAL_NUMBERS if not _finite(given.get(key, ""))}
    known = {
        key: cell for key, cell in given.items() if (cell or key in REQUIRED) and key not in unknown
    }
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
        raise ValueError(
            f"the row has the value {line.value} and n_gpu {devices}, but the value must be"
            " positive and finite, and n_gpu must be positive"
        )
    return PublishedRow(
        id=line.id,
        group=line.id.rpartition("-")[0] or line.id,
        source=line.source,
        model=line.model,
        parameters=line.params_M * 1e6,
        framework=line.framework.lower(),
        strategy=line.strategy.lower(),
        gpu=line.gpu,
        devices=devices,
        interconnect=line.interconnect,
        precision=line.precision,
        batch=batch,
        metric=line.metric,
        value=line.value,
        timed=line.timed,
        optimizer=line.optimizer,
        repeats=line.repeats_of,
        notes=line.notes,
    )


def match(
    rows: Iterable[PublishedRow], *, all_rows: bool = False
) -> tuple[list[Matched], list[Excluded]]:
    """Return the measurements on several devices with their baselines, and the excluded rows.

    With `all_rows`, rows that repeat other rows and rows that are not trusted are included.
    """
    rows, matched, excluded = list(rows), [], []
    ones: dict[tuple[str, ...], list[PublishedRow]] = {}
    for row in rows:
        if row.devices == 1 and not _unfit(row, all_rows):
            ones.setdefault(_setting(row), []).append(row)
    for row in rows:
        reason = _unfit(row, all_rows)
        if not reason and row.devices > 1:
            found = _baseline(row, ones.get(_setting(row), []))
            if found:
                matched.append(found)
                continue
            reason = (
                "the group of the row has no one-device row with the same framework, model, GPU,"
                " precision, metric and timed parts"
            )
        if reason:
            excluded.append(Excluded(row.id, reason))
    return matched, excluded


def distrusted(row: PublishedRow) -> bool:
    """Return whether the step time of a row is unknown, or not to be trusted."""
    return bool(_unfit(row, all_rows=False))


def _unfit(row: PublishedRow, all_rows: bool) -> str:
    """Return the reason for the exclusion of a row, or "" if the row can be scored."""
    reasons = (
        (
            not all_rows and row.notes.startswith(DISTRUSTED),
            "the notes mark the row as suspect or as of low trust",
        ),
        (not all_rows and bool(row.repeats), "the row repeats another row"),
        (
            row.metric not in TIMES,
            f"the duration of a step cannot be derived from the metric {row.metric}",
        ),
        (
            row.metric == "epoch_s" and not row.steps,
            "the number of steps in the measured seconds is unknown: the notes state neither it"
            " nor a data set of known size",
        ),
        (
            bool(_LOADER.search(row.notes)),
            "the notes say that the loading of batches limits the step",
        ),
        (
            row.metric == "samples_per_s" and not row.batch,
            "the duration of a step cannot be derived from a throughput without a batch size",
        ),
        (
            row.devices > 1 and row.strategy not in NAMED,
            f"the strategy {row.strategy} cannot be predicted",
        ),
    )
    return next((reason for unfit, reason in reasons if unfit), "")


def _setting(row: PublishedRow) -> tuple[str, ...]:
    """Return the values that must be the same in a row and in its baseline."""
    return (
        row.group,
        row.framework,
        counts.plain(row.model),
        row.gpu.lower(),
        row.precision.lower(),
        row.metric,
        row.timed,
    )


def _baseline(row: PublishedRow, ones: Sequence[PublishedRow]) -> Matched | None:
    """Return a row with its baseline, which has the same or the nearest batch size per device.

    `ones` are the one-device rows with the same setting; if there are none, return None. If several
    of them have the batch size of the baseline, the baseline's duration is the median over those
    whose interconnect and notes are most similar to the interconnect and notes of `row`.
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
    """Return a number that states how similar two rows are.

    It is the number of words that occur in the interconnect or notes of both rows, plus 100 if the
    interconnect is the same.
    """

    def words(r: PublishedRow) -> set[str]:
        return set(re.split(r"[\s,;]+", f"{r.interconnect} {r.notes}".lower()))

    return len(words(row) & words(one)) + 100 * (row.interconnect == one.interconnect)
