"""A request as the message that its runner gets."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...mtp.types import Sampling
from ...proto import peer_pb2 as pb
from .requests import GenerationRequest


def to_wire(request: GenerationRequest, placed: pb.Placed) -> pb.GenerateRequest:
    s = _sampling(request, placed)
    sampling = pb.Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        xtc_probability=s.xtc_probability,
        xtc_threshold=s.xtc_threshold,
        seed=s.seed,
        repetition_penalty=s.penalties.repetition,
        presence_penalty=s.penalties.presence,
        frequency_penalty=s.penalties.frequency,
        penalty_context=s.penalties.context_size,
        logit_bias=dict(s.penalties.logit_bias),
    )
    wire = pb.GenerateRequest(
        placement=placed.placement,
        request=request.id,
        attempt=1,
        tools=tools_json(request),
        bare=request.text is not None or request.ids is not None,
        continues=_continues(request),
        sampling=sampling,
        max_tokens=request.max_tokens or 0,
        stop=request.stop,
        num_draft_tokens=placed.num_draft_tokens,
        adaptive_draft=placed.adaptive_draft,
        drafting_reason=placed.drafting_reason,
        async_draft_eval=placed.async_draft_eval,
        ignore_eos=request.ignore_eos,
        background=request.background,
        cache_salt=request.cache_salt,
        top_logprobs=request.top_logprobs,
        grammar=_grammar(request),
        call_parts=request.call_parts,
    )
    if request.ids is not None:
        wire.token_ids.ids.extend(request.ids)
    elif request.text is not None:
        wire.text = request.text
    else:
        wire.messages.CopyFrom(messages_to_wire(request))
    return wire


def _continues(request: GenerationRequest) -> bool:
    """Whether the answer goes on where a text ends, an assistant's last message too."""
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
    return pb.EncodeRequest(messages=messages_to_wire(request), tools=tools_json(request))


def messages_to_wire(request: GenerationRequest) -> pb.Messages:
    options = dict(request.options)
    if request.grammar is not None and request.grammar.kind == "calls":
        options["insists"] = json.loads(request.grammar.text)["names"] or []
    told = json.dumps(options) if options else ""
    return pb.Messages(json=json.dumps([dict(m) for m in request.messages]), options=told)


def tools_json(request: GenerationRequest) -> str:
    return json.dumps([dict(tool) for tool in request.tools]) if request.tools else ""


def _grammar(request: GenerationRequest) -> pb.Grammar | None:
    asked = request.grammar
    return (
        None if asked is None else pb.Grammar(kind=asked.kind, text=asked.text, field=asked.field)
    )


def _sampling(request: GenerationRequest, placed: pb.Placed) -> Sampling:
    """The card's defaults under the fields that the request gave."""
    card = {name: value for name, value in placed.sampling.items() if name not in request.given}
    if "top_k" in card:
        return replace(request.sampling, **{**card, "top_k": int(card["top_k"])})
    return replace(request.sampling, **card)
