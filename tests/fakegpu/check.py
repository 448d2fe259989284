"""Check dpbench on fake GPUs, as `make test-gpu` does.

    python -m tests.fakegpu.check [--seed N] [STAGE...]

Each stage is a process with fake GPUs of its own, a limit of time, and a log in build/fakegpu; a
line is printed at its end, and the end of its log if it failed. As many stages run at once as there
are cores, and those that compare times run alone, at the end. Exit code 0: all stages passed; 1:
one failed; 2: the GPUs here are not fake (`--anyway` checks real ones).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dpbench.hardware import nvml

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "fakegpu"
TAIL = 40
"""Lines of a failed stage's log that are printed."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--durations=5")
MARKED = ("-m", "gpu or multi_gpu")
MARKS = ("mark.gpu", "mark.multi_gpu", "tests.engine.conformance")
"""Texts by which a file of tests is known to have tests for GPUs."""
CLOCK_ALONE = {"FAKECUDA_NUMERICS": "0", "FAKECUDA_DATA": "0"}
BEFORE = ROOT / ".venv-gpu-211" / "bin" / "python"
"""The Python of the environment with an earlier torch, 2.11, whose fake GPUs have no numbers."""
TIMED_STEPS = (
    "tests/gpu/test_one_gpu.py::test_cuda_steps_agree_with_the_host_over_a_block",
    "tests/gpu/test_one_gpu.py::test_a_copy_from_the_host_does_not_wait_for_the_replicas_work",
)
TIMED = (
    "tests/doctor/test_probe.py",
    "tests/gpu/test_one_gpu.py::test_the_probe_times_every_link",
    "tests/gpu/test_truth.py",
    "tests/observe/test_examples.py",
    *TIMED_STEPS,
)
"""Tests that compare times: on fake GPUs, without numbers. Those of the probe take longest."""
PROFILED = ("tests/gpu/test_profiling.py", "tests/measure/test_profiling.py")
"""Tests of what torch's profiler records, which differs between versions."""
ACCOUNTS = ("tests/gpu/test_accounts.py", "tests/gpu/test_own_gpu.py")
"""Tests of what ran on fake GPUs that keep time, also on a busy machine."""
FIXED_SEEDS = (1, 2)
FEW_TESTS = "tests/measure/test_profiling.py"
"""The tests that gpu-check repeats, to fill its page."""


@dataclass(frozen=True)
class Stage:
    """A command, the most seconds that it may take, and variables of its environment.

    With `alone`, no other stage runs at the same time.
    """

    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False


def stages(seed: int) -> dict[str, Stage]:
    """Return the stages by name, the longest first; `seed` is that of the stage deferred-drawn."""
    files = {
        path: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("tests/**/test_*.py"))
    }
    marked = [path for path, text in files.items() if any(mark in text for mark in MARKS)]
    mirrored = [path for path in marked if "tests.engine.conformance" in files[path]]
    deferred = sorted(ROOT.glob("tests/gpu/test_deferred*.py"))
    doctor = ROOT / "tests/fakegpu/test_doctor.py"
    faults = ROOT / "tests/fakegpu/test_faults.py"
    fakes = sorted({*ROOT.glob("tests/fakegpu/test_*.py")} - {doctor, faults})
    run = ROOT / "tests/gpu/test_run.py"
    accounts = [ROOT / name for name in ACCOUNTS]
    apart = {*mirrored, *deferred, *fakes, *accounts, doctor, faults, run}
    others = [path for path in marked if path not in apart]
    seeds = {**{str(n): n for n in FIXED_SEEDS}, "drawn": seed}
    return {
        "gpu": Stage(
            (*PYTEST, *MARKED, *_paths(others), *(f"--deselect={test}" for test in TIMED)), 600
        ),
        **{
            f"deferred-{name}": Stage(
                (*PYTEST, *_paths(deferred)),
                300,
                {"FAKECUDA_DEFERRED": "1", "FAKECUDA_SEED": str(number)},
            )
            for name, number in seeds.items()
        },
        "accounts": Stage((*PYTEST, *ACCOUNTS), 300, CLOCK_ALONE),
        "planted": Stage((sys.executable, "-m", "tests.fakegpu.planted"), 600),
        "conformance": Stage((*PYTEST, *MARKED, *_paths(mirrored)), 300),
        "doctor": Stage((*PYTEST, *_paths([doctor])), 480),
        "fakes": Stage((*PYTEST, *_paths(fakes)), 300),
        "faults": Stage((*PYTEST, *_paths([faults])), 300),
        "run": Stage((*PYTEST, *_paths([run])), 300),
        "gpu-check": Stage(
            (
                sys.executable,
                "benchmarks/scripts/gpu_check.py",
                str(LOGS / "gpu-check.txt"),
                *("--tests", FEW_TESTS),
                *("--models", "mlp", "--strategies", "single,dp", "--rounds", "1"),
            ),
            400,
        ),
        "clock": Stage((*PYTEST, *MARKED, *TIMED), 300, CLOCK_ALONE, alone=True),
        "profile-2.11": Stage((str(BEFORE), *PYTEST[1:], *MARKED, *PROFILED), 120, CLOCK_ALONE),
        "clock-2.11": Stage(
            (str(BEFORE), *PYTEST[1:], *MARKED, *TIMED_STEPS, "tests/gpu/test_times.py"),
            120,
            CLOCK_ALONE,
            alone=True,
        ),
    }


def _paths(paths: Sequence[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@dataclass
class Running:
    """The processes that run; once `stop` was called, one that is added is killed at once."""

    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    stopped: bool = False

    def add(self, process: subprocess.Popen[bytes]) -> None:
        self.processes.add(process)
        if self.stopped:
            _kill(process)

    def stop(self) -> None:
        self.stopped = True
        for process in tuple(self.processes):
            _kill(process)


@contextmanager
def _machine(name: str) -> Iterator[dict[str, str]]:
    """Yield the variable that gives a stage GPUs of its own; remove their counters at the end."""
    machine = f"check-{os.getpid()}-{name}"
    try:
        yield {"FAKECUDA_MACHINE": machine}
    finally:
        for counters in Path("/dev/shm").glob(f"fake*-{machine}"):
            counters.unlink()


def attempt(name: str, stage: Stage, running: Running) -> bool:
    """Run a stage, print a line about it, and return whether it passed."""
    log = LOGS / f"{name}.log"
    began = time.perf_counter()
    with _machine(name) as machine, log.open("w") as output:
        process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            env={**os.environ, "DPBENCH_PATIENCE": "0", **machine, **stage.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.add(process)
        try:
            code = process.wait(stage.limit_s)
            outcome = "ok" if code == 0 else f"FAILED with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"FAILED: not done within {stage.limit_s:.0f} s"
            _kill(process)
        finally:
            running.processes.discard(process)
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    text = [line for line in said if line.strip()]
    lines = [
        f"{time.perf_counter() - began:6.1f} s  {name:16} {outcome}; {text[-1] if text else ''}"
    ]
    if outcome != "ok":
        lines += [*(f"    {line}" for line in text[-TAIL:]), f"    log: {log}"]
    print("\n".join(lines), flush=True)
    return outcome == "ok"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check(chosen: Mapping[str, Stage]) -> bool:
    """Run stages, and return whether all passed; an interrupt kills those that run."""
    LOGS.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(os.cpu_count())
    running = Running()
    try:
        together = [
            pool.submit(attempt, name, stage, running)
            for name, stage in chosen.items()
            if not stage.alone
        ]
        passed = [one.result() for one in together]
        for name, stage in chosen.items():
            if stage.alone:
                passed.append(pool.submit(attempt, name, stage, running).result())
    finally:
        running.stop()
        pool.shutdown(cancel_futures=True)
    return all(passed)


def main(arguments: Sequence[str]) -> int:
    """Run the stages of these names, or all; return the exit code."""
    drawn = random.SystemRandom().randrange(3, 10**6)
    parser = argparse.ArgumentParser(description="Check dpbench on fake GPUs.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="stages to run (default: all)")
    parser.add_argument("--seed", type=int, default=drawn, help="of deferred-drawn")
    parser.add_argument("--anyway", action="store_true", help="also on GPUs that are not fake")
    parser.add_argument("--list", action="store_true", help="print the stages, and run none")
    given = parser.parse_args(arguments)
    known = stages(given.seed)
    if unknown := set(given.stages) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if given.list:
        print("\n".join(known))
        return 0
    if not given.anyway and "fake" not in str(driver := nvml.describe().get("driver")):
        print(f"these GPUs are not fake (driver {driver}); --anyway checks them", file=sys.stderr)
        return 2
    chosen = {name: known[name] for name in given.stages or known}
    if absent := {one.command[0] for one in chosen.values() if not Path(one.command[0]).exists()}:
        parser.error(f"{', '.join(absent)} is missing: `make test-gpu` installs it")
    print(f"the seed of deferred-drawn is {given.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    began = time.perf_counter()
    passed = check(chosen)
    print(f"{time.perf_counter() - began:6.1f} s  {'all passed' if passed else 'FAILED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
