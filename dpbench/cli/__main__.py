"""Let `python -m dpbench.cli` be `dpbench`."""

from dpbench.cli import main

main()
