"""Rounds that are built while others run: the same answers by the same forwards."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from engines import ORACLE, answer, engine_of, load_quietly, request, spec
from tables import EndAt
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp.ahead import AHEAD_BY, Ahead
from exo_node.mtp.batch_drafter import BatchHead
from exo_node.mtp.costs import RoundCosts
from exo_node.mtp.depth import AdaptiveDepth, DepthPolicy, Prior
from exo_node.mtp.drafters import NativeDrafter, NoDrafter
from exo_node.mtp.family import Family, family_of
from exo_node.mtp.loop import Generation
from exo_node.mtp.rollback import with_tapes
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Drafter, Drafts
from exo_node.mtp.task import Task
from exo_node.mtp.types import FinishReason, Penalties, Round, Sampling
from exo_node.shard.engine.local import FamilyTarget, LocalVerifier

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

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
        """Its cache holds the ids that it saw."""
        ids = self._ids(embedding)[:, None, :, None].astype(mx.float32)
        _ = cache.update_and_fetch(ids, ids)
        return embedding

    def logits(self, hidden: mx.array) -> mx.array:
        return self._rows[self._ids(hidden)]

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


@dataclass
class Leaving:
    """Whether an answer leaves: from so many asks on."""

    after: int
    asked: int = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked >= self.after


@dataclass
class Told:
    rounds: list[Round]
    reason: FinishReason | None
    generation: Generation
    verifier: LocalVerifier
    drafter: Drafter
    positions: list[int] = field(default_factory=list[int])
    """The verifier's behind each round."""
    ran_ahead: list[bool] = field(default_factory=list[bool])

    @property
    def ids(self) -> list[int]:
        return [token for each in self.rounds for token in each.tokens]


def tell(
    k: int,
    *,
    ahead: bool = False,
    head: Bigrams | None = None,
    max_tokens: int = TOKENS,
    ending: EndAt | None = None,
    sampler: Sampler | None = None,
    depth: DepthPolicy | None = None,
    leaves: Callable[[], bool] = lambda: False,
) -> Told:
    """Runs the real loop on a tiny hybrid model until it ends or leaves."""
    model, family = subject()
    chooser, target = sampler or Sampler(Sampling(), 0), FamilyTarget(family)
    verifier = LocalVerifier(target, with_tapes(model.make_cache()))
    drafter: Drafter = NoDrafter()
    rounds_ahead = None
    if k:
        head = head or Bigrams(plain())
        drafter = NativeDrafter(head, family.embed, head.logits, chooser, k, overlap=True)
        made = BatchHead(head, family.embed, head.logits)
        rounds_ahead = Ahead(target, made, verifier, chooser) if ahead else None
    parts = Task(PROMPT, max_tokens, 512), verifier, drafter, chooser, ending or EndAt(), depth
    generation = Generation(*parts, lambda: 0.0, leaves, ahead=rounds_ahead)
    told = Told([], None, generation, verifier, drafter)
    go_on(told)
    return told


def long() -> dict[str, Any]:
    """Ends before its budget does: near that, rounds built ahead draft fewer tokens."""
    return {"max_tokens": 3 * TOKENS, "ending": EndAt(TOKENS)}


def go_on(told: Told) -> None:
    steps = told.generation.steps()
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            told.reason = end.value
            return
        if isinstance(step, Round):
            told.rounds.append(step)
            told.positions.append(told.verifier.position)
            told.ran_ahead.append(told.generation.runs_ahead)


@cache
def plain() -> list[int]:
    return tell(0).ids


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_rounds_are_those_that_wait_for_each_other(k: int) -> None:
    waiting, ahead = tell(k, **long()), tell(k, ahead=True, **long())
    assert ahead.ids == waiting.ids == plain()
    assert ahead.rounds == waiting.rounds
    assert ahead.positions == waiting.positions
    assert {r.accepted for r in ahead.rounds[1:-1]} == set(range(k + 1)), "all and none stood"


@pytest.mark.parametrize("count", range(1, 20))
def test_an_answer_ends_where_it_would_have(count: int) -> None:
    """At its budget, and within a round behind which the next one runs already."""
    for change in ({"max_tokens": count}, {"ending": EndAt(count)}):
        told = tell(3, ahead=True, **change)  # pyright: ignore[reportArgumentType]
        assert told.ids == plain()[:count]
        assert told.reason == ("length" if "max_tokens" in change else "stop")


@pytest.mark.parametrize("after", range(2, 8))
def test_it_leaves_between_rounds_and_what_is_left_fits_the_answer(after: int) -> None:
    """As a batch takes it over, and gives it back."""
    leaving = Leaving(after)
    told = tell(2, ahead=True, leaves=leaving, **long())
    assert told.reason is None and not told.generation.runs_ahead
    assert told.verifier.position == len(PROMPT) + len(told.ids) - 1
    assert len(told.ids) < TOKENS
    assert isinstance(told.drafter, NativeDrafter)
    state = told.drafter.settled()
    assert state.cache.keys is not None
    seen = state.cache.keys[0, 0, : state.rows, 0].tolist()
    assert seen == [*PROMPT[1:], *told.ids]
    leaving.after = 1000
    go_on(told)
    assert told.ids == plain()
    assert told.rounds == tell(2, **long()).rounds


def test_a_head_that_breaks_is_parked_and_the_answer_goes_on() -> None:
    broken = plain()[12]
    told = tell(2, ahead=True, head=Bigrams(plain(), broken))
    assert told.ids == plain()
    assert told.generation.answer.parked_at is not None
    drafted = [r.drafted for r in told.rounds]
    assert drafted[1] == 2 and drafted[-1] == 0


def test_depths_change_from_round_to_round() -> None:
    """Looks at other depths, and plain tokens between drafts."""
    costs = RoundCosts([1.0, 1.1, 1.2, 1.3])
    depth = AdaptiveDepth(3, 1, Prior(), costs)
    told = tell(3, ahead=True, depth=depth, max_tokens=TOKENS)
    assert told.ids == plain()
    assert len({r.drafted for r in told.rounds}) > 1


def test_no_two_rounds_share_their_noise() -> None:
    """Not even those that are built ahead with those that are not, around them."""
    chooser, leaving = Noted(), Leaving(5)
    told = tell(2, ahead=True, sampler=chooser, leaves=leaving)
    ahead = list(chooser.names)
    assert ahead and min(ahead) > 2**39, "no position is as high"
    told.generation._overlaps = None  # pyright: ignore[reportPrivateUsage]
    leaving.after = 1000
    go_on(told)
    assert len(chooser.names) > len(ahead) and len(set(chooser.names)) == len(chooser.names)


@pytest.mark.parametrize(
    ("sampling", "free"),
    [
        (Sampling(), True),
        (Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1), True),
        (Sampling(temperature=0.7, seed=5), False),
        (Sampling(temperature=0.7, xtc_probability=0.5, xtc_threshold=0.1), False),
        (Sampling(penalties=Penalties(repetition=1.1)), False),
    ],
    ids=["greedy", "sampled", "seeded", "xtc", "penalised"],
)
def test_choices_that_need_a_position_or_the_answer_so_far_wait(
    sampling: Sampling, free: bool
) -> None:
    assert Sampler(sampling, 1).is_free is free


def test_an_engine_answers_the_oracle_so_alone_and_in_a_batch() -> None:
    wanted = spec(native_mtp=True)
    loaded = load_quietly(wanted)
    chosen: list[Any] = [engine_of(loaded, wanted, kernels=k) for k in ((), tuple(AHEAD_BY))]
    assert [each._runs_ahead for each in chosen] == [False, True]
    engine: Any = engine_of(loaded, wanted, runs_ahead=True)
    rows = ORACLE[:2]
    for k, row in zip((3, 2), rows, strict=True):
        got = answer(engine, request(row["prompt_ids"], k))
        assert list(got.ids) == row["greedy_ids"]
        assert len(got.rounds) == row["K"][str(k)]["rounds"] + 1
    running = [engine.generate(request(row["prompt_ids"], 3)) for row in rows]
    ids: list[list[int]] = [[], []]
    while any(running):
        for i, events in enumerate(running):
            event = next(events, None) if events else None
            if event is None:
                running[i] = None
            elif hasattr(event, "round"):
                ids[i] += event.round.tokens
    assert ids == [row["greedy_ids"] for row in rows]
