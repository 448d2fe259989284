"""DataLoaders: the knee on tables, what a sweep prints and stores, and datasets that fail in the worker that loads."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from dpbench.analysis import loaders as analysis
from dpbench.analysis.loaders import Bound, Curve, LoaderReading, Setting, Shape
from dpbench.measure import loaders
from dpbench.measure.request import Loading, Request, Synthetic, WorkKind
from dpbench.measure.server import Server
from dpbench.measure.worker import loaders as worker
from dpbench.records import Effort, Status
from dpbench.records.trial import Estimate, Failure
from tests.exported import Command, is_error

STILL = (1.0, 1.004, 0.996, 1.002, 0.998)
"""Factors by round of a quiet machine."""
NOISY = (1.0, 1.5, 0.7, 1.3, 0.8)


def reading(workers: int, number: int, batch_s: float, **changes: object) -> LoaderReading:
    """Return a measurement of two turns of its workers, after batches that were loaded ahead while one started."""
    setting = Setting(workers=workers, prefetch_factor=2 if workers else None)
    turn = [setting.turn * batch_s] + [0.0] * (setting.turn - 1)
    given = {"setting": setting, "round": number, "batch_size": 10, "status": Status.OK}
    return LoaderReading(
        **{**given, "waits_s": (5.0, *[0.0] * (setting.fill - 1), *turn, *turn), "next_epoch_s": 0.5, **changes}
    )


def curve(seconds: dict[int, float], factors: Sequence[float] = STILL, step: float | None = None) -> Curve:
    """Return the curve of batch times; the noise of a number of workers is a rotation of the factors."""
    made = [
        reading(workers, number, batch_s * factors[(number + workers) % len(factors)])
        for workers, batch_s in seconds.items()
        for number in range(len(factors))
    ]
    (found,) = analysis.curves(made, step)
    return found


RISING = {0: 0.1, 1: 0.1, 2: 0.05, 4: 0.025}
KNEE = {**RISING, 4: 0.025, 6: 0.0249, 8: 0.0251}


def test_the_steady_part_leaves_out_the_start_and_counts_whole_turns() -> None:
    for workers in (0, 1, 4):
        assert reading(workers, 0, 0.02).batch_s == pytest.approx(0.02)


def test_a_measurement_has_the_examples_that_were_asked_for_in_whole_turns() -> None:
    assert Setting(workers=0).batches(10, 95) == 1 + 10
    four = Setting(workers=4, prefetch_factor=3)
    assert four.batches(10, 95) == 4 + 12 + 12 + 12
    assert four.batches(10, 120) == 4 + 12 + 12 + 12


def test_the_knee_is_the_least_number_within_five_percent() -> None:
    found = curve(KNEE)
    assert (found.shape, found.knee.workers, found.knee.possible) == (Shape.KNEE, 4, (4,))
    assert analysis.said([found])[0] == "knee: 4 workers (95 %: 4)"
    assert analysis.advice([found]) == "num_workers=4"
    assert curve({**KNEE, 4: 0.0249 / 0.94}).knee.workers == 6
    assert curve({**KNEE, 4: 0.0249 / 0.96}).knee.workers == 4


def test_a_count_near_the_margin_stays_in_the_interval() -> None:
    found = curve({**KNEE, 4: 0.0249 / 0.95}, (1.0, 1.05, 0.95, 1.02, 0.98))
    assert found.knee.possible[0] == 4
    assert len(found.knee.possible) > 1


@pytest.mark.parametrize(
    ("seconds", "factors", "shape", "said"),
    [
        (RISING, STILL, Shape.RISING, "no knee up to 4 workers: the rate still rises"),
        (dict.fromkeys(KNEE, 0.1), STILL, Shape.FLAT, "flat: the rate with up to 8 workers is not clearly higher"),
        ({0: 0.1, 1: 0.11, 2: 0.14}, STILL, Shape.FLAT, "flat: the rate with up to 2 workers is not clearly"),
        (dict.fromkeys(KNEE, 0.1), NOISY, Shape.UNDECIDED, "cannot tell where the knee is: it may be at 0, 1, 2, 4"),
        (KNEE, STILL[:2], Shape.UNDECIDED, "cannot tell where the knee is: it may be at 0, 1, 2, 4"),
        ({2: 0.1}, STILL, Shape.UNDECIDED, "cannot tell where the knee is from a single number"),
    ],
    ids=["rising", "flat", "falling", "noisy", "two rounds", "one count"],
)  # fmt: skip
def test_a_curve_without_a_knee_is_said_to_be_so(
    seconds: dict[int, float], factors: Sequence[float], shape: Shape, said: str
) -> None:
    found = curve(seconds, factors)
    assert found.shape is shape
    assert analysis.said([found])[0].startswith(said)
    assert analysis.advice([found]) == {Shape.RISING: "num_workers=4", Shape.FLAT: "num_workers=0"}.get(shape, "")


def test_an_end_that_may_be_the_knee_or_not_is_no_knee() -> None:
    found = curve({1: 0.1, 2: 0.05, 4: 0.047}, (1.0, 1.04, 0.96, 1.02, 0.98))
    assert found.knee.possible == (2, 4)
    assert (found.shape is Shape.KNEE) is (found.knee.workers == 2)


def test_the_slower_one_is_named_at_each_number_of_workers() -> None:
    found = curve(KNEE, step=0.06)
    bounds = {point.setting.workers: point.bound for point in found.points}
    assert bounds == {0: Bound.LOADER, 1: Bound.LOADER, 2: Bound.STEP, 4: Bound.STEP, 6: Bound.STEP, 8: Bound.STEP}
    assert found.enough == analysis.Least(2, (2,), open=False)
    assert analysis.said([found], analysis.step_time(0.06))[1:] == [
        "against the step (60.0 ms): loader-bound with 0 or 1 worker; compute-bound with 2, 4, 6 or 8 workers; "
        "enough: 2 workers (95 %: 2)",
        "use: DataLoader(..., num_workers=2)",
    ]


def test_a_step_that_no_number_of_workers_feeds_is_said_to_be_so() -> None:
    found = curve(KNEE, step=0.01)
    assert found.enough == analysis.Least(None, (), open=True)
    (_, said, use) = analysis.said([found], analysis.step_time(0.01))
    assert said.endswith("not enough with up to 8 workers: loading is slower than the step")
    assert use.endswith("num_workers=4)")


def test_noise_leaves_the_bound_open() -> None:
    found = curve(KNEE, NOISY, step=0.05)
    assert found.points[2].bound is Bound.UNDECIDED
    assert found.enough is not None
    assert {2, 4} <= {*found.enough.possible}
    assert curve(KNEE, STILL[:2], step=10.0).points[0].bound is Bound.UNDECIDED  # two rounds show no difference


def test_a_measured_step_is_compared_within_rounds() -> None:
    drift = (1.0, 2.0, 3.0, 4.0, 5.0)  # of the machine: the ratio of both sides stays 1.25
    made = [reading(1, number, 0.1 * factor) for number, factor in enumerate(drift)]
    (found,) = analysis.curves(made, {number: [0.125 * factor] for number, factor in enumerate(drift)})
    assert found.points[0].demand is not None
    assert found.points[0].demand.low == pytest.approx(1.25)
    assert found.points[0].bound is Bound.STEP


def test_each_combination_is_a_curve_that_begins_without_workers() -> None:
    swept = loaders.settings((0, 1, 2), (False,), (2, 4), (False, True))
    assert len(swept) == 1 + 2 * 2 * 2
    rate = {2: 0.1, 4: 0.05}
    made = [
        LoaderReading(setting=one, round=n, batch_size=8, status=Status.OK, waits_s=(0.1,) * one.fill
                + (rate.get(one.prefetch_factor or 2, 0.1) / one.turn,) * one.turn)
        for one in reversed(swept) for n in range(3)
    ]  # fmt: skip
    found = analysis.curves(made)
    families = ["", "persistent_workers=True", "prefetch_factor=4", "persistent_workers=True, prefetch_factor=4"]
    assert [one.family for one in found] == families
    assert all(one.counts == [0, 1, 2] for one in found)
    assert analysis.advice(found) == "num_workers=2, prefetch_factor=4"


def test_a_failed_setting_keeps_its_reason_and_leaves_the_others() -> None:
    made = [reading(workers, number, 0.1) for workers in (0, 2) for number in range(3)]
    made.append(reading(1, 0, 0.1, status=Status.FAILED, reason="example 3"))
    (found,) = analysis.curves(made)
    assert [point.reason for point in found.points] == ["", "failed: example 3", ""]
    assert found.counts == [0, 2]


def test_the_default_numbers_of_workers_are_powers_of_two() -> None:
    assert loaders.default_workers(2) == (0, 1, 2, 4)
    assert loaders.default_workers(24) == (0, 1, 2, 4, 8, 16)


def test_a_request_to_load_keeps_its_types(tmp_path: Path) -> None:
    for dataset in ("a.py:b", Synthetic(wait_s=0.5)):
        loading = Loading(dataset=dataset, setting=Setting(workers=2, prefetch_factor=4), batch_size=8, examples=9)
        request = Request(job=WorkKind.LOAD, cases=(), effort=Effort(), folder=tmp_path, round=0, loading=loading)
        assert Request.from_json(request.to_json()) == request


# ---------------------------------------------------------------- processes


DATASETS = """
import time
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
import torch

class Examples(Dataset):
    def __init__(self, length=64, act=None):
        self.length, self.act = length, act
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        if self.act and get_worker_info() is not None and index % 8 == 7:
            self.act(index)
        return torch.zeros(3)

class Batches(Examples):
    def __getitems__(self, indices):
        return [self[index] for index in indices]

def wrong(index):
    raise KeyError(f"no label for {index}")

def sleep(index):
    time.sleep(1000)

class Ragged(Examples):
    def __getitem__(self, index):
        return torch.zeros(index)

class Stream(IterableDataset):
    def __iter__(self):
        yield 1

good = Examples()
def raising(): return Examples(act=wrong)
def raising_batches(): return Batches(act=wrong)
def hanging(): return Examples(act=sleep)
def dying(): return Examples(act=lambda index: __import__("os")._exit(3))
def empty(): return Examples(0)
def small(): return Examples(3)
def scarce(): return Examples(16)
def broken(): return 1 / 0
def number(): return 5

def late():
    start = DataLoader.__iter__
    def slowly(loader):
        time.sleep(0.1)
        return start(loader)
    DataLoader.__iter__ = slowly
    return Examples()
"""


@pytest.fixture
def here(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file of datasets; sweeps use the common server."""
    (tmp_path / "data.py").write_text(DATASETS)
    monkeypatch.setattr(loaders, "Server", lambda scratch: nullcontext(server))
    return tmp_path


def load(server: Server, here: Path, name: str, workers: int = 2, limit_s: float = 30.0) -> LoaderReading:
    setting = Setting(workers=workers, prefetch_factor=2 if workers else None)
    loading = Loading(dataset=f"{here / 'data.py'}:{name}", setting=setting, batch_size=4, examples=8)
    return loaders.measure(server, loading, limit_s)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_measurement_records_the_wait_for_each_batch(workers: int, server: Server, here: Path) -> None:
    found = load(server, here, "late", workers)
    assert found.status is Status.OK, found.reason
    assert found.length == 64
    assert len(found.waits_s) == (1 + 2 if workers == 0 else 2 + 4 + 2)
    assert found.next_epoch_s > 0
    assert found.batch_s > 0
    assert found.waits_s[0] >= 0.1, "the first wait includes the start, which takes 0.1 s here"


@pytest.mark.parametrize("name", ["raising", "raising_batches"])
def test_an_example_that_raises_is_named_with_its_worker_and_the_users_line(
    name: str, server: Server, here: Path
) -> None:
    found = load(server, here, name)
    assert found.status is Status.FAILED
    index = int(found.reason.partition("no label for ")[2].partition("'")[0])
    assert index % 8 == 7
    assert str(index) in found.reason.partition(" in worker ")[0]
    assert f" in worker {0 if ' in worker 0' in found.reason else 1}: KeyError: " in found.reason
    line = DATASETS.splitlines().index('    raise KeyError(f"no label for {index}")') + 1
    assert f"[data.py:{line} wrong <- data.py:" in found.reason


@pytest.mark.parametrize("full", [False, True])
def test_the_record_of_a_failed_example_is_whole_or_absent(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = worker._Watched([1], tmp_path, "")
    if full:
        monkeypatch.setattr(Path, "write_text", lambda *_, **__: Path("/dev/full").write_bytes(b"-"))

    def of_error(error: BaseException) -> Failure:
        assert not (tmp_path / worker.RAISED).exists(), "another worker could read it now"
        return Failure(status=Status.FAILED, reason=str(error))

    monkeypatch.setattr(worker, "of_error", of_error)
    for name in ("first", "second"):
        watched._record(ValueError(name), "example 0")
        monkeypatch.setattr(worker, "of_error", lambda error: Failure(status=Status.FAILED, reason=str(error)))
    path = tmp_path / worker.RAISED
    assert path.exists() != full
    assert full or path.read_text(encoding="utf-8") == "example 0 in the main process: first"


def test_a_batch_that_cannot_be_collated_is_named(server: Server, here: Path) -> None:
    (here / "data.py").write_text(f"{DATASETS}\ndef ragged(): return Ragged()\n")
    found = load(server, here, "ragged")
    assert found.status is Status.FAILED
    assert found.reason.startswith("collating the batch with example ")
    assert ": RuntimeError: " in found.reason


def test_an_example_that_hangs_is_named_with_its_worker_and_its_stack(server: Server, here: Path) -> None:
    found = load(server, here, "hanging", limit_s=2.0)
    assert found.status is Status.TIMEOUT
    words = found.reason.split()
    assert int(words[words.index("example") + 1].rstrip(";")) % 8 == 7
    assert "; worker " in found.reason
    assert " in sleep\n" in found.reason


def test_the_limit_is_for_each_batch(server: Server, here: Path) -> None:
    cost = Synthetic(wait_s=0.3)
    loading = Loading(dataset=cost, setting=Setting(workers=0), batch_size=1, examples=6)
    assert loaders.measure(server, loading, 2.0).status is Status.OK  # eight batches take 2.4 s


@pytest.mark.parametrize(("times", "status"), [(1, Status.OK), (9, Status.KILLED)])
def test_a_signal_from_outside_costs_one_attempt_at_a_measurement(
    times: int, status: Status, server: Server, here: Path
) -> None:
    left = here / "left"
    left.write_text(str(times))
    killed = f"""
def killed():
    import signal
    from pathlib import Path
    left = int(Path({str(left)!r}).read_text())
    if left:
        Path({str(left)!r}).write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return Examples()
"""
    (here / "data.py").write_text(f"import os\n{DATASETS}{killed}")
    found = load(server, here, "killed")
    assert found.status is status
    assert ("SIGKILL" in found.reason) == (status is Status.KILLED)
    assert int(left.read_text()) == max(0, times - 2)


def test_a_worker_that_dies_is_a_failure(server: Server, here: Path) -> None:
    found = load(server, here, "dying")
    assert found.status is Status.FAILED
    assert "DataLoader worker" in found.reason


UNFIT = {
    "data.py:empty": "Examples has no examples: its __len__ returns 0",
    "data.py:small": "Examples has length 3, less than one batch of 4; give a smaller --batch-size",
    "data.py:scarce": "the dataset has 16 examples, but a measurement with num_workers=2 and batches of 4 needs 48, ",
    "data.py:Stream": "Stream is an IterableDataset, ",
    "data.py:number": "int has no __len__ and no __getitem__; give a map-style Dataset",
    "data.py:broken": "the call without arguments failed: ZeroDivisionError: division by zero [data.py:",
    "data.py:none": "dataset data.py:none: data.py has no object 'none'; correct the name after ':'",
    "none.py:good": "the file none.py does not exist",
    "good": "dataset good: give file.py:name or package.module:name",
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_a_dataset_that_cannot_be_measured_is_one_error(name: str, here: Path, dpbench: Command) -> None:
    # the server's folder is that of its start, so files are named by their paths
    path, _, attribute = name.rpartition(":")
    given = f"{here / path}:{attribute}" if path else name
    got = dpbench("loaders", "--dataset", given, "--workers", "2", "--batch-size", "4")
    said = is_error(*got, expected=2 if path == "none.py" else 64)
    assert (
        UNFIT[name]
        .replace("none.py", str(here / "none.py"))
        .replace("data.py:none", f"{here}/data.py:none")
        .replace("data.py has", f"{here}/data.py has")
        in said
    )


def test_a_dataset_that_cannot_be_pickled_is_refused_where_workers_do_not_fork() -> None:
    import torch
    from torch.utils.data import TensorDataset

    from dpbench.measure.worker import loaders as worker

    dataset = TensorDataset(torch.zeros(9))
    dataset.transform = lambda x: x  # type: ignore[attr-defined]
    worker.check(dataset, 4, pin_memory=False, start="fork")
    with pytest.raises(loaders.Unfit, match=r"TensorDataset cannot be pickled for the workers, .* by spawn: .*lambda"):
        worker.check(dataset, 4, pin_memory=False, start="spawn")
    worker.check(worker.SyntheticDataset(Synthetic()), 4, pin_memory=False, start="spawn")


def test_pinning_without_an_accelerator_is_refused() -> None:
    import torch

    from dpbench.measure.worker import loaders as worker

    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(loaders.Unfit, match="--pin-memory on would have no effect"):
        worker.check([0] * 9, 4, pin_memory=True, start="fork")


def test_a_worker_that_is_not_forked_executes_the_users_file_first(here: Path) -> None:
    from dpbench.measure.worker import loaders as worker
    from dpbench.records import registry

    name = f"{here / 'data.py'}:good"
    loaders.LoaderProgress.created(here, 1)
    sent = pickle.dumps(worker._Watched(registry.outside("dataset", name), here, name))
    (here / "sent").write_bytes(sent)
    code = "import pickle, pathlib; print(pickle.loads(pathlib.Path('sent').read_bytes())[7])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env={"PYTHONPATH": str(Path(loaders.__file__).parents[2]), "PATH": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "tensor([0., 0., 0.])\n", done.stderr
    assert loaders.LoaderProgress.read(here) == (0, [7])


# ---------------------------------------------------------------- the command


def test_a_sweep_prints_draws_and_stores_what_it_measured(here: Path, dpbench: Command) -> None:
    code, out, err = dpbench(
        "loaders", "--workers", "0,2", "--batch-size", 4, "--examples", 24, "--rounds", 3, "--wait-ms", 5,
        "--cpu-ms", 0, "--example-bytes", 10, "--step-ms", 0.01, "--report", "out/page.html",
    )  # fmt: skip
    assert code == 0, err
    assert out.startswith("setting ")
    assert "num_workers=2" in out
    assert "not enough with up to 2 workers: loading is slower than the step" in out
    page = Path("out/page.html").read_text()
    assert "<svg" in page
    assert "the step needs 400,000 examples/s" in page
    stored = json.loads(Path("out/page.json").read_text())
    assert (stored["examples"], stored["plan"]["step"], len(stored["readings"])) == (24, 1e-5, 6)
    assert {len(one["waits_s"]) for one in stored["readings"]} == {1 + 6, 2 + 4 + 6}
    assert all(one["waits_s"][0] >= 0.02 for one in stored["readings"])  # four examples of 5 ms


def test_a_failure_in_workers_ends_no_sweep(here: Path, dpbench: Command) -> None:
    code, out, err = dpbench(
        "loaders", "--dataset", f"{here}/data.py:raising", "--workers", "0,1", "--batch-size", 4, "--examples", 8,
        "--rounds", 3, "--json",
    )  # fmt: skip
    assert code == 2
    stored = json.loads(out)
    assert [one["setting"]["workers"] for one in stored["readings"] if one["status"] == "failed"] == [1]
    assert sum(one["status"] == "ok" for one in stored["readings"]) == 3
    assert "warning: num_workers=1: example " in err


def test_a_sweep_of_which_nothing_succeeds_is_said_to_be_so(here: Path, dpbench: Command) -> None:
    code, out, _ = dpbench(
        "loaders", "--dataset", f"{here}/data.py:raising", "--workers", "1,2", "--batch-size", 4, "--examples", 8,
        "--rounds", 3, "--step-ms", 5,
    )  # fmt: skip
    assert code == 2
    assert "cannot tell: no measurement succeeded" in out
    assert "use: " not in out


@pytest.mark.slow
def test_the_step_of_a_model_is_measured_beside_the_loader(
    here: Path, dpbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "STEP_EFFORT", Effort(budget_s=0.05, memory_by_phase=False))
    monkeypatch.setattr(Estimate, "WIDEST", 100.0)  # on a busy machine, rounds of a step of a millisecond differ much
    code, out, err = dpbench(
        "loaders",
        "--workers",
        "1",
        "--batch-size",
        2,
        "--examples",
        4,
        "--rounds",
        3,
        "--wait-ms",
        50,
        "--model",
        "mlp",
    )
    assert code == 0, err
    assert "mlp single x1 batch 2: ok" in err
    assert "loader-bound with 1 worker" in out  # 100 ms against about 1 ms
    assert {*json.loads(Path("reports/loaders/index.json").read_text())["step_s"]} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "mlp", "--step-ms", "5"], "--model and --step-ms both give the step"),
        (["--dataset", "a.py:b", "--cpu-ms", "1"], "--cpu-ms: for the synthetic dataset only"),
        (["--workers", "-1,2"], "--workers must be from 0 to 1024, got -1,2"),
        (["--prefetch-factor", "0"], "--prefetch-factor must be at least 1"),
        (["--pin-memory", "yes"], "'yes' is not a list of the words off and on, such as off,on"),
        (["--model", "resnet1"], "unknown model 'resnet1'"),
        (["--model", "nowhere:net"], "cannot find the module 'nowhere'"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(arguments: list[str], said: str, dpbench: Command) -> None:
    assert said in is_error(*dpbench("loaders", *arguments))


def test_an_estimate_without_rounds_is_a_given_step() -> None:
    assert analysis.step_time(0.5) == Estimate(0.5, 0.5, 0.5, 0)
    assert analysis.step_time(None) is None
