"""The engine's requests and events as messages of peer.proto."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ...mtp.types import Forward, GenerationStats, Prefilled, Round, Sampling, TokenLogprobs
from ...proto import peer_pb2 as pb
from ..engine.answers.events import AnswerEnd, Delta, EngineEvent, RebuiltText
from ..model.stage_limits import StageLimits

if TYPE_CHECKING:
    from ..text.token_bytes import TokenBytes


def event_to_wire(
    event: EngineEvent,
    pieces: Sequence[pb.Piece],
    token_bytes: "TokenBytes",
    prompt_bytes: "TokenBytes",
    shared: pb.Stats,
) -> pb.GenerateEvent:
    """One event of the engine as a message, with its text in `pieces`.

    `token_bytes`, `prompt_bytes`: the bytes of an answer's tokens, and of a prompt's.
    """
    text, rest = _first_text(pieces)
    match event:
        case Prefilled(rows, total, scores):
            logprobs = [_logprob(entry, prompt_bytes) for entry in scores]
            prefill = pb.Prefill(done=rows, total=total, logprobs=logprobs)
            return pb.GenerateEvent(prefill=prefill)
        case RebuiltText(rounds, total):
            return pb.GenerateEvent(rebuilt=pb.Rebuilt(done=rounds, total=total))
        case Delta(round_):
            at = round_.forward
            forward = pb.Forward(position=at.position, rows=at.rows, batch=at.batch)
            wire = pb.Round(
                tokens=round_.tokens,
                drafted=round_.drafted,
                accepted=round_.accepted,
                forward=forward,
                copied=round_.is_copied,
            )
            logprobs = [_logprob(entry, token_bytes) for entry in round_.logprobs]
            delta = pb.Delta(round=wire, text=text, logprobs=logprobs, pieces=rest)
            return pb.GenerateEvent(delta=delta)
        case AnswerEnd(reason, _, stats, identity, batch_identity, stopped_by):
            wire_stats = stats_to_wire(stats, identity, batch_identity)
            wire_stats.MergeFrom(shared)
            finished = pb.Finished(
                reason=reason, stats=wire_stats, text=text, pieces=rest, stopped_by=stopped_by
            )
            return pb.GenerateEvent(finished=finished)


def _first_text(pieces: Sequence[pb.Piece]) -> tuple[str, Sequence[pb.Piece]]:
    if pieces and pieces[0].WhichOneof("piece") == "text":
        return pieces[0].text, pieces[1:]
    return "", pieces


def _logprob(entry: TokenLogprobs, token_bytes: "TokenBytes") -> pb.TokenLogprob:
    top = [pb.TokenLogprob(id=i, bytes=token_bytes(i), logprob=x) for i, x in entry.top]
    token, logprob = entry.token, entry.logprob
    return pb.TokenLogprob(id=token, bytes=token_bytes(token), logprob=logprob, top=top)


def round_from_wire(wire: pb.Round) -> Round:
    """One entry of a schedule log."""
    forward = Forward(wire.forward.position, wire.forward.rows, max(1, wire.forward.batch))
    tokens = tuple(wire.tokens)
    return Round(tokens, wire.drafted, wire.accepted, forward, is_copied=wire.copied)


def sampling_from_wire(wire: pb.Sampling) -> Sampling:
    """A request's sampling, absent fields at their defaults."""
    off, named = Sampling(), {each.name: getattr(wire, each.name) for each in fields(Sampling)}
    named["seed"] = wire.seed if wire.HasField("seed") else None
    named["logit_bias"] = tuple(sorted(wire.logit_bias.items()))
    for name in ("repetition_penalty", "repetition_context_size"):
        named[name] = named[name] or getattr(off, name)
    return Sampling(**named)


def shared_stats(limits: StageLimits) -> pb.Stats:
    """The stats that all answers of a load have in common."""
    return pb.Stats(kv_bits=limits.kv_bits, dtype=limits.dtype, dtype_reason=limits.dtype_reason)


def stats_to_wire(stats: GenerationStats, identity: str, batch_identity: str = "off") -> pb.Stats:
    """Stats as a message, which has a field of each name, and identities measured at the load."""
    named: dict[str, Any] = {each.name: getattr(stats, each.name) for each in fields(stats)}
    named["draft_k_trace"] = [pb.DraftRun(k=k, rounds=rounds) for k, rounds in stats.draft_k_trace]
    return pb.Stats(**named, greedy_identity=identity, batch_identity=batch_identity)
