"""Lightning: a callback of its Trainer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dpbench
from dpbench.integrations import needed

with needed("lightning"):
    from lightning import Callback


class Watched(Callback):
    """Store the steps of `Trainer.fit` in the results file `store`, also if the training raises.

    `options` are those of `dpbench.watch`.
    """

    def __init__(self, store: str | Path = "dpbench.db", **options: Any) -> None:
        self._store = store
        self._options = {"script": "lightning", **options}
        self._watching = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self._watching.enter_context(dpbench.watch(self._store, **self._options))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Store the steps until the exception; after KeyboardInterrupt, as an interrupted run."""
        self._watching.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Store the run; the end of another stage, such as a test, stores nothing."""
        self._watching.close()
