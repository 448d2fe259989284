"""An asv plugin that saves each result as it ends, and the plan of benchmarks/history.sh.

asv saves the results of a commit after its last benchmark, so that a kill would lose all of them.
The plugin saves them after each benchmark, and notes whether the result is quick or full, how long
it took, and the median of each round. asv's own interpreter runs this: it imports neither torch nor
dpbench.

python reports/asv_history.py groups                        the groups of benchmarks, in order
python reports/asv_history.py select COMMIT [ROUND GROUP]   asv's options for the benchmarks that
                                                            lack this round, or any
python reports/asv_history.py expect COMMIT...              the time that the benchmarks will take
python reports/asv_history.py differences COMMIT...         what the rounds say about the commits

BENCH is a regular expression for the benchmarks, and ROUNDS the number of rounds; with AGAIN, those
that have all rounds are measured too.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from asv.results import Results

RESULTS = Path(".asv/results")
FIRST = ("steps", "verbs")
"""The groups that are measured first; the page has them on top, see asv_offline.py."""
EFFORTS = "efforts.json"
"""The file beside the folder of the results, which has a note on each saved result, by commit and
benchmark.

A note has the `effort`, "quick" or "full", and by round the `medians` of each combination of
parameters, None without a result. Its `seconds` are the sum over rounds of those that pass from the
end of the benchmark before, so that they include the start of processes and the cache of a group of
benchmarks.
"""
LEAST_ROUNDS = 3
"""The least number of rounds that show how much rounds differ."""


def rounds() -> int:
    """Return the number of rounds, each of which measures a benchmark in fresh processes."""
    return int(os.environ.get("ROUNDS") or "5")


def effort() -> str:
    """Return the effort of this run; benchmarks/__init__.py reads the same variable."""
    return "full" if os.environ.get("DPBENCH_QUICK", "0") in ("", "0") else "quick"


def setup() -> None:
    """Let asv save results as each benchmark ends.

    Asv calls this once, when it loads the plugin.
    """
    add, last = Results.add_result, [time.monotonic()]
    if getattr(add, "saves", False):
        return

    def add_result(
        self: Any, benchmark: Mapping[str, Any], result: Any, *args: Any, **options: Any
    ) -> None:
        add(self, benchmark, result, *args, **options)
        spent_s, last[0] = time.monotonic() - last[0], time.monotonic()
        if RESULTS.parent.is_dir() and self._filename:
            self.save(str(RESULTS))
            again = bool(options.get("append_samples"))
            key = self.commit_hash, benchmark["name"]
            _note(RESULTS.parent / EFFORTS, *key, _medians(result), spent_s, again=again)

    add_result.saves = True  # type: ignore[attr-defined]
    Results.add_result = add_result


def _medians(result: Any) -> list[float | None]:
    """Return the median of each combination of parameters, None without a result."""
    return [
        statistics.median(samples) if samples else _number(value)
        for samples, value in zip(result.samples, result.result, strict=True)
    ]


def _number(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if known else None


def _note(
    file: Path,
    commit: str,
    benchmark: str,
    medians: Sequence[float | None],
    spent_s: float,
    *,
    again: bool,
) -> None:
    """Write the note on a round into the file; a kill leaves the old file or the new one.

    It is added to the rounds before it if it is measured `again`; else they are forgotten.
    """
    known = _read(file)
    notes = known.setdefault(commit, {})
    before = notes.get(benchmark, {}) if again else {}
    notes[benchmark] = {
        "effort": effort(),
        "seconds": round(before.get("seconds", 0.0) + spent_s, 1),
        "medians": [*before.get("medians", ()), [*medians]],
    }
    part = file.with_suffix(".part")
    part.write_text(json.dumps(known, indent=1))
    part.replace(file)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def stored(commit: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each benchmark that has a result for a commit, with the result's columns."""
    for file in sorted(RESULTS.glob(f"*/{commit[:8]}*-*.json")):
        content = json.loads(file.read_text())
        for name, row in content["results"].items() if content["commit_hash"] == commit else ():
            yield name, dict(zip(content["result_columns"], row, strict=False))


def benchmarks(pattern: str) -> dict[str, str]:
    """Return the version of each discovered benchmark whose name matches, as asv's --bench does."""
    found = json.loads((RESULTS / "benchmarks.json").read_text())
    return {
        name: one["version"]
        for name, one in found.items()
        if name != "version" and re.search(pattern, name)
    }


def missing(commit: str, pattern: str, number: int = 0) -> list[str]:
    """Return the benchmarks that lack the round `number` of a commit with at least this effort.

    By default, it is the last round. With AGAIN, all benchmarks lack the first round, of which the
    others come after.
    """
    last = rounds()
    if os.environ.get("AGAIN") and number in (0, 1):
        return list(benchmarks(pattern))
    notes = _notes(commit)
    good = {
        (name, columns.get("version"))
        for name, columns in stored(commit)
        if (values := columns.get("result"))
        and None not in values
        and notes.get(name, {}).get("effort") in (effort(), "full")
        and len(notes[name].get("medians", ())) >= (number or last)
    }
    return [name for name, version in benchmarks(pattern).items() if (name, version) not in good]


def _notes(commit: str) -> dict[str, Any]:
    notes: dict[str, Any] = _read(RESULTS.parent / EFFORTS).get(commit, {})
    return notes


def groups(pattern: str) -> list[str]:
    """Return the groups of the benchmarks, which are their files; [""] if no name matches."""
    found = {name.partition(".")[0] for name in benchmarks(pattern)} or {""}
    return sorted(found, key=lambda group: (group not in FIRST, group))


def selection(commit: str, pattern: str, number: int = 0, group: str = "") -> list[str]:
    """Return asv's options that select the benchmarks of a group that lack a round.

    They add it to the rounds before. asv compares a pattern with the name of a benchmark and its
    parameters. If the pattern matches no name, asv gets it as it is. The group "" has all
    benchmarks.
    """
    names = [
        rf"^{re.escape(name)}(\(|$)"
        for name in missing(commit, pattern, number)
        if group in ("", name.partition(".")[0])
    ]
    chosen = [f"--bench={one}" for one in names or ([] if benchmarks(pattern) else [pattern])]
    return [*chosen, "--append-samples"] if chosen and number > 1 else chosen


def expect(commits: Sequence[str], pattern: str) -> str:
    """Return a sentence on the time that the commits' missing benchmarks take, and its basis.

    The time of a benchmark is the median of its earlier results with the same effort.
    """
    if not benchmarks(pattern):
        return f"no benchmark's name matches {pattern!r}; asv compares it with names and parameters"
    todo = [name for commit in commits for name in missing(commit, pattern)]
    done = len(commits) * len(benchmarks(pattern)) - len(todo)
    last = rounds()
    seconds: dict[str, list[float]] = {}
    for notes in _read(RESULTS.parent / EFFORTS).values():
        for name, note in notes.items():
            if note["effort"] == effort():
                each_s = note["seconds"] / max(1, len(note.get("medians", ())))
                seconds.setdefault(name, []).append(last * each_s)
    unknown = sorted({name for name in todo if name not in seconds})
    total = sum(statistics.median(seconds[name]) for name in todo if name in seconds)
    said = f"{len(todo)} results to measure in {last} rounds, {done} are there already"
    if not todo:
        return said
    if len(unknown) == len(set(todo)):
        return (
            f"{said}; expected time: unknown, no benchmark has an earlier {effort()} result on this"
            " machine"
        )
    least = f"at least {total:.0f} s" if unknown else f"about {total:.0f} s"
    without = f"; no earlier result: {', '.join(unknown)}" if unknown else ""
    return f"{said}; expected time: {least} (medians of earlier {effort()} results){without}"


def differences(commits: Sequence[str], pattern: str) -> list[str]:
    """Return sentences on the differences between each commit and the one measured before it.

    A ratio is the geometric mean of those of each round, in which both commits were measured one
    after the other. Its interval is Student's over rounds, and all intervals hold together with
    95 % (Bonferroni).
    """
    from scipy.special import stdtrit

    ratios = [*_ratios(commits, pattern)]
    if not ratios:
        return [f"nothing is compared: no two commits have {LEAST_ROUNDS} rounds in common"]
    found = []
    for what, logs in ratios:
        n = len(logs)
        t = float(stdtrit(n - 1, 1 - 0.025 / len(ratios)))
        found.append((what, statistics.fmean(logs), t * statistics.stdev(logs) / math.sqrt(n)))
    sure = [
        f"{what}: {math.exp(middle):.2f}x as long"
        f" ({math.exp(middle - half):.2f}-{math.exp(middle + half):.2f})"
        for what, middle, half in found
        if abs(middle) > half
    ]
    halves = sorted(half for *_, half in found)
    least, usual, most = (
        f"{math.expm1(min(half, 50.0)):.1%}"
        for half in (halves[0], statistics.median(halves), halves[-1])
    )
    return [
        f"{len(sure)} of {len(found)} differences between a commit and the one before it are"
        " decided; all others may be noise",
        *sure,
        f"on this machine, the rounds decide differences from {usual} on (median; {least} to"
        f" {most}), whatever the page shows",
    ]


def _ratios(commits: Sequence[str], pattern: str) -> Iterator[tuple[str, list[float]]]:
    """Yield the logarithms of the ratios by round, and which benchmark and commits they compare."""
    for name in benchmarks(pattern) or benchmarks(""):
        noted = [(commit, _notes(commit).get(name, {}).get("medians", ())) for commit in commits]
        measured = [(commit, medians) for commit, medians in noted if medians]
        for (before, first), (after, second) in pairwise(measured):
            for place, values in enumerate(zip(*first, strict=False)):
                pairs = zip(values, (each[place] for each in second), strict=False)
                logs = [math.log(new / old) for old, new in pairs if old and new]
                if len(logs) >= LEAST_ROUNDS:
                    which = f" [{place}]" if len(first[0]) > 1 else ""
                    yield f"{name}{which}, {after[:8]} after {before[:8]}", logs


if __name__ == "__main__":
    verb, *given = sys.argv[1:]
    regex = os.environ.get("BENCH", "")
    if verb == "groups":
        print("\n".join(groups(regex)))
    elif verb == "select":
        commit, *rest = given
        print("\n".join(selection(commit, regex, *map(int, rest[:1]), *rest[1:])))
    elif verb == "expect":
        print(expect(given, regex))
    else:
        print("\n".join(differences(given, regex)))
