"""The fast wing: schedules that keep threads, replicas or weights between steps.

Each of `pool`, `cached`, `local`, `allreduce` and `sharded` begins with what it changes in
`dpbench.engine.step`, what it relies on, and what that costs when it fails. `TrainStep` chooses one
of them; `select` says which can run.
"""
