"""Files that a command reads: missing ones, ones of another kind, and byte order marks.

A file that is missing or of another kind ends every command with exit code 2. A wrong argument ends
it with 64, such as the name of an object in a file that is missing.
"""

from __future__ import annotations

import codecs
import re
from pathlib import Path

import pytest

from benchmarks.prediction import published
from dpbench.cli import cli
from dpbench.predict import machine, network
from dpbench.store import export
from tests.exported import is_error, made
from tests.predict.test_measured_bus import printed

STORE_READERS = (
    "report",
    "explain",
    "compare a b",
    "list runs",
    "show",
    "rm x --yes",
    "export csv",
    "run --models mlp --dry-run",
)
EVERY_READER = (
    *(f"{command} --store {{}}" for command in STORE_READERS),
    "merge {}",
    "import {}",
    "watch {}",
    "predict --machine {}.toml --models mlp",
    "predict --machine dgx-a100 --from {}",
    "predict --machine dgx-a100 --models mlp --bus {}",
)
"""Commands that read a file, whose name goes in place of {}."""
READERS = tuple(one for one in EVERY_READER if one.split()[0] in cli.commands)
"""Those of this copy, which may lack a sibling."""
NAMERS = (
    "check --models {}.py:net",
    "check --model {}.py:net",
    "run --models mlp,{}.py:net",
    "run --model {}.py:net",
    "run --strategies single,{}.py:way",
    "run --strategy {}.py:way",
    "run --together mlp,{}.py:net",
    "loaders --dataset {}.py:data",
    "loaders --dataset x.py:data --models {}.py:net",
    "predict --machine dgx-a100 --models {}.py:net",
)
"""Commands with the name of an object in a file."""
READ_NOTHING = {"init", "doctor", "gate"}  # the gate reads a checkout


def test_every_command_that_reads_a_file_is_among_them() -> None:
    commands = {words.split()[0] for words in (*READERS, *NAMERS)}
    assert commands & {*cli.commands} == {*cli.commands} - READ_NOTHING


@pytest.mark.parametrize("reader", [one for one in READERS if "--dry-run" not in one])
def test_a_file_that_does_not_exist_is_named_with_the_code_of_files(
    dpbench, tmp_path, reader
) -> None:
    (tmp_path / "x.py").write_text("data = []\n")
    said = is_error(*dpbench(*reader.format("missing").split()), expected=2)
    assert "missing" in said
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]


@pytest.mark.parametrize("namer", [one for one in NAMERS if one.split()[0] in cli.commands])
def test_a_name_in_a_file_that_does_not_exist_is_a_wrong_argument(dpbench, tmp_path, namer) -> None:
    (tmp_path / "x.py").write_text("data = []\n")
    said = is_error(*dpbench(*namer.format("missing").split()))
    option = re.search(r"--\w+ (?=\S*missing)", namer.format("missing"))
    assert option
    (named,) = [word for word in re.split("[ ,]", namer.format("missing")) if "missing" in word]
    spelled = {"--model": "--models", "--strategy": "--strategies", "--together": "--models"}
    name = spelled.get(option[0].strip(), option[0].strip())
    file = named.partition(":")[0]
    assert said.rstrip() == (
        f"error: {name} {named}: there is no file {file} in the folder {tmp_path}; correct the path"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]


@pytest.mark.parametrize("reader", [one for one in READERS if "watch" not in one])
def test_a_file_of_another_kind_is_named_with_the_code_of_files(dpbench, tmp_path, reader) -> None:
    name = "other.toml" if ".toml" in reader else "other"
    (tmp_path / name).write_text("neither a store, nor a trace, nor a table\n" * 50)
    said = is_error(*dpbench(*reader.format("other").split()), expected=2)
    assert "other" in said
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_defaults_that_are_not_toml_are_named_with_the_code_of_files(dpbench, tmp_path) -> None:
    (tmp_path / "dpbench.toml").write_text("neither")
    assert "dpbench.toml" in is_error(*dpbench("list", "models"), expected=2)
    (tmp_path / "dpbench.toml").write_text("[run]\nno_such_option = 1\n")
    is_error(*dpbench("list", "models"), expected=64)


def test_a_wrong_argument_has_another_code(dpbench) -> None:
    is_error(*dpbench("predict", "--machine", "no-such-machine", "--models", "mlp"), expected=64)
    is_error(*dpbench("check", "--model", "no_such_module:net"), expected=64)
    is_error(
        *dpbench("predict", "--machine", "dgx-a100", "--models", "mlp", "--bus", "-1"), expected=64
    )


# -- byte order marks; tests/observe/test_imported.py has that of a trace


def marked(path: Path, content: str) -> Path:
    path.write_bytes(codecs.BOM_UTF8 + content.encode())
    return path


def test_a_byte_order_mark_is_no_part_of_a_file(dpbench, tmp_path) -> None:
    marked(tmp_path / "dpbench.toml", 'store = "elsewhere.db"\n')
    assert "elsewhere.db" in is_error(*dpbench("report"), expected=2)
    described = machine.text_of_machine("dgx-a100")
    assert machine.load(str(marked(tmp_path / "own.toml", described))).gpu.count == 8
    columns = ["id", *sorted({*published.REQUIRED} - {"id"})]
    _, excluded = published.read(marked(tmp_path / "rows.csv", ",".join(columns) + "\nX-1\n"))
    assert [one.id for one in excluded] == ["X-1"]
    assert network.collective(str(marked(tmp_path / "bus", printed()))).bytes_per_s > 0
    lines = "".join(export.jsonl("f" * 32, [made()]))
    assert export.read_run(marked(tmp_path / "run.jsonl", lines))[0].id == "f" * 32
