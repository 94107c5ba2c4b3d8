"""The head's cache holds the committed rows, all of them and nothing else, whoever shares it.

exo#2110, mlx-lm#990: the row of a last draft was missing where all were accepted. omlx: a head that
was off for a while drafted from a cache with a gap. vllm-mlx#82: hidden, embedding and cache did
not agree in rows.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from drafters import drafter_config, stock_module
from mlx_lm.models.cache import KVCache
from tiny import VOCABULARY, family, tiny_qwen

from exo_node.mtp.caches.batch_slots import order_of
from exo_node.mtp.caches.rollback import row_count, state_arrays
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Drafts, as_ids, as_row
from exo_node.mtp.types import Sampling
from exo_node.shard.engine.drafter import PENDING_ROWS, Drafter, DraftModel, read_rows
from exo_node.shard.engine.states import unread_rows
from exo_node.shard.engine.states.state import DraftState
from exo_node.shard.model.block_drafter import BlockDrafter

FAMILY = family()
HIDDEN = 64
DRAFTERS: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 1},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
]
SAMPLINGS = [Sampling(), Sampling(temperature=1.0)]


class CountingHead:
    """Notes the rows of each of its passes."""

    def __init__(self) -> None:
        mx.random.seed(1)
        self._head = FAMILY.make_head()
        self.passes: list[int] = []

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
        self.passes.append(hidden.shape[0] * hidden.shape[1])
        return self._head(hidden, embedding, cache)


def model_of(head: CountingHead) -> DraftModel:
    return DraftModel(head, FAMILY.embed, FAMILY.logits)


@dataclass(eq=False)
class Answer:
    """One request: the target's hidden states of its rows, and the ids that follow them."""

    sampling: Sampling
    drafts: bool = True
    hidden: list[mx.array] = field(default_factory=list[mx.array])
    following: list[int] = field(default_factory=list[int])

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.sampling, 8)

    def commit(self, hidden: mx.array, tokens: mx.array) -> None:
        self.hidden.append(hidden)
        self.following += as_ids(tokens)

    def at_once(self) -> DraftState:
        """The state of one whose rows the head will read in one pass."""
        whole = mx.concatenate(self.hidden, axis=1), as_row(self.following)[None]
        return DraftState(unread=[whole])


class Scene:
    """Requests that share forwards, whose rounds are made up."""

    def __init__(
        self,
        seed: int,
        size: int = 3,
        patience: int = 10_000,
        reads: float = 0.0,
        model: DraftModel | None = None,
    ) -> None:
        """`reads`: the share of joining requests whose prompts the head has read. `model`: by
        default that of a `CountingHead`."""
        self.reads = reads
        self.draw = random.Random(seed)
        self.head = CountingHead()
        self.model = model or model_of(self.head)
        self.alone = model or model_of(CountingHead())
        self.patience = patience
        self.answers, states = self._joining(size, rests=0.0)
        self.drafter = Drafter(self.model, states)

    def rows(self, count: int) -> tuple[mx.array, mx.array]:
        """Hidden states (1, count, H), and the ids (count,) that follow."""
        key = mx.random.key(self.draw.randrange(1 << 30))
        ids = [self.draw.randrange(VOCABULARY) for _ in range(count)]
        return mx.random.normal((1, count, HIDDEN), key=key), as_row(ids)

    def _joining(self, count: int, rests: float) -> tuple[list[Answer], list[DraftState | None]]:
        """Answers whose prompts were read alone, by the head as well or not. `rests`: the share of
        answers that never draft."""
        answers, states = list[Answer](), list[DraftState | None]()
        for _ in range(count):
            answer = Answer(self.draw.choice(SAMPLINGS), self.draw.random() >= rests)
            state = DraftState()
            for rows in (self.draw.randrange(1, 90), 1):
                new_rows = self.rows(rows)
                if state.unread and self.draw.random() < self.reads:
                    read_rows(self.model, state)
                state.observe(*new_rows)
                answer.commit(*new_rows)
            answers.append(answer)
            states.append(state if answer.drafts else None)
        return answers, states

    def plain_rounds(self, count: int) -> None:
        for _ in range(count):
            self.round(0)

    def round(self, k: int) -> None:
        """A round like `Batch`'s: k drafts, then a verify of which some rows are kept."""
        if k:
            places = [len(answer.following) for answer in self.answers]
            samplers = [answer.sampler for answer in self.answers]
            drafts = self.drafter.draft(k, [k] * len(places), samplers, places).tokens
            if not self.on_device:
                for index, answer in enumerate(self.answers):
                    self._assert_as_alone(self.drafter.extract(index), answer, drafts[index])
        row_counts = [
            self.draw.choice([1, k + 1, self.draw.randrange(1, k + 2)]) for _ in self.answers
        ]
        new_rows = [self.rows(k + 1) for _ in self.answers]
        for answer, (hidden, tokens), count in zip(self.answers, new_rows, row_counts, strict=True):
            answer.commit(hidden[:, :count], tokens[:count])
        hidden = mx.concatenate([hidden for hidden, _ in new_rows])
        tokens = mx.stack([tokens for _, tokens in new_rows])
        counts = as_row(row_counts) if self.on_device and k else row_counts
        self.drafter.observe(hidden, tokens, counts, self.patience)

    on_device = False

    def rounds_on_device(self) -> None:
        """The device alone knows how many rows are kept."""
        self.drafter.count_on_device()
        self.on_device = True
        for _ in range(3):
            self.round(self.draw.randrange(4))
        self.on_device = False
        self.drafter.count_here(len(self.answers[0].following))

    def change(self) -> None:
        """Some leave, with all that the head holds of them, and some join."""
        drafting_ones = [i for i, answer in enumerate(self.answers) if answer.drafts]
        stays = {self.draw.choice(drafting_ones)}
        stays |= {i for i in range(len(self.answers)) if self.draw.random() < 0.5}
        for index, answer in enumerate(self.answers):
            if index not in stays and answer.drafts:
                self._goes_on_alone(self.drafter.extract(index), answer)
        answers, states = self._joining(self.draw.randrange(4 - min(3, len(stays))), rests=0.3)
        order = order_of(sorted(stays))
        self.drafter.change(order, states)
        self.answers = [*(self.answers[place] for place in order), *answers]

    def _goes_on_alone(self, state: DraftState, answer: Answer) -> None:
        new_rows = self.rows(2)
        state.observe(*new_rows)
        answer.commit(*new_rows)
        alone = Drafter(self.alone, [state])
        drafts = alone.draft(2, [2], [answer.sampler], [len(answer.following)]).tokens
        self._assert_as_alone(alone.extract(0), answer, drafts[0])

    def _assert_as_alone(self, state: DraftState, answer: Answer, drafts: mx.array) -> None:
        assert_as_alone(state, answer, drafts, self.alone)


def assert_as_alone(state: DraftState, answer: Answer, drafts: mx.array, model: DraftModel) -> None:
    """Cache and drafts are those of one pass over all rows."""
    if not answer.drafts:
        return
    alone, k = Drafter(model, [answer.at_once()]), drafts.shape[0]
    expected = alone.draft(k, [k], [answer.sampler], [len(answer.following)]).tokens
    assert as_ids(drafts) == as_ids(expected[0])
    once, rows = alone.extract(0).cache, len(answer.following)
    assert state.cache is not None and once is not None
    assert row_count(state.cache) == state.rows == row_count(once) == rows
    for array, needed in zip(state_arrays(state.cache), state_arrays(once), strict=True):
        assert mx.array_equal(array[..., :rows, :], needed[..., :rows, :])


@pytest.mark.parametrize("seed", range(8))
def test_rows_and_drafts_are_those_of_one_pass_whatever_happens(seed: int) -> None:
    play(Scene(seed, size=1 + seed % 3, reads=0.5 * (seed % 2)))


@pytest.mark.parametrize("changes", DRAFTERS, ids=repr)
@pytest.mark.parametrize("seed", range(4))
def test_so_are_those_of_a_block_drafter(seed: int, changes: dict[str, Any]) -> None:
    model = tiny_qwen()
    module = stock_module(drafter_config(VOCABULARY) | changes)
    mx.eval(module.parameters())
    drafter = BlockDrafter(module, model, model.layers, "")
    play(Scene(seed, 1 + seed % 3, reads=0.5 * (seed % 2), model=DraftModel.of(None, drafter)))


def play(scene: Scene) -> None:
    """Rounds, waits and changes of members in a drawn order."""
    scene.plain_rounds(2)
    for _ in range(14):
        match scene.draw.randrange(6):
            case 0:
                scene.change()
            case 1:
                scene.plain_rounds(scene.draw.choice([1, PENDING_ROWS + 3]))
            case 2 if len(scene.answers) == 1:
                scene.rounds_on_device()
            case 3:
                scene.drafter.wake()
                assert scene.drafter.unread == 0
            case _:
                scene.round(scene.draw.randrange(1, 4))
    scene.round(1)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_read", [False, True], ids=["unread-stays", "read-stays"])
def test_a_head_with_rows_and_one_without_join(size: int, *, is_read: bool) -> None:
    """An empty cache has arrays with no rows or none at all, on either side of a join."""
    scene = Scene(3, size=size, reads=float(is_read))
    scene.reads = 1.0 - scene.reads
    answers, states = scene._joining(2, rests=0.0)  # pyright: ignore[reportPrivateUsage]
    scene.drafter.change(order_of(range(size)), states)
    scene.answers += answers
    scene.plain_rounds(2)
    scene.round(2)


def test_nothing_is_read_until_drafts_are_wanted_and_then_all_of_it() -> None:
    scene = Scene(1)
    scene.plain_rounds(3 * PENDING_ROWS)
    scene.change()
    scene.plain_rounds(5)
    assert scene.head.passes == []
    rows = [len(answer.following) for answer in scene.answers]
    assert scene.drafter.unread == sum(rows) - len(rows)  # the last round's are read in any case
    scene.round(2)
    assert sum(scene.head.passes) == len(rows) * (max(rows) + 1)  # and the second draft of each
    assert scene.drafter.unread == 0


def test_what_waits_is_bounded_and_read_in_passes_that_are_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unread_rows, "READ_ROWS", 50)
    scene = Scene(6, patience=120)
    for _ in range(4 * PENDING_ROWS):
        scene.round(0)
        hidden_states = [array for array in scene.drafter.arrays() if array.shape[-1] == HIDDEN]
        rows = sum(array.shape[0] * array.shape[1] for array in hidden_states)
        assert rows <= 3 * (120 + 2 * PENDING_ROWS)
    assert scene.head.passes and max(scene.head.passes) <= 50
    scene.round(1)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_each_draft_follows_from_the_heads_own_output_of_the_one_before(
    sampling: Sampling,
) -> None:
    model, sampler = model_of(CountingHead()), Sampler(sampling, 8)
    hidden, token = mx.random.normal((1, 1, HIDDEN), key=mx.random.key(1)), as_row([2])
    drafter = Drafter(model, [DraftState(unread=[(hidden, token[None])])])
    cache, expected = KVCache(), list[Drafts]()
    for position in (2, 3, 4):
        hidden = model.head(hidden, FAMILY.embed(token[None]), cache)
        expected.append(sampler.draft(FAMILY.logits(hidden)[0], position, expected))
        token = expected[-1].tokens
    drafts = drafter.draft(3, [3], [sampler], [2])
    assert as_ids(drafts.tokens[0]) == [as_ids(draft.tokens)[0] for draft in expected]
    if sampling.temperature:
        drawn = drafts.drawn[0]
        assert drawn is not None and drawn.log_probabilities is not None
        assert drawn.log_probabilities.shape == (3, VOCABULARY), "acceptance needs them"
