"""GPU check: run the GPU tests and a short benchmark, and write a page of text to send back.

    make gpu-check        or:  python benchmarks/scripts/gpu_check.py [OUTPUT.txt] [OPTION...]

The page has the machine's facts, the tests that failed with the first line of each error, and the
answers and the table of a run on 1, 2 and all GPUs. It contains no host name, user name or path.
Other options are those of the run: `dpbench run --help` lists them.

Exit code 0: all tests passed and the run ended; 1: a test failed, or the run did; 2: no GPU is
visible to CUDA.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dpbench.hardware import nvml, provenance

ROOT = Path(__file__).parents[2]
TESTS_S, RUN_S = 1800, 1200
"""The most seconds of the tests and of the run."""
RUN = ("--rounds", "3", "--budget", "300")


@dataclass(frozen=True, kw_only=True)
class Tests:
    """The outcome of the tests: the numbers passed and skipped, and an error per failed one."""

    passed: int
    skipped: Mapping[str, int]
    failed: Mapping[str, str]

    @classmethod
    def of(cls, junit: Path) -> Tests:
        """Return the outcome that a JUnit file of pytest has."""
        passed, skipped, failed = 0, {}, {}
        for case in ElementTree.parse(junit).iter("testcase"):
            bad = next((one for one in case if one.tag in ("failure", "error")), None)
            left_out = case.find("skipped")
            if bad is not None:
                failed[case.get("name", "")] = (bad.get("message") or "").partition("\n")[0][:200]
            elif left_out is not None:
                reason = left_out.get("message") or ""
                skipped[reason] = skipped.get(reason, 0) + 1
            else:
                passed += 1
        return cls(passed=passed, skipped=skipped, failed=failed)


def page(
    facts: Mapping[str, Any], tests: Tests | None, run: str, options: Sequence[str] = RUN
) -> str:
    """Return the page of text.

    `facts` are those of `provenance.collect`, `run` is the output of the run with `options`.

    `tests` is None if pytest did not end.
    """
    gpus = facts["gpus"]
    lines = ["# dpbench on GPUs", "", "## Machine"]
    lines += [
        f"{gpu['index']}: {gpu['name']}, {gpu.get('memory_bytes') or 0:,} bytes"
        for gpu in gpus.get("gpus", ())
    ]
    lines += [
        f"{name}: {gpus.get(name, 'unknown')}"
        for name in ("driver", "cuda_driver", "physical_gpus")
    ]
    lines += [
        f"{name}: {facts['host'].get(name, 'unknown')}" for name in ("system", "cpu", "cores")
    ]
    lines += [f"{name} {version}" for name, version in facts["packages"].items()]
    lines += [f"dpbench {facts['dpbench'].get('commit', facts['dpbench']['version'])}"]
    lines += [f"{name}={value}" for name, value in facts["variables"].items()]
    lines += ["", "## Tests"]
    if tests is None:
        lines.append(f"the tests did not end within {TESTS_S} s")
    else:
        lines.append(
            f"{tests.passed} passed, {sum(tests.skipped.values())} skipped, {len(tests.failed)}"
            " failed"
        )
        lines += [f"skipped {count}: {reason}" for reason, count in tests.skipped.items()]
        lines += [f"FAILED {name}: {error}" for name, error in tests.failed.items()]
    return "\n".join(
        [*lines, "", "## Run", f"dpbench run {' '.join(options)}", "", run.strip(), ""]
    )


def _tests(folder: Path) -> Tests | None:
    junit = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_gpu.py", f"--junitxml={junit}"]
    try:
        subprocess.run(command, cwd=ROOT, timeout=TESTS_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return Tests.of(junit) if junit.exists() else None


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
    facts = provenance.collect(nvml.describe())
    if not facts["gpus"].get("gpus") or not provenance.torch_has_cuda():
        build = (
            ""
            if provenance.torch_has_cuda()
            else "; the installed torch has no CUDA (make TORCH=system gpu-check)"
        )
        print(f"gpu-check: no GPU is visible to CUDA{build}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as name:
        tests = _tests(Path(name))
        code, said = _run(Path(name), options)
    text = page(facts, tests, said, options)
    given.output.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(0 if tests and not tests.failed and code == 0 else 1)


if __name__ == "__main__":
    main()
