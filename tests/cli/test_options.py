"""Defaults from dpbench.toml or pyproject.toml, and the help that shows them and the exit codes."""

from __future__ import annotations

import importlib.util
import re
import shlex
from unittest import mock

import click
import pytest

from dpbench.cli import cli, options
from dpbench.measure import run as runner
from dpbench.measure.run import Outcome
from dpbench.records.options import OPTIONS, OUTPUT
from dpbench.store import Identity
from tests.exported import PROVENANCE, Command, is_error, made, stored
from tests.records.test_options import parsed

TOML = """
store = "mine.db"

[run]
models = ["mlp", "lstm"]
model = ["a:b"]
devices = "1,2"
batch-sizes = [8, 16]
rounds = 5
paired = true
compile = true
limit = 50
tag = ["driver=550", "node=a,b"]

[compare]
margin = 0.5
"""


@pytest.fixture
def asked(dpbench: Command, tmp_path, monkeypatch):
    """Call `dpbench run`.

    Return the cases and options with which it would measure, and the run's command.
    """
    (tmp_path / "a.py").write_text("b = None\n")
    monkeypatch.syspath_prepend(tmp_path)

    def call(*arguments: str):
        seen: list = []

        def run(cases, store, how, **others):
            run_id, _ = store.begin_run(Identity("p", "h", "c"), rounds=1, provenance=PROVENANCE)
            store.end_run(run_id)
            seen.append(
                (cases, {**vars(how), **others}, store.runs()[0].naming.command, store.path.name)
            )
            return Outcome(run_id, False, {})

        monkeypatch.setattr(runner, "run", run)
        code, _, err = dpbench(*arguments)
        assert code == 2, err  # nothing was measured
        return seen[0]

    return call


@pytest.mark.parametrize("file", ["dpbench.toml", "pyproject.toml"])
def test_a_file_gives_defaults_and_the_command_line_wins(asked, tmp_path, file):
    text = TOML if file == "dpbench.toml" else re.sub(r"^\[", "[tool.dpbench.", TOML, flags=re.M)
    (tmp_path / file).write_text(text if file == "dpbench.toml" else f"[tool.dpbench]\n{text}")
    cases, options, _, store = asked(
        "run", "--rounds", "7", "--strategies", "single", "--models", "mlp"
    )
    assert {(case.model, case.batch_size, case.compile) for case in cases} == {
        ("mlp", batch, True) for batch in (8, 16)
    }
    assert (options["rounds"].name, options["paired"], store) == (7, True, "mine.db")


def test_the_stored_command_repeats_the_run_without_the_file(asked, tmp_path):
    (tmp_path / "dpbench.toml").write_text(TOML)
    cases, options, command, _ = asked(
        "run", "--strategies", "single", "--name", "a", "--tag", "k=v"
    )
    words = shlex.split(command)
    assert words[:3] == ["dpbench", "--no-config", "run"]
    again = asked(*words[1:])
    assert (again[0], again[3]) == (cases, "mine.db")
    assert (again[1]["rounds"].name, again[1]["paired"]) == (5, True)
    assert again[1]["rounds"] == options["rounds"]
    assert (parsed(*words[3:]).name, parsed(*words[3:]).tag) == ("a", ("k=v",))
    # without a default from a file, the command is that of the user
    (tmp_path / "dpbench.toml").write_text("[compare]\nmargin = 0.5\n")
    assert asked("run", "--models", "mlp")[2] == ""


def test_defaults_are_for_every_command_that_has_the_option(dpbench, tmp_path):
    run_id = stored(tmp_path / "mine.db", made())
    (tmp_path / "dpbench.toml").write_text(TOML)
    assert dpbench("list", "runs")[1].startswith(run_id[:12])
    assert "dpbench.db" in is_error(*dpbench("--no-config", "list", "runs"), expected=2)
    assert dpbench("list", "runs", "--store", "mine.db")[0] == 0
    assert dpbench("list", "models")[0] == 0


@pytest.mark.sibling("observe")
@pytest.mark.parametrize("command", ["watch", "import"])
def test_defaults_are_for_the_commands_of_a_sibling(dpbench, tmp_path, command):
    (tmp_path / "dpbench.toml").write_text(TOML)
    assert "mine.db" in dpbench(command, "--help")[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[rnu]\n", ["'rnu'", "run"]),
        ("rounds = 3\n", ["'rounds'", "run"]),
        ("run = 3\n", ["'run'"]),
        ("[run]\nmodles = 'mlp'\n", ["[run]", "'modles'", "models"]),
        ("[run]\nbatch_sizes = 8\n", ["'batch_sizes'", "batch-sizes"]),
        ("[run]\nhelp = true\n", ["'help'"]),
        ("[compare]\nbefore = '@last'\n", ["[compare]", "'before'"]),
        ("[run]\nrounds = 'many'\n", ["--rounds", "'many'"]),
        ("[run]\nlimit = 0\n", ["--limit", "0"]),
        ("[run]\nsize = 'huge'\n", ["--size", "huge"]),
        ("[run]\npaired = 'perhaps'\n", ["--paired", "perhaps"]),
        ("[run]\nrounds = {a = 1}\n", ["--rounds"]),
        ("[run]\nlimit = 2020-01-01\n", ["--limit", "2020-01-01"]),
        ("[run]\nstarted = 2020-01-01\n", ["'started'"]),
    ],
)
def test_a_wrong_entry_is_an_error_that_names_file_and_key_and_starts_nothing(
    dpbench, tmp_path, text, words
):
    (tmp_path / "dpbench.toml").write_text(text)
    last = is_error(*dpbench("run", "--models", "mlp"))
    assert all(word in last for word in ["dpbench.toml", *words]), last
    assert [one.name for one in tmp_path.iterdir()] == ["dpbench.toml"]


def test_two_files_with_defaults_are_an_error_and_others_are_none_of_ours(dpbench, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 99\n")
    assert dpbench("list", "models")[0] == 0
    (tmp_path / "dpbench.toml").write_text("[run]\n")
    assert dpbench("list", "models")[0] == 0
    (tmp_path / "pyproject.toml").write_text("[tool.dpbench.run]\nrounds = 3\n")
    last = is_error(*dpbench("list", "models"))
    assert "dpbench.toml and [tool.dpbench] in pyproject.toml" in last


# -- help


def test_help_shows_the_defaults_and_the_file(dpbench, tmp_path):
    assert "Defaults from" not in dpbench("run", "--help")[1]
    (tmp_path / "dpbench.toml").write_text(TOML)
    out = dpbench("run", "--help")[1]
    shown = out[out.index("Defaults from dpbench.toml:") :]
    for line in (
        "--store +mine.db",
        "--models +mlp,lstm,a:b",
        "--batch-sizes +8,16",
        "--paired +on",
        "--compile +on",
        "--tag +driver=550 node=a,b",
    ):
        assert re.search(rf"^  {line}$", shown, re.M), line
    assert "[default: 5]" in out, "click shows the value where it shows a default"


def test_the_help_of_a_run_has_each_option_once_in_its_group(dpbench):
    sections = re.split(r"^(\S.*):$", dpbench("run", "--help")[1], flags=re.M)
    grouped = [
        (option, title)
        for title, text in zip(sections[1::2], sections[2::2], strict=True)
        for option in re.findall(r"^  (?:-., )?(--[a-z-]+)", text, re.M)
    ]
    assert len(dict(grouped)) == len(grouped)
    assert {(one.spelled, one.group) for one in OPTIONS.values()} <= {*grouped}
    assert {dict(grouped)[name] for name in ("--report", "--store", "--json")} == {OUTPUT}
    assert "Options" not in sections


def leaves(group):
    """Yield the words of each command that is not a group."""
    for name, command in sorted(group.commands.items()):
        yield from (
            ([name, *more] for more in leaves(command))
            if hasattr(command, "commands")
            else [[name]]
        )


@pytest.mark.parametrize("words", [*leaves(cli)], ids=" ".join)
def test_the_help_of_a_command_has_its_exit_codes(dpbench, words):
    out = dpbench(*words, "--help")[1]
    codes = re.findall(r"^  (\d+) +\S", out[out.index("Exit codes:") :], re.M)
    assert {"0", "2", "64"} <= {*codes}
    assert codes == sorted(codes, key=int)


def test_no_summary_of_a_command_is_cut_off_on_a_narrow_terminal(dpbench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = dpbench("--help")[1]
    lines = [line for line in out[out.index("Commands:") :].splitlines()[1:] if line]
    assert len(lines) == len(cli.commands)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_bash_completes_commands_and_options(dpbench, monkeypatch):
    assert "_DPBENCH_COMPLETE=bash_source dpbench" in dpbench("--help")[1]
    monkeypatch.setenv("_DPBENCH_COMPLETE", "bash_source")
    assert "complete " in dpbench()[1]
    asked = (
        ("dpbench li", 1, "plain,list"),
        ("dpbench run --batch-s", 2, "plain,--batch-sizes"),
        ("dpbench run --size f", 3, "plain,full"),
    )
    for words, number, expected in asked:
        monkeypatch.setenv("_DPBENCH_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(number))
        assert dpbench()[1].splitlines() == [expected]


def test_options_have_types_for_click_before_8_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its types take no arguments; `make ci-versions` installs it."""
    refuse = mock.Mock(side_effect=TypeError("not subscriptable"))
    monkeypatch.setattr(click.ParamType, "__class_getitem__", refuse, raising=False)
    spec = importlib.util.spec_from_file_location("options_of_old_click", options.__file__)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.Value(OPTIONS["models"]).name == "models"
