"""Lists of models with the profiles of the node that the client asked among them.

The lists are the head's, and profiles are each node's own: so they are added on the way back.
"""

import json
from typing import Any, Final, cast
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...placement.errors import InvalidRequest
from .errors import JsonResponse
from .model_entries import model_entry, model_list
from .profile_file import Profile, ProfileFile
from .strict_json import decode, encode

FORWARDED: Final = "forwarded"
"""The client of a request that came from another node, which adds its own profiles."""
_MODELS: Final = "/v1/models"
_TAGS: Final = "/api/tags"
_SHOW: Final = "/api/show"

Json = dict[str, Any]


class ProfileLists:
    """ASGI middleware around whatever lists models; other requests pass."""

    def __init__(self, app: ASGIApp, profiles: ProfileFile) -> None:
        self._app = app
        self._profiles = profiles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        forwarded = (scope.get("client") or ("",))[0] == FORWARDED
        if not forwarded and scope["type"] == "http":
            await self._profiles.refresh()
        if forwarded or scope["type"] != "http" or not self._has_any():
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], str(scope["path"])
        name = path.removeprefix(f"{_MODELS}/")
        if method == "GET" and path in (_MODELS, f"{_MODELS}/") and not _asks_for_catalogue(scope):
            await self._models(scope, receive, send)
        elif (method, path) == ("GET", _TAGS):
            await self._tags(scope, receive, send)
        elif (method, path) == ("POST", _SHOW):
            await self._show(scope, receive, send)
        elif method == "GET" and name != path and self._listed(name) is not None:
            await self._one(name, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_any(self) -> bool:
        return bool(self._profiles.all() or self._profiles.faults())

    def _listed(self, name: str) -> Profile | None:
        return self._profiles.all().get(name)

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = await _captured(self._app, scope, receive, send)
        if told is None:
            return
        named, faults = self._profiles.all(), self._profiles.faults()
        by_id = {str(entry["id"]): entry for entry in told["data"]}
        kept = [entry for name, entry in by_id.items() if name not in named]
        ours = [_entry(name, each, by_id.get(each.model)) for name, each in named.items()]
        broken = [
            _named(name) | {"loaded": False, "error": fault.message}
            for name, fault in faults.items()
        ]
        told = model_list({**told, "data": [*kept, *ours, *broken]})
        await JsonResponse(told)(scope, receive, send)

    async def _tags(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ollama's list."""
        told = await _captured(self._app, scope, receive, send)
        if told is None:
            return
        named = self._profiles.all()
        by_name = {str(tag["name"]): tag for tag in told["models"]}
        kept = [tag for name, tag in by_name.items() if name not in named]
        ours = [
            {**tag, "name": name, "model": name}
            for name, each in named.items()
            if (tag := by_name.get(each.model)) is not None
        ]
        await JsonResponse({"models": [*kept, *ours]})(scope, receive, send)

    async def _one(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        whole = {**scope, "path": _MODELS, "raw_path": _MODELS.encode()}
        told = await _captured(self._app, whole, receive, send)
        if told is not None:
            by_id = {str(entry["id"]): entry for entry in told["data"]}
            profile = self._profiles.all()[name]
            entry = _entry(name, profile, by_id.get(profile.model))
            await JsonResponse(model_entry(entry))(scope, receive, send)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The profile's model is shown."""
        body = await _body(receive)
        try:
            asked = decode(body)
        except InvalidRequest:
            asked = None  # the endpoint says what is wrong with it
        if isinstance(asked, dict):
            name = str(asked.get("model") or asked.get("name") or "").removesuffix(":latest")
            if (profile := self._listed(name)) is not None:
                body = encode({"model": profile.model})
        length = [(b"content-length", str(len(body)).encode())]
        kept = [each for each in scope["headers"] if each[0] != b"content-length"]
        headers = {**scope, "headers": [*kept, *length]}
        await self._app(headers, _again(body, receive), send)


def _asks_for_catalogue(scope: Scope) -> bool:
    return any(name == "catalog" for name, _ in parse_qsl(scope["query_string"].decode("latin-1")))


def _entry(name: str, profile: Profile, model: Json | None) -> Json:
    """The model's entry under another name."""
    told = {"profile_of": profile.model, "profile": profile.shown()}
    if model is not None:
        return {**model, "id": name, **told}
    why = f"its model {profile.model} is not on the cluster's disks; `exo-node models` lists those"
    return {**_named(name), "loaded": False, **told, "error": why}


def _named(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "exo-node"}


async def _captured(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> Json | None:
    """The object that the app answers; None where its answer is another one, which was sent."""
    messages: list[Message] = []

    async def keep(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, keep)
    body = b"".join(message.get("body", b"") for message in messages)
    if messages and messages[0].get("status") == 200:
        found = json.loads(body)
        if isinstance(found, dict):
            return cast(Json, found)
    for message in messages:
        await send(message)
    return None


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def first_the_body() -> Message:
        return messages.pop() if messages else await receive()

    return first_the_body
