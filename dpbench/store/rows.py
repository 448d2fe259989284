"""Rows: the only module that makes objects from rows of the file.

A row that cannot be read raises UnreadableRow.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

from dpbench.records import Case, Sample, Status, Trial, fake, hidden, visible
from dpbench.records.facts import RunFacts, stated
from dpbench.records.series import Samples, Series
from dpbench.records.trial import in_schema
from dpbench.store import file, summaries
from dpbench.store.file import StoreError
from dpbench.store.runs import StoredRun, known_id

log = logging.getLogger(__name__)
CASE = "case_json, fingerprint, schema"
PLAIN = "round, status, reason, verified, source, failed_device"
TRIAL = f"{CASE}, started, setup, provenance, run_id, {PLAIN}"
STEP = "seconds, warmup, end_s"
SPAN = "step, phase, device, clock, start_s, end_s"
MEMORY = "device, peak_bytes, source, phase, kind"
SERIES = "device, metric, n, times, readings"
"""The columns to read."""
_DATA = (
    sqlite3.Error,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
    zlib.error,
)
"""The exceptions that damaged data cause."""


LATEST_S = 253402300799.0
"""The last second of the year 9999, in seconds since the epoch."""
MOST_READINGS = 2**24
"""The most readings of one metric of a device: those of 19 days, at 10 per second."""
REASON = 8000
"""The number of characters up to which a reason is stored in full: twice a worker's last output."""
Read = TypeVar("Read")
Reader: TypeAlias = Callable[[file.Connection, int], Read]
"""A function that makes an object of the row with a given rowid."""


class UnreadableRow(StoreError):
    """A row cannot be read: `table` is run or trial, `row` its rowid, `why` the fault."""

    def __init__(self, path: object, table: str, row: int, why: str) -> None:
        self.table = table
        self.row = row
        self.why = why
        super().__init__(f"{path}, row {row} of the table {table}: {why}; {file.way_out(path)}")


@contextmanager
def _reading(db: file.Connection, table: str, row: int) -> Iterator[None]:
    """Convert exceptions of damaged data to UnreadableRow, but not that of a locked file."""
    try:
        yield
    except (UnreadableRow, file.Locked):
        raise
    except _DATA as error:
        cause = error.__cause__ if isinstance(error, StoreError) else error
        raise UnreadableRow(db.path, table, row, f"{type(cause).__name__}: {cause}") from error


def run(db: file.Connection, row: int) -> StoredRun:
    """Return the run in a row of the table `run`. Raises UnreadableRow."""
    with _reading(db, "run", row):
        run_id, status, started, rounds, provenance = _row(
            db, "run", "id, status, started, rounds, provenance", row
        )
        stored = StoredRun(
            known_id(run_id),
            visible.visible(str(status)),
            float(started),
            int(rounds),
            hidden.everywhere(visible.loads(provenance)),
            _machine_result(db, row),
        )
        check_time(stored.started)
        _ = stored.facts, stored.naming  # raise for facts and names that no run can have
        return stored


def _machine_result(db: file.Connection, row: int) -> str:
    """Return what a sibling has stored on a run's machine; "" for nothing."""
    if not columns_of(db, "examination"):
        return ""
    query = "SELECT result FROM examination WHERE host=(SELECT host FROM run WHERE rowid=?)"
    found = db.execute(query, (row,)).fetchone()
    return str(found[0]) if found else ""


def trial(db: file.Connection, row: int) -> Trial:
    """Return the trial in a row of the table `trial`, with all its parts. Raises UnreadableRow."""
    with _reading(db, "trial", row):
        steps = _part(db, "step", STEP, row, "step")
        plain = {
            **_plain(db, _row(db, "trial", TRIAL, row)),
            "steps": _columns(STEP, [(seconds, bool(warm), end) for seconds, warm, end in steps]),
            "spans": _columns(SPAN, _part(db, "span", SPAN, row, "number")),
            "memory": _columns(MEMORY, _part(db, "memory", MEMORY, row, "rowid")),
        }
        made = replace(Trial.from_dict(plain), samples=_samples(db, row))
        return checked(made)


def summary(db: file.Connection, row: int) -> Trial:
    """Return `Trial.summary` of the trial in a row. Raises UnreadableRow.

    The summary was stored when the trial ended. If it is missing or damaged, or if another version
    of dpbench wrote it, it is computed from the spans.
    """
    with _reading(db, "trial", row):
        *head, packed = _row(db, "trial", f"{TRIAL}, summary", row)
        ledger = summaries.unpacked(packed)
        if ledger is None:
            return trial(db, row).summary()
        memory = _columns(MEMORY, _part(db, "memory", MEMORY, row, "rowid"))
        plain = {**_plain(db, head), "memory": memory}
        made = replace(Trial.from_dict(plain), steps=ledger.steps, samples=_samples(db, row))
        return checked(made).with_ledger(ledger)


def checked(trial: Trial) -> Trial:
    """Return the trial. Raises ValueError if its start is no time, or a fact has a wrong type."""
    check_time(trial.started_s)
    _ = trial.facts
    return trial


def check_time(started_s: float) -> None:
    """Raise ValueError if a start, in seconds since the epoch, is no time before the year 10000."""
    if not 0 <= started_s <= LATEST_S:
        raise ValueError(
            f"the start, {started_s} s after the year 1970 began, is not before the year 10000"
        )


def _samples(db: file.Connection, row: int) -> Samples:
    columns_by_series: dict[tuple[int, str], Series] = {}
    for device, metric, n, times, readings in _part(db, "series", SERIES, row, "device, metric"):
        if not (isinstance(device, int) and isinstance(metric, str)):
            raise TypeError(f"the device {device!r} or the metric {metric!r} is of another type")
        columns_by_series[device, visible.visible(metric)] = Series(
            _unpacked(times, n), _unpacked(readings, n)
        )
    return Samples({key: partial(Series, *columns) for key, columns in columns_by_series.items()})


def _plain(db: file.Connection, head: Sequence[Any]) -> dict[str, Any]:
    """Return the columns `TRIAL` as data for `Trial.from_dict`."""
    case_json, fingerprint, schema, started, setup, provenance, run_id, *plain = head
    return {
        "case": case(case_json, fingerprint, schema).to_dict(),
        "schema": schema,
        "started_s": started,
        "setup": _object(setup),
        "provenance": {**_object(provenance), **_of_run(db, run_id)},
        **dict(zip(PLAIN.split(", "), plain, strict=True)),
    }


def _of_run(db: file.Connection, run_id: str) -> dict[str, Any]:
    """Return the fact of a trial's run that qualifies the trial: whether its GPUs are fake."""
    try:
        found = db.execute("SELECT provenance FROM run WHERE id=?", (run_id,)).fetchone()
        return stated(fake_gpus=True) if found and _says_fake(found[0]) else {}
    except file.Locked:
        raise
    except _DATA:
        return {}  # a damaged run is reported where it is read; its trials stay readable


@lru_cache(maxsize=256)
def _says_fake(provenance: str) -> bool:
    return fake.fake_gpus(RunFacts.of(_object(provenance)))


def outcome(db: file.Connection, row: int) -> tuple[Case, str]:
    """Return the case and the status of a trial, which may still run. Raises UnreadableRow."""
    with _reading(db, "trial", row):
        *head, status = _row(db, "trial", f"{CASE}, status", row)
        return case(*head), status if status == "running" else Status(status).value


def seconds_of(db: file.Connection, row: int) -> tuple[str, float]:
    """Return a trial's fingerprint and its seconds over all stages. Raises UnreadableRow."""
    with _reading(db, "trial", row):
        *head, setup = _row(db, "trial", f"{CASE}, setup", row)
        return case(*head).fingerprint, float(sum(_object(setup).values()))


@lru_cache(maxsize=4096)
def case(text: str, fingerprint: str, schema: int | None) -> Case:
    """Return the case whose JSON is `text`, cached because all rounds of a case have the same text.

    The result is that of `in_schema`; a trial of a version below 3 that has not ended has no
    schema. Raises ValueError if `fingerprint` is not the fingerprint of the text.
    """
    data = _object(text)
    stored = Case.from_dict(data)
    # escaped texts change the fingerprint
    if stored.fingerprint != fingerprint and visible.everywhere(data) == data:
        raise ValueError(
            f"the row was changed or damaged: its case, {stored.label}, does not match its"
            " fingerprint"
        )
    return in_schema(stored, schema or 0)


def short(reason: str) -> str:
    """Return `reason` as text that can be stored; a long one is cut to its head and tail."""
    # error messages may contain lone surrogates
    reason = reason.encode("utf-8", "replace").decode()
    if len(reason) <= REASON:
        return reason
    half = REASON // 2
    left_out = f"[{len(reason) - 2 * half} characters are left out]"
    return f"{reason[:half]}\n{left_out}\n{reason[-half:]}"


def _row(db: file.Connection, table: str, columns: str, row: int) -> Sequence[Any]:
    values = db.execute(
        f"SELECT {_known(db, table, columns)} FROM {table} WHERE rowid=?", (row,)
    ).fetchone()
    if values is None:
        raise LookupError("the row is missing")
    return tuple(values)


def _known(db: file.Connection, table: str, columns: str) -> str:
    """Return the columns for a query, with defaults for those that the file's schema lacks."""
    has = columns_of(db, table)
    defaults = {"phase": "''", "kind": "'allocated'"}
    return ", ".join(
        name if name in has else defaults.get(name, "NULL") for name in columns.split(", ")
    )


def _part(db: file.Connection, table: str, columns: str, row: int, order: str) -> list[Any]:
    query = f"SELECT {_known(db, table, columns)} FROM {table} WHERE trial_id=? ORDER BY {order}"
    return db.execute(query, (row,)).fetchall()


def _columns(names: str, rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """Return the values of `rows` by column; `names` are the columns, separated by ", "."""
    return {name: [row[i] for row in rows] for i, name in enumerate(names.split(", "))}


def _object(text: str) -> dict[str, Any]:
    data = json.loads(text)
    if not isinstance(data, Mapping):
        raise TypeError(f"JSON of the type {type(data).__name__} instead of an object")
    return {**data}


def series_rows(trial_id: int, samples: Sequence[Sample]) -> list[tuple[Any, ...]]:
    """Return the rows of the table `series`, one per device and metric; only finite values."""
    # a reading of NaN or infinity carries no information
    finite = Samples.of(sample for sample in samples if math.isfinite(sample.value))
    return [
        (trial_id, device, metric, len(r), sum(r) / len(r), max(r), _pack(t), _pack(r))
        for metric in finite.metrics
        for device, (t, r) in finite.series(metric).items()
    ]


def _pack(values: Sequence[float]) -> bytes:
    return zlib.compress(array("d", values).tobytes())


def _unpacked(blob: bytes, n: int) -> array[float]:
    """Return the `n` numbers of a compressed column of the table `series`.

    Raises ValueError for another number of them, found before more than `n` are in memory, and for
    more than `MOST_READINGS`.
    """
    if n > MOST_READINGS:
        raise ValueError(f"the row states {n} readings; at most {MOST_READINGS} are read")
    values = array("d")
    stream = zlib.decompressobj()
    # the byte too many shows that there are more
    plain = stream.decompress(blob, n * values.itemsize + 1)
    if len(plain) != n * values.itemsize or not stream.eof:
        raise ValueError(
            f"a column of the table series has not the {n} readings that its row states"
        )
    values.frombytes(plain)
    return values


def columns_of(db: file.Connection, table: str) -> list[str]:
    """Return the names of a table's columns, which are looked up once per connection.

    They depend on the version of dpbench that wrote the file: files that are only read are not
    migrated.
    """
    if table not in db.columns:
        db.columns[table] = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
    return db.columns[table]
