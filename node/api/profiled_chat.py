"""A `Chat` that knows the person's own names for models: what a profile says is put under what a
request says."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from ...mtp.types import Sampling
from ...placement.errors import ExoNodeError, ModelNotFound
from ...placement.ids import ModelId
from ..chat.requests import Chat, Encoded, Event, GenerationRequest
from .profile_file import Profile, ProfileFile
from .sampling_schema import PENALTY_FIELDS
from .sse import closing
from .thinking_schema import merge_options


class ProfiledChat:
    """`chat` behind the profiles of a file."""

    def __init__(self, chat: Chat, profiles: ProfileFile) -> None:
        self._chat = chat
        self._profiles = profiles

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """See `requests.Chat`. Raises ModelNotFound for a profile with a fault."""
        profile = await self._of(request.model)
        asked = request if profile is None else applied(profile, request)
        async with closing(self._chat.stream(asked)) as events:
            try:
                async for event in events:
                    yield event
            except ModelNotFound as fault:
                if profile is None:
                    raise
                raise _gone(request.model, fault) from fault

    async def encode(self, request: GenerationRequest) -> Encoded:
        profile = await self._of(request.model)
        if profile is None:
            return await self._chat.encode(request)
        try:
            return await self._chat.encode(applied(profile, request))
        except ModelNotFound as fault:
            raise _gone(request.model, fault) from fault

    async def release(self, request: GenerationRequest) -> None:
        profile = await self._of(request.model)
        model = request.model if profile is None else ModelId(profile.model)
        await self._chat.release(replace(request, model=model))

    async def _of(self, name: str) -> Profile | None:
        await self._profiles.refresh()
        try:
            return self._profiles.get(name)
        except ExoNodeError as fault:
            raise ModelNotFound(fault.message, param="model") from fault


def applied(profile: Profile, request: GenerationRequest) -> GenerationRequest:
    """The request to the profile's model, with what it leaves open as the profile has it."""
    sampling, said = profile.sampling()
    keep_alive, trusted = request.keep_alive_s, request.trusted
    if keep_alive is None:
        keep_alive, trusted = profile.keep_alive, True  # the node's own user wrote it
    k = request.num_draft_tokens
    changed = replace(
        request,
        model=ModelId(profile.model),
        sampling=_sampling(request, sampling, said - request.given),
        given=request.given | said,
        max_tokens=request.max_tokens or profile.max_tokens,
        stop=request.stop or tuple(profile.stop or ()),
        num_draft_tokens=profile.num_draft_tokens if k is None else k,
        draft_policy=request.draft_policy or profile.draft_policy,
        background=request.background or profile.background,
        keep_alive_s=keep_alive,
        trusted=trusted,
    )
    if request.text is not None or request.ids is not None:
        return changed  # there is no template
    return replace(
        changed,
        messages=_messages(request, profile.system),
        options=merge_options(profile.template_options, request.options),
    )


def _sampling(request: GenerationRequest, said: Sampling, open_: frozenset[str]) -> Sampling:
    """`open_`: names of fields that the profile gives and the request does not."""
    penalties = {
        field: getattr(said.penalties, field)
        for name, field in PENALTY_FIELDS.items()
        if name in open_
    }
    plain = {name: getattr(said, name) for name in open_ if name not in PENALTY_FIELDS}
    under = request.sampling
    return replace(under, penalties=replace(under.penalties, **penalties), **plain)


def _messages(request: GenerationRequest, system: str | None) -> tuple[Mapping[str, Any], ...]:
    messages = request.messages
    if system is None or (messages and messages[0].get("role") == "system"):
        return messages
    return ({"role": "system", "content": system}, *messages)


def _gone(name: str, fault: ModelNotFound) -> ModelNotFound:
    return ModelNotFound(f"the profile '{name}' names it: {fault.message}", param="model")
