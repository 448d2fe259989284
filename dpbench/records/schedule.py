"""Schedules: the ways in which the engine can run a step; a schedule is a combination of positions of ten switches.

The ladder is a series of named schedules, which are its rungs: each rung changes one more switch than the rung below. A
schedule is written as the name of a rung (`"cached"`) or as switches with positions (`"workers=pool,replicas=cached"`).
The table `RULES` defines the permitted combinations.
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
"""The positions of each switch. The first positions form the rung `reference`, which works as torch's DataParallel."""

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
"""The switch that each rung above `reference` changes, and the new position of this switch, in ladder order."""
EFFECTS: dict[str, str] = {
    "pool": "threads persist between steps",
    "cached": "replicas are refreshed and not rebuilt",
    "flat_storage": "parameters move in one buffer",
    "persistent": "each device keeps its replica",
    "local_loss": "each device computes its part of the loss",
    "local_backward": "each device runs its own backward",
    "overlap": "gradients are added during backward",
    "allreduce": "every device updates its own weights, and must notice all other writes to weights",
    "flat_optimizer": "the optimizer updates one buffer",
    "zero1": "each device updates a part of the weights, and must notice all other writes to weights",
    "graphs": "a CUDA graph replays the kernels",
    "bf16_comm": "gradients move in bf16",
}
"""The effect of the switch position that each rung sets, as a clause."""

REFERENCE = "reference"
COPYING, FASTEST = "copying", "fastest"

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
"""Rules as (switch, position, need): the switch may have this position only if the need is met.

A need is a position of another switch, the use of TrainStep, or CUDA devices. Persistent replicas need TrainStep,
because DataParallel cannot detect the optimizer's step: the weights of the replicas would be outdated, or would be
overwritten between a forward and its backward.
"""

TOLERANCE = (("comm_dtype", "bf16"),)
"""The (switch, position) pairs with which results equal those of `reference` only within a tolerance."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A way to run a step: one position for each switch. `parse` reads the text that `str()` returns."""

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
                raise ValueError(
                    f"the switch {switch} must be one of {', '.join(positions)}, not {getattr(self, switch)!r}"
                )

    def __str__(self) -> str:
        name = next((name for name, schedule in RUNGS.items() if schedule == self), "")
        return name or ",".join(f"{switch}={position}" for switch, position in self.turned().items())

    def turned(self) -> dict[str, str]:
        """Return, by switch, the positions that differ from those of `reference`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def exact(self) -> bool:
        """Return whether weights stay bitwise equal to those under `reference` if gradients are added in replica order.

        Gradients are added in replica order except on several distinct GPUs, where NCCL chooses the order. There,
        `reference` uses torch's coalesced reduction, as torch.nn.DataParallel does, but schedules that keep replicas
        between steps use another collective. The results of the two agree only within rounding errors of the dtype.
        """
        return not any(getattr(self, switch) == position for switch, position in TOLERANCE)

    def needs(self, *conditions: str) -> list[tuple[str, str]]:
        """Return the unmet needs of this schedule, as pairs of (`switch=position`, need).

        A need is met by another switch of the schedule or by `conditions`, which may include TRAIN_STEP and CUDA.
        """
        unmet = []
        for switch, position, need in RULES:
            other, _, wanted = need.partition("=")
            if getattr(self, switch) == position and not (
                getattr(self, other) == wanted if wanted else need in conditions
            ):
                unmet.append((f"{switch}={position}", need))
        return unmet

    def missing(self, *conditions: str) -> list[str]:
        """Return a text for each need of this schedule that is not met under `conditions`."""
        return [f"{turned} needs {need}" for turned, need in self.needs(*conditions)]

    def check(self, *conditions: str) -> Schedule:
        """Return the schedule unchanged. Raises ValueError if one of its needs is not met under `conditions`."""
        if missing := self.missing(*conditions):
            raise ValueError(f"the schedule {str(self)!r} cannot run, because needs are not met: {'; '.join(missing)}")
        return self


def _climb() -> dict[str, Schedule]:
    """Return the schedule of every rung, by name; each rung changes one more switch than the rung below.

    The rung `graphs` is an exception in two ways. It also sets reduce=after: a CUDA graph contains a whole backward, so
    no reduction can overlap with a part of backward. The next rung starts from the rung below `graphs`, not from
    `graphs`, which most machines cannot run.
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


SELECTED: dict[str, Schedule] = {
    COPYING: Schedule(workers="pool", replicas="persistent", loss="local", backward="local"),
    FASTEST: Schedule(
        workers="pool",
        replicas="persistent",
        storage="flat",
        loss="local",
        backward="local",
        update="sharded",
        optimizer="flat",
    ),
}
"""The names for which TrainStep selects an exact schedule, each with the schedule that it selects
if module, loss and optimizer permit every switch.

Under `copying`, every step copies device 0's weights to the other devices, so that it need not
notice when a training loop writes weights. Under `fastest`, a device may keep the weights that it
has updated itself. It does not set reduce=overlap, which helps only if the link between the devices
is idle during backward.
"""


def parse(text: str | Schedule) -> Schedule:
    """Return the schedule that `text` describes: the name of a rung, or switches as `switch=position,...`.

    A `Schedule` is returned unchanged. Raises ValueError for an unknown name, and for the names in
    `SELECTED`, because only TrainStep can select their schedules.
    """
    if isinstance(text, Schedule):
        return text
    if text in RUNGS:
        return RUNGS[text]
    if "=" not in text:
        known = ", ".join((*RUNGS, *SELECTED))
        raise ValueError(
            f"unknown schedule {text!r}; give one of {known}, or switches, such as workers=pool,replicas=cached"
        )
    given: dict[str, str] = {}
    for part in text.split(","):
        switch, _, position = part.strip().partition("=")
        if switch not in SWITCHES:
            raise ValueError(f"unknown switch {switch!r} in schedule {text!r}; known switches: {', '.join(SWITCHES)}")
        if switch in given:
            raise ValueError(f"schedule {text!r} sets {switch} twice")
        given[switch] = position
    return Schedule(**given)


def known(text: str | Schedule) -> Schedule | None:
    """Return the schedule that `text` describes; None for the names in `SELECTED`, and for those of other versions.

    Stored runs keep the names of the version that measured them.
    """
    try:
        return parse(text)
    except ValueError:
        return None


def climb(*conditions: str) -> list[str]:
    """Return the names of the rungs whose needs are met under `conditions` (TRAIN_STEP, CUDA), in ladder order."""
    return [name for name, schedule in RUNGS.items() if not schedule.missing(*conditions)]


def best(*conditions: str) -> Schedule:
    """Return the highest exact rung without CUDA graphs that can run under `conditions` (TRAIN_STEP, CUDA)."""
    return [RUNGS[name] for name in climb(*conditions) if RUNGS[name].exact and RUNGS[name].graphs == "off"][-1]


def ablations(best: Schedule, *conditions: str) -> dict[str, Schedule]:
    """Return, by switch, the schedule that equals `best` except that this switch is set back to its first position.

    Schedules that cannot run under `conditions` are left out.
    """
    back = {switch: replace(best, **{switch: SWITCHES[switch][0]}) for switch in best.turned()}
    return {switch: schedule for switch, schedule in back.items() if not schedule.missing(*conditions)}
