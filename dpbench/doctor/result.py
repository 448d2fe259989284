"""Result: the examined machine with its findings and its picture, for all that shows it."""

from __future__ import annotations

import msgspec

from dpbench.analysis.summary import FAKE_GPU
from dpbench.doctor import faults, picture
from dpbench.doctor.examination import Examination, MadeCopy
from dpbench.doctor.faults import Examined
from dpbench.records import Source, fake
from dpbench.records.disturbance import NOISY
from dpbench.records.facts import Gpus, RunFacts


def result(machine: Examined, started_s: float) -> Examination:
    """Return the result for a machine; `started_s` is in seconds since the epoch."""
    findings = faults.found(machine)
    done, undone = faults.checked(machine)
    copies = _copies(machine)
    boxes, links = picture.of(machine, copies, findings)
    gpus = Gpus(driver=machine.software.get("driver"), gpus=tuple(machine.gpus))
    fakes = machine.gpus and fake.fake_gpus(RunFacts(gpus=gpus))
    return Examination(
        started_s=started_s,
        labels=(
            Source.MEASURED.upper(),
            *([FAKE_GPU] if fakes else []),
            *([NOISY] if machine.busy else []),
        ),
        findings=tuple(findings),
        checked=tuple(done),
        unchecked=tuple(undone),
        gpus=tuple(machine.described or msgspec.to_builtins(machine.gpus)),
        software=machine.software,
        copies=copies,
        all_reduce_bytes_per_s=(machine.all_reduce.bytes_per_s or None)
        if machine.all_reduce
        else None,
        boxes=boxes,
        links=links,
    )


def _copies(machine: Examined) -> tuple[MadeCopy, ...]:
    return tuple(
        MadeCopy(
            source=one.copy.source,
            target=one.copy.target,
            way=one.copy.way,
            bytes_per_s=one.bytes_per_s,
            promised_bytes_per_s=machine.carried(one.copy),
            wrong=one.wrong,
            failure=one.failure,
        )
        for one in machine.transfers
    )
