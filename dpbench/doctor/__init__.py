"""Doctor: find out why this machine is slow for several GPUs, and what would help."""

from __future__ import annotations

from dpbench.records.siblings import Sibling

SIBLING = Sibling(
    commands={"doctor": "dpbench.doctor.commands:doctor"},
    section="dpbench.doctor.page:section",
    links="dpbench.doctor.examination:about_links",
)
