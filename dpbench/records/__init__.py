"""Records: the data types of dpbench, for cases, trials, schedules and estimates.

Besides the standard library, the package imports only msgspec, which checks types.
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
from dpbench.records.series import Sample, Span, Step
from dpbench.records.trial import SCHEMA, Fault, Memory, Source, Status, Trial, Verified

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
]
