"""Entry point of `python -m dpbench`: run the command `dpbench`."""

from dpbench.cli import main

main()
