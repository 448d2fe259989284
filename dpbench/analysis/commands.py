"""Commands: the full `dpbench` command that measures or predicts given cases, as text to paste into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from dpbench.hardware.provenance import Resources
from dpbench.records import Case, plan, registry, schedule

GPUS = "rtx-3090-x8"
"""The described machine for which a prediction is suggested to a user without several GPUs."""
PREDICTABLE = ("fp32", "bf16")
"""The precisions that `dpbench predict` knows."""
_DEFAULT = {f.name: f.default for f in fields(Case)}


def measure(cases: Sequence[Case], *extra: str, machine: Resources) -> str:
    """Return the `dpbench run` command that measures `cases`, which must differ only in strategy, devices and batch.

    The command may select further cases: all combinations of the strategies, the numbers of devices and the batch
    sizes. `extra` are further arguments. On a `machine` with GPUs, cases on the CPU need an option. Return "" for cases
    on several machines, which a single command cannot start, and for models that only predictions know.
    """
    one = cases[0]
    if any(case.hosts > 1 for case in cases) or not (":" in one.model or one.model in registry.own("models")):
        return ""
    parts = ["dpbench", "run", *_model(one), *_strategies(cases), "--devices", _list(case.devices for case in cases)]
    shares = {case.batch_size // case.devices for case in cases}
    weak = len(shares) == 1 < len({case.batch_size for case in cases})
    parts += (
        ["--batch-per-device", str(*shares)] if weak else ["--batch-sizes", _list(case.batch_size for case in cases)]
    )
    return shlex.join([*parts, *_setting(one, machine), *extra])


def predict(case: Case, machine: str = GPUS) -> str:
    """Return the `dpbench predict` command for the work of `case` on one and more GPUs of a described machine.

    Return "" if `dpbench predict` does not know the precision of the case.
    """
    if case.precision not in PREDICTABLE:
        return ""
    precision = ["--precision", case.precision] if case.precision != _DEFAULT["precision"] else []
    return shlex.join(
        ["dpbench", "predict", "--machine", machine, *_model(case), "--size", case.size, "--batch-sizes",
         str(case.batch_size), "--devices", "1,2,4,8", *precision]
    )  # fmt: skip


def at_batch(cases: Iterable[Case], factor: float) -> list[Case]:
    """Return the cases with their batch sizes multiplied by `factor`, rounded down, but at least 1."""
    return [replace(case, batch_size=max(1, int(case.batch_size * factor))) for case in cases]


def _model(case: Case) -> list[str]:
    return ["--model" if ":" in case.model else "--models", case.model]


def _strategies(cases: Sequence[Case]) -> list[str]:
    """Return the options for the strategies and schedules of the cases, the one-device strategies first."""
    ordered = sorted(cases, key=lambda case: (not case.traits.one_device, case.devices))
    names = [*dict.fromkeys(case.strategy for case in ordered)]
    listed, own = [name for name in names if ":" not in name], [name for name in names if ":" in name]
    schedules = [*dict.fromkeys(case.schedule for case in cases if case.schedule)]
    found = ["--strategies", ",".join(listed)] if listed else []
    for name in own:
        found += ["--strategy", name]
    return found + (["--schedules", ";".join(schedules)] if schedules not in ([], [schedule.REFERENCE]) else [])


def _setting(case: Case, machine: Resources) -> list[str]:
    """Return the options for the settings of a case that differ from the defaults of `dpbench run`."""
    found: list[str] = []
    # without the option, the default is cuda on a machine with GPUs
    if case.device_kind == "emulated" or (case.device_kind == "cpu" and machine.gpus):
        found += ["--device-kind", case.device_kind]
    for name, option in (
        ("device_ids", "--device-ids"), ("size", "--size"), ("precision", "--precision"), ("inputs", "--inputs"),
        ("read_loss", "--read-loss"), ("zero_grad", "--zero-grad"), ("device_memory_bytes", "--device-memory"),
    ):  # fmt: skip
        value = getattr(case, name)
        if value != _DEFAULT[name]:
            found += [option, _list(value) if isinstance(value, tuple) else str(value)]
    if case.placement != plan.PLACEMENTS[0]:
        found += ["--placement", case.placement]
    return found + (["--compile"] if case.compile else [])


def _list(values: Iterable[object]) -> str:
    """Return the values without duplicates, in ascending order, separated by commas."""
    return ",".join(map(str, sorted(set(values), key=lambda value: (isinstance(value, str), value))))
