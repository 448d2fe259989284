"""Show which planted faults `dpbench doctor` names, as the table of reports/doctor-on-fakes.

    .venv-gpu/bin/python -m benchmarks.scripts.doctor_on_fakes [FOLDER]

Faults of copies, links and GPUs are planted on fake GPUs (tests/fakegpu/README.md), others in trees
of files and facts that were made by hand (tests/doctor/machines.py). No GPU takes part, and no time
is a GPU's.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dpbench.doctor import faults
from tests.doctor import machines
from tests.doctor.test_faults import PLANTED as IN_TREES
from tests.fakegpu import test_doctor as on_fakes

FOLDER = Path("reports/doctor-on-fakes")
HEAD = """\
# Which planted faults `dpbench doctor` names

FAKE-GPU. No GPU has run anything here, and no time below is a GPU's.

```sh
.venv-gpu/bin/python -m benchmarks.scripts.doctor_on_fakes
```

"as planned" means: the findings are those that were planted, and no other. Findings about the
machine that runs the fake GPUs are left out, such as the size of its `/dev/shm`, busy cores, and a
slow all-reduce, whose bytes the fake NCCL moves on these cores.
"""
FAKES = """
## On fake GPUs

Two fake GPUs with four NVLinks each to one NVSwitch; their rates are so low that the copies of
the host, which stands in for the GPUs, do not matter. `doctor` runs as a command; the seconds are
those of the whole command on a machine with 2 shared cores (load {load}), of which a copy that
hangs takes 15 and an all-reduce that hangs 20.
"""
TREES = """
## In trees made by hand

Trees of `/sys` and `/proc`, with the facts and rates of GPUs, as such machines show them. Nobody
has recorded them on a real machine. The rules judge them within milliseconds; there are no copies.
"""
Row = Sequence[str]


def main(folder: Path) -> None:
    """Write the page, a row after the other on stderr as well."""
    folder.mkdir(parents=True, exist_ok=True)
    load = f"{os.getloadavg()[0]:.0f}"
    fakes = list(_told(_on_fakes()))
    trees = list(_told(_in_trees()))
    text = "\n".join(
        [
            HEAD.rstrip(),
            FAKES.format(load=load).rstrip(),
            "",
            *_table(("planted", "how", "findings printed", "as planned", "seconds"), fakes),
            TREES.rstrip(),
            "",
            *_table(("planted", "machine", "findings", "as planned"), trees),
            "",
        ]
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _told(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        print(" | ".join(row), file=sys.stderr, flush=True)
        yield row


def _on_fakes() -> Iterator[Row]:
    for number, (planted, (settings, expected)) in enumerate(on_fakes.PLANTED.items()):
        machine = f"doctor-report-{os.getpid()}-{number}"
        with tempfile.TemporaryDirectory() as empty:
            began = time.perf_counter()
            found = on_fakes.examined(settings, Path(empty), machine)["findings"]
            seconds = time.perf_counter() - began
        on_fakes.forget(machine)
        yield (
            planted,
            ", ".join(f"`{name}={value}`" for name, value in settings.items()) or "-",
            "; ".join(one["says"] for one in found) or "nothing wrong found",
            _as_planned({one["name"] for one in found}, expected),
            f"{seconds:.0f}",
        )


def _in_trees() -> Iterator[Row]:
    healthy = [name for name in machines.TREES if name != "container"]
    cases = [("nothing", name, lambda one: one, set()) for name in healthy]
    cases += [(planted, *case) for planted, case in IN_TREES.items()]
    for planted, tree, plant, expected in cases:
        with tempfile.TemporaryDirectory() as folder:
            machine = plant(machines.examined(machines.read(Path(folder), tree)))
        found = faults.found(machine)
        yield (
            planted,
            tree,
            "; ".join(one.says for one in found) or "nothing wrong found",
            _as_planned({one.name for one in found}, expected),
        )


def _as_planned(found: set[str], expected: set[str]) -> str:
    if found == expected:
        return "yes"
    missing, more = sorted(expected - found), sorted(found - expected)
    return f"**no**: missing {missing}, not planted {more}"


def _table(head: Row, rows: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
