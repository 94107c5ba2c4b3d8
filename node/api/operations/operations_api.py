"""The part of the HTTP API that shows and changes what the node and its cluster do."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import InvalidRequest, ModelNotFound
from ...machine.awake import KeepAwake
from ...machine.switches import NAMES, Name, Value
from ..http.bodies import StrictBody
from ..http.dialects import HEALTH_PATHS
from ..http.long_bodies import json_response
from ..http.routes import ApiRoute, get_json, post_json, profiles_of
from .model_entries import model_entry, model_list, with_profiles
from .plan_request import PlacementBody, PlanBody, parse_query

Json = Mapping[str, Any]

REACH_PATH: Final = "/v1/cluster/reach"
PROFILE_PATH: Final = "/v1/cluster/profile"
_CATALOG_QUERY: Final = {"catalog": {"enum": ["0", "1", "true", "false"]}}
_PLAN_QUERY: Final[Mapping[str, Json]] = {
    "model": {"type": "string", "minLength": 1, "maxLength": 256},
    "min_nodes": {"type": "integer", "minimum": 1, "maximum": 1024},
    "max_nodes": {"type": "integer", "minimum": 1, "maximum": 1024},
    "context": {"type": "integer", "minimum": 1},
    "kv_bits": {"enum": ["0", "4", "8"]},
    "drafter": {"type": "string", "minLength": 1, "maxLength": 256},
    **{name: {"type": "string", "minLength": 1} for name in ("exclude", "nodes", "layers")},
}


class Operations(Protocol):
    """The node as the HTTP layer uses it beside chat; every Json is ready for the wire.

    Each method may raise an ExoNodeError.
    """

    async def models(self) -> Json:
        """`{"object": "list", "data": …}` of the models on disk; each entry has an `id`."""
        ...

    async def catalogue(self) -> Json: ...

    async def no_model(self, model: str) -> ModelNotFound:
        """The error for a name that is not among `models`: the same as a chat's."""
        ...

    async def cluster(self) -> Json: ...

    async def reach(self) -> Json:
        """Whether this node and the others reach each other; asks them, which takes seconds."""
        ...

    async def profile(self) -> Json: ...

    async def placements(self) -> Json: ...

    async def preview(self, plan: PlanBody, /) -> Json: ...

    async def place(self, plan: PlacementBody, /) -> Json: ...

    async def unplace(self, placement: str) -> None: ...

    async def settings(self) -> Json:
        """`value`, `source`, `writable` and `reason` by name."""
        ...

    async def change_settings(self, changes: Mapping[Name, Value], /) -> Json:
        """Changes them for new requests. Returns all settings.

        Raises InvalidRequest where an environment variable has fixed one.
        """
        ...

    async def ready(self) -> tuple[bool, str]:
        """Whether a request would be served, and why or why not."""
        ...

    async def version(self) -> Json: ...

    async def mtp_stats(self) -> Json: ...

    async def metrics(self) -> tuple[bytes, str]:
        """The metrics in Prometheus' text format, and their content type."""
        ...


class SettingsBody(StrictBody):
    """The defaults mean nothing: only the fields that were given count."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    native_mtp_enabled: bool = False
    native_mtp_async_draft_eval: bool = False
    native_mtp_adaptive: bool = False
    keep_awake: KeepAwake = "answers"

    def changes(self) -> dict[Name, Value]:
        return {name: getattr(self, name) for name in NAMES if name in self.model_fields_set}


class OperationsApi:
    """The endpoints over an `Operations`."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def routes(self) -> list[ApiRoute]:
        operations = self._operations
        return [
            get_json("/health/live", self.live),
            ApiRoute("GET", "/health/ready", self.ready),
            *(ApiRoute("GET", path, self.health, media_type="text/plain") for path in HEALTH_PATHS),
            get_json("/version", operations.version),
            ApiRoute("GET", "/metrics", self.metrics, media_type="text/plain"),
            get_json("/v1/mtp/stats", operations.mtp_stats),
            ApiRoute("GET", "/v1/models", self.models, query=_CATALOG_QUERY),
            ApiRoute("GET", "/v1/models/{id:path}", self.model),
            get_json("/v1/cluster", operations.cluster),
            get_json(REACH_PATH, operations.reach),
            get_json(PROFILE_PATH, operations.profile),
            get_json("/v1/placements", operations.placements),
            post_json("/v1/placements", lambda _, body: operations.place(body), PlacementBody),
            ApiRoute("GET", "/v1/placements/preview", self.preview, query=_PLAN_QUERY),
            ApiRoute("DELETE", "/v1/placements/{id}", self.unplace),
            get_json("/v1/settings", operations.settings),
            post_json("/v1/settings", self.change_settings, SettingsBody, method="PATCH"),
        ]

    async def live(self) -> Json:
        """Shows that the event loop runs; it depends on nothing else."""
        return {"status": "live"}

    async def ready(self, _: Request) -> Response:
        is_ready, reason = await self._operations.ready()
        if is_ready:
            return json_response({"status": "ready", "reason": reason})
        body = {"status": "unready", "reason": reason}
        return json_response(body, 503, headers={"Retry-After": "5"})

    async def health(self, request: Request) -> Response:
        """Readiness in the form of other servers: load generators ask for it before they begin."""
        ready = await self.ready(request)
        return Response() if ready.status_code == 200 else ready

    async def metrics(self, _: Request) -> Response:
        """The metrics of this node alone; they are not forwarded to the head."""
        content, content_type = await self._operations.metrics()
        return Response(content, headers={"Content-Type": content_type})

    async def models(self, request: Request) -> Response:
        # Clients send parameters of other servers' lists, which have no effect.
        catalog = request.query_params.get("catalog", "0")
        if catalog not in _CATALOG_QUERY["catalog"]["enum"]:
            what = f"catalog is {catalog[:40]!r}; it is 1 (the models that have cards) or 0"
            raise InvalidRequest(what, param="catalog")
        if catalog in ("1", "true"):
            listed = await self._operations.catalogue()
        else:
            listed = await self._operations.models()
            entries = with_profiles(listed["data"], profiles_of(request))
            listed = {**listed, "data": entries}
        return json_response(model_list(listed, request.headers))

    async def model(self, request: Request) -> Response:
        model: str = request.path_params["id"]
        if not model:  # the list's path with a slash at its end
            return await self.models(request)
        models = (await self._operations.models())["data"]
        for entry in with_profiles(models, profiles_of(request)):
            if entry["id"] == model:
                return json_response(model_entry(entry, request.headers))
        raise await self._operations.no_model(model)

    async def preview(self, request: Request) -> Response:
        plan = parse_query(request.query_params.multi_items())
        return json_response(await self._operations.preview(plan))

    async def unplace(self, request: Request) -> Response:
        placement: str = request.path_params["id"]
        await self._operations.unplace(placement)
        return json_response({"id": placement, "object": "placement", "deleted": True})

    async def change_settings(self, _: Request, body: SettingsBody) -> Json:
        changes = body.changes()
        if not changes:
            names = ", ".join(SettingsBody.known_fields())
            raise InvalidRequest(f"the body names no setting; give one of {names}", param="body")
        return await self._operations.change_settings(changes)
