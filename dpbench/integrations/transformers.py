"""Transformers: a callback of Hugging Face's Trainer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dpbench
from dpbench.integrations import needed

with needed("transformers"):
    from transformers import TrainerCallback


class Watched(TrainerCallback):
    """Store the steps of `Trainer.train` in the results file `store`.

    `options` are those of `dpbench.watch`. If the training raises, Trainer does not tell its
    callbacks, and no run is stored.
    """

    def __init__(self, store: str | Path = "dpbench.db", **options: Any) -> None:
        self._store = store
        self._options = {"script": "trainer", **options}
        self._watching = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin to watch."""
        self._watching.enter_context(dpbench.watch(self._store, **self._options))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Store the run."""
        self._watching.close()
