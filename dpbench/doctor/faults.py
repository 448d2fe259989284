"""Faults: what slows several GPUs on an examined machine, what it costs, and what would help.

Each rule reads the examined machine and yields its findings. `wrong` findings are faults that a
change removes, and set the exit code; the others are limits of the hardware, or a load during the
examination, that a user should know. A rule without its data yields nothing, and `checked` says
what was not checked.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from dpbench.analysis.validity import SLOWDOWNS
from dpbench.doctor.examination import DIRECT, PINNED, STAGED, Finding
from dpbench.doctor.system import LANE_BYTES_PER_S, PciDevice, System
from dpbench.doctor.transfers import Copy, Transfer, copies
from dpbench.hardware import nvml, shared_memory
from dpbench.hardware.shared_memory import SharedMemory
from dpbench.records import HOST, words
from dpbench.records.boxes import SLOW
from dpbench.records.facts import Gpu

KINDS = {"gpu": "GPU", "nic": "network card"}
"""The names of devices that share a switch."""
LOCKED_BYTES = 2**26
"""The least locked memory for network cards that access memory directly."""
THROTTLING = {bit: SLOWDOWNS[bit] for bit in (0x08, 0x20, 0x40, 0x80)}
"""The causes of lower clocks that are faults: a power cap and a boost of several GPUs are none."""
HARMFUL: Mapping[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every launch waits for its kernel"),
    "NCCL_P2P_DISABLE": (("1",), "NCCL copies between GPUs through the host's memory"),
    "NCCL_SHM_DISABLE": (("1",), "NCCL sends through the network within the machine"),
    "NCCL_IB_DISABLE": (("1",), "NCCL does not use InfiniBand"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "NCCL writes a log of each communicator"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "torch checks each collective on all ranks"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ((), "every tensor is allocated by the driver"),
}
"""Environment variables, the values that make steps slower, () for all, and what these do."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of which the cost of a slow link is a share.

    `name` says whose they are, and `weights_bytes` are those of their model. `parallel_s` and
    `ddp_s` are the seconds of a step of DataParallel and of DistributedDataParallel, 0 if unknown.
    """

    name: str
    weights_bytes: float
    parallel_s: float = 0.0
    ddp_s: float = 0.0


STANDARD = Steps(
    name="a step that computes for 100 ms, with the 102 MB of weights of a ResNet-50",
    weights_bytes=102.2e6,
    parallel_s=0.1,
    ddp_s=0.1,
)
"""The steps without a run on the machine."""


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """The result of an all-reduce over all GPUs, one process per GPU.

    `bytes_per_s` is what each rank sent per second, 0 without a result; `failure` then says why.
    """

    bytes_per_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """An examined machine.

    `gpus` are the facts of NVML for each GPU that torch can use, in CUDA's order, and `described`
    the same with those that no rule reads, as plain data. `unused` says why torch cannot use a GPU
    that is there. `switching` is the module whose import switches Python's interpreter lock on when
    torch makes an optimizer, "" without one. `peers` has the ordered pairs of GPUs with peer
    access, None if unknown. `foreign` has the bytes that other processes hold on each GPU, None for
    a process if unknown, and `busy` says how much of the cores they took, "" if not too much.
    `software` has the versions of torch and what it is built with, and of the driver and the CUDA
    that it supports, each "" if unknown. `no_kernels` are the GPUs for which torch's build has no
    kernels. `memory_bytes_per_s` counts the bytes that a copy in the host's memory reads and
    writes, 0 if unknown. During the copies, `readings` has the throttle reasons of GPUs, and
    `generations` the highest generation of their PCIe links.
    """

    system: System
    gpus: Sequence[Gpu] = ()
    described: Sequence[Mapping[str, Any]] = ()
    unused: str = ""
    peers: frozenset[tuple[int, int]] | None = None
    transfers: Sequence[Transfer] = ()
    all_reduce: AllReduce | None = None
    foreign: Mapping[int, Mapping[int, int | None]] = field(default_factory=dict)
    busy: str = ""
    readings: Mapping[int, int] = field(default_factory=dict)
    generations: Mapping[int, int] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    no_kernels: Sequence[int] = ()
    memory_bytes_per_s: float = 0.0
    variables: Mapping[str, str] = field(default_factory=dict)
    switching: str = ""
    steps: Steps = STANDARD

    def pci(self, gpu: int) -> PciDevice | None:
        """Return the PCIe device of a GPU; None if its address is unknown."""
        return self.system.pci.get(self.gpus[gpu].pci_address or "")

    def promised(self, gpu: int) -> float:
        """Return what the PCIe link of a GPU can carry, in bytes per second; 0 if unknown."""
        facts = self.gpus[gpu]
        return _pcie(facts.pcie_generation or 0, facts.pcie_width or 0)

    def nvlinks(self, source: int, target: int) -> int:
        """Return the number of active NVLinks between two GPUs, directly or through NVSwitch."""
        return nvml.nvlinks(self.gpus[source], self.gpus[target])

    def nvlinked(self, source: int, target: int) -> float:
        """Return what the NVLinks between two GPUs carry each way, in bytes per second; 0 without.

        It is 0 too if NVML does not tell where the links end, or their rate.
        """
        rates = (self.gpus[gpu].nvlinks.bytes_per_s or 0.0 for gpu in (source, target))
        return self.nvlinks(source, target) * min(rates)

    def carried(self, copy: Copy) -> float:
        """Return what the links on the way of a copy promise, in bytes per second; 0 if unknown.

        A copy through the host's memory crosses the PCIe links one after the other.
        """
        if not copy.between_gpus:
            return self.promised(max(copy.ends))
        both = [self.promised(gpu) for gpu in copy.ends]
        staged = copy.way == STAGED or (self.peers is not None and copy.ends not in self.peers)
        if staged:
            return 1 / sum(1 / rate for rate in both) if min(both) else 0.0
        return self.nvlinked(*copy.ends) or min(both)

    def of(self, way: str) -> list[Transfer]:
        """Return the transfers of a way that ended."""
        return [one for one in self.transfers if one.copy.way == way and not one.failure]


def _pcie(generation: int, width: int) -> float:
    return LANE_BYTES_PER_S.get(generation, 0.0) * width


Rule = Callable[[Examined], Iterator[Finding]]


def found(machine: Examined) -> list[Finding]:
    """Return the findings of all rules, the faults first."""
    every = [finding for rule in RULES for finding in rule(machine)]
    return sorted(every, key=lambda finding: not finding.wrong)


def _cost(machine: Examined, rate: float, promised: float) -> str:
    """Return what a link at a lower rate costs as a share of the machine's steps.

    DataParallel sends the weights and returns the gradients, and DDP adds gradients in a ring.
    """
    steps = machine.steps
    gpus = max(2, len(machine.gpus))
    longer_s = steps.weights_bytes * (1 / rate - 1 / promised)
    longer = (
        ("DataParallel", 2 * longer_s, steps.parallel_s),
        ("DDP", 2 * (gpus - 1) / gpus * longer_s, steps.ddp_s),
    )
    costs = [
        f"up to {words.time(more_s)} ({words.percent(more_s / step_s)}) in {name}"
        for name, more_s, step_s in longer
        if step_s
    ]
    return f"{steps.name}, takes longer on {words.count(gpus, 'GPU')}: {' and '.join(costs)}"


def _rate(bytes_per_s: float) -> str:
    return f"{words.number(bytes_per_s / 1e9)} GB/s"


def _corrupt(machine: Examined) -> Iterator[Finding]:
    for one in machine.transfers:
        if one.wrong:
            change, undo = _remedy(machine, one.copy)
            yield Finding(
                name="corrupt transfer",
                says=f"{one.copy}: bytes arrive changed, so that training computes wrong numbers",
                evidence=f"{words.count(one.wrong, 'byte')} of the pattern differ on arrival",
                cost="every result of several GPUs on this machine is in doubt",
                gpus=_gpus_of(one.copy),
                change=change,
                undo=undo,
            )


def _gpus_of(copy: Copy) -> tuple[int, ...]:
    return tuple(end for end in copy.ends if end != HOST)


UNDO = "export NCCL_P2P_DISABLE=0, and the earlier kernel command line"


def _remedy(machine: Examined, copy: Copy) -> tuple[str, str]:
    """Return the change that may help a sick copy, and how to undo it."""
    return (_free_peers(machine), UNDO) if copy.way == DIRECT else ("see the kernel's log", "")


def _free_peers(machine: Examined) -> str:
    causes = []
    if machine.system.iommu == "translating":
        causes.append("start the kernel with iommu=pt, because the IOMMU translates")
    if _redirecting(machine):
        causes.append("turn Access Control Services off in the firmware or with setpci")
    until = "until then, export NCCL_P2P_DISABLE=1"
    return "; ".join([*(causes or ["update the driver and the firmware"]), until])


def _hanging(machine: Examined) -> Iterator[Finding]:
    doubt = "; the cores were busy, so that it may only be slow" if machine.busy else ""
    for one in machine.transfers:
        if one.failure:
            what = "does not answer" if one.hangs else "fails"
            change, undo = _remedy(machine, one.copy)
            yield Finding(
                name="failing transfer",
                says=f"{one.copy} {what}",
                evidence=f"{one.failure}{doubt}",
                cost="DataParallel and NCCL hang or fail on these GPUs",
                gpus=_gpus_of(one.copy),
                change=change,
                undo=undo,
            )
    if machine.all_reduce and machine.all_reduce.failure:
        yield Finding(
            name="failing all-reduce",
            says="an all-reduce over all GPUs has no result",
            evidence=f"{machine.all_reduce.failure}{doubt}",
            cost="DistributedDataParallel hangs or fails on this machine",
            change=_free_peers(machine),
            undo=UNDO,
        )


def _narrow(machine: Examined) -> Iterator[Finding]:
    """Find links with fewer lanes than GPU and slot support; an idle GPU keeps its lanes."""
    for gpu, facts in enumerate(machine.gpus):
        now, most = facts.pcie_width_now or 0, facts.pcie_width or 0
        if 0 < now < most:
            promised = machine.promised(gpu)
            rate = promised * now / most
            yield Finding(
                name="narrow link",
                says=f"the PCIe link of GPU {gpu} uses {now} of {most} lanes",
                evidence=f"NVML: width {now}, at most {most}",
                cost=_cost(machine, rate, promised) if rate else "",
                gpus=(gpu,),
                change=(
                    "seat the card again, or use a slot with more lanes; a second card or an M.2"
                    " drive may share them"
                ),
                undo="put the card back",
            )


def _old_generation(machine: Examined) -> Iterator[Finding]:
    """Find links that stay at a lower generation during copies; an idle GPU lowers it."""
    for gpu, facts in enumerate(machine.gpus):
        now, most = machine.generations.get(gpu, 0), facts.pcie_generation or 0
        rate, promised = _pcie(now, facts.pcie_width or 0), machine.promised(gpu)
        pinned = [one.bytes_per_s for one in machine.of(PINNED) if gpu in one.copy.ends]
        if 0 < now < most and rate and max(pinned, default=0.0) < rate:
            yield Finding(
                name="old generation",
                says=f"the PCIe link of GPU {gpu} stays at generation {now} of {most}",
                evidence=f"NVML, during the copies: {_rate(rate)} instead of {_rate(promised)}",
                cost=_cost(machine, rate, promised),
                gpus=(gpu,),
                change=(
                    "set the slot's generation to Auto in the firmware, and seat the card or its"
                    " riser cable again"
                ),
                undo="restore the earlier setting of the firmware",
            )


def _slow_host(machine: Examined) -> Iterator[Finding]:
    trained_down = {
        gpu for rule in (_narrow, _old_generation) for one in rule(machine) for gpu in one.gpus
    }
    slower: dict[int, Transfer] = {}
    for one in sorted(machine.of(PINNED), key=lambda one: one.bytes_per_s):
        slower.setdefault(max(one.copy.ends), one)
    for gpu, one in slower.items():
        promised = machine.promised(gpu)
        facts = machine.gpus[gpu]
        if promised and one.bytes_per_s < SLOW * promised and gpu not in trained_down:
            yield Finding(
                name="slow link to the host",
                says=f"{one.copy}: {_rate(one.bytes_per_s)}, {_share(one.bytes_per_s, promised)}",
                evidence=f"PCIe {facts.pcie_generation} with {facts.pcie_width} lanes carries"
                f" {_rate(promised)}",
                cost=_cost(machine, one.bytes_per_s, promised),
                gpus=(gpu,),
                change=_why_slow(machine, gpu),
                undo="restore the earlier setting of the firmware",
            )


def _why_slow(machine: Examined, gpu: int) -> str:
    device = machine.pci(gpu)
    if device is not None:
        beside = [
            other
            for other in machine.system.devices
            if other is not device and machine.system.common(device, other)
        ]
        if beside:
            kinds = Counter(KINDS[other.kind] for other in beside)
            shared = " and ".join(words.count(number, kind) for kind, number in kinds.items())
            return f"GPU {gpu} shares a switch with {shared}; move one of them to another slot"
        local = machine.system.nodes.get(device.node, machine.system.affinity)
        if device.node >= 0 and not machine.system.affinity & local:
            return f"bind the process to node {device.node}: numactl --cpunodebind={device.node}"
    return "check the PCIe generation of the slot in the firmware"


def _share(rate: float, promised: float) -> str:
    return f"{words.percent(rate / promised)} of {_rate(promised)}"


def _slow_pairs(machine: Examined) -> Iterator[Finding]:
    """Find pairs that are much slower than their NVLinks promise, or than pairs without NVLinks."""
    direct = machine.of(DIRECT)
    others = [one.bytes_per_s for one in direct if not machine.nvlinked(*one.copy.ends)]
    for one in sorted(direct, key=lambda one: one.bytes_per_s):
        promised = machine.nvlinked(*one.copy.ends)
        usual = promised or statistics.median(others)
        links = words.count(machine.nvlinks(*one.copy.ends), "NVLink")
        if one.bytes_per_s < SLOW * usual:
            yield Finding(
                name="slow pair",
                says=f"{one.copy}: {_rate(one.bytes_per_s)}, {_share(one.bytes_per_s, usual)},"
                f" {f'which {links} carry' if promised else 'the median of the other pairs'}",
                evidence=_route(machine, one.copy),
                cost=_cost(machine, one.bytes_per_s, usual),
                gpus=_gpus_of(one.copy),
                change=(
                    f"{'look at nvidia-smi nvlink --errorcounters; ' if promised else ''}leave one"
                    " of the two GPUs out (CUDA_VISIBLE_DEVICES), or move it to the socket or the"
                    " switch of the others"
                ),
                undo="unset CUDA_VISIBLE_DEVICES",
                wrong=bool(promised) or not _apart(machine, one.copy),
            )


BRIDGES = 3
"""The NVLink bridges that a card takes at most; each has the same number of links."""


def _down(machine: Examined) -> Iterator[Finding]:
    """Find NVLinks that are down although others of the GPU are up.

    All links of a bridge that was not fitted are down, which is a fact if the GPUs are alike.
    """
    states = [gpu.nvlinks for gpu in machine.gpus]
    most = max((state.active for state in states), default=0)
    for gpu, state in enumerate(states):
        active, inactive = state.active, state.inactive
        if active and inactive:
            whole = active == most and not active * BRIDGES % (active + inactive)
            yield Finding(
                name="NVLink down",
                says=f"{inactive} of {words.count(active + inactive, 'NVLink')} of GPU {gpu}"
                f" {words.verb(inactive, 'is', 'are')} down",
                evidence="NVML: state of each link",
                cost="copies to GPUs at the other end have fewer links or none",
                change=(
                    "fit a further bridge, if copies between these GPUs matter"
                    if whole
                    else "look for Xid 74 in the kernel's log (dmesg), seat the bridge again, and"
                    " restart; if it stays, the GPU or its board needs repair"
                ),
                wrong=not whole,
            )


def _route(machine: Examined, copy: Copy) -> str:
    if links := machine.nvlinks(*copy.ends):
        return f"NVML: {words.count(links, 'NVLink')} between the GPUs"
    source, target = (machine.pci(gpu) for gpu in copy.ends)
    if source is None or target is None:
        return "the place of the GPUs on PCIe is unknown"
    common = machine.system.common(source, target)
    if common:
        return f"the GPUs share the bridge {common.address}"
    if source.node != target.node:
        return f"the GPUs are on nodes {source.node} and {target.node}: copies cross the sockets"
    return "the GPUs meet in the root complex of one socket"


def _apart(machine: Examined, copy: Copy) -> bool:
    """Return whether two GPUs are on different sockets, which no setting changes."""
    source, target = (machine.pci(gpu) for gpu in copy.ends)
    return bool(
        source and target and source.node != target.node and min(source.node, target.node) >= 0
    )


def _direct(machine: Examined, copy: Copy) -> bool:
    """Return whether two GPUs have peer access, over NVLinks or without crossing sockets."""
    peers = machine.peers or frozenset()
    return copy.ends in peers and bool(machine.nvlinks(*copy.ends) or not _apart(machine, copy))


def _no_peers(machine: Examined) -> Iterator[Finding]:
    count = len(machine.gpus)
    if machine.peers is None or count < 2:
        return
    without = [pair for pair in combinations(range(count), 2) if pair not in machine.peers]
    if not without:
        return
    staged = [one.bytes_per_s for one in machine.of(STAGED)]
    rate = f"; copies through the host reach {_rate(max(staged))}" if staged else ""
    promised = min(machine.promised(gpu) for gpu in range(count))
    yield Finding(
        name="no peer access",
        says=f"{words.count(len(without), 'pair')} of GPUs cannot access each other's memory",
        evidence=f"CUDA denies it for {_pairs(without)}{rate}",
        cost=_cost(machine, max(staged), promised) if staged and max(staged) < promised else "",
        change=(
            "none for GeForce cards without an NVLink bridge, whose driver does not offer it;"
            " otherwise " + _free_peers(machine)
        ),
        undo="restore the earlier kernel command line",
        wrong=False,
    )


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{one} and {other}" for one, other in pairs[:4])
    return shown + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")


def _slow_all_reduce(machine: Examined) -> Iterator[Finding]:
    """Find an all-reduce that is slower than the pairs, if NCCL can copy directly between all.

    Through the host's memory and between sockets, the driver's copies are faster than NCCL's.
    """
    done, direct = machine.all_reduce, machine.of(DIRECT)
    pairs = [one.bytes_per_s for one in direct]
    if not all(_direct(machine, one.copy) for one in direct):
        return
    if done and done.bytes_per_s and pairs and done.bytes_per_s < SLOW * min(pairs):
        yield Finding(
            name="slow all-reduce",
            says=f"NCCL's all-reduce moves {_rate(done.bytes_per_s)} per GPU, although the slowest"
            f" pair copies {_rate(min(pairs))}",
            evidence="an all-reduce of up to 32 MiB over all GPUs, one process per GPU",
            cost=_cost(machine, done.bytes_per_s, min(pairs)),
            change="run it with NCCL_DEBUG=INFO and look for SHM or NET in place of P2P",
            undo="unset NCCL_DEBUG",
        )


def _sockets(machine: Examined) -> Iterator[Finding]:
    for gpu in range(len(machine.gpus)):
        device = machine.pci(gpu)
        if device is None or device.node < 0:
            continue
        local = machine.system.nodes.get(device.node, frozenset())
        if local and not local & machine.system.affinity:
            yield Finding(
                name="other socket",
                says=f"this process may use no core of node {device.node}, where GPU {gpu} is",
                evidence=f"affinity {_cores(machine.system.affinity)}, node {_cores(local)}",
                cost="copies from the host cross the sockets",
                change=f"numactl --cpunodebind={device.node} --membind={device.node} COMMAND",
                undo="run the command without numactl",
            )


def _cores(cores: frozenset[int]) -> str:
    ordered = sorted(cores)
    return f"{ordered[0]} to {ordered[-1]}" if len(ordered) > 1 else ", ".join(map(str, ordered))


def _redirecting(machine: Examined) -> dict[str, list[PciDevice]]:
    """Return the ports that send copies between GPUs below a switch further up, by the switch.

    Such a port leads from the switch to some of the GPUs below it. A port above the whole switch
    has no part in these copies, although Linux lets it redirect where the IOMMU is on.
    """
    gpus = [device for gpu in range(len(machine.gpus)) if (device := machine.pci(gpu))]
    found: dict[str, list[PciDevice]] = {}
    for port in machine.system.of("bridge"):
        if port.acs and port.path:
            switch = port.path[-1]
            below = [port.address in gpu.path for gpu in gpus if switch in gpu.path]
            if any(below) and not all(below):
                found.setdefault(switch, []).append(port)
    return found


def _redirected(machine: Examined) -> Iterator[Finding]:
    for switch, ports in _redirecting(machine).items():
        addresses = [port.address for port in ports]
        commands = "; ".join(f"setpci -s {one} ECAP_ACS+0x6.w=0000" for one in addresses)
        yield Finding(
            name="ACS",
            says=f"copies between GPUs below the switch {switch} go up to the root complex",
            evidence="Access Control Services redirect requests (control register of the switch's"
            f" {words.count(len(ports), 'port')} {', '.join(addresses)})",
            cost="direct copies take the longer way, and some chipsets corrupt or stall them",
            change=f"{commands} as root, or turn ACS off in the firmware",
            undo="restart the machine",
        )


def _shared_memory(machine: Examined) -> Iterator[Finding]:
    system = machine.system
    found = SharedMemory(size_bytes=system.shm_bytes, container=system.container)
    if found.small:
        least = words.size(shared_memory.LEAST_BYTES)
        yield Finding(
            name="small /dev/shm",
            says=found.small,
            evidence=f"the size of its file system; {least} is a usual least size",
            cost=shared_memory.COST,
            change=found.change,
            undo="leave the option out" if found.container else "remount with the old size",
        )


def _locked_memory(machine: Examined) -> Iterator[Finding]:
    limit = machine.system.locked_bytes
    matters = machine.gpus and any(card.rdma for card in machine.system.of("nic"))
    if matters and limit is not None and 0 <= limit < LOCKED_BYTES:
        yield Finding(
            name="locked memory",
            says=f"a process may lock only {words.size(limit)} of memory",
            evidence="ulimit -l",
            cost="NCCL over InfiniBand or RoCE cannot register its buffers",
            change="ulimit -l unlimited, or docker run --ulimit memlock=-1",
            undo="leave the option out",
            wrong=machine.system.container,
        )


def _quota(machine: Examined) -> Iterator[Finding]:
    quota = machine.system.quota
    cores = len(machine.system.affinity)
    if quota is not None and quota < 0.9 * cores:
        yield Finding(
            name="core quota",
            says=f"the control group may use {words.number(quota)} of the {cores} cores that"
            " programs see",
            evidence="cpu.max of the control group",
            cost="torch and DataLoader start as many threads as they see cores, which take turns",
            change=f"export OMP_NUM_THREADS={max(1, int(quota))}, or raise the limit with docker"
            " --cpus",
            undo="unset OMP_NUM_THREADS",
        )


def _variables(machine: Examined) -> Iterator[Finding]:
    """Find variables that slow steps down; without healthy peer access, P2P is off for a reason."""
    sick = any(one.wrong or one.failure for one in machine.transfers if one.copy.way == DIRECT)
    for name, (values, effect) in HARMFUL.items():
        value = machine.variables.get(name)
        if value is None or (name == "NCCL_P2P_DISABLE" and (sick or not machine.peers)):
            continue
        if not values or value.upper() in values:
            yield Finding(
                name="variable",
                says=f"{name}={value}: {effect}",
                evidence="the environment of this process",
                change=f"unset {name}",
                undo=f"export {name}={value}",
            )


def _torch(machine: Examined) -> Iterator[Finding]:
    build, driver = (machine.software.get(name, "") for name in ("cuda", "driver_cuda"))
    if machine.unused:
        yield Finding(
            name="torch",
            says="torch cannot use the GPUs of this machine",
            evidence=machine.unused,
            cost="everything runs on the processor",
            change="install a build of torch for these GPUs that the driver supports",
            undo="install the earlier build",
        )
    elif build and driver and _version(build) > _version(driver):
        yield Finding(
            name="driver",
            says=f"torch is built for CUDA {build}, and the driver supports {driver}",
            evidence="torch.version.cuda, and NVML's CUDA version of the driver",
            change="update the driver, or install a build of torch for an older CUDA",
            undo="install the earlier driver",
            wrong=_version(build)[0] > _version(driver)[0],
        )
    if machine.no_kernels:
        yield Finding(
            name="torch",
            says=f"torch's build has no kernels for GPU {', '.join(map(str, machine.no_kernels))}",
            evidence="torch.cuda.get_arch_list(), and the compute capability of the GPU",
            cost="every operation on it fails",
            change="install a build of torch for this generation of GPUs",
            undo="install the earlier build",
        )
    if build and len(machine.gpus) > 1 and not machine.software.get("nccl"):
        yield Finding(
            name="torch",
            says="torch is built without NCCL",
            evidence="torch.distributed.is_nccl_available()",
            cost="DDP between GPUs goes through the host (gloo), and DataParallel adds copies",
            change="install a build of torch with NCCL",
            undo="install the earlier build",
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _mixed(machine: Examined) -> Iterator[Finding]:
    models = Counter(gpu.name or "" for gpu in machine.gpus)
    if len(models) > 1:
        yield Finding(
            name="mixed GPUs",
            says="the GPUs are of different models: in each step, the fast ones wait for the slow",
            evidence=", ".join(f"{count} x {name}" for name, count in models.most_common()),
            cost="the step takes as long as that of the slowest GPU with its share",
            change=(
                "use GPUs of one model (CUDA_VISIBLE_DEVICES), or give the slow ones smaller shares"
                " (chunk_sizes of dpbench.TrainStep)"
            ),
            undo="unset CUDA_VISIBLE_DEVICES",
            wrong=False,
        )


def _unlike_ecc(machine: Examined) -> Iterator[Finding]:
    states = {gpu: one.ecc for gpu, one in enumerate(machine.gpus) if one.ecc is not None}
    if len(set(states.values())) > 1:
        on = [gpu for gpu, state in states.items() if state]
        yield Finding(
            name="ECC",
            says=f"ECC is on for GPU {', '.join(map(str, on))} and off for the others",
            evidence="NVML",
            cost="on cards with GDDR memory, ECC takes some of its size and rate",
            change="nvidia-smi -e 1 as root, and a restart, for all GPUs alike",
            undo="nvidia-smi -e 0 for those where it was off, and a restart",
        )


def _states(machine: Examined) -> Iterator[Finding]:
    for gpu, facts in enumerate(machine.gpus):
        limit, usual = facts.power_limit_w, facts.default_power_limit_w
        if limit and usual and limit < 0.95 * usual:
            yield Finding(
                name="power limit",
                says=f"GPU {gpu} may draw {limit:.0f} of {usual:.0f} W",
                evidence="NVML: enforced and default power limit",
                cost="its clocks fall under load, and the other GPUs wait for it",
                change=f"nvidia-smi -i {gpu} -pl {usual:.0f} as root",
                undo=f"nvidia-smi -i {gpu} -pl {limit:.0f}",
            )
        if facts.compute_mode in ("prohibited", "exclusive process"):
            yield Finding(
                name="compute mode",
                says=f"the compute mode of GPU {gpu} is {facts.compute_mode}",
                evidence="NVML",
                cost="other processes cannot use it, such as a DataLoader worker or a second rank",
                change=f"nvidia-smi -i {gpu} -c 0 as root",
                undo=f"nvidia-smi -i {gpu} -c {3 if 'exclusive' in facts.compute_mode else 2}",
            )
        if errors := facts.ecc_errors:
            yield Finding(
                name="memory errors",
                says=f"the memory of GPU {gpu} has had {words.count(errors, 'uncorrectable error')}"
                " since the driver started",
                evidence="NVML: volatile uncorrected ECC errors",
                cost="programs that met one have failed; more may follow",
                change=f"nvidia-smi -i {gpu} -r as root, or restart; if they return, replace it",
            )
        if facts.mig:
            yield Finding(
                name="MIG",
                says=f"GPU {gpu} is divided (MIG)",
                evidence="NVML: the MIG mode is on",
                cost="a process uses one part of it, without peer access to other GPUs",
                change=f"nvidia-smi -i {gpu} -mig 0 as root, if the whole GPU is wanted",
                undo=f"nvidia-smi -i {gpu} -mig 1",
                wrong=False,
            )
        causes = [name for bit, name in THROTTLING.items() if machine.readings.get(gpu, 0) & bit]
        if causes:
            yield Finding(
                name="throttling",
                says=f"GPU {gpu} lowers its clocks: {', '.join(dict.fromkeys(causes))}",
                evidence="NVML: reasons of the clocks, during the copies",
                cost="the other GPUs wait for it in each step",
                change="improve the cooling or the power supply",
            )
    if any(gpu.persistence_mode is False for gpu in machine.gpus):
        yield Finding(
            name="persistence mode",
            says="the driver unloads its state when no process uses a GPU",
            evidence="NVML: persistence mode is off",
            cost="the first process on an idle GPU waits for some seconds; steps are not slower",
            change="nvidia-smi -pm 1 as root",
            undo="nvidia-smi -pm 0",
            wrong=False,
        )


def _interpreter_lock(machine: Examined) -> Iterator[Finding]:
    if machine.switching:
        yield Finding(
            name="interpreter lock",
            says=f"the import of {machine.switching} switches Python's global interpreter lock on,"
            " although this Python begins without it",
            evidence="CPython's warning in a process that imports torch and makes an optimizer",
            cost="threads run Python code one at a time, as in a Python with the lock",
            change="a version of this package for Python without the lock; PYTHON_GIL=0 keeps the"
            " lock off, also where a module is not safe without it",
            undo="unset PYTHON_GIL",
            wrong=False,
        )


def _busy(machine: Examined) -> Iterator[Finding]:
    if machine.busy:
        yield Finding(
            name="busy cores",
            says="other processes took the cores during the examination",
            evidence=machine.busy,
            cost="rates of copies and of the all-reduce may be too low, as steps would be",
            change="end them, and examine the machine again",
            wrong=False,
        )


def _foreign(machine: Examined) -> Iterator[Finding]:
    for gpu, held in machine.foreign.items():
        if held:
            known = sum(size for size in held.values() if size)
            yield Finding(
                name="other processes",
                says=f"{words.count(len(held), 'other process')} use GPU {gpu}"
                if len(held) > 1
                else f"another process uses GPU {gpu}",
                evidence=f"process ids {', '.join(map(str, held))}, with {words.size(known)}",
                cost="they take time and memory of this GPU, and the other GPUs wait for it",
                change="end them, or leave this GPU out (CUDA_VISIBLE_DEVICES)",
                undo="unset CUDA_VISIBLE_DEVICES",
            )


RULES: Sequence[Rule] = (
    _torch,
    _corrupt,
    _hanging,
    _narrow,
    _old_generation,
    _slow_host,
    _down,
    _slow_pairs,
    _redirected,
    _slow_all_reduce,
    _no_peers,
    _interpreter_lock,
    _busy,
    _foreign,
    _states,
    _sockets,
    _mixed,
    _unlike_ecc,
    _shared_memory,
    _quota,
    _variables,
    _locked_memory,
)


def checked(machine: Examined) -> tuple[list[str], list[str]]:
    """Return what was checked, and what was not with the reason."""
    system = machine.system
    several = len(machine.gpus) > 1
    untried = len(copies(len(machine.gpus))) - len(machine.transfers)
    kept = (
        ("size of /dev/shm", system.shm_bytes is not None, "it cannot be read"),
        ("locked memory", system.locked_bytes is not None, "its limit cannot be read"),
        ("NUMA nodes", bool(system.nodes), "the kernel shows none"),
        ("IOMMU", system.iommu != "unknown", "the kernel does not show it"),
        ("copies from and to the host", bool(machine.of(PINNED)), "torch uses no GPU"),
        ("copies between GPUs", bool(machine.of(DIRECT)), "torch uses fewer than two GPUs"),
        ("all-reduce", machine.all_reduce is not None, "torch uses fewer than two GPUs"),
        (
            "Access Control Services",
            any(bridge.acs is not None for bridge in system.of("bridge")),
            "only root may read it" if system.of("bridge") else "the kernel shows no bridge",
        ),
        (
            "state of the GPUs",
            bool(machine.gpus) and all(gpu.pcie_width is not None for gpu in machine.gpus),
            "NVML does not answer" if machine.gpus else "torch uses no GPU",
        ),
        ("peer access", several and machine.peers is not None, "torch uses fewer than two GPUs"),
    )
    yes = [name for name, done, _ in kept if done]
    no = [f"{name}, because {why}" for name, done, why in kept if not done]
    if untried:
        no.append(f"{words.count(untried, 'copy', 'copies')}, because others hang or fail")
    return ["environment variables", "the build of torch", *yes], no
