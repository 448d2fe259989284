"""Schedules: the engine's ways to run one step, as ten switches; the ladder turns one of them a rung.

A schedule is written as a rung's name (`"cached"`), which stands for every switch turned so far, or switch by
switch (`"workers=pool,replicas=cached"`). What may be combined is one table, `RULES`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

SWITCHES: dict[str, tuple[str, ...]] = {
    "workers": ("spawn", "pool", "serial"),
    "replicas": ("rebuilt", "cached", "persistent"),
    "storage": ("separate", "flat"),
    "loss": ("gathered", "local"),
    "backward": ("joint", "local"),
    "reduce": ("after", "overlap"),
    "update": ("root", "each", "sharded"),
    "optimizer": ("per_parameter", "flat"),
    "graphs": ("off", "on"),
    "comm_dtype": ("none", "bf16"),
}
"""Each switch's positions; `reference`, which does what torch does, has the first of each."""

LADDER: dict[str, tuple[str, str]] = {
    "pool": ("workers", "pool"),
    "cached": ("replicas", "cached"),
    "flat_storage": ("storage", "flat"),
    "persistent": ("replicas", "persistent"),
    "local_loss": ("loss", "local"),
    "local_backward": ("backward", "local"),
    "overlap": ("reduce", "overlap"),
    "allreduce": ("update", "each"),
    "flat_optimizer": ("optimizer", "flat"),
    "zero1": ("update", "sharded"),
    "graphs": ("graphs", "on"),
    "bf16_comm": ("comm_dtype", "bf16"),
}
"""The one switch that each rung above `reference` turns, in the order of the climb."""

REFERENCE = "reference"
FASTEST = "fastest"
"""The name of the schedule that TrainStep chooses itself, among those that need no tolerance."""

TRAIN_STEP, CUDA = "TrainStep", "cuda"
RULES: tuple[tuple[str, str, str], ...] = (
    ("replicas", "persistent", TRAIN_STEP),
    ("loss", "local", TRAIN_STEP),
    ("backward", "local", "loss=local"),
    ("backward", "local", "replicas=persistent"),
    ("update", "each", "replicas=persistent"),
    ("update", "sharded", "replicas=persistent"),
    ("optimizer", "flat", TRAIN_STEP),
    ("optimizer", "flat", "storage=flat"),
    ("graphs", "on", CUDA),
    ("graphs", "on", "backward=local"),
    ("graphs", "on", "reduce=after"),
)
"""(switch, position, what it needs): another position, TrainStep, or a kind of device.

Replicas that persist need TrainStep, because DataParallel does not see the optimizer's step: the weights it kept
would be stale, or be overwritten between a forward and its backward.
"""

TOLERANCE = (("comm_dtype", "bf16"),)
"""The positions whose results equal `reference` within a tolerance only."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One position for each switch; `str()` writes it so that `parse` reads it."""

    workers: str = "spawn"
    replicas: str = "rebuilt"
    storage: str = "separate"
    loss: str = "gathered"
    backward: str = "joint"
    reduce: str = "after"
    update: str = "root"
    optimizer: str = "per_parameter"
    graphs: str = "off"
    comm_dtype: str = "none"

    def __post_init__(self) -> None:
        for switch, positions in SWITCHES.items():
            if getattr(self, switch) not in positions:
                raise ValueError(f"{switch} is one of {', '.join(positions)}, not {getattr(self, switch)!r}")

    def __str__(self) -> str:
        name = next((name for name, schedule in RUNGS.items() if schedule == self), "")
        return name or ",".join(f"{switch}={position}" for switch, position in self.turned().items())

    def turned(self) -> dict[str, str]:
        """Return the switches that do not stand as in `reference`, with their positions."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def exact(self) -> bool:
        """Tell whether weights stay bitwise equal to those of `reference`, wherever gradients are added in order.

        That is everywhere but on distinct GPUs, which have NCCL: it adds in an order of its own, `reference` in that
        of torch's coalesced reduction (as torch.nn.DataParallel does), and kept replicas in that of their collective,
        so that results agree within the rounding of their dtype.
        """
        return not any(getattr(self, switch) == position for switch, position in TOLERANCE)

    def needs(self, *conditions: str) -> list[tuple[str, str]]:
        """Return pairs (`switch=position`, need) of needs that neither the schedule nor `conditions` meet.

        `conditions` are TRAIN_STEP and CUDA.
        """
        found = []
        for switch, position, need in RULES:
            other, _, wanted = need.partition("=")
            if getattr(self, switch) == position and not (
                getattr(self, other) == wanted if wanted else need in conditions
            ):
                found.append((f"{switch}={position}", need))
        return found

    def missing(self, *conditions: str) -> list[str]:
        """Return the needs that are not met under `conditions`, as text."""
        return [f"{turned} needs {need}" for turned, need in self.needs(*conditions)]

    def check(self, *conditions: str) -> Schedule:
        """Return the schedule; raise ValueError naming each condition that it misses."""
        if missing := self.missing(*conditions):
            raise ValueError(f"schedule {str(self)!r} cannot run here: {'; '.join(missing)}")
        return self


def _climb() -> dict[str, Schedule]:
    """Return every rung's schedule, each one switch beyond the one below.

    Graphs are a side step, because most machines cannot take it: they hold whole backwards, which leaves nothing to
    overlap with, and the rung after them stands on the one before them.
    """
    below = Schedule()
    rungs = {REFERENCE: below}
    for name, (switch, position) in LADDER.items():
        rungs[name] = replace(below, **{switch: position})
        if switch == "graphs":
            rungs[name] = replace(rungs[name], reduce="after")
        else:
            below = rungs[name]
    return rungs


RUNGS: dict[str, Schedule] = {}
RUNGS.update(_climb())


def parse(text: str | Schedule) -> Schedule:
    """Return the schedule that a rung's name or `switch=position,...` stands for.

    Raises ValueError for what it does not know, with the known names; `fastest` is TrainStep's to resolve.
    """
    if isinstance(text, Schedule):
        return text
    if text in RUNGS:
        return RUNGS[text]
    if "=" not in text:
        known = ", ".join((*RUNGS, FASTEST))
        raise ValueError(
            f"unknown schedule {text!r}; known: {known}; or switches, such as workers=pool,replicas=cached"
        )
    given: dict[str, str] = {}
    for part in text.split(","):
        switch, _, position = part.strip().partition("=")
        if switch not in SWITCHES:
            raise ValueError(f"unknown switch {switch!r} in schedule {text!r}; known: {', '.join(SWITCHES)}")
        if switch in given:
            raise ValueError(f"schedule {text!r} turns {switch} twice")
        given[switch] = position
    return Schedule(**given)


def climb(*conditions: str) -> list[str]:
    """Return the names of the rungs that can run under `conditions` (TRAIN_STEP, CUDA), in ladder order."""
    return [name for name, schedule in RUNGS.items() if not schedule.missing(*conditions)]


def best(*conditions: str) -> Schedule:
    """Return the schedule that the ablations take one switch away from: the top exact rung, graphs apart."""
    return [RUNGS[name] for name in climb(*conditions) if RUNGS[name].exact and RUNGS[name].graphs == "off"][-1]


def ablations(best: Schedule, *conditions: str) -> dict[str, Schedule]:
    """Return the schedules that differ from `best` by one switch set back, by that switch's name; the legal ones."""
    back = {switch: replace(best, **{switch: SWITCHES[switch][0]}) for switch in best.turned()}
    return {switch: schedule for switch, schedule in back.items() if not schedule.missing(*conditions)}
