"""Schedules: the ways in which the engine can run a step, as positions of eight switches.

The ladder is a series of named schedules, its rungs, each of which changes one more switch. A
schedule is written as the name of a rung (`"cached"`) or as switches with positions
(`"workers=pool,replicas=cached"`). The table `RULES` defines the permitted combinations.
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
}
"""The positions of each switch; the first form the rung `reference`: torch's DataParallel."""

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
}
"""The switch, and its new position, of each rung above `reference`, in ladder order."""
EFFECTS: dict[str, str] = {
    "pool": "threads persist between steps",
    "cached": "replicas are refreshed and not rebuilt",
    "flat_storage": "parameters move in one buffer",
    "persistent": "each device keeps its replica",
    "local_loss": "each device computes its part of the loss",
    "local_backward": "each device runs its own backward",
    "overlap": "gradients are added during backward",
    "allreduce": (
        "every device updates its own weights, and must notice all other writes to weights"
    ),
    "flat_optimizer": "the optimizer updates one buffer",
    "zero1": (
        "each device updates a part of the weights, and must notice all other writes to weights"
    ),
}
"""The effect of each rung's switch position, as a clause."""

REFERENCE = "reference"
COPYING = "copying"
FASTEST = "fastest"

TRAIN_STEP = "TrainStep"
RULES: tuple[tuple[str, str, str], ...] = (
    ("replicas", "persistent", TRAIN_STEP),
    ("loss", "local", TRAIN_STEP),
    ("backward", "local", "loss=local"),
    ("backward", "local", "replicas=persistent"),
    ("update", "each", "replicas=persistent"),
    ("update", "sharded", "replicas=persistent"),
    ("optimizer", "flat", TRAIN_STEP),
    ("optimizer", "flat", "storage=flat"),
)
"""(switch, position, need): the switch may have this position only if the need is met.

A need is a position of another switch, or the use of TrainStep. Persistent replicas need TrainStep,
because DataParallel cannot detect the optimizer's step: the weights of the replicas would be
outdated, or would be overwritten between a forward and its backward.
"""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A way to run a step: one position for each switch.

    `parse` reads the text that `str()` returns.
    """

    workers: str = "spawn"
    replicas: str = "rebuilt"
    storage: str = "separate"
    loss: str = "gathered"
    backward: str = "joint"
    reduce: str = "after"
    update: str = "root"
    optimizer: str = "per_parameter"

    def __post_init__(self) -> None:
        for switch, positions in SWITCHES.items():
            if getattr(self, switch) not in positions:
                raise ValueError(
                    f"the switch {switch} must be one of {', '.join(positions)}, not"
                    f" {getattr(self, switch)!r}"
                )

    def __str__(self) -> str:
        name = next((name for name, schedule in RUNGS.items() if schedule == self), "")
        return name or ",".join(
            f"{switch}={position}" for switch, position in self.turned().items()
        )

    def turned(self) -> dict[str, str]:
        """Return, by switch, the positions that differ from those of `reference`."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }

    def missing(self, *, train_step: bool = True) -> list[str]:
        """Return a text for each need of this schedule that is not met.

        `train_step` is whether TrainStep runs the schedule.
        """
        return [
            f"{switch}={position} needs {need}"
            for switch, position, need in RULES
            if getattr(self, switch) == position and not self._meets(need, train_step=train_step)
        ]

    def _meets(self, need: str, *, train_step: bool) -> bool:
        switch, _, position = need.partition("=")
        return getattr(self, switch) == position if position else train_step

    def check(self, *, train_step: bool = True) -> Schedule:
        """Return the schedule. Raises ValueError if one of its needs is not met; see `missing`."""
        if missing := self.missing(train_step=train_step):
            raise ValueError(
                f"the schedule {str(self)!r} cannot run, because needs are not met:"
                f" {'; '.join(missing)}"
            )
        return self


def _climb() -> dict[str, Schedule]:
    rungs = {REFERENCE: Schedule()}
    below = REFERENCE
    for name, (switch, position) in LADDER.items():
        rungs[name] = replace(rungs[below], **{switch: position})
        below = name
    return rungs


RUNGS: dict[str, Schedule] = {}
RUNGS.update(_climb())
BEST = [*RUNGS][-1]
"""The highest rung."""

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
"""The names for which TrainStep selects an exact schedule, and the schedule if all is permitted.

Under `copying`, every step copies device 0's weights to the other devices, so that it need not
notice when a training loop writes weights. Under `fastest`, a device may keep the weights that it
has updated itself. It does not set reduce=overlap, which helps only if the link between the devices
is idle during backward.
"""


def parse(text: str | Schedule) -> Schedule:
    """Return the schedule of the name of a rung, or of switches as `switch=position,...`.

    Raises ValueError for an unknown name, and for those in `SELECTED`, whose schedules only
    TrainStep can select.
    """
    if isinstance(text, Schedule):
        return text
    if text in RUNGS:
        return RUNGS[text]
    if "=" not in text:
        known = ", ".join((*RUNGS, *SELECTED))
        raise ValueError(
            f"unknown schedule {text!r}; give one of {known}, or switches, such as"
            " workers=pool,replicas=cached"
        )
    given: dict[str, str] = {}
    for part in text.split(","):
        switch, _, position = part.strip().partition("=")
        if switch not in SWITCHES:
            raise ValueError(
                f"unknown switch {switch!r} in schedule {text!r}; known switches:"
                f" {', '.join(SWITCHES)}"
            )
        if switch in given:
            raise ValueError(f"schedule {text!r} sets {switch} twice")
        given[switch] = position
    return Schedule(**given)


def known(text: str | Schedule) -> Schedule | None:
    """Return the schedule that `text` describes; None for names in `SELECTED` or of other versions.

    Stored runs keep the names of the version that measured them.
    """
    try:
        return parse(text)
    except ValueError:
        return None


def available(text: str) -> bool:
    """Return whether this version of dpbench has the schedule `text` of a stored case.

    Other strategies have the empty text. Stored runs keep the schedules of the version that
    measured them.
    """
    return text in ("", *SELECTED) or known(text) is not None


def ablations(best: Schedule) -> dict[str, Schedule]:
    """Return, by switch, `best` with this switch set back to its first position.

    Schedules whose needs are not met are left out.
    """
    back = {switch: replace(best, **{switch: SWITCHES[switch][0]}) for switch in best.turned()}
    return {switch: schedule for switch, schedule in back.items() if not schedule.missing()}
