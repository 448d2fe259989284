"""GPU check: check dpbench on a machine with GPUs, and write a page of text to send back.

    python benchmarks/scripts/gpu_check.py [PAGE.txt] [--stage NAME] [OPTION...]

It runs in a checkout or in an unpacked `git archive`, without make and without a network. The
stages are facts (the machine), truth (what convinces a sceptic: docs/first-gpu-run.md), tests (the
GPU tests) and run (the answers and the table of a run on 1, 2 and all GPUs). Each takes less than
nine minutes and adds to the page; --stage, once or several times, runs these alone. The stage tests
goes on with the files that an earlier command has left out, or runs those of --tests. PAGE.json has
what the page is made from. Neither contains a host name, user name or path. Other options are those
of the run: `dpbench run --help` lists them.

Exit code 0: each stage that ran has ended, all tests passed and no claim is wrong; 1: otherwise; 2:
no GPU is visible to CUDA, or a package is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout need not be installed

from benchmarks.scripts.gpu_claims import CLAIMS

ROOT = Path(__file__).parents[2]
STAGES = ("facts", "truth", "tests", "run")
STAGE_S, LEAST_S = 510.0, 20.0
"""The most seconds of a stage, and the least that are left for a file of tests."""
RUN = ("--rounds", "3", "--budget", "300")
USED = ("pytest", "pytest-timeout", "hypothesis")
"""The packages of the tests; without one of the last two, all tests run that do not need it."""
MARKS = ("mark.gpu", "mark.multi_gpu", "tests.engine.conformance")
"""Texts by which a file of tests is known to have tests for GPUs."""
OPTIONS = (
    "-q",
    "-m",
    "gpu or multi_gpu",
    # a setting or mark of a package that is missing is no error
    "-o",
    "addopts=",
    # nor is a warning that only this build of torch gives
    "-W",
    "default",
)


Outcome = dict[str, Any]
"""Of tests: the number `passed`, those `skipped` by reason, and the error of each `failed` one."""


def outcome(junit: Path, last_line: str) -> Outcome:
    """Return the outcome in a JUnit file of pytest; without the file, pytest has failed.

    A file of tests that needs a missing package counts as skipped.
    """
    if not junit.exists():
        return {"passed": 0, "skipped": {}, "failed": {"pytest": last_line}}
    passed, skipped, failed = 0, Counter[str](), dict[str, str]()
    for case in ElementTree.parse(junit).iter("testcase"):
        bad = next((one for one in case if one.tag in ("failure", "error")), None)
        left_out = case.find("skipped")
        reason = left_out.get("message") or "" if left_out is not None else _lacks(bad)
        if reason:
            skipped[reason] += 1
        elif bad is not None:
            failed[case.get("name", "")] = (bad.get("message") or "").partition("\n")[0][:200]
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": failed}


def total(state: Mapping[str, Any]) -> Outcome:
    """Return the outcome of all files of tests so far."""
    every = state.get("tests", {}).values()
    return {
        "passed": sum(one["passed"] for one in every),
        "skipped": sum((Counter(one["skipped"]) for one in every), Counter()),
        "failed": {name: error for one in every for name, error in one["failed"].items()},
    }


def counted(found: Outcome) -> str:
    """Return the numbers of an outcome as text."""
    skipped = sum(found["skipped"].values())
    return f"{found['passed']} passed, {skipped} skipped, {len(found['failed'])} failed"


def _lacks(error: ElementTree.Element | None) -> str:
    """Return the package, if it is not of this repository, that a file of tests cannot import."""
    if error is None or error.get("message") != "collection failure":
        return ""
    found = re.search(
        r"ModuleNotFoundError: (No module named '(?!dpbench|tests|benchmarks).*')", error.text or ""
    )
    return found[1] if found else ""


def needed() -> list[str]:
    """Return the packages that dpbench needs, with the versions that it declares."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [*declared["project"]["dependencies"]]


def lacking(requirements: Sequence[str]) -> str:
    """Return a line with the packages that are not installed, and how to bring them; or ""."""
    absent = [one for one in requirements if not _installed(re.split(r"[<>=]", one)[0])]
    if not absent:
        return ""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine = platform.machine()
    names = shlex.join(absent)
    return (
        f"not installed: {', '.join(absent)}; to install: python -m pip install {names}; without a"
        " network, first on another machine: python -m pip download --only-binary=:all:"
        f" --python-version {python} --platform manylinux_2_28_{machine}"
        f" --platform manylinux2014_{machine} -d wheels {names}; then here: python -m pip install"
        f" --no-index --find-links wheels {names}"
    )


def _installed(name: str) -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False


def ended(command: Sequence[str], limit_s: float, output: Path, folder: Path) -> int | None:
    """Run a command in a folder, and return its exit code; None if it was stopped at its limit.

    Processes that it has started end with it. `output` gets what they print.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (
        output.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# -- stages: each changes what the page is made from, and returns whether all is right

State = dict[str, Any]


def machine(state: State, folder: Path) -> bool:
    """State the facts about the machine."""
    from dpbench.hardware import gpus, provenance

    state["facts"] = described(provenance.collect(gpus.describe()))
    return True


def described(facts: Mapping[str, Any]) -> list[str]:
    """Return lines with the facts of `provenance.collect`, without names of the host."""
    from dpbench.records import fake
    from dpbench.records.facts import RunFacts

    nvidia = facts["gpus"]
    return [
        *([f"FAKE-GPU: {fake.WHY}"] if fake.fake_gpus(RunFacts.of(facts)) else []),
        *(
            f"{gpu['index']}: {gpu.get('name', gpu.get('architecture', 'unknown'))},"
            f" {gpu.get('memory_bytes') or 0:,} bytes"
            for gpu in nvidia.get("gpus", ())
        ),
        *(
            f"{name}: {nvidia.get(name, 'unknown')}"
            for name in ("driver", "cuda_driver", "physical_gpus")
        ),
        *(f"{name}: {facts['host'].get(name, 'unknown')}" for name in ("system", "cpu", "cores")),
        f"python {facts['python']}",
        *(f"{name} {version}" for name, version in facts["packages"].items()),
        f"dpbench {facts['dpbench'].get('commit', facts['dpbench']['version']) or 'unknown'}",
        *(f"{name}={value}" for name, value in facts["variables"].items()),
    ]


def truth(state: State, folder: Path) -> bool:
    """Measure the evidence for the claims; if time runs out, keep what was measured until then."""
    output, log = folder / "truth.json", folder / "truth.txt"
    script = ROOT / "benchmarks" / "scripts" / "gpu_truth.py"
    code = ended([sys.executable, str(script), str(output)], STAGE_S, log, folder)
    found: State = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    if code is None:
        found["stopped"] = f"stopped after {STAGE_S:.0f} s"
    elif code:
        found["stopped"] = f"ended with an error: {_last(log)}"
    state["truth"] = found
    return not code and code is not None and all(right is not False for right, _ in judged(found))


def judged(evidence: Mapping[str, Any]) -> list[tuple[bool | None, str]]:
    """Return whether each claim is right, None if unknown, and a line about it."""
    return [one.line(evidence) for one in CLAIMS]


def marked() -> list[str]:
    """Return the files that have tests for GPUs, first those of GPUs alone, then by size."""
    files = [
        path
        for path in ROOT.glob("tests/**/test_*.py")
        if path.parent.name != "fakegpu"
        and any(mark in path.read_text(encoding="utf-8") for mark in MARKS)
    ]
    files.sort(key=lambda path: (path.parent.name != "gpu", path.stat().st_size, path.name))
    return [str(path.relative_to(ROOT)) for path in files]


def tests(state: State, folder: Path, files: Sequence[str]) -> bool:
    """Run these files of tests, or all that are left, each in a process, until time is over.

    A test that breaks its process or its GPU context so ends no other file.
    """
    until_s = time.monotonic() + STAGE_S
    done: dict[str, Any] = state.setdefault("tests", {})
    asked = [*files] or [file for file in marked() if file not in done]
    for number, file in enumerate(asked):
        began_s = time.monotonic()
        left_s = until_s - began_s
        if left_s < LEAST_S:
            break
        found = tested(file, left_s, folder)
        if found is None and number:
            break  # there was little time left; the next command begins with this file
        late = {"passed": 0, "skipped": {}, "failed": {file: f"not ended within {left_s:.0f} s"}}
        done[file] = found or late
        print(f"{file}: {counted(done[file])}, {time.monotonic() - began_s:.0f} s", flush=True)
    state["left_out"] = [file for file in marked() if file not in done]
    found = total(state)
    return bool(found["passed"]) and not found["failed"] and done.keys() >= {*asked}


def tested(file: str, limit_s: float, folder: Path) -> Outcome | None:
    """Return the outcome of a file of tests; None if it did not end."""
    junit, log = folder / "junit.xml", folder / "tests.txt"
    junit.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={junit}", file]
    if ended(command, limit_s, log, ROOT) is None:
        return None
    return outcome(junit, _last(log))


def run(state: State, folder: Path, options: Sequence[str] = RUN) -> bool:
    """Measure a run with these options, and keep what it prints."""
    log = folder / "run.txt"
    given = [*options, "--quiet", "--store", "check.db", "--report", "check.html"]
    code = ended([sys.executable, "-m", "dpbench", "run", *given], STAGE_S, log, folder)
    said = log.read_text(encoding="utf-8", errors="replace")
    if code is None:
        said += f"\nthe run did not end within {STAGE_S:.0f} s"
    said = said.replace(str(folder), "").strip()
    state["run"] = {"options": shlex.join(options), "said": said}
    return code == 0


def _last(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    found = next((line for line in reversed(lines) if line.strip()), "no output")
    return found.strip()[:200]


def pathless(text: str) -> str:
    """Return a text without the paths of the checkout and of the user's folder."""
    for path in (ROOT, Path.home()):
        text = text.replace(f"{path}/", "")
    return text


def page(state: Mapping[str, Any]) -> str:
    """Return the page of text, from what the stages have stated so far."""

    def later(stage: str) -> Iterator[str]:
        yield f"not done yet: --stage {stage}"

    def of_truth() -> Iterator[str]:
        for _, line in judged(state["truth"]):
            yield f"- {line}"
        for trial in state["truth"].get("trials", ()):
            if trial["status"] != "ok":
                yield f"{trial['label']}: {trial['reason']}"
        if reason := state["truth"].get("stopped"):
            yield f"the measurement {reason}"

    def of_tests() -> Iterator[str]:
        found = total(state)
        yield counted(found) if found["passed"] or found["failed"] else "no test ran"
        yield from (f"skipped {count}: {reason}" for reason, count in found["skipped"].items())
        yield from (f"FAILED {name}: {error}" for name, error in found["failed"].items())
        if files := state["left_out"]:
            yield f"left out, for another --stage tests: {' '.join(files)}"

    def of_run() -> Iterator[str]:
        yield f"dpbench run {state['run']['options']}"
        yield ""
        yield state["run"]["said"]

    parts = {
        "facts": ("Machine", lambda: iter(state["facts"])),
        "truth": ("What convinces a sceptic", of_truth),
        "tests": ("Tests", of_tests),
        "run": ("Run", of_run),
    }
    lines = ["# dpbench on GPUs"]
    for stage, (title, told) in parts.items():
        lines += ["", f"## {title}", "", *(told() if stage in state else later(stage))]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the stages that the command line names, write the page after each, and exit."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--stage", action="append", choices=STAGES, help="run this stage alone")
    parser.add_argument("--tests", action="append", metavar="FILE", help="run this file of tests")
    given, options = parser.parse_known_args()
    # argparse would take the value of an option of the run
    named = options.pop(0) if options and not options[0].startswith("-") else "gpu-check.txt"
    output = Path(named)
    if line := lacking(needed()):
        print(f"gpu-check: {line}", file=sys.stderr)
        sys.exit(2)
    from dpbench.hardware import gpus

    usable = gpus.of_torch()
    if not usable.gpus:
        print(f"gpu-check: {usable.missing}", file=sys.stderr)
        sys.exit(2)
    if line := lacking(USED):
        print(f"gpu-check: {line}", file=sys.stderr)
    # the command of a stage ends with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stored = output.with_suffix(".json")
    adds = given.stage and stored.exists()
    state: State = json.loads(stored.read_text(encoding="utf-8")) if adds else {}
    actions = {
        "facts": machine,
        "truth": truth,
        "tests": lambda state, folder: tests(state, folder, given.tests or ()),
        "run": lambda state, folder: run(state, folder, options or RUN),
    }
    right = True
    for stage in given.stage or STAGES:
        with tempfile.TemporaryDirectory() as folder:
            right &= actions[stage](state, Path(folder))
        stored.write_text(pathless(json.dumps(state, indent=1)), encoding="utf-8")
        output.write_text(pathless(page(state)), encoding="utf-8")
    print(output.read_text(encoding="utf-8"))
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
