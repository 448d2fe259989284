"""Constants: the costs of host operations and messages, their sources, and their uncertainty.

The durations of host operations were measured with torch 2.13 on a virtual machine with an AMD EPYC
processor; the host factor of another machine is relative to these. Constants marked "fitted" were
fitted together to published step times of several machines, with a prior for each constant around
its microbenchmark; `benchmarks/prediction/fit_constants.py` repeats the fit.

The interval of a prediction expresses the uncertainty of the constants. The prior of a constant is
the standard deviation of its logarithm. The step is calculated with each constant one standard
deviation above and below its value; the response is the change of the logarithm of the duration.
Each of 200 random draws adds up the responses with random weights. The interval contains the middle
80 % of the draws.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from statistics import NormalDist

from dpbench.predict.machine import Host, Machine
from dpbench.records import Case
from dpbench.records.registry import Parallelism
from dpbench.records.work import middle_draws


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of predictions, which are the same for all machines.

    Names end in their units: seconds (`_s`, but square root of a second for `root_s`), bytes
    (`_bytes`) or bytes per second (`_bytes_per_s`). All other constants are ratios.
    """

    launch_s: float = 10e-6
    """Launch of one forward kernel from Python: 9-12 us for an nn.Module on the CPU; fitted."""
    backward_launch_s: float = 6e-6
    """Launch of one backward kernel from autograd's C++ threads, without the GIL: 2-6 us."""
    module_s: float = 16.3e-6
    """Copy of one module object for one replica: 13.7-19.7 us on torch 2.13; fitted."""
    tensor_s: float = 1.34e-6
    """Joining a tensor into a message (0.4 us on torch 2.13) and splitting it off (1.0); fitted."""
    thread_s: float = 80e-6
    """Start and join of one Python thread: 60-100 us."""
    wake_s: float = 8e-6
    """Waking up one thread of a pool."""
    update_s: float = 1.0e-6
    """Host time per parameter tensor in a step of a multi-tensor (foreach) optimizer."""
    hand_off: float = 0.017
    """Relative slowdown of a host operation by each other thread that needs the GIL; fitted."""
    contention: float = 0.03
    """Relative slowdown of a backward launch by each other device of the same process."""
    forward_share: float = 0.24
    """The share of forward in a known total with backward; fitted. In FLOP, it is 0.33."""
    host_share: float = 0.9
    """The largest share of a phase's known duration that the launches of its kernels may take."""
    call_s: float = 28e-6
    """Start of one collective from a process that drives all devices (torch.cuda.nccl); fitted."""
    start_s: float = 38e-6
    """Start of a collective between processes on one node.

    Fitted to NCCL all-reduce curves of A100x8 (superbench-results) and H200x8 (ml-engineering).
    """
    root_s: float = 4.5e-3
    """g in the term g * sqrt(wire time) of a collective: 4.5 sqrt(us), fitted like `start_s`."""
    hop_s: float = 30e-6
    """Half of the time that each doubling of the nodes adds to the start of a collective."""
    host_scale: float = 1.0
    """Factor of the costs of a host: 1 except in intervals and with a faster host."""
    bus_scale: float = 1.0
    """Factor of bus bandwidths: 1 except in intervals, calibrations and with faster links."""
    delivered: float = 1.0
    """The share of its links' rates that a machine delivers: 1 except in intervals.

    Nine machines in ten deliver all. One in ten delivers down to a twentieth, as those do whose
    NVLinks or peer access are not in use, or whose messages share one network card.
    """
    peer_efficiency: float = 0.85
    """The share of a PCIe path's rate that a collective reaches with peer access."""
    nvlink_efficiency: float = 0.98
    """A collective's share of NVLink's rate in NCCL's table (Volta, Ampere: 20 GB/s a link)."""
    network_efficiency: float = 0.8
    """A collective's share of a network card's rate: 0.74-0.85 on EFA (ml-engineering)."""
    staged_bytes_per_s: float = 6.5e9
    """Maximum bus bandwidth of an all-reduce staged through host memory, without peer access."""
    staged_one_way: float = 1.57
    """Bus bandwidth of a staged broadcast or reduction / `staged_bytes_per_s`; fitted."""
    socket_efficiency: float = 0.32
    """The share of the rate between two processors that peer-to-peer writes reach."""
    pageable_bytes_per_s: float = 4.2e9
    """Blocking copy from pageable memory to a GPU: 3-6 GB/s; fitted."""
    copy_s: float = 10e-6
    """Start of one copy between two devices, or between the host and a device."""
    slowdown: float = 0.06
    """Relative slowdown of backward by DDP's hooks, copies and collectives: 0.05-0.10."""
    staged_slowdown: float = 0.19
    """Additional relative slowdown of kernels during a collective staged through host memory.

    The mean in the literature for collectives of any kind; the largest is 0.40 (arXiv 2507.03114).
    """
    variation: float = 0.005
    """Relative standard deviation of ranks' step durations: 0.001-0.006 (CNNs, 39 H100 hosts)."""
    chunk_bytes: float = 10.5e6
    """The maximum size of the messages into which torch joins tensors: 10 MiB."""
    memory_bytes_per_s: float = 500e9
    """The memory bandwidth of a GPU if its machine file does not state one."""

    def __hash__(self) -> int:
        return self._hash  # cached, because every look-up of a bus hashes the constants

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))


DEFAULT = Constants()


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """The seconds of each operation on a host.

    Durations are those measured on the host, that of a launch for forward and backward alike, or
    else those in `Constants` multiplied by the host factor. `hand_off` is the relative slowdown by
    each other thread; without an interpreter lock, there is none unless it was measured without it.
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
            described_s: float = host.factor * getattr(constants, name)
            return constants.host_scale * (described_s if measured is None else measured)

        hand_off = host.hand_off if host.gil is host.measured_gil else None
        if hand_off is None:
            hand_off = constants.hand_off if host.gil else 0.0
        return cls(
            launch_s=cost("launch_s", host.launch_s),
            backward_launch_s=cost("backward_launch_s", host.launch_s),
            module_s=cost("module_s", host.module_s),
            tensor_s=cost("tensor_s", host.tensor_s),
            thread_s=cost("thread_s", host.thread_s),
            wake_s=cost("wake_s"),
            update_s=cost("update_s"),
            hand_off=hand_off,
        )


DRAWS = 200
END = 1.2816
"""The end of the middle 80 % of a normal distribution, in standard deviations."""
FREEDOM = 4
"""The degrees of freedom of Student's t for what machines lose beyond the model.

With 4, a source that is far from all others hardly moves a fit to few sources (Lange, Little and
Taylor, "Robust Statistical Modeling Using the t Distribution", 1989).
"""


def students_quantile(share: float) -> float:
    """Return the quantile of Student's t with `FREEDOM` degrees of freedom, in closed form."""
    alpha = 4 * share * (1 - share)
    root = math.cos(math.acos(math.sqrt(alpha)) / 3) / math.sqrt(alpha)
    return math.copysign(2 * math.sqrt(max(0.0, root - 1)), share - 0.5)


@dataclass(frozen=True, kw_only=True)
class Prior:
    """How far constants may be from their values.

    `deviation` is the standard deviation of their logarithm for a described machine; with `linear`,
    it is relative to their values.
    """

    deviation: float
    constants: tuple[str, ...] = ()
    """The constants that are multiplied by one factor; () for that of the prior's name."""
    most: float = math.inf
    """The upper limit of the constants."""
    linear: bool = False
    nodes: tuple[float, ...] = (-1.0, 1.0)
    """Where the response of a step is calculated, in deviations."""
    quantile: Callable[[float], float] = NormalDist().inv_cdf
    """The deviation in a share of all draws."""
    ordered: bool = False
    """Whether the draws are in the order of their deviations."""
    without: tuple[Parallelism, ...] = ()
    """The kinds of parallelism whose steps the constants hardly affect."""

    def factor(self, deviation: float, node: float) -> float:
        """Return the factor of the constants at `node`, in multiples of `deviation`."""
        return 1 + deviation * node if self.linear else math.exp(deviation * node)


COMPUTE = "compute"
"""The prior of the device's computation in a traced or counted profile.

Its standard deviation is in `RESIDUAL`. It changes forward, backward, loss and optimizer before the
step is simulated, so that it does not cancel in the ratio of steps that also communicate.
"""
PRIORS = {
    # evidence on the host factor of published runs lies between 1 and 3
    "host_scale": Prior(deviation=0.35),
    "bus_scale": Prior(deviation=0.3),
    # the deviation is the logarithm of the largest reduction; the last draws are those that deliver
    # less: see `middle_draws`
    "delivered": Prior(
        deviation=3.0,
        nodes=(-1.0, -0.6, -0.3),
        quantile=lambda share: min(0.0, 10 * (0.9 - share)),
        ordered=True,
    ),
    "forward_share": Prior(deviation=0.12, most=0.9),
    "pageable_bytes_per_s": Prior(deviation=0.3),
    # a slowdown may be near zero, but is never negative
    "slowdown": Prior(
        deviation=1.0,
        constants=("slowdown", "staged_slowdown"),
        linear=True,
        nodes=(-1.0, 2.0),
        quantile=lambda share: max(-1.0, NormalDist().inv_cdf(share)),
        without=(Parallelism.THREADS,),
    ),
    "variation": Prior(deviation=0.7, without=(Parallelism.THREADS,)),
    "launch_s": Prior(deviation=0.3, without=(Parallelism.RANKS,)),
}
"""The priors of the constants, by name."""
APART = {
    # a step may hide computation behind copies, so its response is exact at the interval's ends
    COMPUTE: Prior(deviation=0.0, nodes=(-END, END)),
    "deviation": Prior(deviation=0.0, quantile=students_quantile),
}
"""The priors whose deviations are not constants: those of `RESIDUAL` and `Deviation`."""
USUAL = Prior(deviation=0.0)
ASSUMED_BUS = 0.6
"""The deviation of a bus bandwidth if the machine's description rests on assumptions."""
MEASURED_HOST, MEASURED_BUS = 0.15, 0.1
"""The deviations of a host and of a bus bandwidth that were measured."""
RESIDUAL = {"measured": 0.02, "given": 0.03, "traced": 0.3, "counted": 0.6}
"""The standard deviation of log(duration) of a step on one device, by the source of the profile.

For traced and counted profiles it is that of the prior `COMPUTE`.

Durations predicted from traces differ by at most 34 % from four published steps. Those predicted
from counts were compared with 162 published steps. For half of these, the prediction is too short
by more than a factor of two: the nets are light, and the hosts are from 2019-21. Of the 34 steps
that keep a GPU busy, a fifth are predicted with an error of more than 32 %.
"""


def _prior(name: str) -> Prior:
    return PRIORS.get(name) or APART.get(name) or USUAL


@lru_cache(maxsize=64)
def column(name: str) -> tuple[float, ...]:
    """Return the deviation of a prior in each of the `DRAWS` draws, the same at every call.

    The deviations are the quantiles of their distribution in random order. All predictions use the
    same ones, so the errors of two steps with the same cause are correlated.
    """
    prior = _prior(name)
    deviations = [prior.quantile((number + 0.5) / DRAWS) for number in range(DRAWS)]
    if not prior.ordered:
        random.Random(name).shuffle(deviations)
    return tuple(deviations)


def drawn(
    step_s: float,
    evaluate: Callable[[str, float], float],
    priors: Mapping[str, float],
    residual: float,
) -> tuple[float, ...]:
    """Return log(duration / step_s) in each of the `DRAWS` random draws of a step's duration.

    `evaluate(name, factor)` returns the duration in seconds with the constant `name` multiplied by
    `factor`. `priors` maps names of constants to the standard deviations of their logarithms;
    `residual` is that of the duration due to all other causes.
    """
    draws = [residual * deviation for deviation in column("residual")]
    for name, deviation in priors.items():
        prior = _prior(name)
        points = [(0.0, 0.0)]
        for node in prior.nodes:
            moved_s = evaluate(name, prior.factor(deviation, node))
            points.append((node, math.log(max(1e-12, moved_s) / step_s)))
        if max(abs(response) for _, response in points) > 1e-9:
            nodes, responses = zip(*sorted(points), strict=True)
            causes = column("residual" if name == COMPUTE else name)
            draws = [
                moved + _between(nodes, responses, cause)
                for moved, cause in zip(draws, causes, strict=True)
            ]
    return tuple(draws)


def _between(xs: Sequence[float], ys: Sequence[float], at: float) -> float:
    """Return the value at `at` of the line through points, continued beyond both ends.

    `xs` ascend.
    """
    right = min(max(1, bisect.bisect(xs, at)), len(xs) - 1)
    x0, x1 = xs[right - 1 : right + 1]
    y0, y1 = ys[right - 1 : right + 1]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def interval(step_s: float, draws: Sequence[float]) -> tuple[float, float]:
    """Return the 80 % interval of a duration in seconds, from draws of log(duration / step_s)."""
    low, high = middle_draws(draws)
    return step_s * math.exp(min(0.0, low)), step_s * math.exp(max(0.0, high))


def priors_of(case: Case, machine: Machine) -> dict[str, float]:
    """Return the deviations of the priors that affect a case's step on a machine, by name."""
    priors = {
        name: prior.deviation
        for name, prior in PRIORS.items()
        if case.traits.parallelism not in prior.without
    }
    if machine.assumed:
        priors["bus_scale"] = ASSUMED_BUS
    if machine.host.launch_s is not None:
        priors["host_scale"] = MEASURED_HOST
    if machine.collective:
        priors["bus_scale"] = MEASURED_BUS
        del priors["delivered"]
    return priors


def scaled(constants: Constants, name: str, factor: float) -> Constants:
    """Return the constants with those of a prior multiplied by `factor`, up to their limit."""
    prior = _prior(name)
    names = prior.constants or (name,)
    values = {one: min(prior.most, getattr(constants, one) * factor) for one in names}
    return replace(constants, **values)
