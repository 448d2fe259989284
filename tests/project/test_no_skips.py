"""`--no-skips`: what is skipped fails, at collection too, and an expected failure is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest

FILES = {
    "file.py": """
import pytest

pytest.importorskip("a_library_that_is_not_there")
""",
    "tests.py": """
import pytest


def test_skipped():
    pytest.skip("planted")


@pytest.mark.xfail
def test_expected():
    raise ValueError


def test_passed():
    pass
""",
}


class Suite:
    """A plugin of pytest with the hooks of this suite's option, and the outcome of each part."""

    pytest_addoption = staticmethod(conftest.pytest_addoption)
    pytest_make_collect_report = staticmethod(conftest.pytest_make_collect_report)
    pytest_runtest_makereport = staticmethod(conftest.pytest_runtest_makereport)

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.outcomes[report.nodeid] = report.outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.outcomes[report.nodeid] = report.outcome


@pytest.mark.parametrize(("options", "skipped"), [((), "skipped"), (("--no-skips",), "failed")])
def test_what_is_skipped_fails_and_what_is_expected_to_fail_does_not(
    options: tuple[str, ...], skipped: str, tmp_path: Path
) -> None:
    # pytest imports a module of a name once in a process
    begin = f"test_{skipped}_"
    for name, text in FILES.items():
        (tmp_path / f"{begin}{name}").write_text(text)
    suite = Suite()
    quiet = ("-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors")
    alone = ("-c", str(tmp_path / "none.ini"), "--rootdir", str(tmp_path))
    (tmp_path / "none.ini").write_text("[pytest]\n")
    pytest.main([str(tmp_path), *quiet, *alone, *options], plugins=[suite])
    found = {name.removeprefix(begin): how for name, how in suite.outcomes.items() if ".py" in name}
    assert found == {
        "file.py": skipped,
        "tests.py": "passed",
        "tests.py::test_skipped": skipped,
        "tests.py::test_expected": "skipped",
        "tests.py::test_passed": "passed",
    }
