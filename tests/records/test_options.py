"""Runs from the command line and Python have the same options, defaults, checks and cases."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields
from typing import Any

import click
import pytest

from dpbench.cli import running
from dpbench.measure.selection import cases_of
from dpbench.records.errors import told
from dpbench.records.options import Options

ELSEWHERE = {"report", "store", "help", "as_json", "dry_run", "quiet", "verbose"}
"""The options of `dpbench run` that say neither what to measure nor how: files and output."""


def parsed(*arguments: str) -> Options:
    """Return the options that `dpbench run` gets from these arguments."""
    found: list[Options] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            running, "_measure", lambda output, cluster, asked: found.append(asked) or sys.exit()
        )
        with pytest.raises(SystemExit):
            running.run.main([*arguments], standalone_mode=False)
    return found[0]


def test_the_options_are_those_of_the_command_with_their_defaults() -> None:
    assert {one.name for one in fields(Options)} == {one.name for one in running.run.params} - {
        *ELSEWHERE
    }
    assert parsed() == Options()


GIVEN: tuple[dict[str, Any], ...] = (
    {
        "models": ("mlp", "lstm"),
        "devices": (1, 2),
        "batch_sizes": (8,),
        "rounds": 5,
        "strategies": ("single", "dp"),
        "name": "nightly",
        "tag": ("driver=550", "a=b=c"),
    },
    {
        "models": ("pkg.mod:net", "b.py:c"),
        "strategies": ("mine.py:s", "dp[cached]"),
        "schedules": ("pool", "cached"),
        "optimizer": "own",
        "unverified": True,
    },
    {
        "ladder": True,
        "device_kind": "cpu",
        "size": "full",
        "budget": 12.5,
        "batch_per_device": (4, 8),
    },
    {
        "device_ids": (0, "GPU-8d3e"),
        "device_kind": "cuda",
        "placement": "colocated",
        "precision": "bf16",
    },
    {
        "inputs": ("pinned", "device"),
        "read_loss": (0, 10),
        "zero_grad": ("none", "zero"),
        "compile": (False, True),
    },
    {
        "rounds": "auto",
        "paired": True,
        "patience": 0.0,
        "limit": 5.0,
        "retry": ("failed", "oom"),
    },
    {"loader": (-1, 0, 2), "mode": ("train", "no_grad"), "together": ("mlp", "lstm")},
    {"profile": True},
    {"find_max_batch": True, "device_memory": 1 << 30},
)


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: next(iter(given)))
def test_the_command_of_options_gives_these_options(given: dict[str, Any]) -> None:
    assert {name for one in GIVEN for name in one} == {one.name for one in fields(Options)}
    asked = Options.of(**given)
    dpbench_, run, *arguments = shlex.split(asked.command())
    assert (dpbench_, run) == ("dpbench", "run")
    assert parsed(*arguments) == asked


def test_lists_single_values_and_none_are_taken_as_a_caller_means_them() -> None:
    asked = Options.of(
        models="mlp", devices=[1, 2], batch_sizes=range(8, 10), compile=True, budget=None, limit=7
    )
    assert asked == Options(
        models=("mlp",), devices=(1, 2), batch_sizes=(8, 9), compile=(True,), limit=7
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"devices": "2"}, r"devices= must be integers .* from 1 to 1000000000, got '2'"),
        ({"devices": [1, 2.5]}, "devices= must be integers .* got 2.5"),
        ({"devices": 1.5}, "devices= must be integers .* got 1.5"),
        ({"devices": True}, "devices= must be integers .* got True"),
        ({"devices": [1, 0]}, "devices= must be .* got 0"),
        ({"batch_sizes": -4}, "batch_sizes= must be .* got -4"),
        ({"batch_per_device": 10**10}, "batch_per_device= must be .* got 10000000000"),
        ({"models": [object]}, "models= must be names of models, .* got a value of the type type"),
        ({"model": object()}, "models= must be names of models, .* type object"),
        ({"strategy": 3}, "strategies= must be names of strategies, .* got 3"),
        ({"models": []}, "models= is an empty list"),
        ({"compile": 1}, "compile= must be .* got 1"),
        ({"paired": "yes"}, "paired= must be .* got 'yes'"),
        ({"budget": "10"}, "budget= must be a number of at least 1, got '10'"),
        ({"rounds": 0}, "rounds= must be an integer from 1 to 10000 or auto, got 0"),
        ({"rounds": 10_001}, "rounds= must be .* got 10001"),
        ({"rounds": "often"}, "rounds= must be .* got 'often'"),
        ({"rounds": True}, "rounds= must be .* got True"),
        ({"budget": 0.5}, "budget= must be a number of at least 1, got 0.5"),
        ({"limit": float("nan")}, "limit= must be a number from 1 to 1000000, got nan"),
        ({"limit": float("inf")}, "limit= must be a number from 1 to 1000000, got inf"),
        ({"limit": 1e10}, "limit= must be .* got 10000000000.0"),
        ({"patience": -1}, "patience= must be a number of at least 0"),
        ({"device_kind": "gpu"}, "device_kind= must be cpu or cuda or emulated, got 'gpu'"),
        ({"placement": "spraed"}, "did you mean 'spread'"),
        ({"size": "medium"}, "size= must be small or full"),
        ({"precision": "fp8"}, "precision= must be fp32 or .* got 'fp8'"),
        ({"inputs": ["pinned", "disk"]}, "inputs= must be .* got 'disk'"),
        ({"zero_grad": "one"}, "zero_grad= must be none or zero, got 'one'"),
        ({"mode": "test"}, "mode= must be train or .* got 'test'"),
        ({"read_loss": -1}, "read_loss= must be .* got -1"),
        ({"loader": -2}, r"loader= must be off \(-1\) or a number of workers, got -2"),
        ({"retry": "fialed"}, "did you mean 'failed'"),
        ({"tag": "driver"}, "tag= must be key=value"),
        ({"device_ids": "first"}, "device_ids= must be a list of GPUs"),
        ({"device_memory": -1}, "device_memory= must be a number of bytes"),
    ],
)
def test_a_wrong_value_is_refused_and_the_command_refuses_it_too(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Options.of(**wrong)
    [(name, value)] = wrong.items()
    if isinstance(value, str | float) and name not in ("devices", "budget", "paired"):
        with pytest.raises(click.BadParameter):
            parsed(f"--{name.replace('_', '-')}", str(value))


def test_both_names_of_an_option_give_the_same_values() -> None:
    for one, two in (("models", "model"), ("strategies", "strategy")):
        both = {one: ["a.py:b"], two: "c:d"}
        assert getattr(Options.of(**both), one) == ("a.py:b", "c:d")
        words = (f"--{one}", "a.py:b,mlp", f"--{two}", "c:d")
        assert getattr(parsed(*words), one) == ("a.py:b", "mlp", "c:d")
        assert Options.of(**{two: "c:d"}) == Options.of(**{one: ["c:d"]})


def test_an_unknown_argument_is_a_type_error_that_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="unknown argument 'model_names'; known: models"):
        Options.of(model_names=["mlp"])


@pytest.mark.parametrize("option", ["models", "strategies"])
def test_a_name_with_a_comma_which_no_list_can_give_is_refused_as_it_is_given(option: str) -> None:
    with pytest.raises(LookupError) as caught:
        cases_of(Options.of(**{option: "a,b.py:net"}))
    assert (caught.value.option, caught.value.value) == (option, "a,b.py:net")
    assert "package.module:NAME" in caught.value.remedy


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"models": ["resnet81"]}, LookupError, "did you mean 'resnet18'"),
        ({"model": "no_such_module:net"}, LookupError, "cannot find the module 'no_such_module'"),
        ({"models": ["no.py:net"]}, LookupError, "there is no file no.py"),
        ({"strategies": ["no.py:way"]}, LookupError, "there is no file no.py"),
        ({"strategies": ["ddp[cached]"]}, ValueError, "ddp has none"),
        ({"strategies": ["dp[]"]}, ValueError, r"dp\[\]' names no schedule in its brackets"),
        ({"strategies": ["dp[cahced]"]}, ValueError, "unknown schedule 'cahced'"),
        ({"paired": True, "profile": True}, ValueError, "leave out paired=True"),
        ({"ladder": True, "strategies": "dp"}, ValueError, "leave out strategies="),
        ({"together": "mlp,lstm", "read_loss": 5}, ValueError, "leave out read_loss="),
        ({"batch_sizes": 8, "batch_per_device": 8}, ValueError, "and not both"),
    ],
)
def test_options_that_cannot_be_run_are_refused_with_the_text_of_the_command(
    given: dict[str, Any], kind: type[Exception], said: str, dpbench: Any
) -> None:
    asked = Options.of(**given)
    with pytest.raises(kind, match=said) as caught:
        cases_of(asked)
    code, _, err = dpbench(*shlex.split(asked.command())[1:])
    assert (code, err) == (64, f"error: {told(caught.value)}\n")
