"""DataLoaders: the knee on tables, what a sweep prints and stores, and datasets that fail.

They fail in the worker that loads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.analysis import loaders, summary
from dpbench.analysis.loaders import Bound, LoaderCurve, Shape
from dpbench.measure import run as runner
from dpbench.measure.request import Request, WorkKind
from dpbench.measure.server import Server
from dpbench.measure.worker import loaders as worker
from dpbench.records import Case, Effort, Status, Step, Trial, disturbance
from dpbench.records.estimate import Estimate
from dpbench.records.loading import NEXT_EPOCH, Loading, workers_default
from dpbench.report import figures, notebook, svg
from dpbench.store import Store
from tests.exported import Command, is_error
from tests.trials import BUSY, report_on

STILL = (1.0, 1.004, 0.996, 1.002, 0.998)
"""Factors by round of a quiet machine."""
NOISY = (1.0, 1.5, 0.7, 1.3, 0.8)
MLP = Case(model="mlp", strategy="single", batch_size=10)


def trial(case: Case, number: int, seconds: float, **changes: object) -> Trial:
    steps = (
        Step(5.0, True, 5.0),
        *(Step(seconds, False, 5.0 + seconds * (k + 1)) for k in range(4)),
    )
    made = Trial(
        case=case, round=number, steps=steps, setup={"first_batch_s": 5.0, NEXT_EPOCH: 0.5}
    )
    return replace(made, **changes)


def trials(
    seconds: dict[int, float],
    factors: Sequence[float] = STILL,
    step_s: float = 0.0,
    **changes: object,
) -> list[Trial]:
    """Return trials with these batch times.

    The noise of a number of workers is a rotation of the factors.
    """
    loading = Loading(examples=40, step_s=step_s)
    return [
        trial(
            loading.case("data.py:train", workers, 10),
            n,
            batch_s * factors[(n + workers) % len(factors)],
            **changes,
        )
        for workers, batch_s in seconds.items()
        for n in range(len(factors))
    ]


def curve(made: Sequence[Trial]) -> LoaderCurve:
    found = loaders.curve(summary.rows(made), made)
    assert found is not None
    return found


RISING = {0: 0.1, 1: 0.1, 2: 0.05, 4: 0.025}
KNEE = {**RISING, 4: 0.025, 6: 0.0249, 8: 0.0251}


def test_a_measurement_has_the_examples_that_were_asked_for_in_whole_turns() -> None:
    loading = Loading(examples=95, prefetch_factor=3)
    assert (loading.fill(0), loading.steady(0, 10), loading.ahead(0)) == (1, 10, 0)
    assert (loading.fill(4), loading.steady(4, 10), loading.ahead(4)) == (4 + 12, 12, 12)
    assert Loading(examples=120).steady(4, 10) == 12


def test_the_settings_are_in_the_case_and_come_back(tmp_path: Path) -> None:
    loading = Loading(
        examples=7, pin_memory=True, prefetch_factor=4, persistent_workers=True, step_s=0.5
    )
    case = loading.case("a.py:b", 3, 8)
    assert Loading.of(Case.from_dict(json.loads(json.dumps(case.to_dict())))) == loading
    assert case.traits.loads
    request = Request(
        job=WorkKind.MEASURE, cases=(case,), effort=Effort(), folder=tmp_path, round=0
    )
    assert Request.from_json(request.to_json()) == request


def test_the_knee_is_the_least_number_within_five_percent() -> None:
    found = curve(trials(KNEE))
    assert (found.shape, found.knee, found.possible) == (Shape.KNEE, 4, (4,))
    assert found.advised == 4
    assert curve(trials({**KNEE, 4: 0.0249 / 0.94})).knee == 6
    assert curve(trials({**KNEE, 4: 0.0249 / 0.96})).knee == 4


def test_a_count_near_the_margin_stays_in_the_interval() -> None:
    found = curve(trials({**KNEE, 4: 0.0249 / 0.95}, (1.0, 1.05, 0.95, 1.02, 0.98)))
    assert found.possible[0] == 4
    assert len(found.possible) > 1


@pytest.mark.parametrize(
    ("seconds", "factors", "shape", "advised"),
    [
        (RISING, STILL, Shape.RISING, 4),
        (dict.fromkeys(KNEE, 0.1), STILL, Shape.FLAT, 0),
        ({0: 0.1, 1: 0.11, 2: 0.14}, STILL, Shape.FLAT, 0),
        (dict.fromkeys(KNEE, 0.1), NOISY, Shape.UNDECIDED, None),
        (KNEE, STILL[:2], Shape.UNDECIDED, None),
        ({2: 0.1}, STILL, Shape.UNDECIDED, None),
    ],
    ids=["rising", "flat", "falling", "noise", "two rounds", "one count"],
)
def test_a_curve_without_a_knee_has_none(
    seconds: dict[int, float], factors: Sequence[float], shape: Shape, advised: int | None
) -> None:
    found = curve(trials(seconds, factors))
    assert found.shape is shape
    assert found.advised == advised
    assert loaders.said(found)


def test_an_end_that_may_be_the_knee_or_not_is_no_knee() -> None:
    found = curve(trials({1: 0.1, 2: 0.05, 4: 0.047}, (1.0, 1.04, 0.96, 1.02, 0.98)))
    assert found.possible == (2, 4)
    assert (found.shape is Shape.KNEE) is (found.knee == 2)


def test_noisy_rounds_decide_nothing() -> None:
    found = curve(trials(KNEE, step_s=0.06, provenance=BUSY))
    assert found.shape is Shape.UNDECIDED
    assert (found.knee, found.possible) == (None, tuple(KNEE))
    assert {point.bound for point in found.points} == {Bound.UNDECIDED}
    assert "(not enough quiet rounds)" in "".join(loaders.said(found))
    assert found.advised is None
    quiet = [replace(one, provenance=BUSY) if one.round == 0 else one for one in trials(KNEE)]
    assert curve(quiet).knee == 4, "four quiet rounds are enough"


def test_the_slower_one_is_named_at_each_number_of_workers() -> None:
    found = curve(trials(KNEE, step_s=0.06))
    bounds = {point.workers: point.bound for point in found.points}
    assert bounds == {
        0: Bound.LOADER,
        1: Bound.LOADER,
        2: Bound.STEP,
        4: Bound.STEP,
        6: Bound.STEP,
        8: Bound.STEP,
    }
    assert found.step == Estimate(0.06, 0.06, 0.06, 0)
    assert found.advised == 2


def test_a_step_that_no_number_of_workers_feeds_is_not_fed() -> None:
    found = curve(trials(KNEE, step_s=0.01))
    assert {point.bound for point in found.points} == {Bound.LOADER}
    assert found.advised == 4


def test_noise_leaves_the_bound_open() -> None:
    found = curve(trials(KNEE, NOISY, step_s=0.05))
    assert found.points[2].bound is Bound.UNDECIDED
    busy = found.points[2].busy
    assert busy.high > 1
    assert f"{busy.low:.1%} to 100.0% of an iteration" in "".join(loaders.said(found))
    assert curve(trials(KNEE, STILL[:2], step_s=10.0)).points[0].bound is Bound.UNDECIDED


def test_a_measured_step_is_compared_within_rounds() -> None:
    drift = (1.0, 2.0, 3.0, 4.0, 5.0)  # of the machine: the ratio of both sides stays 0.8
    case = Loading().case("data.py:train", 1, 10)
    made = [trial(case, number, 0.125 * factor) for number, factor in enumerate(drift)]
    found = curve(
        [*made, *(trial(MLP, number, 0.1 * factor) for number, factor in enumerate(drift))]
    )
    assert found.points[0].busy is not None
    assert found.points[0].busy.low == pytest.approx(0.8)
    assert found.points[0].bound is Bound.LOADER


def test_without_workers_loading_and_the_step_do_not_overlap() -> None:
    found = curve(trials({0: 0.011, 1: 0.011, 2: 0.0055}, step_s=0.016))
    assert {point.workers: point.bound for point in found.points} == {
        0: Bound.LOADER,
        1: Bound.STEP,
        2: Bound.STEP,
    }
    assert found.points[0].busy is not None
    assert found.points[0].busy.value == pytest.approx(16 / 27, rel=0.01)
    assert found.advised == 1
    assert "give" not in " ".join(loaders.said(found)), "1 worker is enough"
    assert curve(trials({0: 0.001, 1: 0.001}, step_s=0.1)).advised == 0, "it loads for 1 %"


@pytest.mark.parametrize(
    ("persistent", "wait_s", "epoch_s", "advised"),
    [(False, 0.55, 0.55 + 9 * 0.008, 0), (True, 0.032, 0.032 + 9 * 0.008, 4)],
)
def test_the_start_of_workers_counts_in_each_epoch_unless_they_persist(
    persistent: bool, wait_s: float, epoch_s: float, advised: int
) -> None:
    loading = Loading(persistent_workers=persistent)
    made = [
        trial(
            loading.case("data.py:train", workers, 32),
            number,
            batch_s,
            setup={NEXT_EPOCH: next_s},
            provenance={"batches_per_epoch": 10},
        )
        for workers, batch_s, next_s in ((0, 0.032, 0.032), (4, 0.008, wait_s))
        for number in range(3)
    ]
    found = curve(made)
    assert {workers: epoch.value for workers, epoch in found.epochs.items()} == {
        0: pytest.approx(0.32),
        4: pytest.approx(epoch_s),
    }
    assert found.advised == advised
    assert ("persistent_workers=True" in " ".join(loaders.said(found))) is not persistent


def test_the_last_step_of_an_epoch_follows_its_last_batch() -> None:
    loading = Loading(step_s=0.02)
    made = [
        trial(
            loading.case("data.py:train", workers, 32),
            number,
            0.03,
            setup={NEXT_EPOCH: 0.5},
            provenance={"batches_per_epoch": 3},
        )
        for workers in (0, 1)
        for number in range(3)
    ]
    epochs = curve(made).epochs
    assert epochs[0].value == pytest.approx(0.5 + 2 * (0.03 + 0.02) + 0.02)
    assert epochs[1].value == pytest.approx(0.5 + 2 * 0.03 + 0.02)


@pytest.mark.parametrize("measured", [{0: 0.1}, {0: 0.1, 1: 0.05}], ids=["one", "rising"])
def test_a_number_of_workers_without_a_result_is_named(measured: dict[int, float]) -> None:
    made = trials(measured)
    hung = replace(trials({2: 0.1})[0], status=Status.TIMEOUT, reason="example 3", steps=())
    found = curve([*made, hung])
    assert found.counts == [*measured]
    assert found.failed == {2: "timeout"}
    said = " ".join(loaders.said(found))
    assert "2 workers" in said
    assert "give" not in said, "other numbers were given"


def test_a_run_without_a_data_loader_has_no_curve() -> None:
    alone = [trial(MLP, 0, 0.1)]
    assert loaders.curve(summary.rows(alone), alone) is None


def test_the_default_numbers_of_workers_are_powers_of_two() -> None:
    assert workers_default(2) == (0, 1, 2, 4)
    assert workers_default(24) == (0, 1, 2, 4, 8, 16)


# ---------------------------------------------------------------- processes


DATASETS = """
import os
import time
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
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

class Slow(Examples):
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.zeros(3)

good = Examples()
slow = Slow()
def raising(): return Examples(act=wrong)
def raising_batches(): return Batches(act=wrong)
def hanging(): return Examples(act=sleep)
def dying(): return Examples(act=lambda index: os._exit(3))
def empty(): return Examples(0)
def small(): return Examples(3)
def ragged(): return Ragged()
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
def here(tmp_path: Path, one_server: None) -> Path:
    """A folder with the file of datasets; runs use the common server."""
    (tmp_path / "data.py").write_text(DATASETS)
    return tmp_path


def load(server: Server, here: Path, name: str, workers: int = 2, limit_s: float = 30.0) -> Trial:
    case = Loading(examples=8).case(f"{here / 'data.py'}:{name}", workers, 4)
    return server.run(case, Effort(), 0, limit_s)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_measurement_records_the_share_of_each_batch(
    workers: int, server: Server, here: Path
) -> None:
    found = load(server, here, "late", workers)
    assert found.status is Status.OK, found.reason
    fill = 1 if workers == 0 else 2 + 4
    assert [step.warmup for step in found.steps] == [True] * fill + [False] * 2
    assert found.setup["first_batch_s"] == found.steps[0].seconds >= 0.1, (
        "the start takes 0.1 s here"
    )
    assert found.setup[NEXT_EPOCH] >= 0.1, "that of the next epoch too"
    assert found.provenance["batches_per_epoch"] == 64 / 4
    assert workers == 0 or len({step.seconds for step in found.steps[fill:]}) == 1, "one turn"
    whole = found.steps[-1].end_s - found.steps[0].end_s + found.steps[0].seconds
    assert sum(step.seconds for step in found.steps) == pytest.approx(whole)


def test_a_dataset_smaller_than_a_measurement_is_read_again(server: Server, here: Path) -> None:
    assert len(load(server, here, "small", workers=0).timed) == 2


@pytest.mark.parametrize("name", ["raising", "raising_batches"])
def test_an_example_that_raises_is_named_with_its_worker_and_the_users_line(
    name: str, server: Server, here: Path
) -> None:
    found = load(server, here, name)
    assert found.status is Status.FAILED
    first, *traceback = found.reason.splitlines()
    index = first.partition("no label for ")[2].strip("'")
    assert int(index) % 8 == 7
    assert f" {index}," in first.replace(" cannot", ", cannot").partition(" in worker ")[0]
    line = DATASETS.splitlines().index('    raise KeyError(f"no label for {index}")') + 1
    assert any(f'data.py", line {line}, in wrong' in part for part in traceback)


def test_a_batch_that_cannot_be_collated_is_named(server: Server, here: Path) -> None:
    found = load(server, here, "ragged", workers=0)
    assert found.status is Status.FAILED
    assert "the batch of examples " in found.reason
    assert "RuntimeError: " in found.reason


def test_an_example_that_hangs_is_shown_with_the_stack_of_its_worker(
    server: Server, here: Path
) -> None:
    found = load(server, here, "hanging", limit_s=2.0)
    assert found.status is Status.TIMEOUT
    assert "stacks-worker-" in found.reason
    assert " in sleep\n" in found.reason


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
    (here / "data.py").write_text(f"{DATASETS}{killed}")
    assert load(server, here, "killed").status is status
    assert int(left.read_text()) == max(0, times - 2)


def test_a_worker_that_dies_is_a_failure(server: Server, here: Path) -> None:
    found = load(server, here, "dying")
    assert found.status is Status.FAILED
    assert "DataLoader worker" in found.reason


UNFIT = {
    "data.py:empty": "Examples has no examples",
    "data.py:Stream": "Stream is an IterableDataset, ",
    "data.py:number": "int has no __len__ and no __getitem__",
    "data.py:broken": "ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_dataset_that_cannot_be_measured_is_checked_once(
    name: str, here: Path, dpbench: Command
) -> None:
    # the server's folder is that of its start, so files are named by their paths
    code, out, err = dpbench(
        "loaders", "--dataset", f"{here}/{name}", "--workers", "0,2", "--rounds", "1"
    )
    assert code == 2
    assert UNFIT[name] in err
    assert "Cannot tell" in out


def test_a_dataset_that_is_not_there_ends_before_anything_is_stored(
    here: Path, dpbench: Command
) -> None:
    code, out, err = dpbench("loaders", "--dataset", f"{here}/data.py:none")
    assert (code, out) == (64, "")
    assert "none" in err
    assert "good" in err
    assert "__getitem__" not in err, "only names on the file's top level"


def test_pinning_without_an_accelerator_is_refused(here: Path) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(worker.Unfit, match="--pin-memory would have no effect"):
        worker.opened(f"{here / 'data.py'}:good", pin_memory=True)


# ---------------------------------------------------------------- the command


def test_a_sweep_prints_draws_and_stores_what_it_measured(here: Path, dpbench: Command) -> None:
    code, out, err = dpbench(
        "loaders",
        "--dataset",
        f"{here}/data.py:slow",
        "--workers",
        "0,2",
        "--batch-size",
        4,
        "--examples",
        24,
        "--rounds",
        3,
        "--step-ms",
        0.01,
        "--report",
        "out/page.html",
        "--store",
        "x.db",
        "--json",
    )
    assert code == 0, err
    found = json.loads(out)["loading"]
    assert set(found) == {
        "shape",
        "knee",
        "possible",
        "bounds",
        "epochs",
        "batches",
        "advised",
        "failed",
    }
    assert set(found["bounds"]) == set(found["epochs"]) == {"0", "2"}
    assert found["batches"] == 64 / 4
    page = Path("out/page.html").read_text()
    assert '<section id="loaders"' in page
    assert "the step needs 400,000 samples/s" in page
    with Store.read(Path("x.db")) as store:
        stored = store.trials(store.runs()[0].id)
    assert {one.round for one in stored} == {0, 1, 2}
    assert {one.case.loader: len(one.timed) for one in stored} == {0: 6, 2: 6}
    assert all(one.steps[0].seconds >= 0.02 for one in stored)  # four examples of 5 ms


def test_a_sweep_of_which_all_fails_has_a_page(here: Path, dpbench: Command) -> None:
    code, out, _ = dpbench(
        "loaders",
        "--dataset",
        f"{here}/data.py:raising",
        "--workers",
        "1,2",
        "--batch-size",
        4,
        "--examples",
        8,
        "--rounds",
        1,
        "--step-ms",
        5,
        "--report",
        "page.html",
    )
    assert code == 2
    assert "Use num_workers" not in out
    assert '<section id="loaders"' in Path("page.html").read_text()


@pytest.mark.slow
def test_the_step_of_a_model_is_measured_beside_the_loader(
    here: Path, dpbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "Effort", lambda: Effort(budget_s=0.05, memory_by_phase=False))
    monkeypatch.setattr(disturbance, "LIMIT", 9.0)
    monkeypatch.setattr(disturbance, "SPARE_CORES", 99.0)
    # a loaded machine widens intervals by what others took, until nothing is decided
    monkeypatch.setattr(disturbance, "taken_from", lambda trial: 0.0)
    code, out, err = dpbench(
        "loaders",
        "--dataset",
        f"{here}/data.py:slow",
        "--workers",
        "1",
        "--batch-size",
        20,
        "--examples",
        40,
        "--rounds",
        5,  # the interval of three is too wide on a loaded machine
        "--model",
        "mlp",
        "--json",
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["loading"]["bounds"] == {"1": "loader-bound"}  # 100 ms against about 1 ms
    assert len(found["cases"]) == 2
    assert found["answers"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dataset", "a.py:b"],
        ["--model", "mlp", "--step-ms", "5"],
        ["--workers", "-1,2"],
        ["--prefetch-factor", "0"],
        ["--model", "resnet1"],
        ["--model", "nowhere:net"],
        ["--models", "mlp,lstm"],
    ],
)
def test_options_that_cannot_be_measured_are_refused(
    arguments: list[str], here: Path, dpbench: Command
) -> None:
    dataset = [] if "--dataset" in arguments else ["--dataset", f"{here}/data.py:good"]
    is_error(*dpbench("loaders", *dataset, *arguments))


def test_the_plot_has_the_knee_and_the_step(tmp_path: Path) -> None:
    report = report_on(trials(KNEE, step_s=0.06))
    (section,) = figures.sections(report)
    (panel,) = section.panels
    assert "knee: 4 (95 %: 4)" in panel.svg
    assert "the step needs 167 samples/s" in panel.svg
    notebook.drawings(report).savefig(tmp_path / "plot.svg")
    plot = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert [one for one in svg.VARIABLES if one in plot] == []
    assert "knee: 4 (95 %: 4)" in plot
    (table,) = section.tables
    assert [line[0].text for line in table.lines] == ["0", "1", "2", "4", "6", "8"]
    assert [line[4].text for line in table.lines] == ["loader-bound"] * 2 + ["compute-bound"] * 4
    assert table.lines[0][7].text == "500"
