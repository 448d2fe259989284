"""Predict: the time and memory of a training step on a described but unavailable machine."""

from __future__ import annotations

from dpbench.records.siblings import Sibling

SIBLING = Sibling(
    commands={"predict": "dpbench.predict.commands:predict"},
    listed={"machines": "dpbench.predict.machine:rows"},
    rules="dpbench.predict.findings:RULES",
    outlook="dpbench.predict.outlook:outlook",
    prediction="dpbench.predict.suggestion:command",
)
