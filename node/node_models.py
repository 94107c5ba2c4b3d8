"""The models' files of a running node: found on the hub, downloaded, listed and deleted."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from ..placement.errors import (
    DownloadFailed,
    ExoNodeError,
    PeerLost,
    RemovalRefused,
)
from ..placement.ids import ModelId
from ..proto import peer_pb2 as pb
from .api.operations.models_api import PULL_PATHS, PullBody, Source
from .cluster.member import MemberFacts
from .local_node import LocalNode
from .model_list import ModelList
from .peering import PeerWiring
from .placements.stage_runners import LocalStages
from .store.pulls import Pull, Pulls
from .store.stop_signal import not_in_time, stoppable
from .store.transfers import Progress

if TYPE_CHECKING:
    from .store.hub_search import Hit, HubSearch
    from .store.stop_signal import StopSignal

Json = dict[str, Any]
_SEARCH_S: Final = 8.0
"""A search with all that it reads of its hits: a person waits for it."""
_SEARCHES: Final = 4
"""Searches of the hub at the same time, each with several connections; others wait."""


class NodeModels:
    """`models_api.ModelFiles` of the running node."""

    def __init__(
        self,
        local: LocalNode,
        peering: PeerWiring,
        models: ModelList,
        stages: LocalStages,
    ) -> None:
        self._library = local.library
        self._events = local.events
        self._own_folder = local.settings.data_dir / "models"
        self._name = local.settings.name
        self._reply_s = local.timing.reply_s
        self._peering = peering
        self._models = models
        self._stages = stages
        self._rescan = local.rescan
        self._searches = asyncio.Semaphore(_SEARCHES)
        tick_s = local.timing.tick_s
        self._pulls = Pulls(local.library, local.events, tick_s, self._download, local.rescan)

    async def close(self) -> None:
        await self._pulls.close()

    # ------------------------------------------------------------------------------ the hub

    async def search(self, query: str, limit: int, source: Source) -> Json:
        """Models of the hub. Raises DownloadFailed offline, or if it does not answer in time.

        A call that is cancelled leaves nothing behind.
        """
        answer: Json = {"object": "list", "query": query, "source": source}
        if source == "cards":
            words = query.lower().split()
            cards = await self._models.catalogue()
            hits = [card for card in cards if all(word in card["id"].lower() for word in words)]
            return answer | {"data": hits[:limit]}
        if variable := self._library.offline_by:
            raise DownloadFailed(
                f"this node is offline, so the hub is not searched. Unset {variable}.",
                param=variable,
            )
        async with self._searches:
            hits = await self._find(query, limit)
        describe = self._models.planner()
        entries = [await asyncio.to_thread(self._entry, hit, describe) for hit in hits]
        return answer | {"data": entries}

    async def _find(self, query: str, limit: int) -> "list[Hit]":
        try:
            async with asyncio.timeout(1.1 * _SEARCH_S):  # a name may be looked up for longer
                return await stoppable(
                    lambda stop: self._search.find(query, limit, stop, _SEARCH_S), "search"
                )
        except TimeoutError:
            raise not_in_time(_SEARCH_S, "a search") from None

    @cached_property
    def _search(self) -> "HubSearch":
        from .store.hub_search import HubSearch

        return HubSearch()

    def _entry(self, hit: "Hit", describe: "Callable[[Any], Json]") -> Json:
        contents, fault, planned = hit.contents, hit.contents.fault, {}
        if contents.config is not None:
            try:
                card = self._library.card_of(
                    ModelId(hit.repository), contents.config, contents.weight_bytes
                )
                planned = describe(card)
            except ExoNodeError as error:
                fault = error.message
        nodes = self._models.holders(ModelId(hit.repository))
        return {
            "id": hit.repository,
            "downloads": hit.downloads,
            "likes": hit.likes,
            "gated": hit.gated,
            "updated": hit.updated,
            "download_bytes": contents.download_bytes or None,
            "size_bytes": contents.weight_bytes or None,
            "downloaded": bool(nodes),
            "nodes": nodes,
            **planned,
            **({"error": fault} if fault else {}),
        }

    # ---------------------------------------------------------------------------- downloads

    async def pull(self, body: PullBody) -> AsyncGenerator[Json]:
        pull = await self._pulls.start(body.model, body.revision, body.quant)
        return self._states(pull)

    async def _states(self, pull: Pull) -> AsyncGenerator[Json]:
        async with aclosing(self._pulls.follow(pull)) as states:
            async for state in states:
                yield state | {"node": self._name}

    async def pulls(self, *, own: bool) -> Json:
        """`unreachable`: the nodes that did not answer, and why."""
        states = self._named(await self._pulls.unfinished())
        unreachable: list[Json] = []
        if not own:
            members = self._peering.cluster.members()
            others = [each for each in members if each.id != self._peering.cluster.self_id]
            for member, answer in zip(
                others, await asyncio.gather(*map(self._pulls_of, others)), strict=True
            ):
                if isinstance(answer, str):
                    unreachable.append({"node": member.facts.name, "reason": answer})
                else:
                    states += answer
        return {"object": "list", "data": states, "unreachable": unreachable}

    async def pause(self, model: str) -> Json:
        return self._named([await self._pulls.pause(model)])[0]

    async def cancel(self, model: str) -> Json:
        return self._named([await self._pulls.cancel(model)])[0]

    def _named(self, states: Iterable[Json]) -> list[Json]:
        return [state | {"node": self._name} for state in states]

    async def _pulls_of(self, member: MemberFacts) -> list[Json] | str:
        """The downloads of another node, or the reason why they are not known."""
        cluster, path = self._peering.cluster, f"{PULL_PATHS[0]}?node={member.id}"
        request = pb.HttpRequest(method="GET", path=path)
        body, status = b"", 0
        try:
            address = cluster.address(member.id)
            async with asyncio.timeout(self._reply_s):
                answer = self._peering.client.http(address, member.id, request)
                async with aclosing(answer) as chunks:
                    async for chunk in chunks:
                        status = status or chunk.status
                        body += chunk.body
            if status != 200:
                return f"it answered {status}"
            data: list[Json] = json.loads(body)["data"]
            return data
        except TimeoutError:
            return "it did not answer in time"
        except PeerLost as fault:
            return fault.message

    def _download(
        self,
        repository: str,
        revision: str | None,
        note: Callable[[Progress], None],
        stop: "StopSignal",
    ) -> object:
        from .store.hub_download import download

        return download(repository, revision, note, offline=self._library.offline, stop=stop)

    # ---------------------------------------------------------------------------- deletions

    async def remove(self, model: str, *, dry_run: bool) -> Json:
        self._refuse_in_use(model)
        find = self._library.removal
        removal = await asyncio.to_thread(find, model, self._own_folder, only_own=True)
        if not dry_run:
            remove = self._stages.remove_files
            await self._pulls.remove(model, lambda: remove(ModelId(model), removal.carry_out))
            await self._rescan()
            text = f"{model} was deleted from {self._name}"
            _ = self._events.add("removed", text, model=model, bytes=removal.freed_bytes)
        freed = {"freed_bytes": removal.freed_bytes, "node": self._name}
        return {"id": model, "object": "model", "deleted": not dry_run, **freed}

    def _refuse_in_use(self, model: str) -> None:
        stages = (stage for each in self._peering.cluster.members() for stage in each.stages)
        if any(stage.model == model for stage in stages):
            raise RemovalRefused(
                f"{model} is loaded; unload it first, with `exo-node models unload {model}` or on "
                "the page",
                param="model",
            )
        self._pulls.refuse_active(model)
