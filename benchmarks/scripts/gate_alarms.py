"""Gate alarms: how often `dpbench gate` and others are right on commits of known cost.

    python -m benchmarks.scripts.gate_alarms check
    python -m benchmarks.scripts.gate_alarms record quiet --minutes 5
    python -m benchmarks.scripts.gate_alarms record loaded --minutes 5
    python -m benchmarks.scripts.gate_alarms replay
    python -m benchmarks.scripts.gate_alarms live --minutes 5
    python -m benchmarks.scripts.gate_alarms peers --minutes 5
    python -m benchmarks.scripts.gate_alarms table

The script makes a git repository with a training step that applies one layer 200 times, and commits
whose step applies it more often, so that k % more real work is done, forward and backward. `check`
measures these shares by CPU time. `record` takes series of pairs of an unchanged commit, with the
workers and the blocks of `dpbench gate`. `replay` makes decisions from them by the gate's own rule;
for a planted change of k %, it multiplies the head's times by 1 + k/100. `live` runs the whole
command on the commits, a test with the fixture `dpbench_gate`, and the steps of action.yml; `peers`
runs asv, pytest-benchmark and pyperf on the same ones, with their defaults. `table` writes the
report.

Each unit, a series or a decision, is written to the data of reports/gate-alarms when it is done,
and a further call adds to them. No unit begins after `--minutes`.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.scripts import action_steps
from dpbench.analysis import stats
from dpbench.gating import LIMIT
from dpbench.gating.judge import LOOKS, Answer, Pair, Taken, look
from dpbench.gating.pairs import cases, pair
from dpbench.gating.sides import Block
from dpbench.gating.trees import copies
from dpbench.hardware import provenance
from dpbench.measure import scratch
from dpbench.records import words

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "reports" / "gate-alarms"
DATA = "data.json.gz"

REPEATS = 200
"""How often the step of the base applies its layer."""
PLANTED = {0: 0, 3: 6, 5: 11, 10: 21, 20: 42}
"""By planted change in percent: how much more often its step applies the layer.

It is slightly more than the share, because the optimizer's work does not grow.
"""
DECISIONS = {0: 200, 3: 50, 5: 50, 10: 50, 20: 50}
"""How many decisions are replayed for each planted change."""
OF_PEERS = (0, 10)
"""The planted changes that the other tools decide on."""
FALSE_ALARMS, FOUND = 2, 0.9
"""What is expected: at most so many false alarms, and at least this share of 10 % found."""
LOADS = {"quiet": 0.0, "loaded": 0.5}
"""The parts of a core that another process takes during a record."""
SERIES = stats.LOOKS[-1]
"""The pairs of a series, which has its own servers: as many as the gate takes at most."""
GATE, FIXTURE, ACTION = "dpbench gate", "dpbench_gate in a test", "the action's steps"

NET = '''"""A network that applies one layer REPEATS times."""

import torch
from torch import nn

REPEATS = 200


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(REPEATS):
            x = x + 0.01 * torch.tanh(self.layer(x))
        return x


class Net:
    loss = nn.MSELoss()

    def build(self, size):
        return Repeated()

    def batch(self, n, seed, size):
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(n, 64, generator=generator) for _ in range(2))


NET = Net()


def stepper():
    """Return a function that takes a training step with one thread, as a worker of dpbench does."""
    torch.set_num_threads(1)
    module = NET.build("small")
    x, target = NET.batch(64, 0, "small")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        NET.loss(module(x), target).backward()
        optimizer.step()

    return step
'''
INSTALL = f"""
import shutil, sysconfig
place = sysconfig.get_path("purelib")
shutil.copy("{{build_dir}}/net.py", place)
open(place + "/torch.pth", "w").write("{sysconfig.get_path("purelib")}")
"""
"""A program that installs the project in asv's environment, and links the packages of this one."""
ASV = {
    "version": 1,
    "project": "net",
    "repo": ".",
    "branches": ["base"],
    "environment_type": "virtualenv",
    "pythons": [f"{sys.version_info.major}.{sys.version_info.minor}"],
    "build_command": [],
    "install_command": [f"python -c {shlex.quote(INSTALL)}"],
    "uninstall_command": ["python -c pass"],
    "benchmark_dir": "asv_benchmarks",
}
FILES = {
    "net.py": NET,
    "asv.conf.json": json.dumps(ASV),
    "asv_benchmarks/__init__.py": "",
    "asv_benchmarks/steps.py": """from net import stepper


class Step:
    def setup(self):
        self.step = stepper()

    def time_step(self):
        self.step()
""",
    "test_net.py": """from net import stepper


def test_step(benchmark):
    benchmark(stepper())
""",
    "test_gated.py": """from net import stepper


def test_step(dpbench_gate):
    dpbench_gate(stepper(), budget=300)
""",
    "perf_net.py": """import pyperf
from net import stepper

pyperf.Runner().bench_func("step", stepper())
""",
}
"""The files of the repository, by path."""
PYTEST_BENCHMARK = ("pytest-benchmark==5.3.1", "py-cpuinfo2")
CHECK = """import importlib.util, json, sys, time

def stepper(path):
    spec = importlib.util.spec_from_file_location("net", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.stepper()

steppers = [stepper(path) for path in sys.argv[1:]]
rounds = []
for number in range(320):
    spent = {}
    for place in range(len(steppers)):
        turn = (place + number) % len(steppers)
        before = time.process_time()
        steppers[turn]()
        spent[turn] = time.process_time() - before
    rounds.append([spent[turn] for turn in sorted(spent)])
print(json.dumps(rounds[20:]))
"""
"""A program that prints the CPU seconds of steps, taken in turn, of each net.py given."""
BUSY = """import os, sys, time

parent, began = os.getppid(), time.monotonic()
while os.getppid() == parent:
    while time.process_time() < float(sys.argv[1]) * (time.monotonic() - began):
        pass
    time.sleep(0.01)
"""
"""A process that uses a part of a core in the long run, also if it has to wait for the core."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision of a tool on a planted change in percent.

    `answer` is one of the gate's three; another tool that sees no slow-down says "not slower".
    `wrong` is whether the tool states the opposite of the planted change.
    """

    tool: str
    planted: int
    answer: str
    pairs: int = 0
    seconds: float = 0.0
    more_memory: bool = False
    wrong: bool = False

    @property
    def alarm(self) -> bool:
        """Return whether a check that uses the tool fails."""
        return self.answer == Answer.SLOWER or self.more_memory


def read(folder: Path) -> dict[str, Any]:
    """Return the data of a folder."""
    path = folder / DATA
    if not path.exists():
        return {"machine": "", "check": {}, "series": [], "decisions": []}
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def write(folder: Path, data: dict[str, Any]) -> None:
    """Write the data of a folder; refuse to add measurements of another machine."""
    here = machine()
    if data["machine"] not in ("", here):
        raise SystemExit(f"{folder / DATA} is of {data['machine']}, and this is {here}")
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{DATA}.new"
    text = json.dumps(data | {"machine": here}, separators=(",", ":"))
    new.write_bytes(gzip.compress(text.encode(), mtime=0))
    new.replace(folder / DATA)


def machine() -> str:
    """Return the facts on this machine that times depend on."""
    host = provenance.host_facts()
    return f"{host['cpu']}, {words.count(host['cores'], 'core')}, torch {torch.__version__}"


def ran(
    command: Sequence[str | Path], folder: Path, codes: Sequence[int] = (0,), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Return a finished command; raise RuntimeError for an exit code that is not in `codes`."""
    env = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        raise RuntimeError(
            f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stdout[-2000:]}"
            f"{done.stderr[-2000:]}"
        )
    return done


@contextmanager
def project() -> Iterator[Path]:
    """Yield a folder with checkouts `base` and `planted-K` of the branches with these names."""
    with tempfile.TemporaryDirectory(prefix="gate-alarms-") as name:
        place = Path(name)
        base = place / "base"

        def git(*words: str | Path) -> None:
            who = ("-c", "user.name=alarms", "-c", "user.email=alarms@example.org")
            ran(["git", *who, *words], base)

        for path, text in FILES.items():
            (base / path).parent.mkdir(parents=True, exist_ok=True)
            (base / path).write_text(text)
        git("init", "--quiet", "--initial-branch=base")
        git("add", ".")
        git("commit", "--quiet", "--message=base")
        for percent, more in PLANTED.items():
            tree = place / f"planted-{percent}"
            git("worktree", "add", "--quiet", "-b", tree.name, tree, "base")
            text = NET.replace(f"REPEATS = {REPEATS}", f"REPEATS = {REPEATS + more}")
            # the unchanged head is another commit, too
            (tree / "net.py").write_text(f"{text}\n# {percent} % more work\n")
            git("-C", tree, "commit", "--quiet", "--all", f"--message={tree.name}")
        yield place


def check(folder: Path) -> None:
    """Measure the planted shares by CPU time, and write them."""
    with project() as place:
        files = [place / f"planted-{percent}" / "net.py" for percent in PLANTED]
        done = ran([sys.executable, "-c", CHECK, *files], place, OMP_NUM_THREADS="1")
    rounds = json.loads(done.stdout)
    data = read(folder)
    data["check"] = {
        str(percent): [round(one[place] / one[0] - 1, 5) for one in rounds]
        for place, percent in enumerate(PLANTED)
    }
    write(folder, data)
    print(f"real shares: {shares(data)}")


def shares(data: dict[str, Any]) -> str:
    """Return the measured shares of the planted changes as text."""
    return ", ".join(
        f"{100 * statistics.median(found):.1f} % for {percent} %"
        for percent, found in data["check"].items()
        if percent != "0"
    )


@contextmanager
def busy(part: float) -> Iterator[None]:
    """Let another process use a part of a core."""
    if not part:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(part)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def record(folder: Path, load: str, minutes: float) -> None:
    """Take series of pairs of the unchanged commit, and write them one by one."""
    end = time.monotonic() + 60 * minutes
    with project() as place, contextlib.chdir(place / "planted-0"), busy(LOADS[load]):
        (work,) = cases({"models": ("net.py:NET",), "batch_sizes": (64,)})
        while time.monotonic() < end:
            began, used = time.monotonic(), _busy_s()
            with (
                copies("base", Path.cwd()) as trees,
                scratch.folder() as files,
                work.starting(trees.both, files) as start,
            ):
                pairs = [pair(start, trees.both, number) for number in range(SERIES)]
            seconds = time.monotonic() - began
            cores = (_busy_s() - used) / seconds
            one = {"load": load, "seconds": round(seconds, 1), "cores": round(cores, 3)}
            data = read(folder)
            data["series"].append(one | {"pairs": [stored(taken) for taken in pairs]})
            write(folder, data)
            print(one, ratio(pairs), flush=True)


def _busy_s() -> float:
    """Return the seconds that all processes have used of all cores."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def ratio(pairs: Sequence[Pair]) -> str:
    """Return the ratio of a series as text."""
    return words.times(look("", pairs, limit=LIMIT, works=1).wall)


def stored(taken: Pair) -> list[list[list[float]]]:
    """Return the blocks of a pair as lists of wall seconds, CPU seconds and bytes."""
    return [
        [[round(one.wall_s, 9), round(one.cpu_s, 9), one.memory_bytes] for one in side.blocks]
        for side in (taken.base, taken.head)
    ]


def loaded(lists: Sequence[Sequence[Sequence[Any]]], slower: float = 1.0) -> Pair:
    """Return the pair of `stored`, whose head takes `slower` times as long."""
    base, head = lists
    return Pair(
        Taken([Block(*block) for block in base]),
        Taken([Block(wall * slower, cpu * slower, memory) for wall, cpu, memory in head]),
    )


def replays(pairs: Sequence[Any], tool: str, planted: int, count: int) -> list[Decision]:
    """Return `count` decisions by the gate's rule on the pairs of recorded series.

    Each begins at another pair, goes on to the last one, and then from the first. The sides may be
    exchanged, which gives a further decision. Raises SystemExit if there are too few pairs.
    """
    starts = [*product(range(len(pairs)), (False, True))]
    if len(starts) < count:
        raise SystemExit(f"{tool}: {len(starts) // 2} pairs, but {count // 2} are needed: record")
    found = []
    for number in range(count):
        first, turned = starts[number * len(starts) // count]
        order = [*pairs[first:], *pairs[:first]]
        sides = [loaded(one[::-1] if turned else one, 1 + planted / 100) for one in order]
        found.append(replayed(sides, tool, planted))
    return found


def replayed(pairs: Sequence[Pair], tool: str, planted: int) -> Decision:
    """Return the decision at the first look that decides, or at the last one."""
    for number in LOOKS:
        last = number == LOOKS[-1]
        finding = look("", pairs[:number], limit=LIMIT, works=1, last=last)
        if finding.answer is not Answer.UNKNOWN:
            break
    return Decision(
        tool=tool,
        planted=planted,
        answer=finding.answer,
        pairs=finding.pairs,
        more_memory=finding.more_memory,
        wrong=is_wrong(planted, finding.answer, finding.wall.high),
    )


def is_wrong(planted: int, answer: str, high: float) -> bool:
    """Return whether the gate states the opposite of a planted change.

    It says "not slower" of a change above its limit, or its interval says that the step is faster.
    """
    return planted > 0 and (
        high < 1 or (answer == Answer.NOT_SLOWER and planted > round(100 * LIMIT))
    )


def gate(place: Path, planted: int) -> dict[str, Any]:
    """Return the answer of the whole command."""
    command = [sys.executable, "-m", "dpbench", "--no-config", "gate", "--base", "base"]
    of = ["--models", "net.py:NET", "--batch-sizes", "64", "--json"]
    done = ran([*command, *of], place / f"planted-{planted}", codes=(0, 1, 3), PYTHONPATH=str(ROOT))
    (finding,) = json.loads(done.stdout)["findings"]
    return {name: finding[name] for name in ("answer", "pairs", "more_memory")} | {
        "wrong": is_wrong(planted, finding["answer"], finding["wall"]["high"])
    }


def fixture(place: Path, planted: int) -> dict[str, Any]:
    """Return the answer of a test with the fixture, which fails, passes or is skipped."""
    options = ["-q", "-p", "dpbench.gating.plugin", "--dpbench-base", "base"]
    command = [sys.executable, "-m", "pytest", "test_gated.py", *options]
    done = ran(command, place / f"planted-{planted}", codes=(0, 1), PYTHONPATH=str(ROOT))
    (outcome,) = re.findall(r"1 (failed|passed|skipped)", done.stdout)
    if outcome == "failed" and not re.search(r"^test_step: slower", done.stdout, re.MULTILINE):
        raise RuntimeError(f"{FIXTURE}: {done.stdout}")
    return of_way({"failed": Answer.SLOWER, "passed": Answer.NOT_SLOWER}.get(outcome), planted)


def action(place: Path, planted: int) -> dict[str, Any]:
    """Return the answer that the steps of action.yml hand on; raise if they end otherwise."""
    with tempfile.TemporaryDirectory(prefix="action-", dir=place) as name:
        outside = Path(name)
        given = {"base": "base", "model": "net.py:NET", "options": "--batch-sizes 64"}
        codes = action_steps.run(place / f"planted-{planted}", outside, **given)
        told = (outside / "GITHUB_OUTPUT").read_text()
    answer = Answer(re.findall(r"^answer=(.*?)(?:, but .*)?$", told, re.MULTILINE)[0])
    if codes != [0, 0, int(answer is Answer.SLOWER)]:
        raise RuntimeError(f"{ACTION}: {answer}, but the steps ended with {codes}")
    return of_way(answer, planted)


def of_way(answer: Answer | None, planted: int) -> dict[str, Any]:
    """Return the answer of the gate where its interval is not known."""
    known = answer or Answer.UNKNOWN
    return {"answer": known, "wrong": is_wrong(planted, known, math.inf)}


def of_peer(slower: bool, faster: bool, planted: int) -> dict[str, Any]:
    """Return the answer of another tool."""
    answer = Answer.SLOWER if slower else Answer.NOT_SLOWER
    return {"answer": answer, "wrong": faster and planted > 0}


def asv(place: Path, planted: int) -> dict[str, Any]:
    """Return the answer of `asv continuous`, which makes its environment once."""
    base, home = place / "base", place / "home"
    if not home.exists():
        home.mkdir()
        ran([sys.executable, "-m", "asv", "machine", "--yes"], base, HOME=str(home))
    shutil.rmtree(base / "results", ignore_errors=True)
    command = [sys.executable, "-m", "asv", "continuous", "base", f"planted-{planted}"]
    done = ran(command, base, codes=(0, 1), HOME=str(home))
    known = re.search(r"PERFORMANCE (IN|DE)CREASED|NOT SIGNIFICANTLY CHANGED", done.stdout)
    if not known:
        raise RuntimeError(f"asv: {done.stdout}{done.stderr}")
    return of_peer(known[1] == "DE", known[1] == "IN", planted)


def pytest_benchmark(place: Path, planted: int) -> dict[str, Any]:
    """Return the answer of pytest-benchmark, which compares with what it saved of the base."""
    packages, storage = place / "packages", place / "storage"
    if not packages.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages]
        ran([*pip, *PYTEST_BENCHMARK], place)
    shutil.rmtree(storage, ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "test_net.py", f"--benchmark-storage={storage}"]
    env = {"PYTHONPATH": str(packages)}
    ran([*command, "--benchmark-save=base"], place / "base", **env)
    compare = ["--benchmark-compare", "--benchmark-compare-fail=median:10%"]
    done = ran([*command, *compare], place / f"planted-{planted}", codes=(0, 1), **env)
    slower = "Performance has regressed" in done.stdout + done.stderr
    if done.returncode != slower:
        raise RuntimeError(f"pytest-benchmark: {done.stdout}{done.stderr}")
    return of_peer(slower, False, planted)


def pyperf(place: Path, planted: int) -> dict[str, Any]:
    """Return the answer of `pyperf compare_to`."""
    files = []
    for name in ("base", f"planted-{planted}"):
        files.append(place / f"{name}.json")
        files[-1].unlink(missing_ok=True)
        ran([sys.executable, "perf_net.py", "--quiet", "--output", files[-1]], place / name)
    said = ran([sys.executable, "-m", "pyperf", "compare_to", *files], place).stdout
    known = re.search(r"x (slower|faster)|not significant", said)
    if not known:
        raise RuntimeError(f"pyperf: {said}")
    return of_peer(known[1] == "slower", known[1] == "faster", planted)


Tool = Callable[[Path, int], dict[str, Any]]
WAYS: dict[str, Tool] = {GATE: gate, FIXTURE: fixture, ACTION: action}
"""The ways in which a project uses the gate."""
PEERS: dict[str, Tool] = {
    "asv continuous": asv,
    "pytest-benchmark": pytest_benchmark,
    "pyperf": pyperf,
}


def decide(
    folder: Path, tools: dict[str, Tool], changes: Sequence[int], count: int, minutes: float
) -> None:
    """Let tools decide on each change up to `count` times, and write the decisions one by one.

    The next one is of the tool and the change that have taken the least time so far.
    """
    end = time.monotonic() + 60 * minutes
    with project() as place:
        while time.monotonic() < end:
            data = read(folder)
            seconds = {
                key: [
                    one["seconds"]
                    for one in data["decisions"]
                    if (one["tool"], one["planted"]) == key
                ]
                for key in product(tools, changes)
            }
            open_ = [key for key, taken in seconds.items() if len(taken) < count]
            if not open_:
                break
            tool, planted = min(open_, key=lambda key: sum(seconds[key]))
            began = time.monotonic()
            answer = tools[tool](place, planted)
            took = round(time.monotonic() - began, 1)
            one = Decision(tool=tool, planted=planted, seconds=took, **answer)
            data["decisions"].append(asdict(one))
            write(folder, data)
            print(one, flush=True)


def replay(folder: Path) -> None:
    """Make the decisions from each record, and write them."""
    data = read(folder)
    for load, (planted, count) in product(LOADS, DECISIONS.items()):
        tool = f"replayed, {load}"
        pairs = [
            one for series in data["series"] if series["load"] == load for one in series["pairs"]
        ]
        if not pairs:
            continue
        found = [asdict(one) for one in replays(pairs, tool, planted, count)]
        kept = [
            one for one in data["decisions"] if (one["tool"], one["planted"]) != (tool, planted)
        ]
        data["decisions"] = [*kept, *found]
        write(folder, data)
        print(tool, planted, Counter(one["answer"] for one in found), flush=True)


COLUMNS = (
    "tool",
    "planted",
    "decisions",
    "slower",
    "not slower",
    "cannot tell",
    "wrong direction",
    "pairs",
    "seconds",
)


def rows(found: Sequence[Decision]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for tool, planted in dict.fromkeys((one.tool, one.planted) for one in found):
        mine = of(found, tool, planted)
        answers = Counter(one.answer for one in mine)
        pairs = statistics.median(one.pairs for one in mine)
        seconds = statistics.median(one.seconds for one in mine)
        cells = [
            tool,
            f"{planted} %",
            len(mine),
            *(answers[answer] for answer in (Answer.SLOWER, Answer.NOT_SLOWER, Answer.UNKNOWN)),
            sum(one.wrong for one in mine),
            f"{pairs:g}" if pairs else "",
            f"{seconds:.0f}" if seconds else "",
        ]
        yield f"| {' | '.join(map(str, cells))} |"


def of(found: Sequence[Decision], tool: str, planted: int) -> list[Decision]:
    """Return the decisions of a tool on a change."""
    return [one for one in found if (one.tool, one.planted) == (tool, planted)]


def sentences(found: Sequence[Decision]) -> Iterator[str]:
    """Yield what was expected of the gate, and what was found, as items of a list."""
    for tool in dict.fromkeys(one.tool for one in found if one.tool not in PEERS):
        same, ten = of(found, tool, 0), of(found, tool, 10)
        mine = [one for one in found if one.tool == tool]
        alarms = sum(one.alarm for one in same)
        hits = sum(one.answer == Answer.SLOWER for one in ten)
        wrong = sum(one.wrong for one in mine)
        memory = sum(one.more_memory for one in mine)
        kept = (
            alarms <= FALSE_ALARMS * len(same) / DECISIONS[0]
            and hits >= FOUND * len(ten)
            and not wrong
        )
        known = "as expected" if kept else "**not as expected**"
        yield (
            f"- **{tool if tool in WAYS else f'{GATE}, {tool}'}**: {alarms} false alarms of"
            f" {len(same)}, planted 10 % found in {hits} of {len(ten)}, the wrong direction in"
            f" {wrong} of {len(mine)}, more memory in {memory}:"
            f" {known if same and ten else 'too few decisions'}."
        )


README = """# How often `dpbench gate` is right, and how often other tools are

MEASURED, CPU-ONLY: {machine}. Written by `benchmarks/scripts/gate_alarms.py`, whose first lines \
say how, from `{data}`.

A commit applies a layer {repeats} times in its training step, and others apply it more often. By \
CPU time, the planted changes are really {shares}.

{sentences}

Expected: at most {alarms} false alarms of {decisions}, planted 10 % found in {power:.0f} %, never \
the wrong direction.

{rows}

- *Replayed*: decisions by the gate's rule from recorded pairs of processes of an unchanged \
commit. They differ in the pair at which they begin and in which side is the head, so that they \
share pairs. Where a change is planted, the head's times are multiplied by 1 + k/100, and its \
memory is not. {records}.
- *{gate}*, its fixture, its action and the other tools ran as a whole on the real commits, \
without the load. The gate accepts {limit:.0f} %: up to there, "not slower" is right, too.
- *Wrong direction*: a tool says "faster" of more work, or the gate says "not slower" of a change \
above its limit. *Pairs* and *seconds* are medians.
- The other tools have their defaults: asv the factor 1.1 and an environment of its own, whose \
making counts in its first decision; pyperf reports every significant difference; \
pytest-benchmark has no default and got `--benchmark-compare-fail=median:10%`. Their "not slower" \
is that they raise no alarm. A planted 10 % is at the limit of asv and of pytest-benchmark.{missing}
"""
COLUMN = 120
"""The most columns of a line of text in the report."""


def report(data: dict[str, Any]) -> str:
    """Return the text of the report."""
    tools = [*(f"replayed, {load}" for load in LOADS), *WAYS, *PEERS]
    found = sorted(
        (Decision(**one) for one in data["decisions"]),
        key=lambda one: (tools.index(one.tool), one.planted),
    )
    text = README.format(
        machine=data["machine"],
        data=DATA,
        missing="".join(
            f" {tool} was not run for this table."
            for tool in tools
            if not any(one.tool == tool for one in found)
        ),
        repeats=REPEATS,
        shares=shares(data),
        sentences="\n".join(sentences(found)),
        alarms=FALSE_ALARMS,
        decisions=DECISIONS[0],
        power=100 * FOUND,
        rows="\n".join(rows(found)),
        records="; ".join(told(data, load) for load in LOADS),
        gate=GATE,
        limit=100 * LIMIT,
    )
    return "".join(f"{wrapped(line)}\n" for line in text.splitlines())


def wrapped(line: str) -> str:
    """Return a paragraph or an item of a list as lines; a row of a table stays one line."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line, COLUMN, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def told(data: dict[str, Any], load: str) -> str:
    """Return the facts on a record as text."""
    series = [one for one in data["series"] if one["load"] == load]
    if not series:
        return f"*{load}*: no record"
    pairs = sum(len(one["pairs"]) for one in series)
    cores = [one["cores"] for one in series]
    beside = f" beside a process that takes {LOADS[load]:g} of a core" if LOADS[load] else ""
    return (
        f"*{load}*: {words.count(pairs, 'pair')} in {len(series)} series{beside}, while"
        f" {min(cores):.2f} to {max(cores):.2f} cores were in use"
    )


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the data and the report")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    recorded = commands.add_parser("record")
    recorded.add_argument("load", choices=LOADS)
    lived, compared = commands.add_parser("live"), commands.add_parser("peers")
    for command in (recorded, lived, compared):
        command.add_argument("--minutes", type=float, default=5.0, help="begin nothing afterwards")
    for command, changes, tools in ((lived, [*PLANTED], WAYS), (compared, OF_PEERS, PEERS)):
        command.add_argument("--count", type=int, default=20, help="decisions on each change")
        command.add_argument("--planted", type=int, nargs="+", choices=PLANTED, default=changes)
        command.add_argument("--tools", nargs="+", choices=tools, default=[*tools])
    for name in ("replay", "table"):
        commands.add_parser(name)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.command == "check":
        check(folder)
    elif given.command == "record":
        record(folder, given.load, given.minutes)
    elif given.command == "replay":
        replay(folder)
    elif given.command == "table":
        text = report(read(folder))
        (folder / "README.md").write_text(text)
        print(text)
    else:
        tools = {name: (WAYS | PEERS)[name] for name in given.tools}
        decide(folder, tools, given.planted, given.count, given.minutes)


if __name__ == "__main__":
    main()
