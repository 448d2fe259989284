"""Watching loops whose steps are easily miscounted gives the right steps, rows and phases."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpbench.observe import loop, seams, trials
from dpbench.observe.recorder import Recorder
from dpbench.records import UNATTRIBUTED, Phase
from tests.amounts import amounts
from tests.observe.watched_scripts import Clock, phases_of, problems, really_watched, watched


@pytest.mark.parametrize("first", [6, 12])
@pytest.mark.parametrize("by", ["hand", "optimizer"])
def test_of_trainings_one_after_another_the_longest_is_kept_and_the_others_are_named(
    first: int, by: str, tmp_path: Path
) -> None:
    found, _ = watched(
        tmp_path,
        (
            f"""
for x, y in batches({first}):
    step(x, y)
time.sleep(0.2)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in batches(9, batch_size=2):
    step(x, y)
"""
            if by == "optimizer"
            else f"""
def step(x, y):
    nn.functional.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.1 * p.grad
            p.grad = None


for x, y in batches({first}):
    step(x, y)
time.sleep(0.2)
net = Net()
for x, y in batches(9, batch_size=2):
    step(x, y)
"""
        ),
    )
    assert len(found.steps) in ({9 - 1, 9 - 2} if first < 9 else {first - 1, first - 2})
    assert found.rows == (2 if first < 9 else 4)
    assert max(one.seconds for one in found.steps) < 0.5e-3
    assert f"only training {1 + (first < 9)} is stored" in problems(found)


def test_a_new_optimizer_for_the_same_model_ends_the_steps_of_its_time(tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        """
for epoch in range(3):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches(5):
        step(x, y)
""",
    )
    assert len(found.steps) == 14
    assert found.updates == 1
    assert not found.unknown


def test_the_facts_about_folds_are_those_of_the_fold_that_is_kept(tmp_path: Path) -> None:
    found, recorder = watched(
        tmp_path,
        """
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for fold in range(3):
    net = Net()
    optimizer = (torch.optim.Adam if fold == 1 else torch.optim.SGD)(net.parameters(), lr=0.1)
    for x, y in batches(20 if fold == 1 else 9):
        with torch.autocast("cpu", torch.bfloat16, enabled=fold != 1):
            loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        scaler.scale(loss * (1.0 if fold == 1 else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        if fold != 1:
            loss.item()
""",
    )
    assert "only training 2 is stored" in problems(found)
    assert len(found.steps) == 19
    part = trials.Watched(
        script="train.py",
        command="train.py",
        part=trials.RankRecord(loop=found),
        seen=recorder.seen,
    )
    case = trials.case_of(part)
    assert (case.optimizer, case.precision, case.compile) == ("adam", "fp32", False)
    assert found.skipped == 0
    assert not any(found.reads)


def test_sets_that_are_read_before_the_loop_have_the_workers_of_the_larger_one(
    tmp_path: Path,
) -> None:
    _, recorder = watched(
        tmp_path,
        """
trained, validated = list(batches(12)), list(batches(4))
for epoch in range(2):
    for x, y in trained:
        step(x, y)
    with torch.no_grad():
        net.eval()
        for x, y in validated:
            net(x)
        net.train()
""",
    )
    first, second = recorder.seen.loaders
    recorder.seen.loaders.update({first: 3, second: 1})
    assert loop.of(recorder).loader_workers == 3


def test_two_loaders_of_one_dataset_have_workers_of_their_own(tmp_path: Path) -> None:
    found, recorder = watched(
        tmp_path,
        """
data = Rows(4 * 12)
training = DataLoader(data, batch_size=4, num_workers=2)
measuring = DataLoader(data, batch_size=4)
for epoch in range(2):
    for x, y in training:
        step(x, y)
    with torch.no_grad():
        net.eval()
        for x, y in measuring:
            net(x)
        net.train()
""",
    )
    assert found.loader_workers == 2
    assert sorted(recorder.seen.loaders.values()) == [0, 2]


def test_a_loader_that_began_before_the_watching_has_its_workers() -> None:
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    left = iter(DataLoader(TensorDataset(torch.ones(48, 4)), batch_size=4, num_workers=1))
    recorder = Recorder()
    with seams.installed(recorder):
        for (inputs,) in left:
            optimizer.zero_grad()
            net(inputs).sum().backward()
            optimizer.step()
    recorder.stop()
    assert loop.of(recorder).loader_workers == 1


class Transformed(Dataset[torch.Tensor]):
    """A dataset that transforms its rows by a module, as torchvision's do."""

    def __init__(self) -> None:
        self.transform = torch.nn.Identity()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.transform(torch.full((4,), float(i)))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", None])
def test_workers_that_are_not_forked_get_a_dataset_whose_module_was_hooked(
    context: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks cannot be pickled; from Python 3.14 on, workers are not forked by default."""
    monkeypatch.setattr(torch.multiprocessing, "get_start_method", lambda: "forkserver")
    data = Transformed()
    recorder = Recorder()
    with seams.installed(recorder):
        data[0]
        assert data.transform._forward_pre_hooks
        loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context)
        assert torch.equal(torch.cat([*loader])[:, 0], torch.arange(8.0))
        assert not data.transform._forward_pre_hooks
    recorder.stop()
    assert [*recorder.seen.loaders.values()] == [1]


def test_a_loader_that_has_ended_leaves_its_number_to_no_other(tmp_path: Path) -> None:
    _, recorder = watched(
        tmp_path,
        """
for fold in range(12):
    for x, y in batches(2):
        step(x, y)
""",
    )
    assert len(recorder.seen.loaders) == 12


VALIDATIONS = {
    "training mode": ("", "torch.no_grad()"),
    "gradients": ("net.eval()", "torch.enable_grad()"),
    "inference": ("net.eval()", "torch.inference_mode()"),
}


@pytest.mark.parametrize("kind", VALIDATIONS)
def test_validation_within_an_epoch_belongs_to_no_step(kind: str, tmp_path: Path) -> None:
    before, context = VALIDATIONS[kind]
    found, _ = watched(
        tmp_path,
        f"""
validation = batches(5)
for i, (x, y) in enumerate(batches(16)):
    net.train()
    step(x, y)
    if i % 4 == 3:
        {before}
        net.sleeps = EVALUATE_S
        with {context}:
            for u, v in validation:
                nn.functional.cross_entropy(net(u), v).item()
        net.sleeps = 0.0
""",
    )
    assert len(found.steps) == 15
    assert found.evaluation_s == pytest.approx(3 * 5 * 0.004, rel=0.05)
    assert max(one.seconds for one in found.steps) < 0.5e-3
    assert found.rows == 4


def test_a_forward_in_evaluation_mode_in_every_step_belongs_to_the_step(tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        """
for x, y in batches(12):
    net.eval()
    x.requires_grad_()
    net.sleeps = EVALUATE_S
    x = (x + torch.autograd.grad(nn.functional.cross_entropy(net(x), y), x)[0]).detach()
    net.sleeps = 0.0
    net.train()
    step(x, y)
""",
    )
    rows = phases_of(found)
    assert min(row[Phase.FORWARD] for row in rows) > 0.004
    assert found.evaluation_s == 0
    assert found.rows == 4


@pytest.mark.parametrize("advance", [False, True])
def test_the_rows_of_a_step_are_those_of_all_batches_that_it_accumulates(
    advance: bool, tmp_path: Path
) -> None:
    found, _ = watched(
        tmp_path,
        f"""
for epoch in range(3):
    taken = batches(10)
    for i, (x, y) in enumerate(list(taken) if {advance} else taken):
        nn.functional.cross_entropy(net(x), y).backward()
        if i % 4 == 3 or i == 9:
            optimizer.step()
            optimizer.zero_grad()
""",
    )
    assert found.updates == 4
    assert found.rows == (4 if advance else 16)
    assert found.rows / found.batches == 4
    (last,) = (one for one in found.unknown if "backward" in one.problem)
    assert amounts(last.problem) == ["3", "4"], "steps that do not call it as often as the others"


def test_accumulation_without_a_loader_has_an_unknown_number_of_rows(tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        """
for i in range(24):
    nn.functional.cross_entropy(net(torch.ones(4, 8)), torch.ones(4).long()).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    )
    assert found.updates == 4
    assert found.rows == 0


@pytest.mark.parametrize("data", ["batches(12)", "[(torch.ones(4, 8), torch.ones(4).long())] * 12"])
def test_a_loop_without_modules_has_a_forward_up_to_its_loss(data: str, tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        f"""
weights = torch.ones(8, 3, requires_grad=True)
optimizer = torch.optim.SGD([weights], lr=0.1)
for x, y in {data}:
    optimizer.zero_grad()
    time.sleep(0.003)
    nn.functional.cross_entropy(x @ weights, y).backward()
    optimizer.step()
""",
    )
    rows = phases_of(found)
    assert all(0.003 < row[Phase.FORWARD] < 0.0031 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3
    assert "calls no module" in problems(found)


def test_steps_in_another_thread_are_named(tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        """
def train():
    for x, y in batches(5):
        step(x, y)


thread = threading.Thread(target=train)
thread.start()
thread.join()
""",
    )
    assert not found.steps
    assert [("thread" in one.problem, one.steps) for one in found.unknown] == [(True, 5)]


def test_watching_breaks_no_graph_of_a_compiled_function(tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        """
compilations = []


def backend(graph, inputs):
    compilations.append(graph)
    return graph


@torch.compile(backend=backend, fullgraph=True)
def loss(x, y):
    return nn.functional.cross_entropy(net.layer(x), y)


for x, y in batches(70):
    optimizer.zero_grad()
    loss(x, y).backward()
    optimizer.step()
assert len(compilations) <= 2, len(compilations)
""",
    )
    assert len(found.steps) == 69
    assert "calls no module" in problems(found)


# on a machine with one core
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_loader_with_workers_is_waited_for_and_its_workers_are_counted(tmp_path: Path) -> None:
    found, _ = really_watched(
        tmp_path,
        """
import json

waits = []
for epoch in range(2):
    start = time.perf_counter()
    for x, y in DataLoader(Rows(32, batch_s=0.03), batch_size=4, num_workers=2):
        waits.append(time.perf_counter() - start)
        step(x, y)
        start = time.perf_counter()
with open(__file__ + ".json", "w") as file:
    json.dump(waits, file)
""",
    )
    assert len(found.steps) == 15
    assert found.loader_workers == 2
    rows = phases_of(found)
    waits = json.loads((tmp_path / "train.py.json").read_text())[1:]
    assert sum(waits) > 0.1, "two workers make 16 batches of 30 ms in 240 ms"
    differences = [abs(row[Phase.DATA] - wait) for row, wait in zip(rows, waits, strict=True)]
    assert statistics.median(differences) < 0.3e-3


def test_the_time_for_which_item_waits_is_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    slept: list[float] = []
    item: Callable[[torch.Tensor], float] = torch.Tensor.item

    def waits(self: torch.Tensor) -> float:
        if self.requires_grad:  # a DataLoader draws its seed with the same method
            slept.append(0.006 * (len(slept) % 2))
            clock.sleep(slept[-1])
        return item(self)

    monkeypatch.setattr(torch.Tensor, "item", waits)
    found, _ = watched(
        tmp_path,
        """
for x, y in batches(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    loss.item()
""",
        clock,
    )
    rows = phases_of(found)
    # a read after an update belongs to the next step
    remains = [row[Phase.READ] - slept[at] for at, row in enumerate(rows)]
    assert min(remains) >= 0
    assert max(remains) < 0.1e-3
    assert all(place.endswith(" item") for places in found.reads for place in places)


def test_a_scheduler_and_a_step_of_the_instance_belong_to_the_optimizer(tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        """
class Slow(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        time.sleep(0.002)
        return [0.1]


scheduler = Slow(optimizer)
inner = optimizer.step


@functools.wraps(inner)
def slow():
    time.sleep(0.003)
    inner()


optimizer.step = slow
for x, y in batches(12):
    step(x, y)
    scheduler.step()
assert optimizer.step.watched
""",
    )
    rows = phases_of(found)[1:]
    assert all(0.005 < row[Phase.OPTIMIZER] < 0.0051 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


def test_the_class_around_an_optimizer_belongs_to_it(tmp_path: Path) -> None:
    found, _ = watched(
        tmp_path,
        """
class Wrapper(torch.optim.Optimizer):  # as accelerate's, which torch gives no hooks
    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)

    def zero_grad(self):
        time.sleep(0.001)
        self.inner.zero_grad()

    def step(self):
        time.sleep(0.002)
        self.inner.step()


optimizer = Wrapper(torch.optim.SGD(net.parameters(), lr=0.1))
for x, y in batches(12):
    step(x, y)
""",
    )
    rows = phases_of(found)[1:]
    assert len(rows) == 10
    assert all(0.003 < row[Phase.OPTIMIZER] < 0.0031 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


def test_a_step_whose_wrapper_computes_the_gradients_has_no_overlapping_phases(
    tmp_path: Path,
) -> None:
    found, _ = watched(
        tmp_path,
        """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner

    def step(self, closure):
        time.sleep(0.002)
        closure()
        self.inner.step()


wrapper = Wrapper(optimizer)
for x, y in batches(12):
    optimizer.zero_grad()
    net.sleeps = 0.004
    wrapper.step(lambda: nn.functional.cross_entropy(net(x), y).backward())
""",
    )
    rows = phases_of(found)[1:]
    assert all(0.004 < row[Phase.FORWARD] < 0.0041 for row in rows)
    assert all(row[Phase.OPTIMIZER] < 0.1e-3 for row in rows)


def test_accumulation_on_several_devices_is_one_training_from_its_first_backward_on(
    tmp_path: Path,
) -> None:
    found, _ = watched(
        tmp_path,
        """
import dpbench

wrapped = dpbench.DataParallel(net, device_ids=["cpu", "cpu"])
for i, (x, y) in enumerate(batches(24)):
    nn.functional.cross_entropy(wrapped(x), y).backward()
    if i % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
""",
    )
    assert len(found.steps) == 7
    assert found.rows == 12
    assert not found.unknown


def test_a_reduction_that_the_script_calls_is_reduce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda gradient: time.sleep(0.001))
    found, _ = watched(
        tmp_path,
        """
import torch.distributed as dist

for x, y in batches(12):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    with torch.no_grad():
        time.sleep(0.003)
        for p in net.parameters():
            p.grad.clamp_(-1, 1)
    optimizer.step()
""",
    )
    rows = phases_of(found)
    assert len(rows) == 11
    assert all(
        0.002 < row[Phase.REDUCE] < 0.0021 and 0.003 < row[UNATTRIBUTED] < 0.0031 for row in rows
    )


def test_processes_that_the_script_starts_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(
        torch.multiprocessing, "spawn", lambda function, nprocs: started.append(nprocs)
    )
    found, _ = watched(tmp_path, "torch.multiprocessing.spawn(step, nprocs=2)")
    assert started == [2]
    assert not found.steps
    assert [one.problem for one in found.unknown] == [seams.SPAWNED]
