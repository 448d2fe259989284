"""Worker: run trials in a fresh process and return them.

`python -m dpbench.measure.worker` runs the server process, from which workers are forked. The
module `bench` has the loop that times the steps of cases.
"""
