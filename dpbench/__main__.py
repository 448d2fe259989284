"""Let `python -m dpbench` be the command `dpbench`."""

from dpbench.cli import main

main()
