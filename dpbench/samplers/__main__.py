"""Run the sampler process: `python -m dpbench.samplers`."""

import sys

from dpbench.samplers._process import main

sys.exit(main())
