"""Asks a model's replicas how much of a prompt they have cached, before one is claimed."""

import asyncio

from ...placement.errors import ExoNodeError
from ...proto import peer_pb2 as pb
from ..machine.timing import Timing
from .claim import Heads
from .images import as_read
from .requests import GenerationRequest
from .runners import Runners
from .wire import prompt_to_wire


async def replica_prefixes(
    heads: Heads, runners: Runners, request: GenerationRequest, timing: Timing
) -> list[pb.ReplicaPrefix]:
    """Asks each replica of the model how much of the prompt it has cached; none if there is one.

    All of them render the same prompt, so one that takes much longer than the first is not waited
    for. It may be chosen all the same.
    """
    sharing = request.sharing
    generators = heads.generators(request.model)
    if len(generators) < 2 or (sharing.HasField("cache") and not sharing.cache):
        return []
    calls = {
        name: asyncio.ensure_future(
            runners.find_prefix(
                runners.near(each),
                prompt_to_wire(as_read(request, each.ready.images)[0], name, each),
            )
        )
        for name, each in generators.items()
    }
    try:
        _ = await asyncio.wait(calls.values(), return_when=asyncio.FIRST_COMPLETED)
        _ = await asyncio.wait(calls.values(), timeout=timing.quiet_s)
    finally:
        for call in calls.values():
            _ = call.cancel()
        outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
    prefixes: list[pb.ReplicaPrefix] = []
    for name, outcome in zip(calls, outcomes, strict=True):
        if isinstance(outcome, pb.CachedPrefix):
            prefixes.append(pb.ReplicaPrefix(placement=name, prefix=outcome))
        elif not isinstance(outcome, ExoNodeError | asyncio.CancelledError):
            raise outcome
    return prefixes
