"""Watching: loops in which a step is easily counted wrongly have the right steps, rows and phases."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from dpbench.observe import loop, script, seams, trials
from dpbench.observe.recorder import Recorder
from dpbench.records import UNATTRIBUTED, Phase, ledger

HEAD = """
import functools, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EVALUATE_S = 0.004


class Rows(Dataset):
    def __init__(self, n, batch_s=0.0):
        self.n, self.batch_s = n, batch_s

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i % 4 == 0:
            time.sleep(self.batch_s)
        return torch.full((8,), float(i % 7)), torch.tensor(i % 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.sleeps = nn.Linear(8, 3), 0.0

    def forward(self, x):
        time.sleep(self.sleeps)
        return self.layer(x)


def batches(n, batch_size=4, **options):
    return DataLoader(Rows(n * batch_size), batch_size=batch_size, **options)


def step(x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


class Clock:
    """A replacement of the host's clock that only sleeping moves, so that no other process lengthens a step.

    Each look at the clock takes a microsecond, so that no two moments are equal.
    """

    at = 0.0

    def now(self) -> float:
        self.at += 1e-6
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def watched(folder: Path, source: str, clock: Clock | None = None) -> tuple[loop.WatchedLoop, Recorder]:
    """Run a script under the seams on the replaced clock; return its loop and the recorder."""
    clock = clock or Clock()
    with mock.patch("time.sleep", clock.sleep):
        return really_watched(folder, source, clock.now)


def really_watched(
    folder: Path, source: str, now: Callable[[], float] = time.perf_counter
) -> tuple[loop.WatchedLoop, Recorder]:
    """Run a script under the seams, on the host's time or another clock; return its loop and the recorder."""
    file = folder / "train.py"
    file.write_text(HEAD + source)
    recorder = Recorder(now)
    with seams.installed(recorder):
        assert script.run(str(file), []) == 0
    recorder.stop()
    return loop.of(recorder), recorder


def problems(found: loop.WatchedLoop) -> str:
    return "\n".join(map(str, found.unknown))


@pytest.mark.parametrize("first", [6, 12])
@pytest.mark.parametrize("by", ["hand", "optimizer"])
def test_of_trainings_one_after_another_the_longest_is_kept_and_the_others_are_named(
    first: int, by: str, tmp_path: Path
) -> None:
    found, _ = watched(tmp_path, f"""
for x, y in batches({first}):
    step(x, y)
time.sleep(0.2)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in batches(9, batch_size=2):
    step(x, y)
""" if by == "optimizer" else f"""
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
""")  # fmt: skip
    assert len(found.steps) in ({9 - 1, 9 - 2} if first < 9 else {first - 1, first - 2})
    assert found.rows == (2 if first < 9 else 4)
    assert max(one.seconds for one in found.steps) < 0.5e-3
    assert f"only training {1 + (first < 9)} is stored" in problems(found)


def test_a_new_optimizer_for_the_same_model_ends_the_steps_of_its_time(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
for epoch in range(3):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches(5):
        step(x, y)
""")  # fmt: skip
    assert len(found.steps) == 14
    assert found.updates == 1
    assert not found.unknown


def test_the_facts_about_folds_are_those_of_the_fold_that_is_kept(tmp_path: Path) -> None:
    found, recorder = watched(tmp_path, """
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
""")  # fmt: skip
    assert "only training 2 is stored" in problems(found)
    assert len(found.steps) == 19
    part = trials.Watched(script="train.py", command="train.py", part=trials.RankRecord(loop=found), seen=recorder.seen)
    case = trials.case_of(part)
    assert (case.optimizer, case.precision, case.compile) == ("adam", "fp32", False)
    assert found.skipped == 0
    assert not any(found.reads)


def test_sets_that_are_read_before_the_loop_have_the_workers_of_the_larger_one(tmp_path: Path) -> None:
    _, recorder = watched(tmp_path, """
trained, validated = list(batches(12)), list(batches(4))
for epoch in range(2):
    for x, y in trained:
        step(x, y)
    with torch.no_grad():
        net.eval()
        for x, y in validated:
            net(x)
        net.train()
""")  # fmt: skip
    first, second = recorder.seen.loaders
    recorder.seen.loaders.update({first: 3, second: 1})
    assert loop.of(recorder).loader_workers == 3


def test_a_dataset_that_has_ended_leaves_its_number_to_no_other(tmp_path: Path) -> None:
    _, recorder = watched(tmp_path, """
for fold in range(12):
    for x, y in batches(2):
        step(x, y)
""")  # fmt: skip
    assert len(recorder.seen.loaders) == 12
    rows = [1]
    assert recorder.owner(rows) == recorder.owner(rows), "a list, whose end Python does not tell"


VALIDATIONS = {
    "training mode": ("", "torch.no_grad()"), "gradients": ("net.eval()", "torch.enable_grad()"),
    "inference": ("net.eval()", "torch.inference_mode()"),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALIDATIONS)
def test_validation_within_an_epoch_belongs_to_no_step(kind: str, tmp_path: Path) -> None:
    before, context = VALIDATIONS[kind]
    found, _ = watched(tmp_path, f"""
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
""")  # fmt: skip
    assert len(found.steps) == 15
    assert found.evaluation_s == pytest.approx(3 * 5 * 0.004, rel=0.05)
    assert max(one.seconds for one in found.steps) < 0.5e-3
    assert found.rows == 4


def test_a_forward_in_evaluation_mode_in_every_step_belongs_to_the_step(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
for x, y in batches(12):
    net.eval()
    x.requires_grad_()
    net.sleeps = EVALUATE_S
    x = (x + torch.autograd.grad(nn.functional.cross_entropy(net(x), y), x)[0]).detach()
    net.sleeps = 0.0
    net.train()
    step(x, y)
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert min(row[Phase.FORWARD] for row in rows) > 0.004
    assert found.evaluation_s == 0
    assert found.rows == 4


@pytest.mark.parametrize("advance", [False, True])
def test_the_rows_of_a_step_are_those_of_all_batches_that_it_accumulates(advance: bool, tmp_path: Path) -> None:
    found, _ = watched(tmp_path, f"""
for epoch in range(3):
    taken = batches(10)
    for i, (x, y) in enumerate(list(taken) if {advance} else taken):
        nn.functional.cross_entropy(net(x), y).backward()
        if i % 4 == 3 or i == 9:
            optimizer.step()
            optimizer.zero_grad()
""")  # fmt: skip
    assert found.updates == 4
    assert found.rows == (4 if advance else 16)
    assert "3 steps do not call backward 4 times" in problems(found)


def test_accumulation_without_a_loader_has_an_unknown_number_of_rows(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
for i in range(24):
    nn.functional.cross_entropy(net(torch.ones(4, 8)), torch.ones(4).long()).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""")  # fmt: skip
    assert found.updates == 4
    assert found.rows == 0


@pytest.mark.parametrize("data", ["batches(12)", "[(torch.ones(4, 8), torch.ones(4).long())] * 12"])
def test_a_loop_without_modules_has_a_forward_up_to_its_loss(data: str, tmp_path: Path) -> None:
    found, _ = watched(tmp_path, f"""
weights = torch.ones(8, 3, requires_grad=True)
optimizer = torch.optim.SGD([weights], lr=0.1)
for x, y in {data}:
    optimizer.zero_grad()
    time.sleep(0.003)
    nn.functional.cross_entropy(x @ weights, y).backward()
    optimizer.step()
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert all(0.003 < row[Phase.FORWARD] < 0.0031 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3
    assert "calls no module" in problems(found)


def test_steps_in_another_thread_are_named(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
def train():
    for x, y in batches(5):
        step(x, y)


thread = threading.Thread(target=train)
thread.start()
thread.join()
""")  # fmt: skip
    assert not found.steps
    assert [(one.problem[:40], one.steps) for one in found.unknown] == [
        ("an optimizer steps in a thread that dpbe", 5)
    ]  # fmt: skip


def test_watching_breaks_no_graph_of_a_compiled_function(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
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
""")  # fmt: skip
    assert len(found.steps) == 69
    assert "calls no module" in problems(found)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine with one core
def test_a_loader_with_workers_is_waited_for_and_its_workers_are_counted(tmp_path: Path) -> None:
    found, _ = really_watched(tmp_path, """
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
""")  # fmt: skip
    assert len(found.steps) == 15
    assert found.loader_workers == 2
    rows = ledger.Ledger(found.steps, found.spans).phases
    waits = json.loads((tmp_path / "train.py.json").read_text())[1:]
    assert sum(waits) > 0.1, "two workers make 16 batches of 30 ms in 240 ms"
    differences = [abs(row[Phase.DATA] - wait) for row, wait in zip(rows, waits, strict=True)]
    assert statistics.median(differences) < 0.3e-3


def test_the_time_for_which_item_waits_is_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    slept: list[float] = []
    item: Callable[[torch.Tensor], float] = torch.Tensor.item

    def waits(self: torch.Tensor) -> float:
        if self.requires_grad:  # a DataLoader draws its seed with the same method
            slept.append(0.006 * (len(slept) % 2))
            clock.sleep(slept[-1])
        return item(self)

    monkeypatch.setattr(torch.Tensor, "item", waits)
    found, _ = watched(tmp_path, """
for x, y in batches(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    loss.item()
""", clock)  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    # a read after an update belongs to the next step
    remains = [row[Phase.READ] - slept[at] for at, row in enumerate(rows)]
    assert min(remains) >= 0
    assert max(remains) < 0.1e-3
    assert all(place.endswith(" item") for places in found.reads for place in places)


def test_a_scheduler_and_a_step_of_the_instance_belong_to_the_optimizer(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
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
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases[1:]
    assert all(0.005 < row[Phase.OPTIMIZER] < 0.0051 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


def test_the_class_around_an_optimizer_belongs_to_it(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
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
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases[1:]
    assert len(rows) == 10
    assert all(0.003 < row[Phase.OPTIMIZER] < 0.0031 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


def test_a_step_whose_wrapper_computes_the_gradients_has_no_overlapping_phases(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
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
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases[1:]
    assert all(0.004 < row[Phase.FORWARD] < 0.0041 for row in rows)
    assert all(row[Phase.OPTIMIZER] < 0.1e-3 for row in rows)


ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
net.layer = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, batches(20), scheduler)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
"""
TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=2, n_head=2, n_embd=128, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0)
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)} for _ in range(160)]
arguments = TrainingArguments(
    __file__ + ".out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=20, report_to=[],
    use_cpu=True, save_strategy="no", disable_tqdm=True,
)
net = GPT2LMHeadModel(config)
Trainer(model=net, args=arguments, train_dataset=rows).train()
"""
LIGHTNING = """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 3))

    def training_step(self, batch, at):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, at):
        self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


kept = lightning.pytorch.callbacks.ModelCheckpoint(__file__ + ".out", every_n_train_steps=8)
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, callbacks=[kept], accumulate_grad_batches=2, gradient_clip_val=1.0,
    val_check_interval=20, enable_progress_bar=False, enable_model_summary=False,
)
net = Module()
trainer.fit(net, batches(40), batches(10))
"""


@pytest.mark.filterwarnings("default")  # of the libraries themselves
@pytest.mark.parametrize(
    ("libraries", "source", "updates", "rows"),
    [
        (("accelerate",), ACCELERATE, 1, 4),
        (("accelerate", "transformers"), TRAINER, 2, 8),
        (("lightning",), LIGHTNING, 2, 8),
    ],
    ids=["accelerate", "transformers", "lightning"],
)
def test_the_loops_of_libraries_are_understood(
    libraries: tuple[str, ...], source: str, updates: int, rows: int, tmp_path: Path
) -> None:
    for library in libraries:
        pytest.importorskip(library)
    source = f"torch.manual_seed(0)\n{source}torch.save([*net.parameters()], __file__ + '.weights')\n"
    found, _ = really_watched(tmp_path, source, time.thread_time)  # other processes use the cores, too
    weights = torch.load(tmp_path / "train.py.weights", weights_only=False)
    assert script.run(str(tmp_path / "train.py"), []) == 0
    alone = torch.load(tmp_path / "train.py.weights", weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(weights, alone, strict=True))
    assert (len(found.steps), found.updates, found.rows, found.loader_workers) == (19, updates, rows, 0)
    # Lightning calls its callbacks and loggers between the phases, which may take more than 5 % of a step
    own = "in no phase" if "lightning" in libraries else "\n"
    assert not [one for one in found.unknown if own not in one.problem]
    assert (found.evaluation_s > 0, found.checkpoint_s > 0) == ("lightning" in libraries,) * 2
    table = ledger.Ledger(found.steps, found.spans).phases
    assert {Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER} <= {*table[-1]}
    assert min(row[UNATTRIBUTED] / sum(row.values()) for row in table) < 0.05


FAILS = """
class Fault(RuntimeError):
    pass


def fault(place):
    if place == PLACE and i % 6 == 4:
        time.sleep(0.05)
        raise Fault


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        fault("backward")
        return g


class Faulty(Net):
    def forward(self, x):
        fault("forward")
        return Backward.apply(super().forward(x))


class Loss(nn.CrossEntropyLoss):
    def forward(self, x, y):
        fault("loss")
        return super().forward(x, y)


class Descent(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        fault("optimizer")
        return super().step()


class Items(Rows):
    def __getitem__(self, at):
        if at % 4 == 0:
            fault("data")
        return super().__getitem__(at)


net, criterion = Faulty(), Loss()
optimizer = Descent(net.parameters(), lr=0.1)
i, batches = -1, iter(DataLoader(Items(96), batch_size=4))
while True:
    i += 1
    try:
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()
    except Fault:
        pass
    except StopIteration:
        break
"""


@pytest.mark.parametrize("place", ["data", "forward", "loss", "backward", "optimizer"])
def test_an_iteration_that_fails_and_is_caught_belongs_to_no_step(place: str, tmp_path: Path) -> None:
    found, recorder = watched(tmp_path, f"PLACE = {place!r}\n{FAILS}")
    assert not recorder.open
    assert len(found.steps) == 24 - 4 - 1
    assert max(one.seconds for one in found.steps) < 1e-3
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert {*map(frozenset, rows)} == {frozenset(rows[0])}, "each step has each phase"
    assert "4 steps follow an iteration that an exception ended" in problems(found)
    assert "skipped" not in problems(found)
    assert all(one.steps == 0 for one in found.unknown)


@pytest.mark.parametrize("fresh", [False, True])
def test_an_optimizer_whose_first_step_fails_does_not_hide_the_steps_after_it(fresh: bool, tmp_path: Path) -> None:
    found, recorder = watched(tmp_path, f"""
class Descent(torch.optim.SGD):
    def step(self, closure=None):
        if not seen:
            seen.append(1)
            raise RuntimeError
        return super().step()


seen = []
optimizer = Descent(net.parameters(), lr=0.1)
for x, y in batches(12):
    try:
        step(x, y)
    except RuntimeError:
        time.sleep(0.05)
        if {fresh}:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
""")  # fmt: skip
    assert not recorder.open
    assert len(found.steps) == 10
    assert max(one.seconds for one in found.steps) < 1e-3


def test_steps_of_which_a_part_came_before_an_exception_are_left_out_and_counted(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
class Faulty(Net):
    def forward(self, x):
        if i in (9, 21) and len(x) > 2:
            time.sleep(0.05)
            raise RuntimeError
        return super().forward(x)


net = Faulty()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for i, (x, y) in enumerate(batches(36)):
    try:
        nn.functional.cross_entropy(net(x), y).backward()
    except RuntimeError:  # the second batch of a step again, in halves
        nn.functional.cross_entropy(net(x[:2]), y[:2]).backward()
        nn.functional.cross_entropy(net(x[2:]), y[2:]).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""")  # fmt: skip
    assert len(found.steps) == 9 - 1 - 2
    assert found.numbers == (4, 6, 7, 9, 10, 11)  # until the first step, each backward may be an update by hand
    assert max(one.seconds for one in found.steps) < 1e-3
    assert "2 steps are left out, because an exception ended a part of their work" in problems(found)


def test_exceptions_in_most_steps_are_a_part_of_the_loop_that_is_not_understood(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
class Enough(Exception):
    pass


class Features(Net):
    def forward(self, x):
        time.sleep(0.002)
        raise Enough


features = Features()
for x, y in batches(12):
    try:
        features(x)
    except Enough:
        pass
    step(x, y)
""")  # fmt: skip
    assert len(found.steps) == 11
    assert min(one.seconds for one in found.steps) > 0.002
    assert [one.steps for one in found.unknown if "an exception ends a part of the work" in one.problem] == [11]


AVERAGES = {
    "by hand": ("""
average = [p.detach().clone() for p in net.parameters()]


def update():
    with torch.no_grad():
        for e, p in zip(average, net.parameters()):
            e.mul_(0.9).add_(p, alpha=0.1)
        time.sleep(0.002)
""", "update()"),
    "decorated": ("""
import copy

average = copy.deepcopy(net)


@torch.no_grad()
def update():
    time.sleep(0.002)
    for e, p in zip(average.state_dict().values(), net.state_dict().values()):
        e.lerp_(p, 0.1)
""", "update()"),
    "torch": ("""
from torch.optim.swa_utils import AveragedModel


def mean(averages, values, number):
    time.sleep(0.002)
    torch._foreach_lerp_(averages, values, 0.1)


average = AveragedModel(net, multi_avg_fn=mean)
average.update_parameters(net)  # the first call only copies
""", "average.update_parameters(net)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", AVERAGES)
def test_averaging_the_weights_after_the_step_belongs_to_the_optimizer(kind: str, tmp_path: Path) -> None:
    before, after = AVERAGES[kind]
    found, _ = watched(tmp_path, f"""{before}
for x, y in batches(12):
    step(x, y)
    {after}
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert len(rows) == 11
    assert all(0.002 < row[Phase.OPTIMIZER] < 0.0021 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


def test_a_block_without_gradients_that_writes_no_weights_is_not_the_optimizers(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
hits = torch.zeros(3)  # of the shape of the bias
for x, y in batches(12):
    step(x, y)
    with torch.no_grad():
        time.sleep(0.002)
        correct = (net.layer.weight @ x.T).argmax(0) == y
        hits += 1
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert all(row[UNATTRIBUTED] > 0.002 and row[Phase.OPTIMIZER] < 0.1e-3 for row in rows)


def test_steps_that_include_a_batch_that_the_script_skips_are_counted(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
for i, (x, y) in enumerate(batches(24)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x * (float("nan") if i % 8 == 4 else 1.0)), y)
    if not torch.isfinite(loss):
        continue
    loss.backward()
    optimizer.step()
""")  # fmt: skip
    assert len(found.steps) == 24 - 3 - 1
    assert "3 steps include a batch that the script skipped before its backward" in problems(found)
    assert [one.steps for one in found.unknown] == [0]


UNLOADED = {
    "the model returns its own loss": (
        """
class Own(Net):
    def forward(self, x, y):
        return nn.functional.cross_entropy(super().forward(x), y)


net = Own()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = batch()
for i in range(24):
    loss = net(x, y) / 2
    x, y = batch()
    loss.backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
""",
        2,
    ),
    "accumulation": (
        """
for i in range(24):
    x, y = batch()
    nn.functional.cross_entropy(net(x), y).backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
""",
        2,
    ),
    "an environment": (
        """
for i in range(12):
    chosen = []
    for _ in range(3):
        x, y = batch()
        chosen.append(net(x).log_softmax(1))
        chosen[-1].argmax().item()
    optimizer.zero_grad()
    torch.cat(chosen).mean().backward()
    optimizer.step()
""",
        3,
    ),
}


@pytest.mark.parametrize("kind", UNLOADED)
def test_batches_that_a_loop_without_a_loader_makes_within_a_step_are_data(kind: str, tmp_path: Path) -> None:
    source, batches = UNLOADED[kind]
    found, _ = watched(tmp_path, f"""
def batch():
    time.sleep(0.002)
    return torch.ones(4, 8), torch.ones(4).long()

{source}""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert len(rows) == 11
    assert [row[Phase.DATA] for row in rows] == pytest.approx([0.002 * batches] * 11, abs=0.1e-3)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


def test_time_in_no_phase_is_named_with_its_steps_and_its_place(tmp_path: Path) -> None:
    source = """
for i, (x, y) in enumerate(batches(24)):
    time.sleep({} if i % 4 == 0 else 0.0)
    step(x, y)
"""
    named = [watched(tmp_path, source.format(seconds))[0].unknown for seconds in (0.002, 0.0002)]
    assert [[(one.problem, one.steps) for one in unknown] for unknown in named] == [
        [("more than 5% of the time is in no phase, most of it after data and before optimizer", 4)], []
    ]  # fmt: skip


SHARPNESS = """
class Sharpness(torch.optim.SGD):
    @torch.no_grad()
    def first_step(self):
        time.sleep(0.002)
        for p in net.parameters():
            p.add_(p.grad, alpha=0.1)


optimizer = Sharpness(net.parameters(), lr=0.1)
for x, y in batches(12):
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.first_step()
    step(x, y)
"""
BLOCKS = {
    "sharpness": (SHARPNESS, Phase.OPTIMIZER),
    "gradients": ("""
for x, y in batches(12):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        time.sleep(0.002)
        for p in net.parameters():
            p.grad.clamp_(-1, 1)
    optimizer.step()
""", Phase.CLIP),
    "gradients and a step": ("""
for i, (x, y) in enumerate(batches(12)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        time.sleep(0.002)
        for p in net.parameters():
            p.grad.clamp_(-1, 1)
        if i > 2:
            optimizer.step()
    if i <= 2:
        optimizer.step()
""", Phase.CLIP),
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_without_gradients_between_backward_and_the_step_has_a_phase(kind: str, tmp_path: Path) -> None:
    source, phase = BLOCKS[kind]
    found, _ = watched(tmp_path, source)
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert len(rows) == 11
    assert all(0.002 < row[phase] < 0.0021 for row in rows)
    assert max(row[UNATTRIBUTED] for row in rows) < 0.1e-3


WRITES = {
    "same": "p.grad.mul_(0.5)",
    "detached": "p.grad.detach().copy_(p.grad / 2)",
    "new": "p.grad = p.grad.clamp(-1, 1)",
    "none": "p.grad.norm()",
}


@pytest.mark.parametrize("kind", WRITES)
def test_gradients_that_the_script_writes_between_backward_and_the_step_are_clipped(kind: str, tmp_path: Path) -> None:
    found, _ = watched(tmp_path, f"""
for x, y in batches(12):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        time.sleep(0.001)
        {WRITES[kind]}
    optimizer.step()
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert len(rows) == 11
    assert all(0.002 < row[UNATTRIBUTED if kind == "none" else Phase.CLIP] < 0.0021 for row in rows)
    assert ("no phase" in problems(found)) == (kind == "none")


def test_accumulation_on_several_devices_is_one_training_from_its_first_backward_on(tmp_path: Path) -> None:
    found, _ = watched(tmp_path, """
import dpbench

wrapped = dpbench.DataParallel(net, device_ids=["cpu", "cpu"])
for i, (x, y) in enumerate(batches(24)):
    nn.functional.cross_entropy(wrapped(x), y).backward()
    if i % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
""")  # fmt: skip
    assert len(found.steps) == 7
    assert found.rows == 12
    assert not found.unknown


def test_a_reduction_that_the_script_calls_is_reduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda gradient: time.sleep(0.001))
    found, _ = watched(tmp_path, """
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
""")  # fmt: skip
    rows = ledger.Ledger(found.steps, found.spans).phases
    assert len(rows) == 11
    assert all(0.002 < row[Phase.REDUCE] < 0.0021 and 0.003 < row[Phase.CLIP] < 0.0031 for row in rows)


def test_processes_that_the_script_starts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda function, nprocs: started.append(nprocs))
    found, _ = watched(tmp_path, "torch.multiprocessing.spawn(step, nprocs=2)")
    assert started == [2]
    assert not found.steps
    assert [one.problem for one in found.unknown] == [seams.SPAWNED]
