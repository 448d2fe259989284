"""Fuzz: no machine file, table or command line of any content ends in a traceback or hangs.

Errors are in plain lines.

The environment variable FUZZ sets the number of examples of each kind; 2,000 is the number to run
by hand.
"""

from __future__ import annotations

import csv
import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import click
import hypothesis
import pytest
from hypothesis import strategies as st

from benchmarks.prediction import __main__ as scoreboard
from dpbench import cli
from dpbench.predict.machine import text_of_machine
from dpbench.records.options import OPTIONS
from tests.exported import made, stored

EXAMPLES = int(os.environ.get("FUZZ", "60"))
SLOWEST_S = 20.0
"""The seconds after which a command that only reads is called a hang.

The slowest takes 1 s on an idle machine.
"""
TABLE = Path(__file__).parents[1] / "data" / "published.csv"
ODD = (
    "",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e400",
    "9" * 400,
    "true",
    "\x1b[31m",
    "\u202e",
    "=1+1",
    "é",
    "gpu0-99999999999",
    "gpu1-0",
    "gpu9",
    "{}",
    "[]",
    "x" * 3000,
    "a:b",
    ":",
    "..",
    "/dev/null",
    "@last",
    "1,2",
    ",",
    "--",
    "2024-01-01",
)
words = st.sampled_from(ODD) | st.text(max_size=8).filter(
    lambda text: "\0" not in text and text.isprintable()
)
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate)
"""Without shrinking, which would run commands for minutes."""
fuzz = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[*hypothesis.HealthCheck],
    phases=PHASES,
)
OUT = frozenset({0, 1, 2, 3, 64, 130})
"""The exit codes that the help of some command names."""


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def ended(arguments: tuple[str, ...]) -> Iterator[None]:
    """End a command that hangs, and fail."""
    before = signal.signal(
        signal.SIGALRM, lambda number, frame: pytest.fail(f"a hang: {arguments}")
    )
    # the rest of the limit that pytest-timeout has set
    rest_s, _ = signal.setitimer(signal.ITIMER_REAL, SLOWEST_S)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, rest_s)


def ran(*arguments: str) -> tuple[int, str]:
    """Run a command in this process.

    Return its exit code and its output. Only SystemExit may be raised.
    """
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out), ended(arguments):
        try:
            cli.main([*arguments])
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    assert code in OUT, (code, out.getvalue())
    assert "Traceback" not in out.getvalue()
    if code == 64:
        assert "rror: " in out.getvalue(), "an error says so"
    return code, out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    stored(path / "dpbench.db", made(), made(number=1), made(number=2))
    with inside(path), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPBENCH_PATIENCE", "0")
        yield path


# -- machine files

plain = (
    st.booleans()
    | st.integers()
    | st.floats()
    | words.map(lambda text: f"'{text}'" if "'" not in text else "''")
)
PARTS = (
    "{}",
    "[]",
    "[[[]]]",
    "{a = 1}",
    "2024-01-01",
    '"\\u001b[31m"',
    '["gpu0-1", "cpu0"]',
    '["gpu0", "gpu0"]',
    "0x7fffffffffffffff",
)
numbered = plain.map(
    lambda value: str(value).lower() if isinstance(value, bool | float) else str(value)
)
values = numbered | st.sampled_from(PARTS)
FILES = [
    text_of_machine(name).splitlines() for name in ("rtx-3090-x8", "dgx-1-v100-x128", "b200-x8")
]


@st.composite
def machines(draw: st.DrawFn) -> str:
    """Return a machine file in which lines were replaced, removed, doubled or given new values."""
    lines = list(draw(st.sampled_from(FILES)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        key, is_value, _ = lines[place].partition(" = ")
        how = draw(st.sampled_from(["value"] * 5 + ["remove", "double", "replace", "key"]))
        if how == "value" and is_value:
            lines[place] = f"{key} = {draw(values)}"
        elif how == "key" and is_value:
            lines[place] = lines[place].replace(
                key, draw(st.sampled_from(["gpu", "host", "nodes", "between", "x"])), 1
            )
        elif how in ("remove", "double"):
            lines[place : place + 1] = [lines[place]] * (2 * (how == "double"))
        else:
            lines[place] = draw(
                words | st.sampled_from(["[gpu]", "[[link]]", "[probe.a]", "[host", "[collective]"])
            )
        lines = lines or [""]
    return "\n".join(lines)


@fuzz
@hypothesis.given(text=machines() | st.text(max_size=60) | st.binary(max_size=60))
def test_any_machine_file_is_predicted_or_refused(folder, text):
    path = folder / "any.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    code, out = ran("predict", "--machine", "any.toml", "--models", "resnet50", "--devices", "1,2")
    assert code == 0 or "any" in out, out
    assert "\x1b" not in out


# -- published tables

with TABLE.open(newline="", encoding="utf-8") as file:
    ROWS = [row for row in csv.DictReader(file) if row["id"].startswith("RYU2080TI-")][:400]
ONES = [row for row in ROWS if row["n_gpu"] == "1"][:3]
SAMPLE = [
    *ONES,
    *(
        row
        for row in ROWS
        if row["n_gpu"] != "1" and row["model"] in {one["model"] for one in ONES}
    ),
][:8]


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Return a table in which cells, names of columns, or single bytes were changed."""
    rows = [dict(row) for row in SAMPLE]
    for _ in range(draw(st.integers(1, 4))):
        row = draw(st.sampled_from(rows))
        row[draw(st.sampled_from([*row]))] = draw(words)
    columns = [draw(words) if draw(st.integers(0, 60)) == 0 else name for name in rows[0]]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerows([columns, *(list(row.values()) for row in rows)])
    content = bytearray(out.getvalue().encode("utf-8", "surrogatepass"))
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(content) - 1))
        content[place : place + 1] = draw(st.binary(max_size=3))
    return bytes(content)


@fuzz
@hypothesis.given(content=tables() | st.binary(max_size=60))
def test_any_table_is_scored_or_refused(folder, content):
    path = folder / "any.csv"
    path.write_bytes(content)
    said = io.StringIO()
    code: Any = 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            scoreboard.main(["any.csv"])
        except SystemExit as end:
            code = end.code
    assert code == 0 or (code == 2 and "any.csv" in said.getvalue()), (code, said.getvalue())
    assert "\x1b" not in said.getvalue()


# -- command lines

FREE = {
    "report",
    "explain",
    "compare",
    "list",
    "show",
    "rm",
    "merge",
    "export",
    "predict",
    "import",
    "run",
    "check",
    "init",
    "loaders",
    "watch",
}
"""The commands that are fuzzed; `doctor` measures, whatever its options are."""
NEVER = {
    "-m",
    "--yes",
    "--output",
    "--store",
    "--report",
    "--max-batch",
    "--memory",
    "--anyway",
    "--find-max-batch",
}
"""Options that would remove, write elsewhere, or measure."""
MEASURES = {"run": ["--dry-run"]}
"""What keeps a command from measuring."""
ABSENT = {"check": "--model", "loaders": "--dataset"}
"""Options that name code to run: only absent code is named."""


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """Return a command line of known and unknown options, with plausible and with odd values."""
    name = draw(st.sampled_from(sorted(FREE & cli.cli.commands.keys())))
    command = cli.cli.commands[name]
    found = [name, *MEASURES.get(name, [])]
    options = [
        one for one in command.params if isinstance(one, click.Option) and not {*one.opts} & NEVER
    ]
    for one in draw(st.lists(st.sampled_from(options), max_size=4)) if options else []:
        found.append(one.opts[0])
        if not one.is_flag:
            known = OPTIONS[one.name].choices if one.name in OPTIONS else ()
            usual = st.sampled_from(
                [*map(str, known), "1", "2", "mlp", "single,dp", "dpbench.db", "resnet50", "0.5"]
            )
            found.append(draw(usual | words))
    if name in ABSENT:
        found += [
            ABSENT[name],
            draw(st.sampled_from(["absent:net", "absent.py:net", "", ":", "a\x1b:b", "a:"])),
        ]
    elif name in ("watch", "init"):
        found.append(draw(st.sampled_from(["absent/a.py", "", "/", "absent/\x1b.py"])))
    else:
        usual = st.sampled_from(
            ["@last", "jsonl", "csv", "trace", "pyperf", "models", "runs", "metrics", "dpbench.db"]
        )
        found += draw(st.lists(usual | words, max_size=2))
    return found


HUGE = "9" * 400


@fuzz
@hypothesis.example(line=["run", "--dry-run", "--rounds", HUGE])
@hypothesis.example(line=["run", "--dry-run", "--device-memory", HUGE])
@hypothesis.example(line=["loaders", "--dataset", "absent.py:net", "--examples", HUGE])
@hypothesis.example(
    line=["predict", "--machine", "rtx-3090-x8", "--models", "resnet50", "--batch-sizes", HUGE]
)
@hypothesis.example(
    line=["predict", "--machine", "rtx-3090-x8", "--models", "resnet50", "--step-s", "1e-300"]
)
@hypothesis.given(line=lines())
def test_any_command_line_works_or_is_refused(folder, line):
    ran(*line)
