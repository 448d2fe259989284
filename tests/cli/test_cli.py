"""The command line's laws: errors of usage that say the way out, and help that is quick."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from dpbench import cli
from dpbench.cli.options import EXIT_FAILED
from dpbench.records import plan, siblings
from tests import commands
from tests.exported import is_error

# -- usage

CHEAP = ("--models", "mlp", "--strategies", "single", "--batch-sizes", "8", "--rounds", "1")
COMMANDS = ("run", "rnu", "list", "export", "compare", "predict")
LISTS = {
    "run": (
        "--models",
        "--strategies",
        "--schedules",
        "--devices",
        "--device-ids",
        "--batch-sizes",
        "--batch-per-device",
        "--retry",
    ),
}
if siblings.present("predict"):
    LISTS["predict"] = (
        "--models",
        "--strategies",
        "--schedules",
        "--devices",
        "--batch-sizes",
        "--batch-per-device",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            ([command, option, empty], [option, "empty list", "at least one"])
            for command, options in LISTS.items()
            for option in options
            for empty in ("", " , ")
        ),
        (["run", "--models", "resnet81"], ["resnet81", "did you mean 'resnet18'", "mlp"]),
        (["run", "--strategies", "dpp"], ["dpp", "did you mean 'dp'", "ddp"]),
        (["run", "--devices", "0"], ["devices", "0"]),
        (["run", "--devices=-1"], ["devices", "-1"]),
        (["run", "--devices", "x"], ["--devices", "x", "1,2,4"]),
        (["run", "--devices", "1.5"], ["--devices", "1.5"]),
        (["run", "--batch-sizes", "0"], ["--batch-sizes", "0"]),
        (["run", "--batch-sizes", "64", "--batch-per-device", "8"], ["strong", "weak"]),
        (["run", "--device-kind", "cpu", "--device-ids", "0,1"], ["--device-ids", "CPU"]),
        (["run", "--device-kind", "cpu", "--placement", "colocated"], ["colocated", "spread"]),
        (["run", "--device-ids", "first"], ["first", "0,1", "GPU-"]),
        (["run", "--device-ids", "GPU-00"], ["--device-kind cuda", "needs a GPU", "torch"]),
        (["run", "--device-kind", "tpu"], ["tpu", "cpu", "cuda"]),
        (["run", "--size", "huge"], ["huge", "small", "full"]),
        (["run", "--rounds", "0"], ["--rounds", "0"]),
        (["run", "--budget", "-5"], ["--budget"]),
        (["run", "--retry", "fialed", *CHEAP], ["fialed", "failed"]),
        (["run", "--strategies", "dp", "--schedules", "refrence"], ["refrence", "reference"]),
        (["run", "--ladder", "--schedules", "cached"], ["--ladder", "leave out --schedules"]),
        (["run", "--ladder", "--strategies", "dp"], ["--ladder", "leave out --strategies"]),
        (
            ["run", "--together", "mlp,lstm", "--read-loss", "5"],
            ["--together", "leave out --read-loss"],
        ),
        (["run", "--together", "mlp,lstm", "--compile"], ["--together", "leave out --compile"]),
        (["run", "--ladder", "--devices", "1"], ["ladder", "--devices 2"]),
        (["run", "--schedules", "pool,zero1"], ["unknown schedule 'zero1'", "cached", "fastest"]),
        (
            ["run", "--device-kind", "emulated", "--device-ids", "0"],
            ["emulated", "leave out --device-ids"],
        ),
        (
            ["run", "--device-kind", "emulated", "--placement", "colocated"],
            ["colocated", "emulated", "spread"],
        ),
        (["run", "--no-such-option"], ["--no-such-option"]),
        (["run", "surplus"], ["surplus"]),
        (["rnu"], ["rnu"]),
        (["list", "modles"], ["modles", "models"]),
        (["list"], ["models"]),
        (["export"], ["jsonl"]),
        (["export", "xml"], ["xml", "jsonl"]),
        (["compare", "only-one"], ["AFTER"]),
    ],
    ids=lambda value: (
        "-".join(word.strip("-") for word in value[:3]) if value[0] in COMMANDS else ""
    ),
)
def test_a_usage_error_says_what_and_the_way_out_and_starts_nothing(
    dpbench, tmp_path, arguments, words
):
    last = is_error(*dpbench(*arguments))
    assert all(word in last for word in words), last
    assert list(tmp_path.iterdir()) == [], "nothing is made before all arguments are checked"


@pytest.fixture
def planned(dpbench, monkeypatch):
    """Call `dpbench run`; return the cases that it would measure."""
    from dpbench.measure import run as runner

    def call(*arguments):
        seen = []
        monkeypatch.setattr(
            runner, "run", lambda cases, *rest, **options: seen.extend(cases) or sys.exit(0)
        )
        assert dpbench("run", *arguments)[0] == 0
        return seen

    return call


def test_the_ladder_takes_other_axes_and_its_defaults_are_two_models_on_the_most_devices(planned):
    cases = planned("--ladder", "--device-kind", "cpu", "--batch-sizes", "32")
    assert {case.model for case in cases} == {"mlp", "resnet18"}
    assert len({case.devices for case in cases if case.strategy == "dp"}) == 1
    assert {case.batch_size for case in cases if case.strategy == "dp"} == {32}
    cases = planned(
        "--ladder",
        "--models",
        "lstm",
        "--devices",
        "1,2,3",
        "--batch-sizes",
        "12",
        "--size",
        "full",
    )
    axes = {"models": ["lstm"], "devices": [2, 3], "batch_sizes": [12], "size": "full"}
    assert cases == plan.ladder(**axes)


def test_without_a_command_the_help_is_shown_as_a_usage_error(dpbench):
    code, out, err = dpbench()
    assert code == 64
    assert "run" in out + err


@pytest.mark.parametrize(
    "arguments",
    [
        ("report",),
        ("report", "--md"),
        ("export", "jsonl"),
        ("export", "csv"),
        ("compare", "a", "b"),
    ],
)
def test_without_a_store_the_reading_commands_say_how_to_get_one(dpbench, tmp_path, arguments):
    last = is_error(*dpbench(*arguments), expected=2)
    assert "dpbench.db" in last
    assert "dpbench run" in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("run", "--models", "mlp"), ("report",), ("export", "csv")])
@pytest.mark.parametrize("kind", ["directory", "text"])
def test_a_store_that_is_none_is_an_error_of_one_line(dpbench, tmp_path, arguments, kind):
    wrong = tmp_path / "wrong"
    wrong.mkdir() if kind == "directory" else wrong.write_text("a,b\n" * 100)
    assert "wrong" in is_error(*dpbench(*arguments, "--store", wrong), expected=2)


# -- the help


HEAVY = (
    "torch",
    "pandas",
    "numpy",
    "matplotlib",
    "rich",
    "scipy",
    "networkx",
    "jinja2",
    "psutil",
    "pynvml",
    "sqlite3",
)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["--version"], ["list", "models"], ["list", "schedules"]],
)
def test_help_and_lists_import_nothing_heavy(arguments):
    code = f"""
import sys
from dpbench import cli
try:
    cli.main({arguments!r})
except SystemExit as end:
    assert not end.code
sys.stderr.write(" ".join(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=commands.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout
    assert done.stderr == ""


def test_the_help_loads_few_modules():
    """Those of dpbench are about 40, and those of the standard library about 50.

    Each costs about a millisecond. The modules of click, without which nothing runs, do not count;
    nor do those that the .pth files of an environment load before (-S): otherwise the number would
    depend on these files.
    """
    code = """
import sys
import click
before = len(sys.modules)
from dpbench import cli
try:
    cli.main(["--help"])
except SystemExit as end:
    assert not end.code
sys.stderr.write(str(len(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=commands.ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr) <= 110


def test_help_names_every_command_and_the_first_step(dpbench):
    code, out, err = dpbench("--help")
    assert (code, err) == (0, "")
    assert all(
        re.search(rf"^  {name} ", out, re.M)
        for name in ("run", "report", "list", "export", "compare")
    )
    assert "dpbench run" in out


@pytest.mark.parametrize("bug", [ValueError("of two lists"), KeyError("key"), IndexError("list")])
def test_a_bug_is_no_wrong_usage(
    bug: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise bug

    monkeypatch.setattr(cli.cli.commands["explain"], "callback", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain"])
    assert ended.value.code == EXIT_FAILED
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_that_python_wraps_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupt in the body of a class becomes a RuntimeError."""

    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr(cli.cli.commands["explain"], "callback", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain"])
    assert ended.value.code == 130
    assert "Traceback" not in capsys.readouterr().err
