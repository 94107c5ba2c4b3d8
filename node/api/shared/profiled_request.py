"""Requests to profiles: the user's own names for models, with fields of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....mtp.types import Sampling
from ....placement.errors import ExoNodeError, ModelNotFound
from ....placement.ids import ModelId
from ....proto import peer_pb2 as pb
from ....proto.fields import completed, filled
from ...chat.requests import GenerationRequest
from .profile_file import Profile, ProfileFile
from .thinking_schema import merge_options


async def profiled(profiles: ProfileFile, request: GenerationRequest) -> GenerationRequest:
    """The request, to the profile's model if it names one.

    Raises ModelNotFound for a profile with a fault.
    """
    await profiles.refresh()
    try:
        profile = profiles.get(request.model)
    except ExoNodeError as fault:
        raise ModelNotFound(fault.message, param="model") from fault
    return request if profile is None else apply_profile(profile, request)


def apply_profile(profile: Profile, request: GenerationRequest) -> GenerationRequest:
    """The request to the profile's model, with the profile's fields where it sets none."""
    sampling, fields = profile.sampling()
    keep_alive, trusted = request.keep_alive_s, request.trusted
    if keep_alive is None:
        keep_alive, trusted = profile.keep_alive, True  # the node's own user wrote it
    k = request.num_draft_tokens
    own_fields = fields - request.explicit_fields
    changed = replace(
        request,
        model=ModelId(profile.model),
        profile=request.model,
        sampling=_sampling(request, sampling, own_fields),
        explicit_fields=request.explicit_fields | own_fields,
        profile_fields=own_fields,
        limits=completed(request.limits, filled(pb.Limits, profile)),
        sharing=completed(request.sharing, filled(pb.Sharing, profile)),
        num_draft_tokens=profile.num_draft_tokens if k is None else k,
        draft_policy=request.draft_policy or profile.draft_policy,
        keep_alive_s=keep_alive,
        trusted=trusted,
    )
    if (request.text, request.ids, request.embeddings) != (None, None, None):
        return changed  # there is no template
    return replace(
        changed,
        messages=_messages(request, profile.system),
        options=merge_options(profile.template_options, request.options),
    )


def _sampling(request: GenerationRequest, defaults: Sampling, names: frozenset[str]) -> Sampling:
    """The request's sampling with the fields `names` of `defaults`."""
    return replace(request.sampling, **{name: getattr(defaults, name) for name in names})


def _messages(request: GenerationRequest, system: str | None) -> tuple[Mapping[str, Any], ...]:
    messages = request.messages
    if system is None or (messages and messages[0].get("role") == "system"):
        return messages
    return ({"role": "system", "content": system}, *messages)
