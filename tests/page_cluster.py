"""The fake cluster of a node with fakes, for tests of the page."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fakes import Json
from http_node import Node

from exo_node.node.api.operations.plan_request import PlacementBody, PlanBody

HEAD: Json = {"default_k": 2, "max_k": 3, "weights": "found", "enabled": True, "reason": ""}


def model(id: str, *, loaded: bool, nodes: int, **more: Any) -> Json:
    return {
        "id": id,
        "object": "model",
        "loaded": loaded,
        "downloaded": True,
        "nodes": ["mac-1"],
        "size_bytes": 33_000_000,
        "format": "bfloat16",
        "quantization": None,
        "context_length": 4096,
        "fits": {"nodes": nodes, "needed_bytes": 47_000_000_000},
        "mtp": "head found",
        "native_mtp": HEAD,
        **more,
    }


def member(number: int, **more: Any) -> Json:
    return {
        "id": f"{number:02}" + "a" * 18,
        "name": f"mac-{number}",
        "version": "0.1.0",
        "host": "127.0.0.1",
        "port": 52416,
        "chip": "M4 Max",
        "backend": "metal",
        "memory_bytes": 64 * 10**9,
        "status": "alive",
        "self": number == 1,
        "head": number == 2,
        "stages": [],
        **more,
    }


def stage(number: int, from_layer: int, to_layer: int, needs: int) -> Json:
    """A stage of a preview, on the node `member(number)`."""
    return {
        "node": member(number)["id"],
        "name": member(number)["name"],
        "layers": [from_layer, to_layer],
        "memory_bytes": needs,
        "memory_left_bytes": 48 * 10**9,
    }


def planned(*stages: Json, brings: list[Json] | None = None) -> Json:
    """A placement of a preview."""
    figures = {"seconds_per_token": 0.04, "context_length": 4096, "reason": "because"}
    return {"stages": list(stages), **figures, "to_bring": brings or []}


def copy(number: int, **more: Any) -> Json:
    """A placement of `demo` whole on the node `member(number)`."""
    return {
        "id": f"p-{number:08}",
        "model": "demo",
        "status": "ready",
        "reason": f"on mac-{number} it is fastest",
        "stages": [{"node": member(number)["id"], "layers": [0, 16], "status": "ready"}],
        "answers": 0,
        "replicas": 1,
        "auto_replicas": False,
        "replicas_missing": None,
        **more,
    }


def hit(id: str, **more: Any) -> Json:
    """A model that a search of the hub finds."""
    fits = {"nodes": 1, "needed_bytes": 9 * 10**9, "tokens_per_second": 31.2, "on": ["mac-2"]}
    by_node = [
        {"node": "mac-1", "fits": False, "tokens_per_second": None},
        {"node": "mac-2", "fits": True, "tokens_per_second": 31.2},
    ]
    return {
        "id": id,
        "size_bytes": 17 * 10**9,
        "download_bytes": 17 * 10**9,
        "format": "4-bit",
        "context_length": 262_144,
        "downloads": 12_345,
        "likes": 67,
        "gated": False,
        "downloaded": False,
        "nodes": [],
        "fits": fits,
        "by_node": by_node,
        **more,
    }


class Cluster:
    """The models, nodes, placements and previews that the fake node returns; tests change them."""

    def __init__(self, running: Node) -> None:
        self.models = [
            model("aa/too-large", loaded=False, nodes=0),
            model("demo", loaded=False, nodes=1),
        ]
        self.nodes = [member(1)]
        self.identity: Json = {}
        """Further facts of the cluster."""
        self.previews: dict[str, Json] = {}
        """The previews by excluded node ids, separated by commas."""
        self._placed = running.operations.placed
        self.requested: list[Json] = []
        """The bodies of requests for a placement."""
        self.loop: asyncio.AbstractEventLoop | None = None
        running.operations.place = self._place  # type: ignore[method-assign]
        running.operations.models = self._models  # type: ignore[method-assign]
        running.operations.cluster_source = self._cluster
        running.operations.preview = self._preview  # type: ignore[method-assign]

    async def _preview(self, request: PlanBody) -> Json:
        return self.previews[",".join(request.exclude)]

    @property
    def placements(self) -> list[Json]:
        return list(self._placed.values())

    @placements.setter
    def placements(self, placements: Sequence[Json]) -> None:
        self._placed.clear()
        self._placed.update({each["id"]: each for each in placements})

    async def _place(self, request: PlacementBody) -> Json:
        """Changes the desired copies; tests add and remove the placements themselves."""
        auto = request.replicas == "auto"
        changes: Json = {"auto_replicas": auto}
        if not auto:
            changes["replicas"] = request.replicas
        self.placements = [placement | changes for placement in self.placements]
        self.requested.append(request.model_dump(exclude_unset=True))
        return self.placements[0] if self.placements else {}

    async def _models(self) -> Json:
        return {"object": "list", "data": self.models}

    def _cluster(self) -> Json:
        self.loop = asyncio.get_running_loop()
        identity = {"self": "01" + "a" * 18, "head": "02" + "a" * 18, "cluster": "c" * 16}
        return {**identity, **self.identity, "term": 1, "version": "0.1.0", "nodes": self.nodes}
