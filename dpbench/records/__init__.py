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
    host_device,
    marked,
    no_mark,
    rows_of_chunks,
)
from dpbench.records.series import Sample, Span, Step
from dpbench.records.trial import SCHEMA, Fault, Memory, Source, Status, Trial, Verified

__all__ = [
    "HOST",
    "host_device",
    "rows_of_chunks",
    "UNATTRIBUTED",
    "CASE_FIELDS",
    "HABITS",
    "Phase",
    "Mark",
    "no_mark",
    "marked",
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
