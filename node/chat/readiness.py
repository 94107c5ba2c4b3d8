"""Whether a loaded model would answer now: it computed a step recently, or does on a probe."""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from ...placement.errors import ExoNodeError
from ...placement.ids import ModelId
from ...proto import peer_pb2 as pb
from ..machine.timing import Timing
from ..placements.loaded_placement import LoadedPlacement
from ..placements.placements import Placements
from ..runners.runner_client import Endpoint
from .claim import Runners


@dataclass(eq=False, repr=False)
class Readiness:
    """Probes each model that has not computed a step recently, with one token or embedding."""

    _placements: Placements
    _generators: Runners
    _timing: Timing
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._probes: dict[ModelId, asyncio.Task[str]] = {}

    async def fault(self) -> str:
        """Why a placement of this node would not answer; "" if all would."""
        for record in self._placements.records:
            if fault := await self._fault_of(record):
                return fault
        return ""

    async def _fault_of(self, record: LoadedPlacement) -> str:
        if record.status != "ready":
            why = record.error or record.step or record.why
            return f"{record.card.id} is {record.status}" + (f": {why}" if why else "")
        if self._clock() - record.activity.worked_at < self._timing.silence_s:
            return ""
        probe = self._probes.get(record.card.id)
        if probe is None or probe.done():
            probe = self._probes[record.card.id] = asyncio.create_task(
                self._probe(record, record.generator)
            )
        return await asyncio.shield(probe)

    async def _probe(self, record: LoadedPlacement, generator: Endpoint) -> str:
        """Generates one token, through every stage, or an embedding. Returns why that failed, or
        ""."""
        prompt = pb.TokenIds(ids=[0])
        inputs = pb.Embeddings(inputs=[pb.EmbeddingInput(token_ids=prompt)])
        embeds = record.card.embeds
        request = pb.GenerateRequest(
            placement=record.id,
            request=f"ready-{secrets.token_hex(8)}",
            attempt=1,
            token_ids=None if embeds else prompt,
            embeddings=inputs if embeds else None,
            sampling=pb.Sampling(top_p=1.0),
            limits=pb.Limits(max_tokens=1),
            drafting=pb.Drafting(drafting_reason="a probe"),
        )
        within_s = self._timing.reply_s
        epoch = record.epoch
        record.activity.begin(epoch)
        try:
            async with asyncio.timeout(within_s):
                async with aclosing(self._generators.generate(generator, request)) as events:
                    async for event in events:
                        if event.WhichOneof("event") in ("delta", "embedded"):
                            record.activity.probed_at = self._clock()
        except TimeoutError:
            return f"{record.card.id} gave no token within {within_s:.0f} s"
        except ExoNodeError as fault:
            return f"{record.card.id} gave no token: {fault.message}"
        finally:
            record.activity.end(epoch)
        return ""
