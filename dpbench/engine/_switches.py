"""Switches: what a schedule changes in the step, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from dpbench.records.schedule import Schedule

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

@dataclass(frozen=True, kw_only=True)
class Switches:
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
        return str(next(name for name, switches in OF.items() if switches == self))


_POOL = {"workers": "pool"}
_LOCAL = {**_POOL, "replicas": "persistent", "loss": "local", "backward": "local"}
OF: dict[Schedule, Switches] = {
    Schedule.REFERENCE: Switches(),
    Schedule.POOL: Switches(**_POOL),
    Schedule.CACHED: Switches(**_POOL, replicas="cached"),
    Schedule.LOCAL: Switches(**_LOCAL),
    Schedule.ALLREDUCE: Switches(**_LOCAL, update="each"),
    Schedule.SHARDED: Switches(**_LOCAL, storage="flat", update="sharded", optimizer="flat"),
}
