"""Worker: measure cases in a fresh process and return their trials.

This package has the only measuring loop. `python -m dpbench.measure.worker` runs the server from which worker processes
are forked.
"""
