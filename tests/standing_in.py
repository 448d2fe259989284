"""Stand-ins for a run's processes: a server that answers at once, and samples that do not vary."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from dpbench.hardware import foreign_load, samplers
from dpbench.measure import run as module
from dpbench.records import Sample, Step, Trial
from dpbench.records.load import Load

QUIET = Load(foreign=0.0, steal=0.0, cores=2, seconds=1.0)


class Server:
    """A replacement for a server: answers at once, records requests, can be set to misbehave."""

    made: ClassVar[list] = []
    checked: ClassVar[list] = []
    act = staticmethod(lambda case, effort: {})
    verdict = staticmethod(lambda case: {})

    def __init__(self, scratch):
        assert scratch.is_dir()
        self.asked, self.open = [], False
        Server.made.append(self)

    def __enter__(self):
        assert not any(server.open for server in Server.made)
        self.open = True
        return self

    def __exit__(self, *error):
        self.open = False

    def check(self, case, limit_s):
        assert self.open
        Server.checked.append(case)
        return Trial(**({"case": case} | Server.verdict(case)))

    def run_together(self, cases, effort, number, limit_s):
        return [self.run(case, effort, number, limit_s) for case in cases]

    def run(self, case, effort, number, limit_s):
        assert self.open
        self.asked.append((case, number, effort))
        step = Step(0.01, False, time.perf_counter())
        return Trial(
            **({"case": case, "round": number, "steps": (step,)} | Server.act(case, effort))
        )


class Series:
    def cut(self, began, ended):
        assert began <= ended
        return (Sample(began, -1, "rss_bytes", 1.0),)


@contextmanager
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Replace processes by stand-ins, and temporary files by files that a test can read."""

    @contextmanager
    def sampling(ordinals, path):
        yield Series()

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(module, "Server", Server)
    monkeypatch.setattr(samplers, "sampling", sampling)
    monkeypatch.setattr(Server, "made", [])
    monkeypatch.setattr(Server, "checked", [])
    monkeypatch.setattr(Server, "act", staticmethod(lambda case, effort: {}))
    monkeypatch.setattr(Server, "verdict", staticmethod(lambda case: {}))
    monkeypatch.setattr(foreign_load, "measure", lambda: QUIET)
    monkeypatch.setattr(foreign_load, "since", lambda before: QUIET)
    yield
    assert list(temporary.iterdir()) == [], "nothing is left in the folder of temporary files"
