"""Documents that stay correct: the files that they name exist, and the code that they show runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import dpbench
from benchmarks.scripts import commands_page
from dpbench.cli import cli
from tests.marked import patience

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
DOCS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("SKILL.md", "SECURITY.md", "examples/README.md")),
]
PIP_EXTRA = re.compile(r"pip install '([\w-]+)\[(?:([\w-]+)|\{[^}]*\})\]")
"""Matches the distribution and the extra, which is empty if an f-string inserts it."""


CONTRACT = (ROOT / "docs" / "contract.md").read_text()
TESTS: dict[str, list[str]] = tomllib.loads((Path(__file__).with_name("contract.toml")).read_text())
"""The tests of each entry of the contract."""


def test_every_test_that_the_contract_names_exists() -> None:
    named = {test for tests in TESTS.values() for test in tests}
    written = set(
        re.findall(
            r"^def (test_\w+)", "".join(f.read_text() for f in (ROOT / "tests").rglob("*.py")), re.M
        )
    )
    assert named
    assert named <= written


def test_every_entry_of_the_contract_has_a_test() -> None:
    rows = re.findall(r"^\| ?(.*?) ?\|", CONTRACT, re.M)
    entries = [first for first in rows if first not in ("#", "---")]
    assert len(entries) > 100
    assert entries == [*TESTS]
    assert all(TESTS.values())


PYTHON = [
    code
    # tests/observe/test_integrations.py runs the code for other libraries
    for text in (README, *(path.read_text() for path in DOCS if path.stem != "integrations"))
    for code in re.findall(r"```python\n(.*?)```", text, re.S)
]


def test_the_python_of_the_documents_runs(tmp_path: Path) -> None:
    """Each program has a separate namespace.

    All run in one process, because every process would load torch again.
    """
    for number, code in enumerate(PYTHON):
        (tmp_path / f"{number}.py").write_text(code)
    run = (
        f"import runpy\nfor number in range({len(PYTHON)}): runpy.run_path(f'{{number}}.py',"
        " run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", run],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert len(PYTHON) > 1
    assert done.returncode == 0, done.stderr


COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for text in (README, *(path.read_text() for path in DOCS))
    for block in re.findall(r"```\w*\n(.*?)```", text, re.S)
    for line in block.splitlines()
    if line.startswith("dpbench ")
]
TEN = [shlex.split(line)[1:] for line in re.findall(r"^\| `(dpbench .*?)` \|", README, re.M)]
"""The commands of the README's table."""


def test_every_option_that_a_document_names_is_one() -> None:
    known = {
        option for command in cli.commands.values() for p in command.params for option in p.opts
    }
    known |= {"--help"}
    shown = re.findall(
        r"dpbench \w+[^`\n]*", README + CONTRIBUTING + "".join(path.read_text() for path in DOCS)
    )
    named = {option for line in shown for option in re.findall(r"--[a-z][a-z-]+", line)}
    assert named
    assert named <= known


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_has_help_and_stands_in_the_recipes(command: str) -> None:
    assert CliRunner().invoke(cli, [command, "--help"]).exit_code == 0
    assert f"dpbench {command}" in (ROOT / "docs" / "recipes.md").read_text()


def test_the_page_of_commands_is_that_of_this_version() -> None:
    assert commands_page.PAGE.read_text() == commands_page.page(), (
        "run: python -m benchmarks.scripts.commands_page"
    )


def test_every_extra_that_a_text_names_is_one_of_this_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = {
        path: path.read_text()
        for path in [*(ROOT / "dpbench").rglob("*.py"), ROOT / "README.md", *DOCS]
    }
    named = [
        (path.name, *found) for path, text in texts.items() for found in re.findall(PIP_EXTRA, text)
    ]
    assert len(named) >= 4
    extras = {"", *project["optional-dependencies"]}
    assert [one for one in named if one[1] != project["name"] or one[2] not in extras] == []


def test_the_answer_of_the_readme_is_that_of_the_committed_trials() -> None:
    (shown,) = re.findall(r"```text\n(mlp: .*?)```", README, re.S)
    answer, *_ = dpbench.open_trials(ROOT / "reports/default/trials.jsonl.gz").answers
    label = f" [{' '.join(answer.labels)}]"
    assert " ".join(shown.split()).replace(label, "") == answer.text


def test_the_prediction_of_the_readme_is_that_of_its_page() -> None:
    ((speedup, page),) = re.findall(r"\[only (\S+ \(\S+\)) as\s+fast\]\((.*?)\)", README)
    assert f"| {speedup} |" in (ROOT / page).read_text().replace("*", "")


def test_every_link_of_a_document_leads_to_a_file() -> None:
    for path in {*ROOT.glob("*.md"), *DOCS}:
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
        missing = [one for one in links if "://" not in one and not (path.parent / one).exists()]
        assert not missing, path.name


def test_the_citation_and_the_skill_are_of_this_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.M))
    assert cited["cff-version"] == "1.2.0"
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert {"message", "title", "type"} <= cited.keys()
    front = (ROOT / "SKILL.md").read_text().split("---\n")[1]
    assert re.findall(r"^(\w+):", front, re.M) == ["name", "description"]


def test_documents_name_only_files_that_exist() -> None:
    text = README + CONTRIBUTING + "".join(path.read_text() for path in DOCS)
    named = set(
        re.findall(r"`((?:docs|dpbench|tests|benchmarks|reports)/[\w./-]+\.\w+)`", text)
    ) - {"reports/latest/index.html", "reports/runs/index.html"}
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert [name for name in missing if not re.search(r"/NAME\.\w+$", name)] == []


@pytest.mark.parametrize(
    "path",
    sorted({*ROOT.glob("*.md"), *DOCS}),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_line_of_a_document_is_longer_than_120_columns(path: Path) -> None:
    long = [
        f"{path.name}:{n}: {len(line)}"
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert not long
