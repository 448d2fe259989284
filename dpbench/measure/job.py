"""Job: measure one case in a job of a scheduler; `python -m dpbench.measure.job FOLDER` is its process.

The folder has the request (`request.json`). The job adds a store with its trials (`part.db`) and, when all rounds are
measured, `done.json`. A job that is repeated in the same folder resumes its store.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from dpbench.records import Case

PART, DONE, REQUEST = "part.db", "done.json", "request.json"


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The work of one job: a case, its number of rounds, and the limits of `measure.run.run` in seconds."""

    case: Case
    rounds: int
    limit_s: float
    patience_s: float

    def write(self, folder: Path) -> None:
        """Write the request to a folder, which is created if it does not exist."""
        folder.mkdir(parents=True, exist_ok=True)
        plain = {"rounds": self.rounds, "limit_s": self.limit_s, "patience_s": self.patience_s}
        (folder / REQUEST).write_text(json.dumps(plain | {"case": self.case.to_dict()}), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> JobRequest:
        """Return the request in a folder."""
        plain = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        return cls(**plain | {"case": Case.from_dict(plain["case"])})


def main(folder: Path) -> None:
    """Measure the case of the request in `folder`, and write `done.json` at the end."""
    from dpbench.measure import run
    from dpbench.store import Store

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cancelled job keeps its finished trials
    asked = JobRequest.read(folder)

    def listen(event: object) -> None:
        print(event.text if isinstance(event, run.Note) else type(event).__name__, flush=True)

    with Store.create(folder / PART) as store:
        outcome = run.run(
            [asked.case], store, rounds=asked.rounds, limit_s=asked.limit_s, patience_s=asked.patience_s, listen=listen
        )
    partial = folder / f"{DONE}.part"
    partial.write_text(json.dumps(outcome.counts), encoding="utf-8")
    partial.rename(folder / DONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
