"""Requests and final stats between the API's form and the runner's messages."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...mtp.types import Sampling
from ...placement.ids import PlacementId
from ...placement.sampling_values import API_DEFAULTS, Source, SourcedValue, model_sampling
from ...proto import peer_pb2 as pb
from ...proto.fields import changed, filled
from ..runners.runner_client import Endpoint
from .requests import GenerationRequest


def to_wire(request: GenerationRequest, placed: pb.Placed) -> pb.GenerateRequest:
    sampling = _sampling(request, placed)
    bare = request.text is not None or request.ids is not None
    is_chat = not bare and request.embeddings is None
    return filled(
        pb.GenerateRequest,
        request,
        placement=placed.placement,
        request=request.id,
        attempt=1,
        messages=messages_to_wire(request) if is_chat else None,
        token_ids=None if request.ids is None else pb.TokenIds(ids=request.ids),
        tools=tools_json(request),
        images=_images(request),
        bare=bare,
        sampling=filled(pb.Sampling, sampling, logit_bias=dict(sampling.logit_bias)),
        output=changed(request.output, continues=_continues(request)),
        drafting=placed.drafting,
        prefix_source=placed.prefix_source if placed.HasField("prefix_source") else None,
        readers=placed.readers,
        read_reason=placed.read_reason,
    )


def prompt_to_wire(
    request: GenerationRequest, placement: PlacementId, generator: Endpoint
) -> pb.GenerateRequest:
    """The request as far as its prompt is concerned, and whether it drafts there."""
    drafts = request.num_draft_tokens != 0 and generator.ready.mtp_head == "loaded"
    drafting = pb.Drafting(num_draft_tokens=int(drafts))
    return to_wire(request, pb.Placed(placement=placement, drafting=drafting))


def _continues(request: GenerationRequest) -> bool:
    """Whether the answer continues a text: a bare prompt, or an assistant's last message."""
    if request.text is not None or request.ids is not None:
        return True
    last: Mapping[str, Any] = request.messages[-1] if request.messages else {}
    return (
        last.get("role") == "assistant"
        and isinstance(last.get("content"), str)
        and not last.get("tool_calls")
    )


def encode_to_wire(request: GenerationRequest) -> pb.EncodeRequest:
    if request.ids is not None:
        return pb.EncodeRequest(token_ids=pb.TokenIds(ids=request.ids))
    if request.text is not None:
        return pb.EncodeRequest(text=request.text)
    return pb.EncodeRequest(
        messages=messages_to_wire(request), tools=tools_json(request), images=_images(request)
    )


def messages_to_wire(request: GenerationRequest) -> pb.Messages:
    options = dict(request.options)
    if request.output.grammar.kind == "calls":
        options["insists"] = json.loads(request.output.grammar.text)["names"] or []
    messages = json.dumps([dict(message) for message in request.messages])
    return pb.Messages(json=messages, options=json.dumps(options) if options else "")


def _images(request: GenerationRequest) -> list[pb.Image]:
    return [filled(pb.Image, image) for image in request.images]


def tools_json(request: GenerationRequest) -> str:
    return json.dumps([dict(tool) for tool in request.tools]) if request.tools else ""


def sources_of(request: GenerationRequest, placed: pb.Placed) -> dict[str, SourcedValue]:
    """The sampling parameters of an answer, with their sources: all that a model may set, and the
    others that the request or its profile sets."""
    generator = placed.stages[0].ready if placed.stages else pb.LoadReady()
    values = model_sampling(placed.sampling, generator.published_sampling)
    open_fields = {name for name, each in values.items() if each["source"] == "default"}
    for name in sorted((request.explicit_fields | open_fields) - {"logit_bias"}):
        source: Source = "request" if name in request.explicit_fields else "default"
        source = "profile" if name in request.profile_fields else source
        values[name] = SourcedValue(value=getattr(request.sampling, name), source=source)
    return values


def _sampling(request: GenerationRequest, placed: pb.Placed) -> Sampling:
    """The request's sampling with the model's values where it sets none; the seed is the
    choice's."""
    values = sources_of(request, placed)
    model: dict[str, Any] = {name: values[name]["value"] for name in API_DEFAULTS}
    sampling = replace(request.sampling, **model)
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + request.choice) % 2**64)


def stats_to_json(stats: pb.Stats) -> dict[str, Any]:
    """The `generation_stats` object of the API, without the entry node's fields; see `docs/mtp.md`.

    The names and their order are those of the message.
    """
    values = {field.name: getattr(stats, field.name) for field in pb.Stats.DESCRIPTOR.fields}
    for name in ("accepted_per_position", "draft_k_histogram", "kernels", "read_by"):
        values[name] = list(values[name])
    for name in ("acceptance_rate", "accepted_share_of_output"):
        if not stats.HasField(name):
            values[name] = None
    values["draft_k_trace"] = [[run.k, run.rounds] for run in stats.draft_k_trace]
    values["kv_bits"] = stats.kv_bits or None
    return values
