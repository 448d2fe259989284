"""Constants: what operations of the host and messages cost, each with where the figure comes from.

Seconds of host operations hold for a host factor of 1: torch 2.13 on a virtual machine with an AMD EPYC processor.
Those that say so were fitted, jointly over machines, to published step times, near what was measured of each alone;
`benchmarks/scripts/fit_constants.py` fits them again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Figures of mechanisms, the same on all machines; seconds, bytes a second, or ratios."""

    launch_s: float = 10e-6
    """A kernel of forward launched through Python: 9-12 us for a call of nn.Module on the CPU; fitted."""
    backward_launch_s: float = 6e-6
    """The same from autograd's C++ threads, which take no interpreter lock: 2-6 us."""
    module_s: float = 16.3e-6
    """One module copied for one replica: 13.7-19.7 us on torch 2.13; fitted."""
    tensor_s: float = 1.34e-6
    """One tensor joined into a message and cut out again: 0.4 + 1.0 us on torch 2.13; fitted."""
    thread_s: float = 80e-6
    """A Python thread started and joined: 60-100 us."""
    wake_s: float = 8e-6
    """A thread of a pool woken up."""
    update_s: float = 1.0e-6
    """One parameter in an optimizer that goes over lists of tensors."""
    hand_off: float = 0.017
    """What a launch costs more for each other thread that wants the interpreter, as a ratio; fitted."""
    contention: float = 0.03
    """What backward's launches cost more for each other device's thread, as a ratio."""
    forward_share: float = 0.24
    """Forward's share of forward and backward, where only their sum is known; fitted, 0.33 by FLOP."""
    host_share: float = 0.9
    """The largest part of a known step that launching may take up."""
    call_s: float = 28e-6
    """A message from one process that drives all devices (torch.cuda.nccl); fitted."""
    start_s: float = 38e-6
    """A collective's start on one node: fitted to NCCL all-reduce curves of A100x8 (superbench-results) and
    H200x8 (ml-engineering)."""
    root_s: float = 4.5e-3
    """The curve's second term, g * sqrt(W): 4.5 sqrt(us), from the same fit."""
    hop_s: float = 30e-6
    """What a doubling of the nodes adds to a collective's start."""
    bus_scale: float = 1.0
    """What every bus bandwidth is multiplied with: 1 but for its doubt, and on machines that were calibrated."""
    peer_efficiency: float = 0.85
    """What a collective gets of a PCIe path with peer access."""
    nvlink_efficiency: float = 0.98
    """What a collective gets of NVLink's rate by NCCL's own table (20 GB/s a link for Volta and Ampere)."""
    network_efficiency: float = 0.8
    """What a collective gets of a network card: 0.74 on EFA, 0.85 on its first version (ml-engineering)."""
    staged_bytes_per_s: float = 6.5e9
    """What NCCL moves through host memory in an all-reduce, where GPUs do not reach each other's, links allowing."""
    staged_one_way: float = 1.57
    """A broadcast or a reduction through host memory, against that: data goes one way only; fitted."""
    socket_efficiency: float = 0.32
    """What GPUs that write to each other get of the links between two processors, which carry far more for others."""
    pageable_bytes_per_s: float = 4.2e9
    """A copy from memory that is not pinned: 3-6 GB/s, and the calling thread waits; fitted."""
    copy_s: float = 10e-6
    """A copy's start."""
    slowdown: float = 0.06
    """What DDP's hooks, copies into buckets and collectives beside it cost backward, as a ratio: 0.05-0.10."""
    staged_slowdown: float = 0.19
    """What kernels lose besides while a collective through host memory runs: the literature's mean for collectives of
    any kind, with 0.40 as the worst (arXiv 2507.03114)."""
    variation: float = 0.005
    """A rank's step varies by so much (standard deviation, ratio): 0.001-0.006 for CNNs on 39 H100 hosts."""
    chunk_bytes: float = 10.5e6
    """torch joins tensors into messages of at most 10 MiB."""
    memory_bytes_per_s: float = 500e9
    """A GPU's memory, where its machine is known by its links alone."""

    def __hash__(self) -> int:
        return self._hash  # asked for at every look-up of a bus

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def changed(self, **values: Any) -> Constants:
        """Return the constants with some of them replaced; an unknown name is an error."""
        known = {f.name for f in fields(self)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown constants {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return replace(self, **values)


DEFAULT = Constants()
