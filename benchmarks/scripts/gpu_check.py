"""GPU check: run the GPU tests and a short benchmark, and write a page of text to send back.

    make gpu-check        or:  python benchmarks/scripts/gpu_check.py [OUTPUT.txt] [OPTION...]

The page has the machine's facts, the tests that failed with the first line of each error, and the
answers and the table of a run on 1, 2 and all GPUs. It contains no host name, user name or path.
Other options are those of the run: `dpbench run --help` lists them.

Exit code 0: all tests passed and the run ended; 1: a test failed, no test ran, or the run failed;
2: no GPU is visible to CUDA.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any
from xml.etree import ElementTree

from dpbench.hardware import gpus, provenance
from dpbench.records import fake
from dpbench.records.facts import RunFacts

ROOT = Path(__file__).parents[2]
TESTS_S, RUN_S = 1800, 1200
"""The most seconds of the tests and of the run."""
RUN = ("--rounds", "3", "--budget", "300")
USED = ("pytest", "pytest-timeout", "hypothesis")
"""The packages of the tests; without one of the last two, all tests run that do not need it."""
OPTIONS = (
    "-q",
    "-m",
    "gpu or multi_gpu",
    "--continue-on-collection-errors",
    # a setting or mark of a package that is missing is no error
    "-o",
    "addopts=",
    # nor is a warning that only this build of torch gives
    "-W",
    "default",
)


@dataclass(frozen=True, kw_only=True)
class Tests:
    """The outcome of the tests: the numbers passed and skipped, and an error per failed one.

    `last_line` is the last line that pytest printed.
    """

    passed: int = 0
    skipped: Mapping[str, int]
    failed: Mapping[str, str]
    last_line: str = ""

    @property
    def sound(self) -> bool:
        """Return whether tests ran, and all of them passed."""
        return bool(self.passed) and not self.failed

    @classmethod
    def of(cls, junit: Path, last_line: str = "") -> Tests:
        """Return the outcome that a JUnit file of pytest has; no tests without the file.

        A file of tests that needs a missing package counts as skipped.
        """
        passed = 0
        skipped: dict[str, int] = {}
        failed: dict[str, str] = {}
        for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
            bad = next((one for one in case if one.tag in ("failure", "error")), None)
            left_out = case.find("skipped")
            reason = left_out.get("message") or "" if left_out is not None else _lacks(bad)
            if reason:
                skipped[reason] = skipped.get(reason, 0) + 1
            elif bad is not None:
                failed[case.get("name", "")] = (bad.get("message") or "").partition("\n")[0][:200]
            else:
                passed += 1
        return cls(passed=passed, skipped=skipped, failed=failed, last_line=last_line)


def _lacks(error: ElementTree.Element | None) -> str:
    """Return the package, if it is not of this repository, that a file of tests cannot import."""
    if error is None or error.get("message") != "collection failure":
        return ""
    found = re.search(
        r"ModuleNotFoundError: (No module named '(?!dpbench|tests|benchmarks).*')", error.text or ""
    )
    return found[1] if found else ""


def lacking(names: Sequence[str] = USED) -> str:
    """Return a line with the packages that are not installed, and the command for them; or ""."""
    absent = [name for name in names if not provenance.version(name)]
    install = f"{Path(sys.executable).name} -m pip install {' '.join(absent)}"
    return f"not installed: {', '.join(absent)}; to install: {install}" if absent else ""


def page(
    facts: Mapping[str, Any], tests: Tests | None, run: str, options: Sequence[str] = RUN
) -> str:
    """Return the page of text.

    `facts` are those of `provenance.collect`, `run` is the output of the run with `options`.

    `tests` is None if pytest did not end.
    """
    nvidia = facts["gpus"]
    lines = ["# dpbench on GPUs", "", "## Machine"]
    lines += [f"FAKE-GPU: {fake.WHY}"] if fake.fake_gpus(RunFacts.of(facts)) else []
    lines += [
        f"{gpu['index']}: {gpu['name']}, {gpu.get('memory_bytes') or 0:,} bytes"
        for gpu in nvidia.get("gpus", ())
    ]
    lines += [
        f"{name}: {nvidia.get(name, 'unknown')}"
        for name in ("driver", "cuda_driver", "physical_gpus")
    ]
    lines += [
        f"{name}: {facts['host'].get(name, 'unknown')}" for name in ("system", "cpu", "cores")
    ]
    lines += [f"{name} {version}" for name, version in facts["packages"].items()]
    lines += [f"dpbench {facts['dpbench'].get('commit', facts['dpbench']['version'])}"]
    lines += [f"{name}={value}" for name, value in facts["variables"].items()]
    lines += ["", "## Tests", *filter(None, [lacking()])]
    if tests is None:
        lines.append(f"the tests did not end within {TESTS_S} s")
    else:
        lines.append(
            f"{tests.passed} passed, {sum(tests.skipped.values())} skipped, {len(tests.failed)}"
            " failed"
        )
        if not tests.passed and not tests.failed:
            lines.append(f"no test ran; pytest ended with: {tests.last_line}")
        lines += [f"skipped {count}: {reason}" for reason, count in tests.skipped.items()]
        lines += [f"FAILED {name}: {error}" for name, error in tests.failed.items()]
    return "\n".join(
        [*lines, "", "## Run", f"dpbench run {' '.join(options)}", "", run.strip(), ""]
    )


def _tests(folder: Path) -> Tests | None:
    junit = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={junit}", "tests"]
    last_line = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        limit = Timer(TESTS_S, process.kill)
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last_line = line.strip() or last_line
    ended = limit.is_alive()
    limit.cancel()
    return Tests.of(junit, last_line) if ended else None


def _run(folder: Path, options: Sequence[str]) -> tuple[int, str]:
    """Return the exit code of the run and its output without the names of the folder."""
    command = [
        sys.executable,
        "-m",
        "dpbench",
        "run",
        *options,
        "--quiet",
        "--store",
        "check.db",
        "--report",
        "check.html",
    ]
    try:
        done = subprocess.run(
            command, cwd=folder, timeout=RUN_S, check=False, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return 1, f"the run did not end within {RUN_S} s"
    return done.returncode, (done.stdout + done.stderr).replace(str(folder), "").replace(
        str(ROOT), ""
    )


def main() -> None:
    """Make the page, print it, write it to the file that the command line names, and exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, nargs="?", default=Path("gpu-check.txt"))
    given, options = parser.parse_known_args()
    options = options or [*RUN]
    usable = gpus.of_torch()
    if not usable.gpus:
        print(f"gpu-check: {usable.missing}", file=sys.stderr)
        sys.exit(2)
    if packages := lacking():
        print(f"gpu-check: {packages}", file=sys.stderr)
    facts = provenance.collect(gpus.describe())
    with tempfile.TemporaryDirectory() as name:
        tests = _tests(Path(name))
        code, said = _run(Path(name), options)
    text = page(facts, tests, said, options)
    given.output.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(0 if tests and tests.sound and code == 0 else 1)


if __name__ == "__main__":
    main()
