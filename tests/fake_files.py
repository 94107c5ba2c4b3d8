"""Stand-ins for the models' files of a node, each driven by the test that uses it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from fakes import Json

from exo_node.node.api.operations.models_api import PullBody, Source
from exo_node.placement.errors import ExoNodeError, ModelNotFound


def state(status: str, done_bytes: int = 0, total_bytes: int | None = 100) -> Json:
    """The state of a download of `owner/tiny`."""
    return {
        "object": "model.pull",
        "model": "owner/tiny",
        "node": "mac-1",
        "status": status,
        "done_bytes": done_bytes,
        "total_bytes": total_bytes,
        "bytes_per_second": None,
        "seconds_left": None,
        "files": [],
    }


@dataclass
class FakePull:
    """A download with a script: its states, and the error that it ends with."""

    script: Sequence[Json]
    error: ExoNodeError | None = None
    waits: bool = False
    """After its last state it goes on without another."""
    left: int = 0

    async def states(self) -> AsyncGenerator[Json]:
        try:
            for each in self.script:
                yield each
            if self.waits:
                _ = await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.left += 1


def _whole() -> FakePull:
    return FakePull([state("waiting", 0, None), state("downloading", 40), state("done", 100)])


@dataclass
class FakeFiles:
    """`models_api.ModelFiles` in memory; `calls` has every change that was asked for."""

    running: FakePull = field(default_factory=_whole)
    listed: list[Json] = field(default_factory=list[Json])
    """The unfinished downloads."""
    found: list[Json] = field(default_factory=list[Json])
    """What a search of the hub finds."""
    cards: list[Json] = field(default_factory=list[Json])
    """What a search of the packaged cards finds."""
    freed_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """By model; others free 100 bytes."""
    calls: list[tuple[object, ...]] = field(default_factory=list[tuple[object, ...]])
    refusal: ExoNodeError | None = None

    async def search(self, query: str, limit: int, source: Source) -> Json:
        self.calls.append(("search", query, limit, source))
        if self.refusal is not None and source == "hub":
            raise self.refusal
        data = self.cards if source == "cards" else self.found
        return {"object": "list", "query": query, "data": data}

    async def pull(self, body: PullBody) -> AsyncGenerator[Json]:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(("pull", body.model, body.revision, body.quant))
        return self.running.states()

    async def pulls(self, *, own: bool) -> Json:
        return {"object": "list", "data": self.listed, "unreachable": [], "own": own}

    async def pause(self, model: str) -> Json:
        self.calls.append(("pause", model))
        return state("paused")

    async def cancel(self, model: str) -> Json:
        self.calls.append(("cancel", model))
        return state("cancelled") | {"freed_bytes": 40}

    async def remove(self, model: str, *, dry_run: bool) -> Json:
        if self.refusal is not None:
            raise self.refusal
        if model == "no/model":
            raise ModelNotFound(f"{model} is not on this machine", param="model")
        self.calls.append(("remove", model, dry_run))
        freed = self.freed_bytes.get(model, 100)
        return {"id": model, "object": "model", "deleted": not dry_run, "freed_bytes": freed}
