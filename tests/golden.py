"""Golden outputs: what commands print of each run below reports/, of made runs and machines.

    python -m tests.golden [RUN...]             print how today's output differs from the recorded
    python -m tests.golden --record [RUN...]    record today's output below tests/golden/

The texts of commands are asserted here only. A commit that changes one lists the change in its
message.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import lzma
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from dpbench import cli
from dpbench.cli import tables
from dpbench.records import HOST, UNATTRIBUTED, Phase, Span, Status, Trial, Verified
from dpbench.records.observed import Held, Unknown
from dpbench.records.registry import Parallelism
from dpbench.store import Identity, Store
from dpbench.store.export import read_run
from tests import exported, observed_loops
from tests.analysis import test_findings, test_noisy, test_uneven
from tests.measure import test_cluster

REPORTS = Path(__file__).parent.parent / "reports"
GOLDEN = Path(__file__).parent / "golden"
TRIALS = "trials.jsonl.gz"
RUN_ID = bytes.fromhex("901de2" * 5 + "00")
STARTED_S = 1.79e9
"""The start of every run, in seconds since the epoch: an exported file does not have it."""
PAIRS = (("default", "cpu-2-cores"), ("cpu-2-cores", "answers-2-cores"), ("default", "watched"))
"""Pairs of reports that are compared: with cases in common, and without."""
COMMANDS = {
    "report --md": ("report", "--md"),
    "report --json": ("report", "--json"),
    "explain --all": ("explain", "--all"),
    "show --json": ("show", "@last", "--json"),
    "export csv": ("export", "csv"),
    "export jsonl": ("export", "jsonl"),
    "export pyperf": ("export", "pyperf"),
}
PAGE = "report --html"
Outputs = dict[str, str]
"""The output of each command."""


def printed(arguments: Sequence[str]) -> str:
    """Return what a command prints to stdout and stderr, and its exit code unless that is 0."""
    out = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main(list(arguments))
        except SystemExit as end:
            code = end.code
    return out.getvalue() + (f"exit code {code}\n" if code else "")


def with_spans(trial: Trial) -> Trial:
    """Return an exported trial with a host span for each phase of a step, from its seconds."""
    spans: list[Span] = []
    for index, (step, phases) in enumerate(zip(trial.steps, trial.ledger.phases, strict=True)):
        at_s = step.end_s - step.seconds
        for name, seconds in phases.items():
            if name == UNATTRIBUTED:
                continue
            spans.append(Span(index, Phase(name), HOST, "host", at_s, at_s + seconds))
            at_s += seconds
    return replace(trial, spans=tuple(spans))


def store(path: Path, trials: Sequence[Trial]) -> None:
    """Write a store with one finished run of these trials, with a fixed id and a fixed start."""
    facts = trials[0].provenance
    with (
        patch("os.urandom", return_value=RUN_ID),
        patch("time.time", return_value=STARTED_S),
        Store.create(path) as opened,
    ):
        opened.add(trials, Identity("golden", "golden", "golden"), provenance=facts)


def one_round(name: str, text: str) -> str:
    """Return the first round of an export: all rounds have the same form, and are long."""
    if name == "export jsonl":
        lines = text.splitlines(keepends=True)
        return "".join(
            line for line in lines if not line.startswith("{") or json.loads(line)["round"] == 0
        )
    if name == "export pyperf" and text.startswith("{"):
        suite = json.loads(text)
        for benchmark in suite["benchmarks"]:
            del benchmark["runs"][1:]
        return json.dumps(suite, indent=1) + "\n"
    return text


def of_run(trials: Sequence[Trial]) -> Outputs:
    """Return the output of each command on a store with these trials, and its report's page."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        store(Path("dpbench.db"), trials)
        outputs = {name: one_round(name, printed(command)) for name, command in COMMANDS.items()}
        printed(("report", "--report", "page.html"))
        outputs[PAGE] = Path("page.html").read_text()
        return {name: text.replace(folder, "FOLDER") for name, text in outputs.items()}


def of_report(name: str) -> Outputs:
    """Return the output of each command on the run in reports/`name`."""
    _, trials = read_run(REPORTS / name / TRIALS)
    return of_run([with_spans(trial) for trial in trials])


def of_comparisons() -> Outputs:
    """Return the output of `dpbench compare` for each pair of reports, as text and as JSON."""
    outputs: Outputs = {}
    for before, after in PAIRS:
        files = [str(REPORTS / name / TRIALS) for name in (before, after)]
        for form in ("--md", "--json"):
            text = printed(("compare", *files, "--unlike", form))
            outputs[f"compare {before} {after} {form}"] = text.replace(str(REPORTS), "reports")
    return outputs


def failed_and_noisy() -> list[Trial]:
    """Return a run: half its rounds are NOISY, and one case fails differently in each round."""
    trials = test_noisy.run(noisy={1, 3})
    case = replace(exported.DP, devices=4)
    failures = (
        {"status": Status.FAILED, "reason": "rank 1: ValueError: a <b> & 'c'", "failed_device": 1},
        {"status": Status.OOM, "reason": "device 0 has no memory left", "failed_device": 0},
        {"status": Status.TIMEOUT, "reason": "no step ended within 60 s"},
        {"verified": Verified.NO, "reason": "gradients differ by 3e-2"},
    )
    return [*trials, *(exported.made(case, number=i, **how) for i, how in enumerate(failures))]


def explained(trials: Sequence[Trial]) -> Outputs:
    """Return what `dpbench explain` prints of a run of these trials and of an epoch."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        store(Path("dpbench.db"), trials)
        asked = (*COMMANDS["explain --all"], "--samples", "768000")
        return {" ".join(asked): printed(asked)}


def with_findings() -> list[Trial]:
    """Return a run of four devices on two cores with most findings that compare cases."""
    case, measured = test_findings.case, test_findings.measured
    level = test_findings.LEVEL
    links = [
        {"source": source, "target": to, "bytes": 2**20, "seconds": [1e-4 * (1 + (to == 2))] * 3}
        for source in (HOST, 0)
        for to in range(source + 1, 4)
    ]
    slow = dict.fromkeys(("scatter", "replicate", "gather", "reduce"), 0.004)
    trials = [
        *test_findings.one(),
        *measured(case("single", devices=1, batch=16), level),
        *measured(case("ddp", devices=4), level),
        *test_findings.dp(devices=2),
        *measured(case(devices=4, batch=6), level),
        *measured(case(devices=4, batch=128), level),
        *measured(
            case(devices=4),
            {**level, **slow, "optimizer": 0.002, UNATTRIBUTED: 0.002},
            busy={0: 0.020, 1: 0.010, 2: 0.015, 3: 0.010},
            memory=(2**27, *(2**26,) * 3),
        ),
    ]
    host = {"name": "golden", "cores": 2}
    return [
        replace(one, provenance={**one.provenance, "host": host, "links": links}) for one in trials
    ]


def with_problems() -> list[Trial]:
    """Return a run of observed loops, of which each has other problems."""
    made, loop = observed_loops, observed_loops.loop
    gpu = partial(made.case, device_kind="cuda")
    ranks = gpu(model="ranks.py", devices=2, parallelism=Parallelism.RANKS)
    held = [
        Held(rank=rank, gpu=on, uuid=f"GPU-{on}", held_bytes=2**29, own=rank == on)
        for rank, on in ((0, 0), (1, 1), (1, 0))
    ]
    groups = [*made.PLAIN[:4], [(Phase.REDUCE, device, 0.004) for device in range(2)]]
    waits = partial(made.with_part, Phase.DATA)
    unknown = Unknown(problem="autograd.grad was called", steps=40)
    trials = [
        loop(waits(0.007), gpu(model="waits.py"), loader_workers=2),
        loop(of=gpu(model="open.py"))[:3] + loop(waits(0.0017), gpu(model="open.py"), seed=1)[3:],
        loop(waits(0.007), gpu(model="few.py"), rounds=1, steps=2),
        loop(
            made.with_part(Phase.READ, 0.003), gpu(model="reads.py"), reads={"reads.py:31 item": 50}
        ),
        loop(made.with_part(Phase.SCATTER, 0.002, 0), gpu(model="pageable.py"), pinned=False),
        loop(of=gpu(model="launches.py"), busy={0: 0.003}),
        loop(groups, ranks, wrapper="DistributedDataParallel", held=held),
        loop(of=gpu(model="unclear.py"), unknown=(unknown,)),
        loop(of=gpu(model="late.py"), evaluation_s=2.0, checkpoint_s=0.5, skipped_updates=13),
    ]
    return [
        replace(one, provenance={**one.provenance, **made.GPU_FACTS})
        for case in trials
        for one in case
    ]


def with_statements() -> list[Trial]:
    """Return a run of two unlike machines, of which one is slow, with uneven steps.

    The first trial states the facts of the run, which are none of a trial: its row is unreadable.
    """
    machines = [
        {"name": name, "machine": name * 9, "facts": test_cluster.facts(cores=cores)}
        for name, cores in (("a", 8), ("b", 4))
    ]
    facts = {
        "host": {"name": "golden", "cores": 8},
        "hosts": {"machines": machines},
        "foreign_load": {"unknown": "no counts here"},
        "dpbench": {"commit": "aaaa1111", "dirty": True},
    }
    uneven = test_uneven.rounds(test_uneven.SINGLE, test_uneven.every(4))
    others_told = {
        "averaging": {"low": 0.02, "high": 0.131, "rows": 7},
        "gil": "on",
        "gil_switched_on_by": "numba._dispatcher",
    }
    even = test_uneven.rounds(test_uneven.DDP, test_uneven.even)
    told = [replace(one, provenance={**one.provenance, **others_told}) for one in even]
    first, *others = [*uneven, *told]
    slow = [test_cluster.alone(number, ratio) for number, ratio in enumerate((1.49, 1.5, 1.51))]
    lost = replace(slow[0], round=9, steps=(), samples=(), status=Status.FAILED, reason="planted")
    return [replace(first, provenance={**first.provenance, **facts}), *others, *slow, lost]


def of_doctor() -> Outputs:
    """Return what `dpbench doctor` prints of each machine with a planted fault."""
    faults, machines = map(import_module, ("tests.doctor.test_faults", "tests.doctor.machines"))
    words, result = map(import_module, ("dpbench.doctor.words", "dpbench.doctor.result"))
    outputs: Outputs = {}
    for name, (tree, plant, _) in faults.PLANTED.items():
        with tempfile.TemporaryDirectory() as folder:
            machine = plant(machines.examined(Path(folder), tree))
        text = words.text(machine, result.result(machine, STARTED_S))
        outputs[name] = "1. " + text.partition("\n1. ")[2].partition("\nChecked: ")[0]
    return outputs


def of_answers() -> Outputs:
    """Return the answer to each situation, and what reports say of the peak and of energy."""
    names = ("test_decision", "test_peak", "test_sampled")
    decision, peak, sampled = (import_module(f"tests.analysis.{name}") for name in names)
    outputs: Outputs = {
        name: "\n".join(decision.only(one.rows, one.facts).lines)
        for name, one in decision.SITUATIONS.items()
    }
    impossible = [peak.trial(seconds=0.001, number=number) for number in range(3)]
    outputs["share of peak"] = tables.table([peak.row(), peak.row(peak.FOUR)])
    outputs["above the peak"] = str(peak.stated_of(impossible))
    outputs["energy"] = sampled.answered(
        *(sampled.powered(sampled.ALONE, 300.0, number=n) for n in range(3)),
        *(sampled.powered(sampled.PAIR, 250.0, 200.0, number=n) for n in range(3)),
    )
    return outputs


def runs() -> dict[str, Callable[[], Outputs]]:
    """Return the functions that render each run's outputs, by the name of its recorded file."""
    stored = {path.parent.name for path in REPORTS.glob(f"*/{TRIALS}")}
    return {
        **{name: partial(of_report, name) for name in sorted(stored)},
        "made-failed-and-noisy": lambda: of_run(failed_and_noisy()),
        "made-observed": lambda: of_run(observed_loops.loop(observed_loops.parallel())),
        "made-findings": lambda: explained(with_findings()),
        "made-problems": lambda: explained(with_problems()),
        "made-statements": lambda: explained(with_statements()),
        "made-answers": of_answers,
        "doctor": of_doctor,
        "comparisons": of_comparisons,
    }


def recorded(name: str) -> Outputs:
    """Return the recorded outputs of a run; none if it has no file."""
    path = GOLDEN / f"{name}.json.xz"
    if not path.exists():
        return {}
    outputs: Outputs = json.loads(lzma.decompress(path.read_bytes()))
    return outputs


def record(name: str, outputs: Outputs) -> None:
    """Write the outputs of a run."""
    GOLDEN.mkdir(exist_ok=True)
    text = json.dumps(outputs, indent=1)
    (GOLDEN / f"{name}.json.xz").write_bytes(lzma.compress(text.encode()))


def differences(name: str, before: Outputs, after: Outputs) -> Iterator[str]:
    """Yield the lines of a diff of the outputs of a run, command by command."""
    for command in dict.fromkeys([*before, *after]):
        old, new = (pieces(outputs.get(command, "")) for outputs in (before, after))
        yield from difflib.unified_diff(old, new, f"{name}: {command}", "today", n=0, lineterm="")


def pieces(text: str) -> list[str]:
    """Return a text's lines, with HTML and JSON split at each element to keep a diff short."""
    return [
        part for line in text.splitlines() for part in re.split(r"(?<=>)(?=<)|(?<=,) (?=\")", line)
    ]


def main(arguments: Sequence[str]) -> int:
    """Compare or record the outputs of these runs, or of all; return 1 if they differ."""
    parser = argparse.ArgumentParser(
        description="Compare what the reading commands print with the recorded outputs."
    )
    parser.add_argument(
        "names", nargs="*", metavar="RUN", help="runs below reports/ (default: all)"
    )
    parser.add_argument("--record", action="store_true", help="record today's outputs")
    chosen = parser.parse_args(arguments)
    rendered = {
        name: render()
        for name, render in runs().items()
        if name in chosen.names or not chosen.names
    }
    if chosen.record:
        for name, outputs in rendered.items():
            record(name, outputs)
        return 0
    found = [
        line
        for name, outputs in rendered.items()
        for line in differences(name, recorded(name), outputs)
    ]
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
