"""A strategy in a file that describes its step is predicted, and its bytes are known."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dpbench.analysis.moves import of_step, of_trial
from dpbench.measure.worker import trial
from dpbench.predict import counts, machine, simulation
from dpbench.predict.cases import Predictor
from dpbench.predict.tasks import EXCHANGEABLE, Unpredictable, only
from dpbench.predict.work import Cost, Profile
from dpbench.records import HOST, Case, Phase, Status, Trial, registry
from dpbench.records.errors import UsageError
from dpbench.records.facts import stated
from dpbench.records.registry import Traits
from dpbench.records.work import Move
from dpbench.strategies import Graph
from dpbench.strategies._steps import ring
from tests.analysis.test_moves import SHAPES
from tests.runs import TWO_STEPS

MINE = textwrap.dedent('''
    """Training on device 0, which then sends its weights to the others."""

    from contextlib import contextmanager

    from dpbench.records import Phase
    from dpbench.strategies import Graph, Group, Parallelism, Strategy, Traits, optimizer_of


    class Sending(Strategy):
        @contextmanager
        def start(self, case, model, devices, mark):
            optimizer = optimizer_of(case)(model.module.parameters())

            def step(inputs, target):
                optimizer.zero_grad()
                with mark(Phase.FORWARD, 0):
                    loss = sum(
                        model.loss(model.module(x), y) * (len(y) / len(target))
                        for x, y in zip(inputs.chunk(case.devices), target.chunk(case.devices))
                    )
                with mark(Phase.BACKWARD, 0):
                    loss.backward()
                with mark(Phase.OPTIMIZER, 0):
                    optimizer.step()
                return loss.detach()

            yield step


    class Described(Sending):
        def describe(self, case, sizes):
            graph = Graph()
            rows = case.batch_size * sizes.input_bytes
            last = graph.add(Phase.SCATTER, 0, "copy:host:0", rows, "bytes")
            for phase, launches in (
                (Phase.FORWARD, sizes.forward_launches),
                (Phase.BACKWARD, sizes.backward_launches),
            ):
                last = graph.launch(phase, 0, "host", launches, (1.0, "share"), [last])
            last = graph.update(case, sizes, 0, "host", [last])
            every = range(case.devices)
            group = Group((0,), tuple(every))
            size = sizes.trainable_bytes
            graph.each(Phase.REPLICATE, every, "broadcast:1", size, group, lambda i: [last])
            return graph.tasks


    class Exchanging(Described):
        def describe(self, case, sizes):
            graph = Graph()
            graph.add(Phase.REDUCE, 0, "all_to_all:1", 1e9, "bytes")
            return graph.tasks


    class InParts(Described):
        traits = Traits(parallelism=Parallelism.OTHER)


    class InTurn(Described):
        """Each rank waits for the one before."""

        traits = Traits(parallelism=Parallelism.RANKS)

        def describe(self, case, sizes):
            graph, last = Graph(), []
            for rank in range(case.devices):
                last = [graph.launch(Phase.FORWARD, rank, f"host:{rank}", 1, (1.0, "share"), last)]
            return graph.tasks


    class Failing(Described):
        def describe(self, case, sizes):
            return 1 / len(sizes.gradient_sizes)


    sending, described, exchanging, in_parts = Sending(), Described(), Exchanging(), InParts()
    in_turn, failing = InTurn(), Failing()
''')
PROFILE = Profile(
    model="mlp",
    parameter_tensors=6,
    parameter_bytes=10**9,
    buffer_bytes=0,
    input_bytes=50.0,
    output_bytes=4.0,
    forward=Cost(0.25),
    backward=Cost(0.5),
)
MACHINE = machine.load("rtx-3090-x8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the file of the two strategies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def case_of(folder: Path, name: str, **changed: object) -> Case:
    """Return a case as a plan makes it for a strategy that the user has named."""
    strategy = f"{folder / 'mine.py'}:{name}"
    given = {"model": "mlp", "batch_size": 8, "devices": 3, "device_kind": "cuda", **changed}
    return Case(strategy=strategy, declared=registry.declared(strategy), **given)  # type: ignore[arg-type]


def test_a_described_step_is_predicted(folder: Path) -> None:
    case = case_of(folder, "described")
    timeline = simulation.step(case, PROFILE, MACHINE)
    assert timeline.seconds > 0.75, "forward and backward follow each other"
    spans = {(span.phase, span.device) for span in timeline.spans()}
    assert {(Phase.REPLICATE, device) for device in range(3)} < spans
    alone = simulation.step(case_of(folder, "described", devices=1), PROFILE, MACHINE)
    assert alone.seconds < timeline.seconds


def test_the_bytes_of_a_described_step_are_known(folder: Path) -> None:
    assert of_step(case_of(folder, "described"), SHAPES) == [
        Move(Phase.SCATTER, HOST, 0, 80),
        Move(Phase.REPLICATE, 0, 1, 1000),
        Move(Phase.REPLICATE, 0, 2, 1000),
    ]


def test_a_step_without_a_description_is_refused_with_what_is_missing(folder: Path) -> None:
    case = case_of(folder, "sending")
    with pytest.raises(Unpredictable, match=r"add the method describe\(case, sizes\)"):
        simulation.step(case, PROFILE, MACHINE)
    assert of_step(case, SHAPES) == []


def test_a_task_of_an_unknown_kind_is_refused(folder: Path) -> None:
    case = case_of(folder, "exchanging")
    with pytest.raises(UsageError, match="'all_to_all:1' of device 0: resources begin with one of"):
        simulation.step(case, PROFILE, MACHINE)
    with pytest.raises(UsageError, match="'all_to_all:1'"):
        of_step(case, SHAPES)


def test_a_parallelism_without_published_steps_is_refused_on_several_devices(folder: Path) -> None:
    case = case_of(folder, "in_parts")
    assert simulation.step(case, PROFILE, MACHINE).seconds > 0.75
    with pytest.raises(Unpredictable, match=r"threads and ranks, and not for .* other"):
        Predictor(MACHINE, measured={counts.key(case): PROFILE}).predict(case)


@pytest.mark.parametrize("devices", [EXCHANGEABLE - 1, EXCHANGEABLE, 40])
def test_ranks_that_wait_for_each_other_are_all_simulated(folder: Path, devices: int) -> None:
    case = case_of(folder, "in_turn", devices=devices, batch_size=8 * devices)
    timeline = simulation.step(case, PROFILE, machine.load("dgx-a100-x512"))
    assert timeline.seconds >= 0.25 * devices


def test_removed_tasks_hand_on_each_dependency_once() -> None:
    graph, last = Graph(), list[int]()
    for _ in range(40):
        last = [graph.launch(Phase.FORWARD, 0, "host", 1, (1.0, "share"), last)]
    graph.add(Phase.LOSS, 1, "device:1", 1, "bytes", last)
    (kept,) = only(graph.tasks, lambda task: task.device == 1)
    assert kept.after == ()


def test_each_collective_of_a_step_has_a_name_of_its_own() -> None:
    graph = Graph()
    graph.each(Phase.REDUCE, (0, 1), "all_reduce:0", 8.0, ring(2), lambda i: ())
    with pytest.raises(ValueError, match=r"device 0 takes part in .* all_reduce:0 twice"):
        graph.each(Phase.REDUCE, (0, 1), "all_reduce:0", 8.0, ring(2), lambda i: ())
    graph.each(Phase.REDUCE, (0, 1), "all_reduce:1", 8.0, ring(2), lambda i: ())
    assert len(graph.tasks) == 4


def test_an_error_of_a_description_costs_no_measurement(folder: Path) -> None:
    case = case_of(folder, "failing", devices=2, device_kind="cpu")
    done = trial.run(case, TWO_STEPS, folder)
    assert (done.status, done.facts.moves) == (Status.OK, None)


def test_stored_moves_that_cannot_be_are_left_out() -> None:
    good = Move(Phase.REDUCE, 1, HOST, 7.0)
    bad = [replace(good, source=2), replace(good, target=-2), replace(good, bytes=-1.0)]
    case = Case(model="mlp", strategy="dp", batch_size=8, devices=2)
    assert of_trial(Trial(case=case, provenance=stated(moves=(good, *bad)))) == [good]


def test_a_distribution_that_only_a_stored_case_names_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("theirs", "dpbench_test_absent:strategy", registry.GROUP)
    monkeypatch.setattr(registry, "_installed", lambda: {"theirs": entry})
    for name in ("theirs", "nobody", "\0.py:strategy"):
        assert of_step(Case(model="mlp", strategy=name, batch_size=8, devices=2), SHAPES) == []


def test_a_trial_states_the_bytes_of_a_strategy_in_a_file(folder: Path) -> None:
    case = case_of(folder, "described", devices=2, device_kind="cpu")
    done = trial.run(case, TWO_STEPS, folder)
    assert done.status is Status.OK, done.reason
    assert {(move.phase, move.source, move.target) for move in of_trial(done)} == {
        (Phase.SCATTER, HOST, 0),
        (Phase.REPLICATE, 0, 1),
    }
    own = trial.run(Case(model="mlp", strategy="single", batch_size=8), TWO_STEPS, folder)
    assert (own.facts.moves, len(of_trial(own))) == (None, 1), "those of dpbench are computed"


def test_a_file_that_only_a_stored_case_names_is_not_imported(folder: Path) -> None:
    (folder / "theirs.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    name = f"{folder / 'theirs.py'}:strategy"
    moves = (Move(Phase.REDUCE, 0, 1, 7.0),)
    for strategy in (name, "theirs:strategy"):
        case = Case(
            model="mlp",
            strategy=strategy,
            batch_size=8,
            devices=2,
            device_kind="cuda",
            declared=Traits(strategy=strategy),
        )
        assert of_step(case, SHAPES) == []
        with pytest.raises(Unpredictable):
            simulation.step(case, PROFILE, MACHINE)
        stored = Trial(case=case, provenance=stated(moves=moves))
        assert of_trial(stored) == [*moves]
    assert not (folder / "executed").exists()
