"""A head that rests catches up without a hole: its rows are those of one pass over all of them."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import random
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tiny import VOCABULARY, family

from exo_node.mtp import drafters
from exo_node.mtp.batch_drafter import BatchDrafter, BatchHead
from exo_node.mtp.batch_slots import order_of
from exo_node.mtp.drafters import PENDING_ROWS, NativeDrafter
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import as_ids, as_row
from exo_node.mtp.types import Sampling

FAMILY = family()
HIDDEN = 64


class CountingHead:
    """The rows of each of its passes."""

    def __init__(self) -> None:
        mx.random.seed(1)
        self._head = FAMILY.make_head()
        self.passes: list[int] = []

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
        self.passes.append(hidden.shape[0] * hidden.shape[1])
        return self._head(hidden, embedding, cache)


@dataclass(eq=False)
class Answer:
    """One request: the ids behind which it is, and the target's hidden of all rows before."""

    drafter: NativeDrafter
    hidden: list[mx.array] = field(default_factory=list[mx.array])
    following: list[int] = field(default_factory=list[int])

    def rows(self, draw: random.Random, count: int) -> tuple[mx.array, mx.array]:
        """`count` rows more: hidden (1, count, H) and the ids (count,) that follow."""
        ids = [draw.randrange(VOCABULARY) for _ in range(count)]
        key = mx.random.key(draw.randrange(1 << 30))
        return mx.random.normal((1, count, HIDDEN), key=key), as_row(ids)

    def commits(self, hidden: mx.array, tokens: mx.array) -> None:
        self.hidden.append(hidden)
        self.following += as_ids(tokens)


class Scene:
    """Requests of a batch whose rounds are made up."""

    def __init__(self, seed: int, patience: int = 10_000) -> None:
        self.draw = random.Random(seed)
        self.head = CountingHead()
        self.patience = patience
        self.answers: list[Answer] = [self.joining() for _ in range(3)]
        self.batch = BatchDrafter(
            BatchHead(self.head, FAMILY.embed, FAMILY.logits),
            [answer.drafter for answer in self.answers],
        )

    def joining(self) -> Answer:
        """One that read a prompt alone, which its head did not."""
        answer = Answer(self._drafter())
        for rows in (self.draw.randrange(1, 90), 1):
            hidden, tokens = answer.rows(self.draw, rows)
            answer.drafter.observe(hidden, tokens)
            answer.commits(hidden, tokens)
        return answer

    def _drafter(self) -> NativeDrafter:
        made = self.head, FAMILY.embed, FAMILY.logits, Sampler(Sampling(), 0), 3
        return NativeDrafter(*made, overlap=True, patience=lambda: self.patience)

    def separate(self, answer: Answer) -> NativeDrafter:
        """A drafter outside the batch that has observed all rows of the answer."""
        drafter = self._drafter()
        drafter.observe(mx.concatenate(answer.hidden, axis=1), as_row(answer.following))
        return drafter

    def round(self, k: int) -> None:
        """As `Batch` has them: k drafts, then a verify of which some rows are kept."""
        if k:
            places = [len(answer.following) for answer in self.answers]
            samplers = [Sampler(Sampling(), 0) for _ in self.answers]
            _ = self.batch.draft(k, [k] * len(self.answers), samplers, places)
            self.check()
        kept = [self.draw.randrange(1, k + 2) for _ in self.answers]
        made = [answer.rows(self.draw, k + 1) for answer in self.answers]
        for answer, (hidden, tokens), count in zip(self.answers, made, kept, strict=True):
            answer.commits(hidden[:, :count], tokens[:count])
        hidden = mx.concatenate([hidden for hidden, _ in made])
        self.batch.observe(hidden, mx.stack([tokens for _, tokens in made]), kept)

    def change(self) -> None:
        """Somebody leaves, somebody joins."""
        stays = sorted(self.draw.sample(range(len(self.answers)), k=len(self.answers) - 1))
        joins = [self.joining()]
        order = order_of(stays)
        self.batch.change(order, [answer.drafter for answer in joins])
        self.answers = [*(self.answers[place] for place in order), *joins]

    def check(self) -> None:
        for index, answer in enumerate(self.answers):
            assert_is_one_pass(self.cache(index), answer)

    def cache(self, index: int) -> KVCache:
        """What the head has read of one request's rows; nothing is computed for it."""
        joint, drafters = self.batch._joint, self.batch._drafters  # pyright: ignore[reportPrivateUsage]
        drafter = drafters[index]
        assert drafter is not None
        return drafter.cache if joint is None else joint.cache.of(index)


def assert_is_one_pass(cache: KVCache, answer: Answer) -> None:
    once, rows = KVCache(), len(answer.following)
    after = FAMILY.embed(as_row(answer.following)[None])
    _ = CountingHead()(mx.concatenate(answer.hidden, axis=1), after, once)
    assert cache.offset == once.offset == rows
    for held, wanted in ((cache.keys, once.keys), (cache.values, once.values)):
        assert held is not None and wanted is not None
        assert mx.array_equal(held[..., :rows, :], wanted[..., :rows, :])


def plain_rounds(scene: Scene, count: int) -> None:
    for _ in range(count):
        scene.round(0)


def test_nothing_is_read_until_drafts_are_wanted_and_then_all_of_it() -> None:
    scene = Scene(1)
    plain_rounds(scene, 3 * PENDING_ROWS)
    scene.change()
    plain_rounds(scene, 5)
    assert scene.head.passes == [] and scene.batch.rests
    waiting = sum(len(answer.following) for answer in scene.answers)
    assert scene.batch.unread == waiting
    scene.round(2)
    assert sum(scene.head.passes) == waiting + len(scene.answers)  # and the second draft of each
    assert scene.batch.unread == 0


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_one_pass_however_often_it_rests(seed: int) -> None:
    scene = Scene(seed)
    plain_rounds(scene, 2)
    for _ in range(16):
        step = scene.draw.randrange(4)
        if step == 0:
            scene.change()
        elif step == 1:
            plain_rounds(scene, scene.draw.choice([1, PENDING_ROWS + 3]))
        else:
            scene.round(scene.draw.randrange(1, 4))
    scene.round(1)


def test_one_that_leaves_takes_its_rows_along_awake_or_not() -> None:
    for rests in (False, True):
        scene = Scene(5)
        scene.round(2)
        plain_rounds(scene, 3 + PENDING_ROWS * rests)
        assert scene.batch.rests is rests
        leaving = scene.answers[1]
        scene.batch.leave(1)
        hidden, tokens = leaving.rows(scene.draw, 2)
        leaving.drafter.observe(hidden, tokens)
        leaving.commits(hidden, tokens)
        _ = leaving.drafter.draft(1, len(leaving.following))
        assert_is_one_pass(leaving.drafter.cache, leaving)
        scene.batch.change([0, 2], [])
        del scene.answers[1]
        scene.round(2)


def test_a_request_that_moves_to_anothers_place_drafts_behind_its_own_rows() -> None:
    scene = Scene(8)
    scene.round(2)
    scene.batch.change(order_of([1, 2]), [])
    scene.answers = [scene.answers[2], scene.answers[1]]
    places = [len(answer.following) for answer in scene.answers]
    samplers = [Sampler(Sampling(), 0) for _ in scene.answers]
    drafts = scene.batch.draft(3, [3, 3], samplers, places).tokens
    alone = [scene.separate(answer).draft(3, 0).tokens for answer in scene.answers]
    assert [as_ids(row) for row in drafts] == [as_ids(row) for row in alone]
    assert as_ids(alone[0]) != as_ids(alone[1])


def test_what_waits_is_bounded_and_read_in_passes_that_are_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafters, "READ_ROWS", 50)
    scene = Scene(6, patience=120)
    for _ in range(4 * PENDING_ROWS):
        scene.round(0)
        held = [array for array in scene.batch.arrays() if array.shape[-1] == HIDDEN]
        rows = sum(array.shape[0] * array.shape[1] for array in held)
        assert rows <= 3 * (120 + 2 * PENDING_ROWS)
    assert scene.head.passes and max(scene.head.passes) <= 50
    scene.round(1)
