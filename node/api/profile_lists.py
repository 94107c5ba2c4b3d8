"""Lists of models with the entry node's profiles.

The head answers the lists, and each node has profiles of its own, so the entry node adds them to
the head's answer.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...placement.errors import InvalidRequest
from .forward import FORWARDED, with_body
from .http.long_bodies import json_response
from .http.strict_json import decode, encode
from .operations.model_entries import model_entry, model_list
from .shared.profile_file import Profile, ProfileFile

_MODELS: Final = "/v1/models"

Json = dict[str, Any]


class ProfileLists:
    """ASGI middleware that edits the lists of models; other requests pass unchanged."""

    def __init__(self, app: ASGIApp, profiles: ProfileFile) -> None:
        self._app = app
        self._profiles = profiles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope.get("client") or ("",))[0] == FORWARDED:
            await self._app(scope, receive, send)
            return
        await self._profiles.refresh()
        edit: Callable[[Json], Json] | None = None
        if self._profiles.all() or self._profiles.faults():
            match scope["method"], str(scope["path"]):
                case "POST", "/api/show":
                    scope, receive = await self._with_model(scope, receive)
                case "GET", "/v1/models" | "/v1/models/" if not _asks_for_catalogue(scope):
                    edit = self._with_profiles
                case "GET", "/api/tags":
                    edit = self._with_tags
                case "GET", path if (name := path.removeprefix(f"{_MODELS}/")) != path:
                    if name in self._profiles.all():
                        scope = {**scope, "path": _MODELS, "raw_path": _MODELS.encode()}
                        edit = partial(self._one, name)
                case _:
                    pass
        if edit is None:
            await self._app(scope, receive, send)
        elif (answer := await _capture(self._app, scope, receive, send)) is not None:
            await json_response(edit(answer))(scope, receive, send)

    def _with_profiles(self, models: Json) -> Json:
        profiles, faults = self._profiles.all(), self._profiles.faults()
        by_id = {str(entry["id"]): entry for entry in models["data"]}
        others = [entry for name, entry in by_id.items() if name not in profiles]
        own = [_entry(name, each, by_id.get(each.model)) for name, each in profiles.items()]
        broken = [
            _bare_entry(name) | {"loaded": False, "error": fault.message}
            for name, fault in faults.items()
        ]
        return model_list({**models, "data": [*others, *own, *broken]})

    def _with_tags(self, tags: Json) -> Json:
        """Ollama's list with the profiles whose model is in it."""
        profiles = self._profiles.all()
        by_name = {str(tag["name"]): tag for tag in tags["models"]}
        others = [tag for name, tag in by_name.items() if name not in profiles]
        own = [
            {**tag, "name": name, "model": name}
            for name, each in profiles.items()
            if (tag := by_name.get(each.model)) is not None
        ]
        return {"models": [*others, *own]}

    def _one(self, name: str, models: Json) -> Json:
        by_id = {str(entry["id"]): entry for entry in models["data"]}
        profile = self._profiles.all()[name]
        return model_entry(_entry(name, profile, by_id.get(profile.model)))

    async def _with_model(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """The request for the model of the profile that the body names."""
        body = await Request(scope, receive).body()
        try:
            value = decode(body)
        except InvalidRequest:
            value = None  # the endpoint reports what is wrong with the body
        if isinstance(value, dict):
            name = str(value.get("model") or value.get("name") or "").removesuffix(":latest")
            if (profile := self._profiles.all().get(name)) is not None:
                body = encode({"model": profile.model})
        length = (b"content-length", str(len(body)).encode())
        headers = [each for each in scope["headers"] if each[0] != length[0]]
        return {**scope, "headers": [*headers, length]}, with_body(body, receive)


def _asks_for_catalogue(scope: Scope) -> bool:
    return any(name == "catalog" for name, _ in parse_qsl(scope["query_string"].decode("latin-1")))


def _entry(name: str, profile: Profile, model: Json | None) -> Json:
    """The model's entry under the profile's name."""
    fields = {"profile_of": profile.model, "profile": profile.describe()}
    if model is not None:
        return {**model, "id": name, **fields}
    why = f"its model {profile.model} is not on the cluster's disks; `exo-node models` lists those"
    return {**_bare_entry(name), "loaded": False, **fields, "error": why}


def _bare_entry(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "exo-node"}


async def _capture(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> Json | None:
    """The object of a successful answer; None for another answer, which is sent on."""
    messages: list[Message] = []

    async def append(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, append)
    body = b"".join(message.get("body", b"") for message in messages)
    if messages and messages[0].get("status") == 200:
        value = json.loads(body)
        if isinstance(value, dict):
            return cast(Json, value)
    for message in messages:
        await send(message)
    return None
