"""Records: the data types of dpbench, for cases, trials and estimates.

All of them are immutable. The package imports only the standard library and, for machine files, msgspec.
"""

from dpbench.records.case import (
    CASE_FIELDS,
    HABITS,
    HOST,
    UNATTRIBUTED,
    Case,
    Effort,
    Mark,
    Phase,
    chunk_sizes,
    host_device,
    no_mark,
)
from dpbench.records.series import Sample, Step
from dpbench.records.trial import SCHEMA, Fault, Memory, Source, Span, Status, Trial, Verified
from dpbench.records.work import Cost, Profile, Task

__all__ = [
    "HOST",
    "host_device",
    "chunk_sizes",
    "UNATTRIBUTED",
    "CASE_FIELDS",
    "HABITS",
    "Phase",
    "Mark",
    "no_mark",
    "Case",
    "Effort",
    "SCHEMA",
    "Source",
    "Status",
    "Fault",
    "Verified",
    "Span",
    "Sample",
    "Step",
    "Memory",
    "Trial",
    "Cost",
    "Profile",
    "Task",
]
