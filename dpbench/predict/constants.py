"""Constants: the costs of host operations and messages, each with its source, and the uncertainty
that they cause.

The durations of host operations were measured with torch 2.13 on a virtual machine with an AMD EPYC
processor. The host factor of another machine is the duration of its host operations relative to
these. Constants marked "fitted" were fitted together to published step times of several machines,
with a prior for each constant around its microbenchmark; `benchmarks/prediction/fit_constants.py`
repeats the fit.

The interval of a prediction expresses the uncertainty of the constants. Each constant has a prior:
a standard deviation of its logarithm. The duration of the step is calculated with each constant one
standard deviation above and below its value. The response to a constant is the change of the
logarithm of the duration. Each of 200 random draws adds up the responses with random weights. The
interval contains the middle 80 % of the draws.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from dpbench.records import Case
from dpbench.records.machine import Host, Machine
from dpbench.records.registry import Parallelism
from dpbench.records.work import middle_draws


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of predictions, which are the same for all machines.

    The ends of the names state the units: seconds (`_s`), bytes (`_bytes`) or bytes per second
    (`_bytes_per_s`). There is one exception: the unit of `root_s` is the square root of a second.
    All other constants are ratios.
    """

    launch_s: float = 10e-6
    """The host's time to launch one forward kernel from Python: 9-12 us for a call of nn.Module on
    the CPU; fitted.
    """
    backward_launch_s: float = 6e-6
    """The host's time to launch one backward kernel from autograd's C++ threads, which do not hold
    the interpreter lock: 2-6 us.
    """
    module_s: float = 16.3e-6
    """The host's time to copy one module object for one replica: 13.7-19.7 us on torch 2.13.

    Fitted.
    """
    tensor_s: float = 1.34e-6
    """The host's time to join one tensor into a message (0.4 us on torch 2.13) and to split the
    tensor off again (1.0 us); fitted.
    """
    thread_s: float = 80e-6
    """The host's time to start and join one Python thread: 60-100 us."""
    wake_s: float = 8e-6
    """The host's time to wake up one thread of a pool."""
    update_s: float = 1.0e-6
    """The host's time per parameter tensor in a step of a multi-tensor (foreach) optimizer."""
    hand_off: float = 0.017
    """The relative increase in the duration of a host operation for each other thread that competes
    for the interpreter lock; fitted.
    """
    contention: float = 0.03
    """The relative increase in the duration of a backward launch for each other device on which the
    same process runs backward at the same time.
    """
    forward_share: float = 0.24
    """The share of forward in the total duration of forward and backward, used if only the total is
    known; fitted. In FLOP, the share of forward is 0.33.
    """
    host_share: float = 0.9
    """The largest share of a phase's known duration that the launches of its kernels may take."""
    call_s: float = 28e-6
    """The time to start one collective from a process that drives all devices (torch.cuda.nccl).

    Fitted.
    """
    start_s: float = 38e-6
    """The time to start a collective between processes on one node: fitted to NCCL all-reduce
    curves of A100x8 (superbench-results) and H200x8 (ml-engineering).
    """
    root_s: float = 4.5e-3
    """The factor g of the term g * sqrt(W) in the duration of a collective, where W is the time on
    the wire: 4.5 sqrt(us), from the same fit as `start_s`.
    """
    hop_s: float = 30e-6
    """Half of the time that each doubling of the number of nodes adds to the start of a
    collective.
    """
    bus_scale: float = 1.0
    """The factor by which every bus bandwidth is multiplied.

    It is 1 except in intervals, in calibrations and in the what-if with faster links.
    """
    peer_efficiency: float = 0.85
    """The share of a PCIe path's rate that a collective reaches with peer access."""
    nvlink_efficiency: float = 0.98
    """The share of NVLink's rate that a collective reaches.

    The rate is that of NCCL's table: 20 GB/s per link for Volta and Ampere.
    """
    network_efficiency: float = 0.8
    """The share of a network card's rate that a collective reaches: 0.74 on EFA, and 0.85 on the
    first version of EFA (ml-engineering).
    """
    staged_bytes_per_s: float = 6.5e9
    """The maximum bus bandwidth of an all-reduce that NCCL stages through host memory, for GPUs
    without peer access.
    """
    staged_one_way: float = 1.57
    """The maximum bus bandwidth of a staged broadcast or reduction, which sends data in one
    direction only, relative to `staged_bytes_per_s`; fitted.
    """
    socket_efficiency: float = 0.32
    """The share of the rate of the links between two processors that peer-to-peer writes over these
    links reach.
    """
    pageable_bytes_per_s: float = 4.2e9
    """The rate of a copy from pageable memory to a GPU, during which the calling thread waits: 3-6
    GB/s; fitted.
    """
    copy_s: float = 10e-6
    """The time to start one copy between two devices, or between the host and a device."""
    slowdown: float = 0.06
    """The relative increase in the duration of backward due to DDP's hooks, copies into buckets and
    concurrent collectives: 0.05-0.10.
    """
    staged_slowdown: float = 0.19
    """The additional relative increase in the duration of kernels while a collective is staged
    through host memory. The value is the mean in the literature for collectives of any kind; the
    largest is 0.40 (arXiv 2507.03114).
    """
    variation: float = 0.005
    """The standard deviation of the durations of the ranks' steps, relative to their mean:
    0.001-0.006 for CNNs on 39 H100 hosts.
    """
    chunk_bytes: float = 10.5e6
    """The maximum size of the messages into which torch joins tensors: 10 MiB."""
    memory_bytes_per_s: float = 500e9
    """The memory bandwidth of a GPU if its machine file does not state one."""

    def __hash__(self) -> int:
        return self._hash  # cached, because every look-up of a bus hashes the constants

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def changed(self, **values: Any) -> Constants:
        """Return a copy of the constants with new `values`, by name.

        Raises ValueError for an unknown name.
        """
        known = {f.name for f in fields(self)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"these names of constants are unknown: {', '.join(unknown)}; the known names are "
                f"{', '.join(sorted(known))}"
            )
        return replace(self, **values)


DEFAULT = Constants()


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """The duration in seconds of each operation on a host, and `hand_off`, the slowdown by other
    threads.

    If an operation was measured on the host, its duration is the measured one; that of a launch
    holds in forward and in backward. Otherwise, it is the duration in `Constants`, multiplied by
    the host factor. `hand_off` is the relative increase in a duration for each other thread that
    competes for the interpreter lock.
    """

    launch_s: float
    backward_launch_s: float
    module_s: float
    tensor_s: float
    thread_s: float
    wake_s: float
    update_s: float
    hand_off: float

    @classmethod
    def of(cls, host: Host, constants: Constants) -> HostCosts:
        """Return the costs on a described host."""

        def cost(name: str, measured: float | None = None) -> float:
            return host.factor * getattr(constants, name) if measured is None else measured

        return cls(
            launch_s=cost("launch_s", host.launch_s),
            backward_launch_s=cost("backward_launch_s", host.launch_s),
            module_s=cost("module_s", host.module_s),
            tensor_s=cost("tensor_s", host.tensor_s),
            thread_s=cost("thread_s", host.thread_s),
            wake_s=cost("wake_s"),
            update_s=cost("update_s"),
            hand_off=constants.hand_off if host.hand_off is None else host.hand_off,
        )


DRAWS = 200
HOST_FACTOR = "host"
"""The name of the prior of a machine's host factor.

All other priors in `STATED` have the names of constants.
"""
STATED = {
    HOST_FACTOR: 0.15,
    "bus_scale": 0.6,
    "forward_share": 0.12,
    "pageable_bytes_per_s": 0.3,
    "slowdown": 0.7,
    "variation": 0.7,
    "launch_s": 0.3,
}
"""The priors for a machine that is fully described: the standard deviation of each constant's
logarithm, by name.

The bus has a wide prior, because descriptions are often wrong about it. With 0.2, the 80 %
intervals contained 66 % of 1,818 published steps of all-reduces. With 0.6, they contain 76 %, and
the interval score is better (lower).

For torch.nn.DataParallel, intervals with 0.3 would contain 80 % of 398 published steps instead of
88 %, and the mean interval score would be 0.52 instead of 0.56. The prior remains 0.6, because 0.3
suits the TITAN RTX only: for the RTX 2080 Ti, it raises the score from 0.51 to 0.61. No steps of a
third machine are published.
"""
MEASURED_BUS = 0.1
"""The standard deviation of the logarithm of a bus bandwidth that was measured.

Replaces the prior in `STATED`.
"""
APART = {
    Parallelism.RANKS: ("launch_s",),
    Parallelism.THREADS: ("slowdown", "variation"),
    Parallelism.NONE: (),
    Parallelism.OTHER: (),
}
"""For each kind of parallelism, the names of the priors that are ignored, because they have little
or no effect on the duration of a step.
"""
RESIDUAL = {"measured": 0.02, "given": 0.03, "traced": 0.3, "counted": 0.6}
"""The standard deviation of log(duration) of a step on one device, by the source of the profile.

Durations predicted from traces differ by at most 34 % from four published steps. Durations
predicted from counts were compared with 161 published steps. For half of these steps, the
prediction is off by more than a factor of two: the nets are light, the hosts are from 2019-21, and
the predicted step is too short. Of the 33 steps that keep a GPU busy, a fifth are predicted with an
error of more than 32 %.
"""


@lru_cache(maxsize=8)
def _normal(columns: int) -> tuple[tuple[float, ...], ...]:
    """Return `DRAWS` rows of `columns` random numbers from the standard normal distribution, the
    same at every call.
    """
    source = random.Random(20250607)
    return tuple(tuple(source.gauss(0.0, 1.0) for _ in range(columns)) for _ in range(DRAWS))


COLUMNS = ("residual", *STATED, "features")
"""The causes of errors, in the order of the columns of random numbers.

A cause has the same random numbers in all predictions. The errors that it causes in two steps are
thus correlated. "features" are the counts of a model that are estimated from its number of
parameters, as benchmarks/prediction does.
"""


def drawn(
    step_s: float,
    evaluate: Callable[[str, float], float],
    priors: Mapping[str, float],
    residual: float,
) -> tuple[float, ...]:
    """Return log(duration / step_s) in each of the `DRAWS` random draws of a step's duration.

    `step_s` is the predicted duration. `evaluate(name, factor)` returns the duration with the
    constant `name` multiplied by `factor`. `priors` maps the names of constants to the standard
    deviations of their logarithms. `residual` is the standard deviation of log(duration) due to all
    other causes.
    """
    responses = []
    for name, deviation in priors.items():
        down, up = (
            math.log(max(1e-12, evaluate(name, math.exp(sign * deviation))) / step_s)
            for sign in (-1, 1)
        )
        if abs(down) > 1e-9 or abs(up) > 1e-9:
            responses.append((COLUMNS.index(name), down, up))
    found = []
    for draw in _normal(len(COLUMNS)):
        moved = draw[0] * residual
        for column, down, up in responses:
            z = draw[column]
            moved += z * up if z > 0 else -z * down
        found.append(moved)
    return tuple(found)


def interval(step_s: float, draws: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 80 % interval of a duration in seconds, from draws of log(duration /
    step_s).
    """
    low, high = middle_draws(draws)
    return step_s * math.exp(min(0.0, low)), step_s * math.exp(max(0.0, high))


def priors_of(case: Case, machine: Machine) -> dict[str, float]:
    """Return the priors of the constants that affect the duration of a case's step on a machine.

    A prior is the standard deviation of a constant's logarithm; the keys are the names of the
    constants.
    """
    apart = APART[case.traits.parallelism]
    found = {name: deviation for name, deviation in STATED.items() if name not in apart}
    return found | ({"bus_scale": MEASURED_BUS} if machine.collective else {})


def scaled(constants: Constants, name: str, factor: float) -> Constants:
    """Return the constants with the constant `name` multiplied by `factor`.

    The product is limited to 0.9 if `name` ends in "_share". If `name` is "slowdown", the constant
    `staged_slowdown` is multiplied by `factor`, too.
    """
    if name == "slowdown":
        return constants.changed(
            slowdown=constants.slowdown * factor, staged_slowdown=constants.staged_slowdown * factor
        )
    value = getattr(constants, name) * factor
    return constants.changed(**{name: min(0.9, value) if name.endswith("_share") else value})
