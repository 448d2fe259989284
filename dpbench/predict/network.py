"""Links as a graph: the way from one node to another, and what a collective may carry over all ways together."""

from __future__ import annotations

from collections import deque
from functools import lru_cache

from dpbench.predict.max_min_fair import rates
from dpbench.records.machine import HOST_NODE, Link, Machine, Unknown

Direction = tuple[str, str]


@lru_cache(maxsize=4096)
def route(machine: Machine, source: str, target: str) -> tuple[Direction, ...]:
    """Return the directed links of the way with the fewest hops, NVLink before anything else.

    `host` stands for the memory of the processor nearest to the other end. Without peer access two GPUs meet in host
    memory, unless NVLink joins them.
    """
    links = machine.links
    if "host" not in (source, target):
        over = _shortest([link for link in links if link.kind == "nvlink"], source, target)
        if over:
            return over
        if not machine.peer_access:
            return (*route(machine, source, "host"), *route(machine, "host", target))
        links = tuple(link for link in links if link.kind != "nvlink")
    found = _shortest(links, source, target)
    if not found and source != target:
        raise Unknown(f"machine {machine.name}: no way from {source} to {target}; its links are {_listed(machine)}")
    return found


def _listed(machine: Machine) -> str:
    return ", ".join(f"{link.a}-{link.b}" for link in machine.links)


def _shortest(links: tuple[Link, ...] | list[Link], source: str, target: str) -> tuple[Direction, ...]:
    """Return the directions of the way with the fewest hops; () where there is none."""
    beside: dict[str, list[str]] = {}
    for link in links:
        beside.setdefault(link.a, []).append(link.b)
        beside.setdefault(link.b, []).append(link.a)
    starts = [n for n in beside if n.startswith(HOST_NODE)] if source == "host" else [source]
    came: dict[str, str] = dict.fromkeys(starts, "")
    todo = deque(starts)
    while todo:
        here = todo.popleft()
        if here == target or (target == "host" and here.startswith(HOST_NODE)):
            way = []
            while came[here]:
                way.append((came[here], here))
                here = came[here]
            return tuple(way[::-1])
        # a copy never goes through a GPU on its way
        for other in beside.get(here, ()) if here == source or not here.startswith("gpu") else ():
            if other not in came:
                came[other] = here
                todo.append(other)
    return ()


@lru_cache(maxsize=1024)
def capacities(machine: Machine) -> dict[Direction, float]:
    """Return each direction's bytes a second; parallel links add up."""
    found: dict[Direction, float] = {}
    for link in machine.links:
        for way in ((link.a, link.b), (link.b, link.a)):
            found[way] = found.get(way, 0.0) + link.bytes_per_s
    return found


@lru_cache(maxsize=1024)
def nvlink_cut(machine: Machine, count: int) -> float:
    """Return what NVLink alone lets through the tightest cut between the first `count` GPUs; 0 if it joins not all.

    Bytes a second in each direction: rings of a collective cross every cut, so none can carry more.
    """
    gpus = [f"gpu{i}" for i in range(count)]
    return _tightest([link for link in machine.links if link.kind == "nvlink" and _inside(link, gpus)], gpus)


@lru_cache(maxsize=1024)
def ring(machine: Machine, count: int, *, closed: bool) -> tuple[float, str]:
    """Return what each hop of a ring over the first `count` GPUs gets, and the worst kind of hop: peer, staged, socket.

    All hops carry at once and share links fairly; a chain that is not `closed` has no last hop, as a broadcast has
    none.
    """
    hops = [(f"gpu{i}", f"gpu{(i + 1) % count}") for i in range(count if closed else count - 1)]
    ways = {hop: route(machine, *hop) for hop in hops}
    rate = min(rates(ways, capacities(machine)).values())
    over = [_processors(way) for way in ways.values()]
    if not machine.peer_access and any(over):
        return rate, "staged"
    return rate, "socket" if any(len(found) > 1 for found in over) else "peer"


def _processors(way: tuple[Direction, ...]) -> set[str]:
    """Return the processors on a way."""
    return {end for direction in way for end in direction if end.startswith(HOST_NODE)}


def _inside(link: Link, gpus: list[str]) -> bool:
    """Tell whether a link joins these GPUs and switches alone."""
    return link.kind != "network" and all(not end.startswith("gpu") or end in gpus for end in (link.a, link.b))


def _tightest(links: list[Link], gpus: list[str]) -> float:
    """Return the least cut that separates any two of the GPUs."""
    if len(gpus) < 2:
        return sum(link.bytes_per_s for link in links if gpus[0] in (link.a, link.b))
    return min(_flow(links, gpus[0], other) for other in gpus[1:])


def _flow(links: list[Link], source: str, target: str) -> float:
    """Return the largest flow from one node to another, by augmenting shortest ways."""
    room: dict[str, dict[str, float]] = {}
    for link in links:
        for a, b in ((link.a, link.b), (link.b, link.a)):
            room.setdefault(a, {})[b] = room.get(a, {}).get(b, 0.0) + link.bytes_per_s
    total = 0.0
    while True:
        came: dict[str, str] = {source: ""}
        todo = deque([source])
        while todo and target not in came:
            here = todo.popleft()
            for other, left in room.get(here, {}).items():
                if left > 0 and other not in came:
                    came[other] = here
                    todo.append(other)
        if target not in came:
            return total
        way, here = [], target
        while came[here]:
            way.append((came[here], here))
            here = came[here]
        least = min(room[a][b] for a, b in way)
        for a, b in way:
            room[a][b] -= least
            room[b][a] = room[b].get(a, 0.0) + least
        total += least
