"""Schedules: the engine's ways to run one step, as ten switches; each rung of the ladder turns one of them.

A schedule is written as the name of a rung (`"cached"`), which includes the switches of all rungs below, or switch by
switch (`"workers=pool,replicas=cached"`). The table `RULES` defines the permitted combinations.
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
"""The positions of each switch. The rung `reference`, which does the same as torch, has the first of each."""

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
"""The switch and position that each rung above `reference` adds, in ladder order."""

REFERENCE = "reference"
FASTEST = "fastest"
"""The name for the schedule that TrainStep itself chooses from the exact schedules."""

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
"""(switch, position, need); a need is a position of another switch, TrainStep, or a kind of device.

Persistent replicas need TrainStep, because DataParallel does not see the optimizer's step: the replicas' weights would
be stale, or would be overwritten between a forward and its backward.
"""

TOLERANCE = (("comm_dtype", "bf16"),)
"""The positions whose results equal `reference` within a tolerance only."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One position for each switch; `parse` reads the text that `str()` returns."""

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
                raise ValueError(f"{switch} must be one of {', '.join(positions)}, not {getattr(self, switch)!r}")

    def __str__(self) -> str:
        name = next((name for name, schedule in RUNGS.items() if schedule == self), "")
        return name or ",".join(f"{switch}={position}" for switch, position in self.turned().items())

    def turned(self) -> dict[str, str]:
        """Return the switches whose positions differ from `reference`, with their positions."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def exact(self) -> bool:
        """Return whether weights stay bitwise equal to those of `reference` if gradients are added in replica order.

        Gradients are added in replica order except on several distinct GPUs, where NCCL chooses the order. There,
        `reference` uses torch's coalesced reduction (as torch.nn.DataParallel does), and replicas that are kept between
        steps use another collective, so results agree only within the rounding of their dtype.
        """
        return not any(getattr(self, switch) == position for switch, position in TOLERANCE)

    def needs(self, *conditions: str) -> list[tuple[str, str]]:
        """Return pairs (`switch=position`, need) for the needs that neither the schedule nor `conditions` meet.

        `conditions` may include TRAIN_STEP and CUDA.
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
        """Return the schedule unchanged. Raises ValueError, with a list of the needs, if any need is not met."""
        if missing := self.missing(*conditions):
            raise ValueError(f"schedule {str(self)!r} cannot run here: {'; '.join(missing)}")
        return self


def _climb() -> dict[str, Schedule]:
    """Return the schedule of every rung; each turns one switch more than the rung below.

    The rung `graphs` is an exception, because most machines cannot run it: the rung after it continues from the rung
    before it. A graph contains a whole backward, with which no reduction can overlap. Therefore `graphs` also sets
    reduce=after.
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
    """Return the schedule that `text` describes: a rung's name, or switches as `switch=position,...`.

    Raises ValueError for unknown names, with the known ones, and for `fastest`, which only TrainStep can resolve.
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
            raise ValueError(f"schedule {text!r} sets {switch} twice")
        given[switch] = position
    return Schedule(**given)


def climb(*conditions: str) -> list[str]:
    """Return the names of the rungs that can run under `conditions` (TRAIN_STEP, CUDA), in ladder order."""
    return [name for name, schedule in RUNGS.items() if not schedule.missing(*conditions)]


def best(*conditions: str) -> Schedule:
    """Return the schedule that the ablations start from: the highest runnable rung that is exact and without graphs."""
    return [RUNGS[name] for name in climb(*conditions) if RUNGS[name].exact and RUNGS[name].graphs == "off"][-1]


def ablations(best: Schedule, *conditions: str) -> dict[str, Schedule]:
    """Return, by switch, the permitted schedule that differs from `best` only in that switch, which is set back."""
    back = {switch: replace(best, **{switch: SWITCHES[switch][0]}) for switch in best.turned()}
    return {switch: schedule for switch, schedule in back.items() if not schedule.missing(*conditions)}
