"""The worker: one case in one fresh process -> one trial. Holds the only measuring loop.

`python -m dpbench.measure.worker` is the server that worker processes are forked from.
"""
