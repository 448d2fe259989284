"""Errors have the option, its value and the remedy; the command line and Python spell options."""

from __future__ import annotations

import pickle

import pytest

from dpbench.records.errors import UnknownName, UsageError
from dpbench.records.spelling import dashed, keyword
from dpbench.store import StoreError


def test_an_error_is_told_with_the_options_of_each_face() -> None:
    error = UsageError(
        "{} has no effect on {kind}",
        option="inputs",
        value="device",
        remedy="leave out {inputs}, or give {device_kind:cuda} and {paired:True}",
        kind="{odd} devices",
    )
    assert (error.option, error.value) == ("inputs", "device")
    assert error.told(dashed) == (
        "--inputs device has no effect on {odd} devices: leave out --inputs, or give --device-kind"
        " cuda and --paired"
    )
    assert str(error) == (
        "inputs='device' has no effect on {odd} devices: leave out inputs=, or give"
        " device_kind='cuda' and paired=True"
    )


def test_a_text_without_an_option_is_the_message_as_it_is() -> None:
    assert str(UsageError("the run has no case {} of {models}")) == (
        "the run has no case {} of {models}"
    )


def test_a_remedy_follows_a_reason_after_a_semicolon() -> None:
    error = StoreError("{path}: {why}", option="store", remedy="give {}", path="x", why="y: z")
    assert error.told(dashed) == "x: y: z; give --store"
    told = StoreError("{why}", option="store", remedy="give {}", why="y: z").told(dashed)
    assert told == "y: z; give --store", "also after a reason in a fact"
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("kind", [UsageError, UnknownName, StoreError])
def test_an_error_from_another_process_keeps_its_parts(kind: type[UsageError]) -> None:
    error = pickle.loads(pickle.dumps(kind("{}: no", option="models", value="a.py:b", remedy="c")))
    assert error.told(dashed) == "--models a.py:b: no; c"
    assert str(error) == "models='a.py:b': no; c"


@pytest.mark.parametrize(
    ("name", "value", "command", "python"),
    [
        ("batch_sizes", "", "--batch-sizes", "batch_sizes="),
        ("batch_sizes", "64", "--batch-sizes 64", "batch_sizes=64"),
        ("device_ids", [0, 1], "--device-ids 0,1", "device_ids=[0, 1]"),
        ("models", "a,b.py:c", "--models a,b.py:c", "models='a,b.py:c'"),
        ("devices", 1, "--devices 1", "devices=1"),
        ("paired", True, "--paired", "paired=True"),
        ("models", "a.py:b", "--models a.py:b", "models='a.py:b'"),
    ],
)
def test_an_option_is_written_as_each_face_takes_it(
    name: str, value: object, command: str, python: str
) -> None:
    assert (dashed(name, value), keyword(name, value)) == (command, python)
