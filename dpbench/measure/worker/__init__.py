"""Worker: run trials in a fresh process and return them.

This package has the only loop that times steps. `python -m dpbench.measure.worker` runs the server process, from which
worker processes are forked.
"""
