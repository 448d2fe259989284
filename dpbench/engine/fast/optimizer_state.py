"""Optimizer state: `optimizer.state` has an entry per parameter; the devices store shards.

Reading and changing `optimizer.state` has the same effect as in a loop without the engine. The
first access gathers the values from the shards. From then on they are copied from the entries to
the shards before each step, and back after each step, because the training loop may keep references
to the entries. If the state is never accessed, no values are copied.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dpbench.engine.fast.flat_storage import line
from dpbench.engine.fast.shards import ParamShard, Segment
from dpbench.engine.fast.stepper import OptimizerGroup, Stepper, groups_of, is_elementwise

State = defaultdict[Any, Any]
"""An optimizer's state in torch's format: for each tensor, a dict of values by name."""


class FetchedState(UserDict[Any, Any]):
    """An optimizer's state by parameter, which the function `fetch` gathers at the first access."""

    def __init__(self, fetch: Callable[[], State]) -> None:
        self._fetch: Callable[[], State] | None = fetch
        self._entries = State(dict)

    @property
    def fetched(self) -> bool:
        """Return whether the user's code has accessed the entries, and may have changed them."""
        return self._fetch is None

    @property
    def data(self) -> State:  # type: ignore[override]
        """The entries, which every method of a UserDict accesses by this attribute."""
        if self._fetch is not None:
            fetch, self._fetch = self._fetch, None
            self._entries.update(fetch())
        return self._entries

    def store(self, state: State) -> None:
        """Write the values of `state` into the entries.

        A tensor is overwritten in place if the new value has the same shape and dtype.
        """
        for parameter, values in state.items():
            entry = self.data[parameter]
            for name, value in values.items():
                held = entry.get(name)
                if _alike(held, value):
                    held.copy_(value)
                else:
                    entry[name] = value

    def __missing__(self, key: Any) -> Any:
        return self.data[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the entry of a parameter, or the default if there is none."""
        return self.data.get(key, default)

    def copy(self) -> State:  # type: ignore[override]
        """Return a copy that is an ordinary defaultdict, as torch's."""
        return self.data.copy()

    __copy__ = copy  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return self.data | other

    def __reduce__(self) -> Any:
        return self.data.__reduce__()


def _alike(held: Any, value: Any) -> bool:
    return (
        isinstance(held, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and held.shape == value.shape
        and held.dtype == value.dtype
    )


class OptimizerState:
    """The state of the user's `optimizer`, whose `steppers` keep it by shard.

    `groups` are the optimizer's groups of `parameters`. All devices together have the state of each
    parameter if it is `sharded`; if not, each device has all of it. The tensors of the state have
    the strides of `like`.
    """

    def __init__(
        self,
        optimizer: Any,
        groups: Sequence[OptimizerGroup],
        parameters: Sequence[torch.Tensor],
        like: Sequence[torch.Tensor],
        steppers: Sequence[Stepper],
        *,
        sharded: bool,
    ) -> None:
        self._optimizer = optimizer  # of any type, because torch declares `state` as a defaultdict
        self._groups = groups
        self._parameters = parameters
        self._like = like
        self._steppers = steppers
        self._owners = steppers if sharded else steppers[:1]
        state = self._optimizer.state
        stepped = {parameters[n] for group in groups for n in group.parameters}
        self._rest = {key: entry for key, entry in state.items() if key not in stepped}
        self._cut(state)
        # the training loop may have references to the entries of a state that it has accessed
        kept = isinstance(state, FetchedState) and state.fetched
        self._state: FetchedState = state if kept else FetchedState(self._joined)
        self._optimizer.state = self._state
        self._hooks = [
            self._optimizer.register_state_dict_pre_hook(lambda _: self._open()),
            self._optimizer.register_state_dict_post_hook(lambda *_: self._shut()),
        ]

    @property
    def regrouped(self) -> bool:
        """Return whether the state was replaced, or no longer fits the shards."""
        if self._optimizer.state is not self._state:
            return True
        return self._state.fetched and groups_of(self._optimizer, self._parameters) != self._groups

    def begin(self) -> None:
        """Copy `optimizer.state` to the shards if the training loop may have changed it."""
        if self._state.fetched:
            self._cut(self._state)

    def end(self) -> None:
        """Copy the shards' state to `optimizer.state` if the training loop has accessed it."""
        if self._state.fetched:
            self._state.store(self._joined())

    def step_plainly(self) -> None:
        """Step the module's own parameters with the user's optimizer and state."""
        self._open()
        try:
            self._optimizer.step()
            self._cut(self._optimizer.state)
        finally:
            self._shut()

    def close(self) -> None:
        """Leave the user's optimizer with its complete state and without hooks."""
        if self._optimizer.state is self._state and not self._state.fetched:
            self._optimizer.state = self._joined()
        for hook in self._hooks:
            hook.remove()
        # break a cycle: the former mapping references this object
        self._state = FetchedState(State)

    def _joined(self) -> State:
        """Return the state by parameter, including entries of tensors that no shard contains."""
        return State(dict, {**self._rest, **joined(self._owners, self._parameters, self._like)})

    def _cut(self, state: Mapping[Any, Any]) -> None:
        for stepper in self._steppers:
            stepper.state = cut(state, stepper.shards, self._parameters)

    def _open(self) -> None:
        """Make `optimizer.state` the state by parameter, so that torch's own code can use it.

        Does nothing if the training loop has replaced or accessed it.
        """
        self._opened = self._optimizer.state is self._state and not self._state.fetched
        if self._opened:
            self._optimizer.state = self._joined()

    def _shut(self) -> None:
        """Undo `_open`."""
        if self._opened:
            self._optimizer.state = self._state


def joined(
    steppers: Sequence[Stepper],
    parameters: Sequence[torch.Tensor],
    like: Sequence[torch.Tensor],
) -> State:
    """Return the optimizer state by parameter, joined from the state of all shards.

    The keys of the returned state are `parameters`; the tensors in it have the strides of `like`.
    """
    state: State = State(dict)
    with torch.no_grad():
        for stepper in steppers:
            for shard in stepper.shards:
                for name, value in stepper.state.get(shard.weight, {}).items():
                    for segment in shard.segments:
                        n = segment.parameter
                        _put(state[parameters[n]], like[n], shard, segment, name, value)
    return state


def _put(
    entry: dict[str, Any],
    like: torch.Tensor,
    shard: ParamShard,
    segment: Segment,
    name: str,
    value: Any,
) -> None:
    """Copy the value `name` of a shard's optimizer state into `entry`, the parameter's state.

    Values that are not elementwise, such as the step count, are copied whole.
    """
    if not is_elementwise(name, value, shard.weight):
        entry[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in entry:
        entry[name] = torch.zeros_like(like, dtype=value.dtype, requires_grad=False)
    line(entry[name])[segment.start : segment.stop].copy_(segment.of(value))


def cut(
    given: Mapping[Any, Any], shards: Sequence[ParamShard], parameters: Sequence[torch.Tensor]
) -> State:
    """Return the optimizer state by shard weight, cut from `given`, the state by parameter."""
    state: State = State(dict)
    with torch.no_grad():
        for shard in shards:
            for segment in shard.segments:
                for name, value in given.get(parameters[segment.parameter], {}).items():
                    _take(
                        state[shard.weight],
                        parameters[segment.parameter],
                        shard,
                        segment,
                        name,
                        value,
                    )
    return state


def _take(
    entry: dict[str, Any],
    like: torch.Tensor,
    shard: ParamShard,
    segment: Segment,
    name: str,
    value: Any,
) -> None:
    """Copy the value `name` of a parameter's optimizer state into `entry`, the shard's state.

    Values that are not elementwise, such as the step count, are copied whole.
    """
    if not is_elementwise(name, value, like):
        if name not in entry:
            entry[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in entry:
        entry[name] = torch.zeros_like(shard.weight, dtype=value.dtype, requires_grad=False)
    in_strides_of_like = torch.empty_like(like, dtype=value.dtype).copy_(value)
    segment.of(entry[name]).copy_(line(in_strides_of_like.detach())[segment.start : segment.stop])
