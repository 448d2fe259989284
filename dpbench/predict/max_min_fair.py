"""Sharing: what each of several flows gets of the resources that they all cross, by max-min fairness."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Flow = TypeVar("Flow", bound=Hashable)
Resource = TypeVar("Resource", bound=Hashable)


def rates(flows: Mapping[Flow, Sequence[Resource]], capacity: Mapping[Resource, float]) -> dict[Flow, float]:
    """Return each flow's rate: no flow can get more without taking from one that has no more than it.

    Progressive filling: all rates grow together until a resource is full, whose flows then stay as they are.
    """
    left = dict(capacity)
    crossing: dict[Resource, set[Flow]] = {}
    for flow, way in flows.items():
        for resource in way:
            crossing.setdefault(resource, set()).add(flow)
    found: dict[Flow, float] = {}
    while crossing:
        full = min(crossing, key=lambda resource: left[resource] / len(crossing[resource]))
        share = left[full] / len(crossing[full])
        for flow in tuple(crossing[full]):
            found[flow] = share
            for resource in flows[flow]:
                left[resource] = max(0.0, left[resource] - share)
                users = crossing.get(resource)
                if users is not None:
                    users.discard(flow)
                    if not users:
                        del crossing[resource]
    return found
