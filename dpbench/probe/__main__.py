"""One pass of the probe: a JSON line for each part that begins, and for each figure."""

from __future__ import annotations

import json
from dataclasses import asdict

from dpbench.probe import measure

if __name__ == "__main__":
    for found in measure():
        print(json.dumps(found if isinstance(found, str) else asdict(found)), flush=True)
