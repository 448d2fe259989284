"""The fast wing: schedules that keep threads, replicas or weights between steps.

Each of `pool`, `cached`, `local`, `allreduce` and `sharded` begins with what it changes in
`dpbench.engine.step`, what it relies on, and what that costs when it fails. The import of this
package makes them known to `dpbench.engine.schedules`.
"""

from functools import partial

from dpbench.engine import schedules
from dpbench.engine.fast import select
from dpbench.engine.fast.cached import CachedReplicas
from dpbench.engine.fast.pool import Pool
from dpbench.engine.replicate import replicate
from dpbench.engine.schedules import Means
from dpbench.records.schedule import SELECTED, Schedule

schedules.COPYING |= {
    Schedule.POOL: lambda module: Means(Pool(), replicate),
    Schedule.CACHED: lambda module: Means(Pool(), CachedReplicas(module).replicate),
}
schedules.RUNNERS |= {schedule: partial(select.named, schedule) for schedule in Schedule}
schedules.RUNNERS |= {name: partial(select.selected, name) for name in SELECTED}
