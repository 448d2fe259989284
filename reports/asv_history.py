"""An asv plugin that saves each result as it ends, and the plan of benchmarks/history.sh.

asv saves the results of a commit after its last benchmark, so that a kill would lose all of them.
The plugin saves them after each benchmark, and notes whether the result is quick or full, and how
long it took. asv's own interpreter runs this: it imports neither torch nor dpbench.

python reports/asv_history.py groups                  the groups of benchmarks, in order
python reports/asv_history.py select COMMIT [GROUP]   asv's options that select the benchmarks
python reports/asv_history.py expect COMMIT...        the time that the benchmarks will take

BENCH is a regular expression for the benchmarks; with AGAIN, those that have a result are measured
too.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asv.results import Results

RESULTS = Path(".asv/results")
FIRST = ("steps", "verbs")
"""The groups that are measured first; the page has them on top, see asv_offline.py."""
EFFORTS = "efforts.json"
"""The file beside the folder of the results, which has a note on each saved result, by commit and
benchmark.

A note has the `effort`, "quick" or "full", and the `seconds` that pass from the end of the
benchmark before, so that the seconds include the start of processes and the cache of a group of
benchmarks. Of several rounds they are the sum.
"""


def effort() -> str:
    """Return the effort of this run; benchmarks/__init__.py reads the same variable."""
    return "full" if os.environ.get("DPBENCH_QUICK", "0") in ("", "0") else "quick"


def setup() -> None:
    """Let asv save results as each benchmark ends.

    Asv calls this once, when it loads the plugin.
    """
    add, saved, ended = Results.add_result, Results.save, Counter[tuple[str, str]]()
    spent, last = Counter[tuple[str, str]](), [time.monotonic()]
    if getattr(add, "saves", False):
        return

    def add_result(
        self: Any, benchmark: Mapping[str, Any], result: Any, *args: Any, **options: Any
    ) -> None:
        add(self, benchmark, result, *args, **options)
        name, now = benchmark["name"], time.monotonic()
        key = self.commit_hash, name
        ended[key] += 1
        spent[key] += now - last[0]
        last[0] = now
        # asv measures a benchmark without any result in no further round
        rounds = (
            1 if all(value is None for value in result.result) else int(benchmark.get("rounds", 1))
        )
        self.__dict__.setdefault("unfinished", set()).add(name)
        if ended[key] >= rounds and RESULTS.parent.is_dir() and self._filename:
            self.unfinished.discard(name)
            _save_finished(self)
            _note(RESULTS.parent / EFFORTS, *key, spent[key])

    def _save_finished(results: Any) -> None:
        """Save the results with no rounds left: a later run would take the others for complete."""
        whole = results._results
        results._results = {
            name: value for name, value in whole.items() if name not in results.unfinished
        }
        try:
            saved(results, str(RESULTS))
        finally:
            results._results = whole

    add_result.saves = True  # type: ignore[attr-defined]
    Results.add_result = add_result


def _note(file: Path, commit: str, benchmark: str, seconds: float) -> None:
    """Write the note on a result into the file; a kill leaves the old file or the new one."""
    known = _read(file)
    known.setdefault(commit, {})[benchmark] = {"effort": effort(), "seconds": round(seconds, 1)}
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


def missing(commit: str, pattern: str) -> list[str]:
    """Return the benchmarks that have no good result for a commit with at least this effort.

    With AGAIN, all.
    """
    if os.environ.get("AGAIN"):
        return list(benchmarks(pattern))
    notes = _read(RESULTS.parent / EFFORTS).get(commit, {})
    good = {
        (name, columns.get("version"))
        for name, columns in stored(commit)
        if (values := columns.get("result"))
        and None not in values
        and notes.get(name, {}).get("effort") in (effort(), "full")
    }
    return [name for name, version in benchmarks(pattern).items() if (name, version) not in good]


def groups(pattern: str) -> list[str]:
    """Return the groups of the benchmarks, which are their files; [""] if no name matches."""
    found = {name.partition(".")[0] for name in benchmarks(pattern)} or {""}
    return sorted(found, key=lambda group: (group not in FIRST, group))


def selection(commit: str, pattern: str, group: str = "") -> list[str]:
    """Return asv's options that select a group's missing benchmarks; none if there are none.

    asv compares a pattern with the name of a benchmark and its parameters. If the pattern matches
    no name, asv gets it as it is. The group "" has all benchmarks.
    """
    names = [
        rf"^{re.escape(name)}(\(|$)"
        for name in missing(commit, pattern)
        if group in ("", name.partition(".")[0])
    ]
    return [f"--bench={one}" for one in names or ([] if benchmarks(pattern) else [pattern])]


def expect(commits: Sequence[str], pattern: str) -> str:
    """Return a sentence on the time that the commits' missing benchmarks take, and its basis.

    The time of a benchmark is the median of its earlier results with the same effort.
    """
    if not benchmarks(pattern):
        return f"no benchmark's name matches {pattern!r}; asv compares it with names and parameters"
    todo = [name for commit in commits for name in missing(commit, pattern)]
    done = len(commits) * len(benchmarks(pattern)) - len(todo)
    seconds: dict[str, list[float]] = {}
    for notes in _read(RESULTS.parent / EFFORTS).values():
        for name, note in notes.items():
            if note["effort"] == effort():
                seconds.setdefault(name, []).append(note["seconds"])
    unknown = sorted({name for name in todo if name not in seconds})
    total = sum(statistics.median(seconds[name]) for name in todo if name in seconds)
    said = f"{len(todo)} results to measure, {done} are there already"
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


if __name__ == "__main__":
    verb, *given = sys.argv[1:]
    regex = os.environ.get("BENCH", "")
    if verb == "groups":
        print("\n".join(groups(regex)))
    else:
        print(
            expect(given, regex)
            if verb == "expect"
            else "\n".join(selection(given[0], regex, *given[1:]))
        )
