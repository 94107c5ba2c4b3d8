"""Rounds that are issued before the ones in front of them are read: the same answers, by the same
forwards, where only the device knows how many drafts stand."""

# pyright: reportPrivateUsage=false

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from engines import engine_of, load_quietly, spec
from mlx_lm.models.cache import KVCache
from tables import EndAt
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp.caches.rollback import with_tapes
from exo_node.mtp.families.family import Family
from exo_node.mtp.families.table import family_of
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Drafts
from exo_node.mtp.targets import FamilyTarget
from exo_node.mtp.types import FinishReason, Round, Sampling
from exo_node.shard.engine import round_forms
from exo_node.shard.engine.batch import DEVICE_POSITIONS
from exo_node.shard.engine.drafter import DraftModel
from exo_node.shard.engine.engine import Engine
from exo_node.shard.engine.request import MAX_UNREAD_EVENTS, Request
from exo_node.shard.engine.round_forms import COUNTS_ON_DEVICE
from exo_node.shard.engine.states.state import State
from exo_node.shard.kernels.trial import KernelChoice
from exo_node.shard.tools.bare_engine import bare_engine, bare_request

PROMPT, TOKENS = [5, 9, 14, 33, 8], 30


@cache
def subject() -> tuple[Any, Family]:
    model = taped_qwen()
    family = family_of(model)
    assert family is not None
    return model, family


class Bigrams:
    """A head that drafts what follows a token in `answer`, but for a third of the tokens."""

    def __init__(self, answer: list[int], broken: int | None = None) -> None:
        """Behind the token `broken` its logits are no numbers."""
        following = dict(pairwise(answer))
        table = [(following.get(t, 0) + (t % 3 == 0)) % VOCABULARY for t in range(VOCABULARY)]
        rows = mx.eye(VOCABULARY)[mx.array(table)]
        nan = mx.arange(VOCABULARY)[:, None] == (-1 if broken is None else broken)
        self._rows = mx.where(nan, float("nan"), rows)
        self._embeddings = subject()[1].embed(mx.arange(VOCABULARY)[None])[0]

    @property
    def model(self) -> DraftModel:
        return DraftModel(self._head, subject()[1].embed, self._logits)

    def _head(self, hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
        """Its cache holds the ids that it saw."""
        ids = self._ids(embedding)[:, None, :, None].astype(mx.float32)
        _ = cache.update_and_fetch(ids, ids)
        return embedding

    def _logits(self, out: mx.array) -> mx.array:
        return self._rows[self._ids(out)]

    def _ids(self, embedding: mx.array) -> mx.array:
        return mx.argmax(embedding @ self._embeddings.T, axis=-1)


class Noted(Sampler):
    """Notes what names the noise of each verdict."""

    def __init__(self) -> None:
        super().__init__(Sampling(temperature=1.0), entropy=3)
        self.names: list[int] = []

    def judge(self, logits: mx.array, drafts: Drafts | None, position: int) -> Any:
        self.names.append(position)
        return super().judge(logits, drafts, position)


def engine_with(head: Bigrams | None, *, runs_ahead: bool) -> Engine:
    model, family = subject()
    return bare_engine(
        FamilyTarget(family),
        lambda: with_tapes(model.make_cache()),
        head.model if head else None,
        runs_ahead=runs_ahead,
    )


@dataclass
class Answer:
    """One that is asked of an engine, and what it was told."""

    request: Request
    rounds: list[Round] = field(default_factory=list[Round])
    end: FinishReason | BaseException | None = None

    @property
    def ids(self) -> list[int]:
        return [token for each in self.rounds for token in each.tokens]


def answer_of(engine: Engine, k: int, max_tokens: int = TOKENS, **changes: Any) -> Answer:
    answer = Answer(bare_request(PROMPT, max_tokens, k=k))

    def deliver(step: object) -> None:
        answer.request.events_read += 1
        if isinstance(step, Round):
            answer.rounds.append(step)

    def finish(end: FinishReason | BaseException) -> None:
        answer.end = end

    answer.request.deliver, answer.request.finish = deliver, finish
    for name, value in changes.items():
        setattr(answer.request, name, value)
    engine.add(answer.request)
    return answer


def tell(k: int, *, ahead: bool = True, head: Bigrams | None = None, **changes: Any) -> Answer:
    """Answers on a tiny hybrid model, to the end."""
    engine = engine_with((head or Bigrams(plain())) if k else None, runs_ahead=ahead)
    answer = answer_of(engine, k, **changes)
    while engine.step():
        pass
    return answer


def long() -> dict[str, Any]:
    """Ends before its budget does: near that, rounds issued ahead draft fewer tokens."""
    return {"max_tokens": 3 * TOKENS, "stop_condition": EndAt(TOKENS)}


@cache
def plain() -> list[int]:
    return tell(0, ahead=False).ids


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_the_rounds_are_those_that_wait_for_each_other(k: int) -> None:
    waiting, ahead = tell(k, ahead=False, **long()), tell(k, **long())
    assert ahead.ids == waiting.ids == plain()
    assert ahead.rounds == waiting.rounds
    accepted = {r.accepted for r in ahead.rounds[1:-1]}
    assert accepted == set(range(k + 1)) if k < 7 else len(accepted) > 4, "all and none stood"


def taken_out(engine: Engine, answer: Answer) -> State:
    """Its state between two rounds, as it would join another batch."""
    answer.request.events_read -= MAX_UNREAD_EVENTS  # its reader pauses, so nothing more is issued
    while engine.step():
        pass
    executor: Any = engine.executor
    (batch,) = executor._groups.groups
    state = batch.extract(answer.request)
    answer.request.events_read += MAX_UNREAD_EVENTS
    return state


@pytest.mark.parametrize("steps", range(3, 9))
def test_its_state_fits_the_answer_whenever_it_is_taken_out(steps: int) -> None:
    engine = engine_with(Bigrams(plain()), runs_ahead=True)
    answer = answer_of(engine, 2, **long())
    for _ in range(steps):
        assert engine.step()
    state = taken_out(engine, answer)
    text = [*PROMPT, *answer.ids]
    assert len(PROMPT) < state.rows == len(text) - 1 < TOKENS
    assert state.draft is not None and isinstance(state.draft.cache, KVCache)
    keys: Any = state.draft.cache.keys
    ids: Any = keys[0, 0, : state.draft.rows, 0].tolist()
    unread = [i for _, tokens in state.draft.unread for i in tokens[0].tolist()]  # pyright: ignore
    assert [*ids, *unread] == text[1:]
    while engine.step():
        pass
    assert answer.rounds == tell(2, **long()).rounds


@pytest.mark.parametrize("k", [0, 2])
def test_a_prompt_is_read_while_an_answer_continues(k: int) -> None:
    engine = engine_with(Bigrams(plain()), runs_ahead=True)
    answer = answer_of(engine, k, 200)
    while len(answer.rounds) < 6:
        assert engine.step()
    other = answer_of(engine, k)
    while not other.rounds:
        assert engine.step()
    assert len(answer.rounds) < 12


def test_no_two_rounds_share_their_noise() -> None:
    """Not even those that are issued ahead with those of several requests between them."""
    engine, sampler = engine_with(Bigrams(plain()), runs_ahead=True), Noted()
    answer = answer_of(engine, 2, 3 * TOKENS, sampler=sampler)
    while len(answer.rounds) < 6:
        assert engine.step()
    other = answer_of(engine, 2, 8)
    while engine.step():
        pass
    assert (answer.end, other.end) == ("length", "length")
    assert {r.forward.batch for r in answer.rounds} == {1, 2}
    are_ahead = [name > DEVICE_POSITIONS for name in sampler.names]
    first, last = are_ahead.index(True), are_ahead[::-1].index(True)
    assert False in are_ahead[first : len(are_ahead) - last], "ahead, together and ahead again"
    assert len(set(sampler.names)) == len(sampler.names)


def test_a_head_that_breaks_is_parked_and_the_answer_continues() -> None:
    result = tell(2, head=Bigrams(plain(), broken=plain()[12]))
    assert result.ids == plain()
    assert result.request.drafts.parked_at is not None
    drafted = [r.drafted for r in result.rounds]
    assert drafted[1] == 2 and drafted[-1] == 0


@pytest.mark.parametrize(
    ("sampling", "free"),
    [
        (Sampling(), True),
        (Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1), True),
        (Sampling(temperature=0.7, seed=5), False),
        (Sampling(temperature=0.7, xtc_probability=0.5, xtc_threshold=0.1), False),
        (Sampling(repetition_penalty=1.1), False),
    ],
    ids=["greedy", "sampled", "seeded", "xtc", "penalised"],
)
def test_choices_that_need_a_position_or_the_answer_so_far_wait(
    sampling: Sampling, free: bool
) -> None:
    assert Sampler(sampling, 1).is_free is free


def test_the_device_counts_rows_where_kernels_compute_the_same_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage_spec = spec(native_mtp=True)
    loaded = load_quietly(stage_spec)
    monkeypatch.setattr(round_forms, "computes_asynchronously", lambda: True)
    ours = tuple(KernelChoice(kernel, "a shape", 16, True, "") for kernel in COUNTS_ON_DEVICE)
    engines = [engine_of(replace(loaded, kernels=k), stage_spec) for k in ((), ours)]
    executors: list[Any] = [each._engine.executor for each in engines]
    assert [each.forms.counts_on_device for each in executors] == [False, True]
