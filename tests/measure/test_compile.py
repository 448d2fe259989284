"""torch.compile: replicas run the result with their weights, and compilation is timed apart."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dpbench import models, strategies
from dpbench.engine.fast.turns import TurnsIfFaster
from dpbench.engine.replicate import rebuild
from dpbench.measure import verification
from dpbench.measure.failures import Unverified
from dpbench.measure.worker import bench, trial
from dpbench.records import Case, Effort, Trial, Verified, plan

# torch.compile asks the weights of replicas, which are not leaves, for their gradients
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)

FEW = Effort(
    budget_s=9, min_steps=3, max_steps=3, warmup_steps=1, block_steps=1, marks=False, links=False
)
NAME = f"{__name__}:small"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def batch(n: int, seed: int, size: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator), torch.randint(8, (n,), generator=generator)


small = SimpleNamespace(build=lambda size: Net(), batch=batch, loss=nn.functional.cross_entropy)
CASE = Case(model=NAME, strategy="dp", schedule="reference", batch_size=20, devices=2, compile=True)

Backend = Callable[[Any, Any], Any]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Compile without a C++ compiler, and yield the list of the graphs' inputs."""
    torch.compiler.reset()
    seen: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        seen.append(inputs)
        return graph.forward

    original = torch.compile
    compiled = functools.partial(original, backend=keep)
    monkeypatch.setattr(torch, "compile", compiled)
    yield seen
    torch.compiler.reset()


def measured(case: Case = CASE) -> Trial:
    return trial.measure(case, FEW, strategies.load(case.strategy))


def test_a_replica_runs_the_compiled_forward_with_its_own_weights(backend: list[Any]) -> None:
    module = Net()
    models.compile_forward(module)
    replica = rebuild(
        module, {id(t): torch.zeros_like(t) for t in (*module.parameters(), *module.buffers())}
    )
    assert not replica(torch.ones(3, 4)).any()
    assert len(backend) == 1
    assert (type(module).__name__, isinstance(module, Net)) == ("Net", True)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("schedule", ["reference", "sharded"])
def test_the_time_of_compilation_is_apart_from_the_steps(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = verification._trained

    def spied(*given: Any) -> Any:
        module, steps, _ = original(*given)
        return module, steps, 1000.0

    monkeypatch.setattr(verification, "_trained", spied)
    # steps whose forwards run in turns have other marks
    monkeypatch.setattr(TurnsIfFaster, "choose", lambda turn, seconds: None)
    done = measured(replace(CASE, schedule=schedule))
    assert done.verified is Verified.BITWISE
    # torch promises no single graph to two threads that ask for it at the same time
    assert done.provenance["compiled"]["graphs"] in (1, 2)
    assert done.provenance["compiled"]["graph_breaks"] == 0
    assert done.setup["compile_s"] > 1000, "the step of verification compiles too"
    assert done.setup["verify_s"] < 0, "and is not counted twice"
    assert "no_memory_by_phase" in done.provenance
    spans = Counter(span.step for span in done.spans)
    assert spans[0] == spans[2], "the steps that compile have no spans"


@pytest.mark.usefixtures("backend")
def test_a_plain_case_has_no_time_of_compilation() -> None:
    done = measured(replace(CASE, compile=False))
    assert not {*done.setup, *done.provenance} & {"compile_s", "compiled"}


def test_the_timed_graphs_are_compiled_for_the_batch_of_the_case(backend: list[Any]) -> None:
    """Verification uses another batch size, after which torch would make the graphs dynamic."""
    measured()
    assert len(backend) > 2
    assert not [one for one in backend[-1] if isinstance(one, torch.SymInt)]


def test_a_graph_that_computes_another_gradient_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = torch.compile

    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *given: tuple(output * 1.01 for output in graph.forward(*given))

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda one, **limit: original(one, backend=wrong))
    with pytest.raises(Unverified, match="gradients or buffers are wrong"):
        measured()


def test_a_module_of_which_nothing_is_compiled_is_not_timed(
    backend: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untraced(Net):
        @torch.compiler.disable
        def eager(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.eager(x)

    monkeypatch.setattr(small, "build", lambda size: Untraced())
    with pytest.raises(ValueError, match="compiled nothing of the model"):
        measured(replace(CASE, strategy="single", schedule="", devices=1))
    assert backend == []


@pytest.mark.usefixtures("backend")
def test_steps_that_always_compile_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()

    def more() -> Counter[str]:
        made["graphs"] += 1
        return Counter(made)

    monkeypatch.setattr(bench, "compilations", more)
    with pytest.raises(RuntimeError, match="compiled again in each of 10 passes"):
        measured()


def changing(monkeypatch: pytest.MonkeyPatch, changes: range) -> Case:
    """Return a case whose model takes other paths at the calls with the numbers in `changes`."""
    calls = iter(range(1, 10**6))

    class Changing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layer(x)) * len(self.path())

        @torch.compiler.disable
        def path(self) -> str:
            """Return a text, because torch.compile may have one graph for all numbers."""
            call = next(calls)
            return "x" * (1 + sum(call >= change for change in changes))

    monkeypatch.setattr(small, "build", lambda size: Changing())
    return replace(CASE, strategy="single", schedule="", devices=1)


@pytest.mark.usefixtures("backend")
def test_no_timed_step_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 14th forward is in a timed step, which then belongs to the warm-up, with all before."""
    usual = measured(changing(monkeypatch, range(0)))
    done = measured(changing(monkeypatch, range(14, 15)))
    assert len(done.timed) == len(usual.timed) == FEW.max_steps
    assert len(done.steps) > len(usual.steps)


@pytest.mark.usefixtures("backend")
def test_steps_that_compile_in_many_blocks_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="compiled again in 10 blocks of steps"):
        measured(changing(monkeypatch, range(14, 40)))


@pytest.mark.usefixtures("backend")
@pytest.mark.skipif(
    bool(torch.version.cuda),
    reason="with a CUDA build of torch, no rank may be forked after a backward",
)
def test_ranks_compile(tmp_path: Path) -> None:
    case = replace(CASE, strategy="ddp", devices=2, schedule="")
    done = trial.run(case, replace(FEW, marks=True), tmp_path)
    assert done.facts.mark_pairs
    assert done.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE), done.reason
    assert done.provenance["compiled"]["graphs"] == 1


def for_all_sizes(inputs: Any) -> bool:
    return any(isinstance(one, torch.SymInt) for one in inputs)


@pytest.mark.slow
def test_cases_measured_together_compile_apart(backend: list[Any], tmp_path: Path) -> None:
    cases = [replace(CASE, batch_size=rows) for rows in (8, 20)]
    for done in trial.run_together(cases, replace(FEW, memory_by_phase=False), tmp_path):
        assert done.verified is Verified.BITWISE, done.reason
        assert done.provenance["compiled"]["graphs"] in (1, 2)
    assert sum(map(for_all_sizes, backend)) == len(cases), "one of each verification"


def test_a_module_is_compiled_as_if_it_were_alone(backend: list[Any]) -> None:
    """Otherwise the second has a graph for all sizes, and two threads may each miss theirs."""
    called = []
    for rows in (4, 10):
        models.forget_sizes()
        module = Net()
        models.compile_forward(module)
        called.append((module, rows))
        module(torch.ones(rows, 4))
    for module, rows in called:
        module(torch.ones(rows, 4))
    assert [for_all_sizes(inputs) for inputs in backend] == [False, False]


def test_compilation_is_an_axis() -> None:
    axes: dict[str, Any] = {
        "models": ["mlp"],
        "strategies": ["single", "dp"],
        "devices": [2],
        "batch_sizes": [8],
    }
    cases = plan.sweep(**axes, compile=[False, True])
    assert [case.habits for case in cases] == [(), ("compiled",)] * 2
    assert cases[1].label == f"{cases[0].label} compiled"
    assert plan.alone(cases[3], 8) == cases[1]
    with pytest.raises(
        ValueError, match="cannot trace the tensors of emulated devices: leave out compile="
    ):
        plan.sweep(**axes, device_kind="emulated", compile=[True])
