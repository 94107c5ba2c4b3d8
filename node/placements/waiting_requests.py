"""Requests that wait for their models' placements."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf

from ...placement.errors import ExoNodeError, HeadGone, PlacementSuperseded
from ...placement.ids import ModelId, PlacementId
from ...placement.reading import ReaderLayers
from ...proto import peer_pb2 as pb
from ..cluster.desired import Desired
from .loaded_placement import LoadedPlacement
from .state import StageRunner


@dataclass(frozen=True, slots=True)
class Assignment:
    """The placement that an answer may begin on."""

    record: LoadedPlacement
    reading_s: float = 0.0
    """Seconds that its prompt is expected to take there."""
    source: LoadedPlacement | None = None
    """The replica whose cached state is to be copied first."""
    reason: str = ""
    """The reason of the choice, for a person."""
    readers: Sequence[tuple[StageRunner, ReaderLayers]] = ()
    """The runners that read upper layers of its prompt, in order."""
    read_reason: str = ""
    """Why those, or none."""


def _future() -> "asyncio.Future[Assignment]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Waiter:
    """One request."""

    model: ModelId
    since: float
    requested: Desired | None = None
    """The placement that it must get, or None if any of its model serves an answer."""
    previous: Desired | None = None
    """The desired placement if that one fails."""
    prefixes: Mapping[PlacementId, pb.CachedPrefix] = field(
        default_factory=dict[PlacementId, pb.CachedPrefix]
    )
    """The part of its prompt that each replica has cached."""
    outcome: "asyncio.Future[Assignment]" = field(default_factory=_future)

    def asks_for(self, desired: Desired | None) -> bool:
        """Whether it waits for exactly this placement."""
        if self.requested is None or desired is None or self.model != desired.model:
            return False
        return not _change(self.requested, desired)


class WaitingRequests:
    """In order of arrival."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []

    @property
    def all(self) -> list[Waiter]:
        return list(self._waiters)

    @property
    def since(self) -> dict[ModelId, float]:
        """The time since which the first request waits, by model."""
        since: dict[ModelId, float] = {}
        for waiter in self._waiters:
            since[waiter.model] = min(waiter.since, since.get(waiter.model, inf))
        return since

    def previous(self, desired: Desired | None) -> Desired | None:
        """The desired placement if the one that replaces `desired` fails.

        It is `desired` itself, unless a request still waits for it: its client receives an error.
        """
        for waiter in self._waiters:
            if waiter.asks_for(desired):
                return waiter.previous
        return desired

    async def wait(
        self, waiter: Waiter, look: Callable[[], None], every_s: float, leads: Callable[[], bool]
    ) -> Assignment:
        """Its placement; `look` makes a pass. Raises what it is failed with, and HeadGone."""
        self._waiters.append(waiter)
        try:
            look()
            while not waiter.outcome.done() and leads():
                _ = await asyncio.wait([waiter.outcome], timeout=every_s)
                if not waiter.outcome.done():
                    look()
            if waiter.outcome.cancelled() or not waiter.outcome.done():
                raise HeadGone("this node places nothing any more")
            return waiter.outcome.result()
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def give(self, waiter: Waiter, assignment: Assignment) -> None:
        self._waiters.remove(waiter)
        if not waiter.outcome.done():
            waiter.outcome.set_result(assignment)

    def fail(self, model: ModelId, error: ExoNodeError) -> None:
        """Fails the requests that wait for a model now; later ones have another try."""
        for waiter in self.all:
            if waiter.model == model:
                self._fail(waiter, error)

    def fail_superseded(self, desired: Mapping[ModelId, Desired]) -> None:
        """Fails the requests for placements that later requests have changed or removed."""
        for waiter in self.all:
            if waiter.requested is not None and (
                change := _change(waiter.requested, desired.get(waiter.model))
            ):
                text = f"{waiter.model} is not placed as requested: meanwhile another request "
                text += f"{change}. Ask again if this placement should hold"
                self._fail(waiter, PlacementSuperseded(text, param="model"))

    def _fail(self, waiter: Waiter, error: ExoNodeError) -> None:
        self._waiters.remove(waiter)
        if not waiter.outcome.done():
            waiter.outcome.set_exception(error)

    def cancel(self) -> None:
        """Another head is to be asked."""
        for waiter in self._waiters:
            _ = waiter.outcome.cancel()
        self._waiters.clear()


def _change(requested: Desired, now: Desired | None) -> str:
    """The difference between a requested placement and the desired one, if any."""
    if now is None:
        return "removed the model"
    before = _fields(requested)
    changes = [
        f"{name} {value} instead of {before[name]}"
        for name, value in _fields(now).items()
        if value != before[name]
    ]
    return f"placed it with {', '.join(changes)}" if changes else ""


def _fields(desired: Desired) -> dict[str, str]:
    """The fields of `POST /v1/placements` as JSON. Answers change the number of "auto" replicas."""
    replicas = "auto" if desired.auto_replicas else desired.replicas
    options = desired.options
    values = {**asdict(options), "drafter": options.drafter_name, "replicas": replicas}
    return {name: json.dumps(value, default=sorted) for name, value in values.items()}
