"""The fast wing: schedules that keep threads, replicas or weights between steps.

Each of `pool`, `cached`, `local`, `allreduce` and `sharded` begins with what it changes in
`dpbench.engine.step`, what it relies on, and what that costs when it fails. The import of this
package makes them known to `dpbench.engine.schedules`.
"""

from functools import partial

from dpbench.engine import schedules
from dpbench.engine.fast import select
from dpbench.engine.fast.allreduce import AllReduce
from dpbench.engine.fast.cached import CachedReplicas
from dpbench.engine.fast.local import Local
from dpbench.engine.fast.pool import Pool
from dpbench.engine.fast.sharded import Sharded
from dpbench.engine.replicate import replicate
from dpbench.engine.schedules import Means
from dpbench.records.schedule import SELECTED, Schedule

schedules.COPYING |= {
    Schedule.POOL: lambda module: Means(Pool(), replicate),
    Schedule.CACHED: lambda module: Means(Pool(), CachedReplicas(module).replicate),
}
KEEPING: dict[Schedule, type[Local]] = {
    Schedule.LOCAL: Local,
    Schedule.ALLREDUCE: AllReduce,
    Schedule.SHARDED: Sharded,
}
"""The schedules that keep replicas, and what runs their steps."""
schedules.RUNNERS |= {one: partial(select.named, KEEPING, one) for one in Schedule}
schedules.RUNNERS |= {name: partial(select.selected, KEEPING, name) for name in SELECTED}
