"""Three stages of a small model in this process, any of which may be lost.

Every linear layer is perturbed by its number of rows, as kernels chosen by it would do: only the
very forwards of before give the numbers of before.
"""

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
from engines import CHUNK, STORY, answer, engine_of, load_quietly, request, spec
from loopback import LoopbackLink
from shims import by_rows, perturb
from small import LAYERS, small_checkpoint

from exo_node.mtp.types import Round
from exo_node.placement.errors import PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.events import Delta
from exo_node.shard.engine.prefixes.store import PrefixStore
from exo_node.shard.engine.stage import StageOutput, StageWorker
from exo_node.shard.engine.text_engine import TextEngine
from exo_node.shard.model.load import Loaded
from exo_node.shard.pipeline.frames import HiddenBlock

PROMPT: list[int] = STORY["prompt_ids"]
TOKENS = 30
SIZE = 0.4
BOUNDS = (0, 1, 3, LAYERS)


@functools.cache
def _loaded(prefill_chunk: int) -> tuple[list[pb.StageSpec], list[Loaded]]:
    """Once for all pipelines of a process: what requests leave behind is not in here."""
    specs = [
        spec(
            small_checkpoint(),
            a,
            b,
            i,
            num_stages=3,
            num_layers=LAYERS,
            prefill_chunk=prefill_chunk,
        )
        for i, (a, b) in enumerate(itertools.pairwise(BOUNDS))
    ]
    loaded = [load_quietly(stage_spec) for stage_spec in specs]
    for part in loaded:
        assert perturb(part.model.model, by_rows, size=SIZE) > 10
    return specs, loaded


class Pipeline:
    """The generator's engine and the workers of two more stages.

    `rooms`: bytes of each stage for prefixes.
    """

    def __init__(
        self,
        *,
        prefill_chunk: int = CHUNK,
        tokens: int = TOKENS,
        rooms: Sequence[int] = (0, 0, 0),
    ) -> None:
        self._rooms = rooms
        self._specs, self._loaded = _loaded(prefill_chunk)
        self._tokens = tokens
        self.forwards: list[int] = []
        """The stage of each forward that a stage ran."""
        self.workers: list[StageWorker] = []
        expectations = [part.expected for part in self._loaded[1:]]
        self._link = LoopbackLink(self.workers, expectations)
        self.engine = self._engine()
        self.workers.extend(self._worker(number) for number in (1, 2))

    def replace(self, number: int) -> None:
        """Replaces a stage by a runner without the stage's requests."""
        if number:
            self.workers[number - 1] = self._worker(number)
        else:
            self.engine = self._engine()

    def lose(self, number: int, after: int) -> None:
        """From its forward number `after` on, the stage is gone."""
        worker = self.workers[number - 1]
        alive = worker.forward
        countdown = iter(range(after))

        def forward(block: HiddenBlock) -> StageOutput:
            if next(countdown, None) is None:
                raise PeerLost("the stage is gone")
            return alive(block)

        worker.forward = forward

    def until_lost(self, prompt: Sequence[int] = PROMPT, **changes: Any) -> tuple[Round, ...]:
        """The rounds that were handed out before the stage was lost."""
        engine_request = request(
            prompt, 0, self._tokens, ignore_end=True, top_logprobs=0, **changes
        )
        rounds: list[Round] = []
        with pytest.raises(PeerLost):
            for event in self.engine.generate(engine_request):
                if isinstance(event, Delta):
                    rounds.append(event.round)
        return tuple(rounds)

    def rest(
        self,
        log: Sequence[Round],
        attempt: int,
        prompt: Sequence[int] = PROMPT,
        **changes: Any,
    ) -> tuple[Round, ...]:
        """The rounds of another attempt behind those of the log; it counts `forwards` anew."""
        self.forwards.clear()
        fields = {"attempt": attempt, "replay": log, "top_logprobs": 0, "ignore_end": True}
        return answer(self.engine, request(prompt, 0, self._tokens, **fields, **changes)).rounds

    def undisturbed(self, prompt: Sequence[int] = PROMPT) -> tuple[Round, ...]:
        engine_request = request(prompt, 0, self._tokens, ignore_end=True, top_logprobs=0)
        return answer(self.engine, engine_request).rounds

    def _engine(self) -> TextEngine:
        loaded, stage_spec = self._loaded[0], pb.StageSpec()
        stage_spec.CopyFrom(self._specs[0])
        stage_spec.prefix_cache_bytes = self._rooms[0]
        return engine_of(loaded, stage_spec, self._link)

    def _worker(self, number: int) -> StageWorker:
        part = self._loaded[number]
        worker = StageWorker(
            part.model,
            part.expected,
            time.monotonic,
            PrefixStore(self._rooms[number], part.model.make_caches),
        )
        computed = worker._compute  # pyright: ignore[reportPrivateUsage]

        def counted(block: HiddenBlock, sessions: Any) -> bytes:
            data = computed(block, sessions)
            self.forwards.extend([number] * len(block.replayed or (1,)))
            return data

        internals: Any = worker
        internals._compute = counted
        return worker
