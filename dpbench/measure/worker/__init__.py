"""Worker: measure one case in a fresh process and return a trial. This package has the only measuring loop.

`python -m dpbench.measure.worker` runs the server from which worker processes are forked.
"""
