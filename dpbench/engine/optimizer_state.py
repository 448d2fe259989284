"""State: `optimizer.state` by parameter, while the values are kept by the units that devices step.

Reading it, or changing it, does what it does in a loop without the engine. The first access fetches the values; from
then on every step reads the entries before it and writes them back after it, since a loop may hold on to them. An
optimizer whose state is never looked at pays nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

State = defaultdict[Any, Any]
"""An optimizer's state, as torch keeps it: a dict by name, for each tensor that is stepped."""


class FetchedState(State):
    """The state by parameter, fetched when it is first looked at."""

    def __init__(self, fetch: Callable[[], State]) -> None:
        super().__init__(dict)
        self._fetch: Callable[[], State] | None = fetch

    @property
    def fetched(self) -> bool:
        """Return whether the entries have been looked at, and so may have been changed, or be held by others."""
        return self._fetch is None

    def _load(self) -> None:
        if self._fetch is not None:
            fetch, self._fetch = self._fetch, None
            super().update(fetch())

    def store(self, found: State) -> None:
        """Write values into the entries, in place where tensors allow it."""
        for parameter, values in found.items():
            entry = super().setdefault(parameter, {})
            for name, value in values.items():
                held = entry.get(name)
                if _alike(held, value):
                    held.copy_(value)
                else:
                    entry[name] = value

    # every way in which a dict is looked at

    def __getitem__(self, key: Any) -> Any:
        self._load()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._load()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._load()
        super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        self._load()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._load()
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        self._load()
        return super().__reversed__()

    def __len__(self) -> int:
        self._load()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._load()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # as for any dict

    def __repr__(self) -> str:
        self._load()
        return super().__repr__()

    def __or__(self, other: Any) -> Any:
        return State(dict, self) | other

    def __reduce__(self) -> Any:
        return State, (dict, dict(self))

    def copy(self) -> State:  # type: ignore[override]
        """Return a plain copy."""
        return State(dict, self)

    __copy__ = copy  # type: ignore[assignment]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return an entry, or the default."""
        self._load()
        return super().get(key, default)

    def keys(self) -> Any:
        """Return the parameters that have state."""
        self._load()
        return super().keys()

    def values(self) -> Any:
        """Return the entries."""
        self._load()
        return super().values()

    def items(self) -> Any:
        """Return the parameters with their entries."""
        self._load()
        return super().items()

    def pop(self, *arguments: Any) -> Any:
        """Remove an entry and return it."""
        self._load()
        return super().pop(*arguments)

    def popitem(self) -> Any:
        """Remove the last entry and return it."""
        self._load()
        return super().popitem()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return an entry, having set it if it was missing."""
        self._load()
        return super().setdefault(key, default)

    def update(self, *arguments: Any, **entries: Any) -> None:
        """Set entries."""
        self._load()
        super().update(*arguments, **entries)

    def clear(self) -> None:
        """Remove all entries."""
        self._load()
        super().clear()


def _alike(held: Any, value: Any) -> bool:
    """Return whether a tensor can take over another's values without becoming another tensor."""
    return (
        isinstance(held, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and held.shape == value.shape
        and held.dtype == value.dtype
    )
