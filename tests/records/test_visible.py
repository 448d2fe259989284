"""Texts of a store, export or trace control no terminal, reorder no line and start no formula."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import pytest

from dpbench.hardware import provenance
from dpbench.observe import kineto
from dpbench.records import Case, Status, Trial, objects, registry, visible
from dpbench.report import page
from dpbench.store import FINISHED, Store, StoredRun, export
from dpbench.store.export import formats
from tests import exported
from tests.exported import made, stored

HIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What must never be printed; a line feed may, because it ends the lines."""
TEXT = (
    "\x1b]0;x\x07\x1b[31m\x00\x9b1m\u202ea\u2066b\u200fc\u2028d\x85e\r\n"
    "=1\t<script>alert(1)</script>|`"
)
FORMULAS = tuple(f"{start}cmd|'/c calc'!A1{TEXT}" for start in ("=", "+", "-", "@", "\t=", "\r="))
DRIVERS = {"strategy", "schedule", "mode", "declared"}
"""The fields of a case that choose code: an unknown value is refused, and the refusal must be
visible too.
"""


@pytest.fixture
def dpbench(tmp_path, monkeypatch, capfd):
    return exported.command(tmp_path, monkeypatch, capfd)


def poisoned(value: Any, text: str) -> Any:
    """Return a value in which every text, at any depth, also the key of a mapping, is `text`.

    Other values stay.
    """
    if isinstance(value, str) and not isinstance(value, Enum):
        return text
    if dataclasses.is_dataclass(value):
        found = {
            one.name: poisoned(getattr(value, one.name), text) for one in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **found)
    if isinstance(value, Mapping):
        texts = all(isinstance(one, str) for one in value.values())
        found = {name: poisoned(inner, text) for name, inner in value.items()}
        return found | {text: text if texts else 1.0}
    return (
        type(value)(poisoned(one, text) for one in value)
        if isinstance(value, list | tuple)
        else value
    )


FULL = dataclasses.replace(
    exported.DP,
    options=(("a", "b"),),
    neighbour="mlp",
    declared=dataclasses.replace(registry.traits("dp"), strategy="dp"),
)
TEXTS = [
    one.name
    for one in dataclasses.fields(Case)
    if poisoned(getattr(FULL, one.name), "x") != getattr(FULL, one.name)
]


def texts(value: Any) -> Iterator[str]:
    """Yield every text of a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            yield from texts(getattr(value, one.name))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from (*texts(name), *texts(inner))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts(one)


def everything(trials: list[Trial], run: StoredRun) -> str:
    return "\n".join([*texts(trials), *texts(run)])


def poison() -> Trial:
    """Return a trial that is hostile in every text of every record in it."""
    return poisoned(made(FULL, reason="r", provenance={"a": {"b": ["c"]}, "d": "e"}), TEXT)


# -- where texts enter


def test_the_corpus_reaches_every_text_of_a_trial() -> None:
    found = [text for text in texts(poison()) if not isinstance(text, Enum) and HIDDEN.search(text)]
    assert len(found) > 100
    assert {
        "model",
        "strategy",
        "size",
        "device_kind",
        "placement",
        "options",
        "neighbour",
        "mode",
    } <= {*TEXTS}


def test_every_text_of_a_store_is_visible(tmp_path) -> None:
    facts = poisoned(provenance.collect(), TEXT)
    path = tmp_path / "dpbench.db"
    run_id = stored(path, poison(), provenance=facts)
    with Store.read(path) as opened:
        assert not HIDDEN.search(everything(opened.trials(run_id), opened.runs()[0]))
        assert not HIDDEN.search(everything(opened.summaries(run_id), opened.runs()[0]))
        (case,) = opened.outcomes(run_id)
        assert not HIDDEN.search("\n".join(texts(case)))
        for one in opened.past(run_id, opened.summaries(run_id)):
            assert not HIDDEN.search(everything(list(one.trials), one.run))


def test_only_the_reason_of_a_trial_has_several_lines(tmp_path) -> None:
    path = tmp_path / "dpbench.db"
    run_id = stored(path, poison(), provenance=poisoned({"command": ""}, TEXT))
    with Store.read(path) as opened:
        (trial,), (run,) = opened.trials(run_id), opened.runs()
    assert "\n" in trial.reason
    assert "\\x1b[31m" in trial.reason

    assert not [text for text in texts(dataclasses.replace(trial, reason="")) if "\n" in text]
    assert not [text for text in texts(run) if "\n" in text]


def test_every_text_of_an_export_is_visible(tmp_path) -> None:
    path = tmp_path / "run.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(export.jsonl(TEXT, [poison()]))
    run, trials = formats.read_run(path)
    assert run.status == FINISHED
    assert trials[0].status is Status.OK
    assert not HIDDEN.search(everything(trials, run))


def test_every_text_of_a_trace_is_visible(tmp_path) -> None:
    event = {
        "ph": "X",
        "ts": 1.0,
        "dur": 1.0,
        "name": TEXT,
        "pid": 0,
        "tid": 1,
        "args": {"correlation": 1},
    }
    categories = ("cpu_op", "user_annotation", "cuda_runtime", "kernel", "gpu_memcpy")
    path = tmp_path / "trace.json"
    content = {
        "traceEvents": [{**event, "cat": category} for category in categories],
        "deviceProperties": [{"id": 0, "name": TEXT}],
        "distributedInfo": {"backend": TEXT},
    }
    path.write_text(json.dumps(content))
    profile = kineto.read(path)
    events = [*profile.host, *profile.device, *profile.launches.values()]
    assert len(events) == 5
    assert not HIDDEN.search(
        "\n".join([*(one.name for one in events), profile.gpus[0].name, profile.backend])
    )


def test_a_model_whose_name_cannot_be_stored_is_refused() -> None:
    for refuse in (objects.check, lambda name, kind: registry.outside(kind, name)):
        with pytest.raises(LookupError, match=r"a\\+x1b\.py:net'?: the name has control"):
            refuse("a\x1b.py:net", "strategy")
    with pytest.raises(LookupError, match="not UTF-8"):
        objects.check("a\udcff.py:net", "models")


def test_escapes_are_those_of_python_and_other_texts_stay() -> None:
    assert visible.visible("a\x1b\u202e\x85\n") == r"a\x1b\u202e\x85\n"
    assert visible.visible("a\tb\nc\r", lines=True) == "a\\tb\nc\\r"
    for text in ("größer 1,5 µs × 日本語 👩‍🔬", "a\u00a0b", ""):
        assert visible.visible(text) == text


# -- where texts leave


@pytest.mark.parametrize("field", [*TEXTS, "reason", "spans", "samples", "memory", "provenance"])
def test_no_field_of_a_trial_controls_the_output(dpbench, tmp_path, field) -> None:
    trial = made(FULL, reason="r", provenance={"gpus": {"gpus": [{"name": "a"}]}})
    if field in TEXTS:
        trial = dataclasses.replace(trial, case=poisoned_field(trial.case, field))
    else:
        trial = dataclasses.replace(trial, **{field: poisoned(getattr(trial, field), TEXT)})
    failed = dataclasses.replace(
        trial, status=Status.FAILED, reason=TEXT, round=1, steps=(), spans=(), samples=()
    )
    stored(tmp_path / "dpbench.db", trial, failed, provenance=poisoned(exported.PROVENANCE, TEXT))
    for command in (
        ["list", "runs"],
        ["show"],
        ["report", "--md"],
        ["explain"],
        ["export", "csv"],
        ["export", "jsonl"],
    ):
        code, out, err = dpbench(*command)
        assert code == 0 or field in DRIVERS, (command, err)
        assert not HIDDEN.search(out + err), command
        assert "Traceback" not in err


def poisoned_field(case: Case, field: str) -> Case:
    return dataclasses.replace(case, **{field: poisoned(getattr(case, field), TEXT)})


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_text_of_a_csv_is_a_formula_and_numbers_stay_numbers(dpbench, tmp_path, formula) -> None:
    case = dataclasses.replace(
        FULL, model=formula, size=formula, neighbour=formula, device_memory_bytes=7
    )
    stored(
        tmp_path / "dpbench.db", made(case), made(Case(model="-1", strategy="dp", batch_size=64))
    )
    code, out, err = dpbench("export", "csv")
    assert code == 0, err
    second, first = sorted(csv.DictReader(io.StringIO(out)), key=lambda row: row["model"] != "'-1")
    cells = [
        cell
        for cell in (*first, *first.values())
        if cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    ]
    assert cells == ["-1"], "only the number of loaders"
    assert (second["model"], second["loader"], second["batch_size"]) == ("'-1", "-1", "64")
    assert first["device_memory_bytes"] == "7"
    assert float(first["step_value"]) == pytest.approx(exported.STEP_S)


def test_nothing_of_a_hostile_run_is_executed_by_its_page(tmp_path) -> None:
    from dpbench.api.reports import report_of
    from dpbench.api.stored import read
    from tests.report_rows import Tags

    case = poisoned_field(FULL, "model")
    run_id = stored(
        tmp_path / "dpbench.db",
        made(case, reason=TEXT),
        provenance=poisoned(exported.PROVENANCE, TEXT),
    )
    text = page.render(report_of(*read(tmp_path / "dpbench.db", run_id)))
    assert len(Tags(text).all("script")) == 4
    assert "<script>alert" not in text
    assert not HIDDEN.search(text)
