"""Jobs: measure the cases of a plan in jobs of Slurm, or of this machine, through submitit; collect their trials.

Each case is one job, whose process is `python -m dpbench.measure.jobs FOLDER`. The job and this process share the
folder. It has the request (`request.json`). The job adds a store with its trials (`part.db`) and, when all rounds are
measured, `done.json`. A job that is repeated in the same folder resumes its store. A job has ended if its result file
exists, or if the scheduler's queue no longer has the job. Slurm's accounting is not needed.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dpbench.hardware import foreign_load, provenance
from dpbench.measure.run import Ended, Listener, Note, Outcome, Started
from dpbench.measure.scratch import write_whole
from dpbench.records import Case, plan
from dpbench.store import Store

LAUNCHERS = ("slurm", "local")
ID = "job.id"
"""The file with the id of the job that was last submitted for a folder."""
POLL_S = 1.0
"""The interval in seconds between two checks of whether jobs have ended."""
SETTLE_S = 5.0
"""The seconds for which a job must be missing from the queue, without a result, before it counts as ended.

Between the end of a job and the appearance of its files, a network file system needs some time.
"""
CANCEL_S = 30.0
"""The longest wait in seconds for the end of cancelled jobs."""
START_S = 300.0
"""The seconds of a job's time limit that are reserved for its start and the check of its model."""
PART, DONE, REQUEST = "part.db", "done.json", "request.json"


class JobsError(RuntimeError):
    """Jobs cannot be submitted; the message has the reason and the remedy."""


class SubmittedJob(Protocol):
    """A submitted job."""

    @property
    def job_id(self) -> str:
        """Return the scheduler's id of the job."""

    def queued(self) -> bool:
        """Return whether the job waits or runs; if that is unknown, return True."""

    def cancel(self) -> None:
        """End the job."""


@dataclass(frozen=True)
class SlurmJob:
    """A job of Slurm, identified by its id."""

    job_id: str

    def queued(self) -> bool:
        """Return whether the job is in the queue; True if the queue cannot be read."""
        command = ["squeue", "--noheader", "--format=%T", f"--jobs={self.job_id}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        forgotten = "Invalid job id" in done.stderr  # squeue exits with 1 for other errors too
        return bool(done.stdout.strip()) if done.returncode == 0 else not forgotten

    def cancel(self) -> None:
        """End the job with scancel."""
        subprocess.run(["scancel", self.job_id], capture_output=True, check=False)


@dataclass(frozen=True)
class LocalJob:
    """A job that submitit runs on this machine."""

    job: Any

    @property
    def job_id(self) -> str:
        """Return the id of the job's process."""
        return str(self.job.job_id)

    def queued(self) -> bool:
        """Return whether the job runs."""
        return not self.job.done()

    def cancel(self) -> None:
        """End the job."""
        self.job.cancel()


@dataclass(frozen=True)
class Launcher:
    """A way to run jobs: `name` is one of `LAUNCHERS`; `options` has options of sbatch for Slurm, by name."""

    name: str
    options: Mapping[str, str]

    @property
    def parallel(self) -> bool:
        """Return whether several jobs may run at the same time; on one machine they would disturb each other."""
        return self.name == "slurm"

    def submit(self, folder: Path, limit_s: float) -> SubmittedJob:
        """Submit a job that measures the request in `folder`, with a time limit of `limit_s` seconds; return the job.

        Raises JobsError if the job cannot be submitted.
        """
        try:
            import submitit
        except ModuleNotFoundError:
            raise JobsError("--launcher needs submitit: pip install 'torch-dpbench[jobs]'") from None
        if self.name == "slurm" and not shutil.which("sbatch"):
            raise JobsError("--launcher slurm needs Slurm's command sbatch, which is not on the PATH of this machine")
        executor = submitit.AutoExecutor(folder / "submitit", cluster=self.name)
        executor.update_parameters(name="dpbench", timeout_min=int(limit_s // 60) + 1)
        if self.name == "slurm":
            executor.update_parameters(slurm_additional_parameters={"exclusive": True, **self.options})
        command = [sys.executable, "-m", "dpbench.measure.jobs", str(folder)]
        try:
            job = executor.submit(submitit.helpers.CommandFunction(command, verbose=False))
        except submitit.core.utils.FailedJobError as error:
            raise JobsError(f"{self.name} did not accept the job: {error}") from None
        return SlurmJob(job.job_id) if self.name == "slurm" else LocalJob(job)


class _Submitted:
    """A submitted job, with its case and its folder."""

    def __init__(self, case: Case, folder: Path, job: SubmittedJob) -> None:
        self.case, self.folder, self.job = case, folder, job
        self._missing_s = float("inf")

    def ended(self) -> bool:
        """Return whether the job has a result, or has been missing from the queue for `SETTLE_S` seconds."""
        if (self.folder / DONE).exists():
            return True
        if self.job.queued():
            self._missing_s = float("inf")
            return False
        self._missing_s = min(self._missing_s, time.monotonic())
        return time.monotonic() >= self._missing_s + SETTLE_S


class _Jobs:
    """The manager of one run's jobs: it submits them, waits for them, and stores their trials."""

    def __init__(
        self, store: Store, run_id: str, folder: Path, launcher: Launcher, total: int, listen: Listener
    ) -> None:
        self._store, self._run_id, self._folder, self._launcher = store, run_id, folder, launcher
        self._total, self._listen = total, listen
        self._running: list[_Submitted] = []

    def measure(self, requests: Sequence[JobRequest]) -> None:
        """Submit a job for each request, wait for all of them, and store their trials."""
        waiting = list(requests)
        try:
            while waiting or self._running:
                while waiting and (self._launcher.parallel or not self._running):
                    self._submit(waiting.pop(0))
                self._running = [job for job in self._running if not self._collected(job)]
                time.sleep(POLL_S if self._running else 0)
        finally:
            for job in self._running:  # jobs remain only after an error or Ctrl-C: keep the trials that they finished
                job.job.cancel()
            deadline_s = time.monotonic() + CANCEL_S
            while any(job.job.queued() for job in self._running) and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
            for job in self._running:
                self._absorb(job)

    def _submit(self, request: JobRequest) -> None:
        folder = self._folder / request.case.fingerprint[:12]
        job = self._earlier(folder)
        if job is None:
            (folder / DONE).unlink(missing_ok=True)
            request.write(folder)
            job = self._launcher.submit(folder, START_S + request.rounds * request.limit_s)
            write_whole(folder / ID, job.job_id)
        self._listen(Note(f"{request.case.label} is measured in the {self._launcher.name} job {job.job_id}"))
        self._running.append(_Submitted(request.case, folder, job))

    def _earlier(self, folder: Path) -> SubmittedJob | None:
        """Return the job that an earlier process submitted for this folder if it still waits or runs, otherwise None.

        Only jobs of Slurm are looked up; for other launchers, the result is None.
        """
        if self._launcher.name != "slurm" or not (folder / ID).exists():
            return None
        job = SlurmJob((folder / ID).read_text(encoding="utf-8"))
        return job if job.queued() else None

    def _collected(self, job: _Submitted) -> bool:
        """Return whether a job has ended; if it has, store its trials."""
        if not job.ended():
            return False
        self._absorb(job)
        if not (job.folder / DONE).exists():
            logs = job.folder / "submitit"
            text = f"job {job.job.job_id} ended before it had measured all rounds; its log is in {logs}"
            self._listen(Note(f"{job.case.label}: {text}"))
        return True

    def _absorb(self, job: _Submitted) -> None:
        """Store the trials of a job that are not stored yet."""
        if (job.folder / PART).exists():
            for trial in self._store.absorb(self._run_id, job.folder / PART):
                done = len(self._store.done(self._run_id))
                self._listen(Ended(trial, done, self._total, sum(trial.setup.values())))


def run(
    cases: Sequence[Case], store: Store, launcher: Launcher, *, rounds: int, limit_s: float, patience_s: float | None,
    listen: Listener,
) -> Outcome:  # fmt: skip
    """Measure each case in a separate job, and store all trials in one run; the same call resumes an unfinished run.

    Each job passes `rounds`, `limit_s` and `patience_s` to `measure.run.run`. `listen` is called with every event.
    Raises JobsError if a job cannot be submitted.
    """
    facts = provenance.collect() | {"launcher": {"name": launcher.name, "options": dict(launcher.options)}}
    run_id, resumed = store.begin_run(
        plan=plan.plan_hash(cases, rounds, launcher.name, *_pairs(launcher.options)), rounds=rounds, provenance=facts,
        host=launcher.name, code=provenance.code_key(facts),
    )  # fmt: skip
    done = store.done(run_id)
    missing = [case for case in cases if any((case.fingerprint, n) not in done for n in range(rounds))]
    listen(Started(run_id, len(cases) * rounds, len(done)))
    patience = foreign_load.patience(patience_s)
    requests = [JobRequest(case=case, rounds=rounds, limit_s=limit_s, patience_s=patience) for case in missing]
    folder = store.path.absolute().with_name(f"{store.path.name}.jobs") / run_id
    try:
        _Jobs(store, run_id, folder, launcher, len(cases) * rounds, listen).measure(requests)
    finally:
        whole = len(store.done(run_id)) >= len(cases) * rounds
        store.end_run(run_id, "finished" if whole else "interrupted")
    if whole:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(run_id, resumed, store.counts(run_id))


def _pairs(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(options.items()):
        yield f"{name}={value}"


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The work of one job: a case, its number of rounds, and the arguments `limit_s` and `patience_s` of `run.run`."""

    case: Case
    rounds: int
    limit_s: float
    patience_s: float

    def write(self, folder: Path) -> None:
        """Write the request to a folder, which is created if it does not exist."""
        folder.mkdir(parents=True, exist_ok=True)
        plain = {"rounds": self.rounds, "limit_s": self.limit_s, "patience_s": self.patience_s}
        write_whole(folder / REQUEST, json.dumps(plain | {"case": self.case.to_dict()}))

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
    write_whole(folder / DONE, json.dumps(outcome.counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
