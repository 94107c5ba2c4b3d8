"""The states of all requests of one stage: single ones, and groups that share forwards."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import mlx.core as mx

from ....mtp.caches.batch_slots import order_of
from ....mtp.caches.rollback import cache_arrays
from .cache_set import CacheSet
from .state import State

K = TypeVar("K", bound=Hashable)


class Group(Protocol[K]):
    """The state of one or several requests that share forwards."""

    @property
    def requests(self) -> tuple[K, ...]:
        """The members, in the order of the rows of a forward."""
        ...

    def extract(self, request: K) -> State:
        """The state of one request, which stays here until `change`."""
        ...

    def change(self, leaves: Sequence[K], joins: dict[K, State]) -> None:
        """Removes members and appends others."""
        ...

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        ...


G = TypeVar("G", bound=Group)  # pyright: ignore[reportMissingTypeArgument]


class Groups(Generic[K, G]):
    """The states of all requests of one stage. All methods run on the compute thread."""

    def __init__(self, make: Callable[[dict[K, State]], G], is_live: Callable[[K], bool]) -> None:
        """`make` makes a group of requests. `is_live`: whether a request still needs its state."""
        self._make = make
        self._is_live = is_live
        self.single: dict[K, State] = {}
        """The states of requests that are in no group."""
        self.groups: list[G] = []

    def of(self, requests: Sequence[K]) -> G:
        """The group of exactly these requests.

        If there is none yet, the group that has most of them changes its members; nothing of theirs
        is in flight then.
        """
        members = set(requests)
        overlapping = [group for group in self.groups if not members.isdisjoint(group.requests)]
        if len(overlapping) == 1 and set(overlapping[0].requests) == members:
            return overlapping[0]
        home = max(overlapping, key=lambda group: len(members & set(group.requests)), default=None)
        stays = set[K]() if home is None else set(home.requests) & members
        joins = {request: self.take(request) for request in requests if request not in stays}
        if home is None:
            home = self._make(joins)
            self.groups.append(home)
            return home
        leaves = [request for request in home.requests if request not in members]
        survivors = {r: home.extract(r) for r in leaves if self._is_live(r)}
        home.change(leaves, joins)
        self.single |= survivors  # only now: if the change fails, they are lost with the others
        return home

    def take(self, request: K) -> State:
        """Removes a request's state from its place and returns it."""
        if request in self.single:
            return self.single.pop(request)
        group = next(group for group in self.groups if request in group.requests)
        state = group.extract(request)
        leaves = [r for r in group.requests if r == request or not self._is_live(r)]
        if len(leaves) < len(group.requests):
            group.change(leaves, {})
        else:
            self.groups.remove(group)
        return state

    def release(self, request: K) -> None:
        """Frees a request's state; its rows in a group are freed by the next change of members."""
        _ = self.single.pop(request, None)
        self.groups = [g for g in self.groups if any(self._is_live(each) for each in g.requests)]

    def forget(self, requests: Sequence[K]) -> list[K]:
        """Drops caches that a failed forward left undefined. Returns all requests in them."""
        lost = dict.fromkeys(requests)
        for group in list(self.groups):
            if not lost.keys().isdisjoint(group.requests):
                lost |= dict.fromkeys(group.requests)
                self.groups.remove(group)
        for request in lost:
            _ = self.single.pop(request, None)
        return list(lost)

    @property
    def bytes(self) -> int:
        """Bytes of all states."""
        arrays = [array for state in self.single.values() for array in state.arrays()]
        arrays += [array for group in self.groups for array in group.arrays()]
        return sum(array.nbytes for array in arrays)


class StageGroup(Generic[K]):
    """The caches of requests that share the forwards of one stage of a pipeline."""

    def __init__(self, joins: dict[K, State]) -> None:
        self.requests: tuple[K, ...] = tuple(joins)
        self.caches = CacheSet([(state.caches, state.rows) for state in joins.values()])

    def extract(self, request: K) -> State:
        return State(*self.caches.extract(self.requests.index(request)))

    def change(self, leaves: Sequence[K], joins: dict[K, State]) -> None:
        order = order_of([i for i, r in enumerate(self.requests) if r not in leaves])
        self.caches.change(order, [(state.caches, state.rows) for state in joins.values()])
        mx.eval(self.arrays())
        # Only now: if that fails, who leaves is lost with the others.
        self.requests = (*(self.requests[index] for index in order), *joins)

    def arrays(self) -> list[mx.array]:
        return cache_arrays(self.caches.caches)
