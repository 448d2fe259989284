"""Start `dpbench` as a user does, in a separate folder and session, and read its store."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import dpbench
from tests.marked import Mark, marked, patience, poll

ROOT = Path(dpbench.__file__).parent.parent
COMMAND = [sys.executable, "-m", "dpbench"]


class Folder:
    """A user's working directory: its commands, its store, its folder for temporary files."""

    def __init__(self, path: Path, mark: Mark) -> None:
        self.path, self.mark, self.store = path, mark, path / "dpbench.db"
        self.temporary = path / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.paths: list[Path] = []
        """Further entries of Python's path."""

    @property
    def env(self) -> dict[str, str]:
        """Return the environment of its commands: no new commit changes dpbench's identity."""
        paths = [str(ROOT), *map(str, self.paths)]
        own = {
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(self.temporary),
            "GIT_CEILING_DIRECTORIES": os.pathsep.join(map(str, (ROOT, self.path.parent))),
        }
        return os.environ | self.mark.env | own

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command in a separate session.

        Its output goes to files, so that no reader can block it.
        """
        with (self.path / "out").open("w") as out, (self.path / "err").open("w") as err:
            return subprocess.Popen(
                [*COMMAND, *arguments],
                cwd=self.path,
                env=self.env,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def do(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        process = self.start(*arguments)
        code = process.wait(patience(timeout_s))
        return subprocess.CompletedProcess(arguments, code, self.out, self.err)

    @property
    def out(self) -> str:
        return (self.path / "out").read_text()

    @property
    def err(self) -> str:
        return (self.path / "err").read_text()

    def query(self, sql: str) -> list[tuple]:
        """Return the result of a query of the store at this moment; [] if there is no store yet."""
        try:
            with closing(
                sqlite3.connect(f"{self.store.as_uri()}?mode=ro", uri=True, timeout=30)
            ) as db:
                return db.execute(sql).fetchall()
        except sqlite3.OperationalError:
            return []

    def final(self) -> list[tuple]:
        """Return the ended trials, as rows that must never change again."""
        seconds = "(SELECT total(seconds) FROM step WHERE trial_id=id)"
        return self.query(
            f"SELECT id, fingerprint, round, status, started, setup, {seconds} FROM trial "
            "WHERE status NOT IN ('running', 'killed') ORDER BY id"
        )

    def wait_for(self, process: subprocess.Popen[str], trials: int, timeout_s: float = 90) -> bool:
        """Wait until `trials` trials are final and another one runs, or the command has ended."""

        def there() -> bool:
            busy = (
                self.query("SELECT 1 FROM trial WHERE status='running'")
                and len(self.mark.alive()) >= 3
            )
            return process.poll() is not None or bool(len(self.final()) >= trials and busy)

        poll(there, timeout_s)
        return process.poll() is None and len(self.final()) >= trials


def end(process: subprocess.Popen[str], how: str) -> int:
    """End a command in one of the ways in which commands end before their time.

    Return its exit status.
    """
    if how == "kill group":
        os.killpg(process.pid, signal.SIGKILL)
    elif how == "interrupt group":  # what a terminal does on Ctrl-C
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(
            {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}[how]
        )
    return process.wait(patience(20))


@contextmanager
def folder(path: Path) -> Iterator[Folder]:
    """Yield a working directory; end whatever was started in it."""
    with marked() as mark:
        yield Folder(path, mark)
