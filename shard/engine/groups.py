"""Who shares forwards: states of requests by themselves, and groups of several."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import mlx.core as mx

from ...mtp.batch_slots import order_of
from ...mtp.rollback import cache_arrays
from .cache_set import CacheSet
from .state import State

K = TypeVar("K", bound=Hashable)


class Group(Protocol[K]):
    """The state of one or several requests that share forwards."""

    @property
    def requests(self) -> tuple[K, ...]:
        """In the order of the rows of a forward."""
        ...

    def extract(self, request: K) -> State:
        """The state of one request, which stays here until `change`."""
        ...

    def change(self, leaves: Sequence[K], joins: dict[K, State]) -> None:
        """Those that join come behind the others."""
        ...

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        ...


G = TypeVar("G", bound=Group)  # pyright: ignore[reportMissingTypeArgument]


class Groups(Generic[K, G]):
    """The states of all requests of one stage. All methods run on the compute thread."""

    def __init__(self, make: Callable[[dict[K, State]], G], goes_on: Callable[[K], bool]) -> None:
        """`make`: a group of these requests. `goes_on`: whether a request's state still counts."""
        self._make = make
        self._goes_on = goes_on
        self.single: dict[K, State] = {}
        """The states of requests that are in no group."""
        self.groups: list[G] = []

    def of(self, requests: Sequence[K]) -> G:
        """The group of exactly these requests: the largest that has some of them changes.

        Nothing of theirs is in flight then.
        """
        wanted = set(requests)
        some = [group for group in self.groups if not wanted.isdisjoint(group.requests)]
        if len(some) == 1 and set(some[0].requests) == wanted:
            return some[0]
        home = max(some, key=lambda group: len(wanted & set(group.requests)), default=None)
        stays = set[K]() if home is None else set(home.requests) & wanted
        joins = {request: self.take(request) for request in requests if request not in stays}
        if home is None:
            home = self._make(joins)
            self.groups.append(home)
            return home
        leaves = [request for request in home.requests if request not in wanted]
        going_on = {r: home.extract(r) for r in leaves if self._goes_on(r)}
        home.change(leaves, joins)
        self.single |= going_on  # only now: a change that fails leaves them lost with the others
        return home

    def take(self, request: K) -> State:
        """Its state, out of where it is."""
        if request in self.single:
            return self.single.pop(request)
        group = next(group for group in self.groups if request in group.requests)
        state = group.extract(request)
        leaves = [r for r in group.requests if r == request or not self._goes_on(r)]
        if len(leaves) < len(group.requests):
            group.change(leaves, {})
        else:
            self.groups.remove(group)
        return state

    def release(self, request: K) -> None:
        """Frees what only this request held; its rows in a group go with the next change."""
        _ = self.single.pop(request, None)
        self.groups = [g for g in self.groups if any(self._goes_on(each) for each in g.requests)]

    def forget(self, requests: Sequence[K]) -> list[K]:
        """Nobody knows what their caches hold any more; all that shared them."""
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
        """Bytes of all that the states hold."""
        held = [array for state in self.single.values() for array in state.arrays()]
        held += [array for group in self.groups for array in group.arrays()]
        return sum(array.nbytes for array in held)


class StageGroup(Generic[K]):
    """The caches of requests that share the forwards of a pipeline's stage."""

    def __init__(self, joins: dict[K, State]) -> None:
        self.requests: tuple[K, ...] = tuple(joins)
        self.caches = CacheSet([(state.caches, state.rows) for state in joins.values()])

    def extract(self, request: K) -> State:
        return State(*self.caches.extract(self.requests.index(request)))

    def change(self, leaves: Sequence[K], joins: dict[K, State]) -> None:
        order = order_of([i for i, r in enumerate(self.requests) if r not in leaves])
        self.caches.change(order, [(state.caches, state.rows) for state in joins.values()])
        self.requests = (*(self.requests[index] for index in order), *joins)
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        return cache_arrays(self.caches.caches)
