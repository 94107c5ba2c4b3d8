"""The part of the HTTP API that shows and changes what the node and its cluster do."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...placement.errors import InvalidRequest, ModelNotFound
from ..machine.switches import VARIABLES, SwitchName
from .body_schema import StrictBody, read_body
from .errors import JsonResponse
from .model_entries import model_entry, model_list
from .plan_request import PlacementBody, PlanBody, parse_query

Json = Mapping[str, Any]

REACH_PATH: Final = "/v1/cluster/reach"


class Operations(Protocol):
    """What the HTTP layer needs of the node beside chat; every Json is ready for the wire.

    Each method may raise an ExoNodeError.
    """

    async def models(self) -> Json:
        """`{"object": "list", "data": …}`, the entries each with their `id`: those on disk."""
        ...

    async def catalogue(self) -> Json:
        """The same of the models that there are cards of, on disk or not."""
        ...

    async def no_model(self, model: str) -> ModelNotFound:
        """The error for a name that is not among `models`: the same as a chat's."""
        ...

    async def cluster(self) -> Json: ...

    async def reach(self) -> Json:
        """Whether this node and the others reach each other; asks them, which takes seconds."""
        ...

    async def placements(self) -> Json:
        """`{"object": "list", "data": …}`."""
        ...

    async def preview(self, asked: PlanBody) -> Json:
        """Where the model would be placed, with the runner-up; nothing is loaded."""
        ...

    async def place(self, asked: PlacementBody) -> Json:
        """Plans and loads; the placement."""
        ...

    async def unplace(self, placement: str) -> None:
        """Raises PlacementNotFound."""
        ...

    async def settings(self) -> Json:
        """Per name: `value`, `source`, `writable`, `reason`."""
        ...

    async def change_settings(self, wanted: Mapping[SwitchName, bool]) -> Json:
        """Sets them for new requests; all settings afterwards.

        Raises InvalidRequest where an environment variable has fixed one.
        """
        ...

    async def ready(self) -> tuple[bool, str]:
        """Whether a request would be served, and why or why not."""
        ...

    async def version(self) -> Json: ...

    async def mtp_stats(self) -> Json:
        """Totals per model since the node started."""
        ...

    async def metrics(self) -> tuple[bytes, str]:
        """What Prometheus reads, and its content type."""
        ...


class SettingsBody(StrictBody):
    """The defaults mean nothing: only the fields that were given count."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    native_mtp_enabled: bool = False
    native_mtp_async_draft_eval: bool = False
    native_mtp_adaptive: bool = False

    def given(self) -> dict[SwitchName, bool]:
        return {name: getattr(self, name) for name in VARIABLES if name in self.model_fields_set}


class OperationsApi:
    """The endpoints over an `Operations`."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def routes(self) -> list[Route]:
        return [
            Route("/health/live", self.live, methods=["GET"]),
            Route("/health/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/mtp/stats", self.mtp_stats, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.model, methods=["GET"]),
            Route("/v1/cluster", self.cluster, methods=["GET"]),
            Route(REACH_PATH, self.reach, methods=["GET"]),
            Route("/v1/placements", self.placements, methods=["GET"]),
            Route("/v1/placements", self.place, methods=["POST"]),
            Route("/v1/placements/preview", self.preview, methods=["GET"]),
            Route("/v1/placements/{id}", self.unplace, methods=["DELETE"]),
            Route("/v1/settings", self.settings, methods=["GET"]),
            Route("/v1/settings", self.change_settings, methods=["PATCH"]),
        ]

    async def live(self, _: Request) -> Response:
        """That the event loop turns; it asks nothing else."""
        return JsonResponse({"status": "live"})

    async def ready(self, _: Request) -> Response:
        is_ready, reason = await self._operations.ready()
        if is_ready:
            return JsonResponse({"status": "ready", "reason": reason})
        body = {"status": "unready", "reason": reason}
        return JsonResponse(body, 503, headers={"Retry-After": "5"})

    async def mtp_stats(self, _: Request) -> Response:
        return JsonResponse(await self._operations.mtp_stats())

    async def metrics(self, _: Request) -> Response:
        """Of this node alone: it is not forwarded to the head."""
        content, content_type = await self._operations.metrics()
        return Response(content, headers={"Content-Type": content_type})

    async def version(self, _: Request) -> Response:
        return JsonResponse(await self._operations.version())

    async def models(self, request: Request) -> Response:
        match request.query_params.get("catalog", "0"):
            case "1" | "true":
                return JsonResponse(model_list(await self._operations.catalogue(), request.headers))
            case "0" | "false":
                return JsonResponse(model_list(await self._operations.models(), request.headers))
            case other:
                what = f"catalog is {other[:40]!r}; it is 1 (the models that have cards) or 0"
                raise InvalidRequest(what, param="catalog")

    async def model(self, request: Request) -> Response:
        wanted: str = request.path_params["id"]
        if not wanted:  # a list with a slash behind it
            return await self.models(request)
        for entry in (await self._operations.models())["data"]:
            if entry["id"] == wanted:
                return JsonResponse(model_entry(entry, request.headers))
        raise await self._operations.no_model(wanted)

    async def cluster(self, _: Request) -> Response:
        return JsonResponse(await self._operations.cluster())

    async def reach(self, _: Request) -> Response:
        return JsonResponse(await self._operations.reach())

    async def placements(self, _: Request) -> Response:
        return JsonResponse(await self._operations.placements())

    async def preview(self, request: Request) -> Response:
        asked = parse_query(request.query_params.multi_items())
        return JsonResponse(await self._operations.preview(asked))

    async def place(self, request: Request) -> Response:
        body = await read_body(request, PlacementBody)
        return JsonResponse(await self._operations.place(body))

    async def unplace(self, request: Request) -> Response:
        placement: str = request.path_params["id"]
        await self._operations.unplace(placement)
        return JsonResponse({"id": placement, "object": "placement", "deleted": True})

    async def settings(self, _: Request) -> Response:
        return JsonResponse(await self._operations.settings())

    async def change_settings(self, request: Request) -> Response:
        given = (await read_body(request, SettingsBody)).given()
        if not given:
            names = ", ".join(SettingsBody.known_fields())
            raise InvalidRequest(f"the body names no setting; give one of {names}", param="body")
        return JsonResponse(await self._operations.change_settings(given))
