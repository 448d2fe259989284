"""Write docs/commands.md, the page with the help of every command.

python -m benchmarks.scripts.commands_page
"""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from dpbench.cli import cli

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
WIDTH = 100
HEAD = """# Commands

The help of every command, as `dpbench COMMAND --help` prints it. `python -m
benchmarks.scripts.commands_page` writes this page.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for name in ("", *sorted(cli.commands)):
        words = [*name.split(), "--help"]
        help_ = CliRunner().invoke(
            cli, words, prog_name="dpbench", terminal_width=WIDTH, max_content_width=WIDTH
        )
        title = f"dpbench {name}".strip()
        parts.append(f"## {title}\n\n```text\n{help_.output.rstrip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
