"""Run the commands of docs/why-dataparallel-is-slow.md, and write their tables into it.

    python benchmarks/scripts/claims.py            # rewrite the tables; takes two minutes
    python benchmarks/scripts/claims.py --check    # exit status 1 if a predicted table differs

A table follows the marker `<!-- result -->`, which follows the command. With `<!-- result memory
-->`, it is the second table that the command prints. After `<!-- measured run -->`, it is a
measurement, followed by the verdict.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from click.testing import CliRunner

from dpbench.cli import cli

PAGE = Path(__file__).parents[2] / "docs" / "why-dataparallel-is-slow.md"
RESULT = re.compile(
    r"```sh\ndpbench (?P<command>[^\n]+)\n```\n\n(?P<marker><!-- result(?: memory)?"
    r" -->)\n(?P<table>(?:\|[^\n]*\n)*)"
)
MEASURED = re.compile(
    r"```sh\ndpbench (?P<command>[^\n]+)\n```\n\n(?P<marker><!-- measured run"
    r" -->)\n(?P<table>(?:[|>][^\n]*\n)*)"
)
COLUMNS = {
    "<!-- measured run -->": ("model", "strategy", "devices", "ms/step (95 %)", "speed-up (95 %)"),
    "<!-- result -->": (
        "strategy",
        "devices",
        "ms/step (80 %)",
        "speed-up (80 %)",
        "phases, ms",
    ),
    "<!-- result memory -->": (
        "strategy",
        "devices",
        "GPU 0 allocated",
        "other GPUs",
        "GPU 0 reserved",
    ),
}


def table(command: str, marker: str) -> str:
    """Return the marker's columns of the table that a command prints, in Markdown."""
    with TemporaryDirectory() as folder, chdir(folder):  # some commands write a page
        done = CliRunner().invoke(cli, shlex.split(command), catch_exceptions=False)
    if done.exit_code:
        raise RuntimeError(
            f"dpbench {command} ended with exit status {done.exit_code}: {done.output}"
        )
    printed = [block.splitlines() for block in done.stdout.split("\n\n")]
    blocks = [block for block in printed if len(block) > 1 and set(block[1]) <= {"-", " "}]
    header, dashes, *rows = blocks[1 if "memory" in marker else 0]
    places = [match.span() for match in re.finditer("-+", dashes)]
    names = [header[start:end].strip() for start, end in places]
    wanted = COLUMNS[marker]
    cells = [[row[start:end].strip() for start, end in places] for row in rows]
    lines = [
        wanted,
        ["---"] * len(wanted),
        *([one[names.index(name)] for name in wanted] for one in cells),
    ]
    verdict = printed[-1] if "measured" in marker else []
    said = [
        part
        for line in verdict
        for part in textwrap.wrap(line, 98, initial_indent="> - ", subsequent_indent=">   ")
    ]
    return "".join(f"{line}\n" for line in [*(f"| {' | '.join(line)} |" for line in lines), *said])


def renewed(text: str, results: re.Pattern[str] = RESULT) -> str:
    """Return the page with the tables that its commands print now."""

    def replaced(found: re.Match[str]) -> str:
        command, marker = found["command"], found["marker"]
        return f"```sh\ndpbench {command}\n```\n\n{marker}\n{table(command, marker)}"

    return results.sub(replaced, text)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = renewed(before)
    if "--check" in sys.argv:
        sys.exit(before != after)
    PAGE.write_text(renewed(after, MEASURED), encoding="utf-8")
