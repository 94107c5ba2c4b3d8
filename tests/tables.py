"""A target and a draft head that are tables over a tiny vocabulary, for the real engine.

Their caches are mlx-lm's own and hold ids, so that a test can read what was kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from forced_copies import allow_always
from mlx_lm.models.cache import KVCache

from exo_node.mtp.drafting.lookup_drafts import PromptLookup
from exo_node.mtp.drafting.round_policy import RoundPolicy
from exo_node.mtp.families.placed_rope import RopePositions
from exo_node.mtp.grammar import GrammarMatcher
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import ForwardOutput, Want, as_ids
from exo_node.mtp.types import FinishReason, Round, Sampling, Step
from exo_node.shard.engine.drafter import DraftModel
from exo_node.shard.engine.request import ReplayProgress
from exo_node.shard.tools.bare_engine import bare_engine, bare_request

Logits = npt.NDArray[np.float32]
"""(positions, vocabulary, vocabulary): the logits after a token at a position."""

PROMPT = (1, 0, 2)
BEYOND = 16
"""Positions after the last of a table: rounds in flight may reach them, and nobody reads them."""


def random_table(vocabulary: int, seed: int, positions: int = 64, spread: float = 1.0) -> Logits:
    draws = np.random.default_rng(seed).normal(size=(positions, vocabulary, vocabulary))
    return (spread * draws).astype(np.float32)


def _embed(ids: mx.array) -> mx.array:
    return ids[..., None].astype(mx.float32)


def _device(table: Logits) -> mx.array:
    return mx.array(np.concatenate([table, table[-1:].repeat(BEYOND, axis=0)]))


class TableTarget:
    """A whole model whose logits are rows of a table; its hidden states name their rows."""

    def __init__(self, table: Logits) -> None:
        self._table = _device(table)
        self.forwards: list[tuple[int, Want]] = []
        """Rows of each forward, and whose logits were wanted."""
        self.rope_positions = RopePositions()

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        assert embeddings is None, "a table has no images"
        logits, hidden = self._append(tokens[None], caches)
        self.forwards.append((tokens.shape[0], want))
        rows = {"all": logits[0], "last": logits[0, -1:], "none": logits[0, :0]}[want]
        return ForwardOutput(rows, hidden)

    def forward_batch(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        self.forwards.append((tokens.shape[1], "all"))
        return self._append(tokens, caches)

    def _append(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        (cache,) = caches
        starts = mx.array(cache.offset).reshape(-1, 1)
        positions = mx.broadcast_to(starts + mx.arange(tokens.shape[1]), tokens.shape)
        rows = tokens[:, None, :, None].astype(mx.float32)
        _ = cache.update_and_fetch(rows, rows)
        hidden = mx.stack([positions, tokens], axis=-1).astype(mx.float32)
        return self._table[positions, tokens], hidden


@dataclass
class TableHead:
    """A draft head that drafts from a table; its cache holds (position, id there, id after it)."""

    table: Logits
    in_blocks: bool = False
    """Whether it drafts a block at once, each token as if it followed the last committed one."""
    follows: bool = False
    """Whether each token of a block follows the one before it after all, as it is drawn."""
    cache: Any = None

    def __post_init__(self) -> None:
        self._table = _device(self.table)
        self.passes: list[int] = []
        """Rows of each pass."""

    @property
    def model(self) -> DraftModel:
        block = self._block if self.in_blocks else None
        follow = self._follow if self.follows else None
        return DraftModel(self._head, _embed, self._logits, block=block, follow=follow)

    @property
    def head_rows(self) -> list[tuple[int, int, int]]:
        """The rows of one request's cache."""
        if self.cache is None or self.cache.keys is None:
            return []
        rows: list[list[float]] = self.cache.keys[0, 0, : self.cache.offset].tolist()
        return [(int(a), int(b), int(c)) for a, b, c in rows]

    def _head(self, hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
        self.cache = cache
        self.passes.append(hidden.shape[1])
        rows = mx.concatenate([hidden, embedding], axis=-1)[:, None]
        _ = cache.update_and_fetch(rows, rows)
        return mx.concatenate([hidden[..., :1] + 1, embedding], axis=-1)

    def _block(self, out: mx.array, k: int, cache: Any) -> mx.array:
        assert cache is self.cache
        places = out[..., :1] + mx.arange(k)[None, :, None]
        return mx.concatenate([places, mx.broadcast_to(out[..., 1:], places.shape)], axis=-1)

    def _follow(self, out: mx.array, _logits: mx.array, before: mx.array) -> mx.array:
        return self._table[out[:, 0, 0].astype(mx.int32), before]

    def _logits(self, out: mx.array) -> mx.array:
        at = out.astype(mx.int32)
        return self._table[at[..., 0], at[..., 1]]


@dataclass
class EndAt:
    """The `Ending` of an answer at its `count`-th token, or at the first of `tokens`."""

    count: int = 1_000_000
    tokens: Sequence[int] = ()
    pushed: list[int] = field(default_factory=list[int])

    def push(self, token: int) -> FinishReason | None:
        self.pushed.append(token)
        return "stop" if len(self.pushed) == self.count or token in self.tokens else None


@dataclass(frozen=True, slots=True)
class TableAnswer:
    """The steps of one answer, and its target, head and cache at the end."""

    steps: tuple[Step, ...]
    end: FinishReason | BaseException
    target: TableTarget
    head: TableHead | None
    cache: KVCache
    """The target's, one row for each id."""

    @property
    def reason(self) -> FinishReason:
        assert not isinstance(self.end, BaseException), self.end
        return self.end

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple(step for step in self.steps if isinstance(step, Round))

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for round_ in self.rounds for token in round_.tokens)

    @property
    def cached_ids(self) -> list[int]:
        """The ids whose rows the target's cache holds."""
        keys = cast(Any, self.cache).keys
        if keys is None:
            return []
        return as_ids(keys[0, 0, : self.cache.offset, 0].astype(mx.int32))


def tell(
    target: Logits,
    draft: Logits | None = None,
    k: int = 0,
    *,
    sampling: Sampling | None = None,
    entropy: int = 0,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 12,
    prefill_chunk: int = 256,
    replay: Sequence[Round] = (),
    ending: EndAt | None = None,
    runs_ahead: bool = False,
    lookup: PromptLookup | None = None,
    grammar: GrammarMatcher | None = None,
    in_blocks: bool = False,
    follows: bool = False,
    **fields: Any,
) -> TableAnswer:
    """Answers over tables to the end, or to what goes wrong; `draft` None decodes plainly.

    `fields`: others of the request. Raises nothing: see `TableAnswer.end`.
    """
    model, head, caches = TableTarget(target), None, list[KVCache]()
    if draft is not None:
        head = TableHead(draft, in_blocks, follows)

    def make_caches() -> list[Any]:
        caches.append(KVCache())
        return caches[-1:]

    engine = bare_engine(
        model,
        make_caches,
        head.model if head else None,
        chunk=prefill_chunk,
        runs_ahead=runs_ahead,
        policy=None if lookup is None else allow_always(RoundPolicy(), lookup.evidence.longest),
    )
    steps, ends = list[Step](), list[FinishReason | BaseException]()
    request = bare_request(
        prompt,
        max_tokens,
        prefill_chunk,
        k if head else 0,
        sampler=Sampler(sampling or Sampling(), entropy, (), prompt, grammar),
        stop_condition=ending or EndAt(),
        replay=ReplayProgress(replay),
        deliver=steps.append,
        finish=ends.append,
        lookup=lookup,
        **fields,
    )
    engine.add(request)
    while engine.step():
        request.events_read = len(steps)
    (end,) = ends
    return TableAnswer(tuple(steps), end, model, head, caches[-1])
