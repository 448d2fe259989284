"""Run the sampler process: `python -m dpbench.hardware.samplers`."""

import sys

from dpbench.hardware.samplers._process import main

sys.exit(main())
