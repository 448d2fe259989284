"""Entry point of `python -m dpbench`, which runs the command `dpbench`."""

from dpbench.cli import main

main()
