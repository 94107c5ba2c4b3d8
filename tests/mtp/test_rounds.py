"""Rounds over tables and tiny heads: what drafts, caches and budgets hold after each of them."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tables import PROMPT, EndAt, TableDrafter, random_table, tell
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp.answer import CLEAR_EVERY
from exo_node.mtp.drafters import NativeDrafter
from exo_node.mtp.family import draft_logits, family_of
from exo_node.mtp.rollback import rollback, with_tapes
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.sampling import greedy_token
from exo_node.mtp.seams import Drafts, as_ids, as_row
from exo_node.mtp.types import Penalties, Sampling

V = 8
TARGET = random_table(V, seed=1)
HALF = np.where(np.arange(64)[:, None, None] % 3 == 0, -TARGET, TARGET)


@pytest.fixture(scope="module")
def family() -> Any:
    found = family_of(taped_qwen())
    assert found is not None
    return found


def made_head(family: Any) -> Any:
    mx.random.seed(1)
    head = family.make_head()
    mx.eval(head.parameters())
    return head


class Counting(NativeDrafter):
    """Notes the committed rows that the head's cache holds when a round's first draft is made."""

    def __init__(self, family: Any, k: int) -> None:
        head = made_head(family)
        logits = draft_logits(family, head)
        super().__init__(head, family.embed, logits, Sampler(Sampling(), 0), k, overlap=True)
        self.held: list[tuple[int, int]] = []

    def draft(self, k: int, position: int) -> Drafts:
        drafts = super().draft(k, position)
        self.held.append((self.cache.offset - (k - 1), position - 1))
        return drafts


def test_the_heads_cache_has_no_hole_after_a_full_accept(family: Any) -> None:
    """exo#2110, mlx-lm#990: nobody wrote the row of the last draft when all were accepted."""
    drafter = Counting(family, 2)
    hidden = mx.ones((1, 3, 64))
    drafter.observe(hidden, as_row([1, 2, 3]))
    for position in (4, 7, 10):  # each round commits both drafts and the bonus token
        _ = drafter.draft(2, position)
        drafter.observe(hidden, as_row([1, 2, 3]))
    assert [held for held, _ in drafter.held] == [wanted for _, wanted in drafter.held]
    told = tell(TARGET, TARGET, 2)  # what the loop tells a drafter, where every draft stands
    assert isinstance(told.drafter, TableDrafter)
    assert [at for at, _, _ in told.drafter.seen] == list(range(len(PROMPT) + len(told.ids) - 1))


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_the_prompt_is_prefilled_once_and_not_token_by_token(chunk: int) -> None:
    """exo#2110: twice on dense models, token by token on mixtures of experts."""
    told = tell(TARGET, HALF, 2, prompt=(1, 0, 2, 3, 1, 0, 2), prefill_chunk=chunk)
    prefills = [call for call in told.verifier.calls if "all" not in call and "roll" not in call]
    assert len(prefills) == -(-7 // chunk)
    assert isinstance(told.drafter, TableDrafter)
    assert [at for at, _, _ in told.drafter.seen[:7]] == list(range(7))


def test_a_penalty_holds_within_a_block_of_drafts() -> None:
    """exo#2110, though its own cards set one. `test_engine.py` compares with mlx-lm's.

    Here a penalty is so strong that a row depends on the drafts before it in its own block.
    """
    strong = Sampling(penalties=Penalties(repetition=9.0, context_size=4))
    expected = tell(TARGET, sampling=strong).ids
    assert expected != tell(TARGET).ids
    assert tell(TARGET, TARGET, 3, sampling=strong).ids == expected


@pytest.mark.parametrize("length", [4, 5, 6, 7])
def test_a_token_that_was_not_emitted_leaves_the_caches(length: int) -> None:
    """mlx-lm#990, exo#2110: the answer ended inside an accepted block."""
    told = tell(TARGET, TARGET, 3, ending=EndAt(length))
    text = [*PROMPT, *told.ids]
    assert told.verifier.ids == text[:-1]
    assert len(told.ids) == length


def test_a_sampled_draft_is_accepted_by_its_probability() -> None:
    """vllm-mlx#82: at temperature 1 an unlikely draft was kept as often as a likely one."""
    p = mx.log(mx.array([[0.9, 0.1] + [1e-9] * 6] * 2))
    kept = 0
    for seed in range(400):
        chooser = Sampler(Sampling(temperature=1.0), seed)
        q = mx.log(mx.array([[0.5, 0.5] + [1e-9] * 6]))
        drafts = chooser.draft(q, 5)
        accepted, ids = chooser.judge(p, drafts, 5).read()
        kept += ids[0] == 1
        assert accepted in (0, 1)
    assert 0.1 * 400 - 4 * 6 < kept < 0.1 * 400 + 4 * 6  # 6: the binomial's standard deviation


def test_hidden_embedding_and_cache_agree_in_rows(family: Any) -> None:
    """vllm-mlx#82: hidden, embedding and cache must agree in rows, whatever their number."""
    drafter = Counting(family, 3)
    for rows, position in ((5, 6), (1, 7), (4, 11)):
        hidden = mx.ones((1, rows, 64))
        drafter.observe(hidden, as_row([1] * rows))
        assert drafter.draft(3, position).tokens.shape == (3,)
    keys = drafter.cache.keys
    assert keys is not None
    assert keys.shape[0] == 1


def test_memory_is_cleared_though_blocks_step_over_the_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clearing when the number of tokens is a multiple of 256 never clears if rounds jump it."""
    cleared: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    table = np.tile(TARGET, (12, 1, 1))
    _ = tell(table, table, 2, max_tokens=2 * CLEAR_EVERY + 5)
    assert len(cleared) == 2


def test_acceptance_and_replacement_use_the_same_argmax() -> None:
    """exo#2110 used the one to accept and the other to replace."""
    logits = mx.random.normal((2000, 1024), key=mx.random.key(0)).astype(mx.bfloat16)
    stock = mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)
    assert not mx.array_equal(stock, mx.argmax(logits, axis=-1)), "a seed that shows nothing"
    assert mx.array_equal(greedy_token(logits), stock)
    chooser = Sampler(Sampling(), 0)
    verdict = chooser.judge(logits[:4], Drafts(stock[:3].astype(mx.int32), None), 0)
    assert verdict.read() == (3, as_ids(stock[:4]))
    assert as_ids(chooser.token(logits[:1], 0)) == as_ids(stock[:1])


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_no_more_is_drafted_than_the_budget_has_left(budget: int) -> None:
    """exo#2110: rows past max_tokens stayed in the caches."""
    told = tell(TARGET, TARGET, 3, max_tokens=budget)
    assert isinstance(told.drafter, TableDrafter)
    # The prompt gives the first token, and a round one more than its drafts.
    assert told.drafter.asked == ([budget - 2] if budget > 2 else [])
    assert told.verifier.ids == [*PROMPT, *told.ids][:-1]


def test_two_calls_of_a_recurrent_layer_are_kept_apart() -> None:
    """Captured states were indexed by call: a tape must be its own layer's and its forward's."""
    model = taped_qwen()
    caches = with_tapes(model.make_cache())
    family = family_of(model)
    assert family is not None
    ids = [[(5 * i + j) % VOCABULARY for i in range(4)] for j in range(3)]
    _ = family.hidden(mx.array([ids[0]]), caches)
    _ = family.hidden(mx.array([ids[1]]), caches)
    rollback(caches, 2)
    got = family.hidden(mx.array([ids[2]]), caches)
    again = with_tapes(model.make_cache())
    _ = family.hidden(mx.array([ids[0] + ids[1][:2]]), again)
    assert mx.array_equal(got, family.hidden(mx.array([ids[2]]), again))


def test_a_head_that_was_off_for_a_while_has_no_gap(family: Any) -> None:
    """omlx: a drafter that was off for a while drafted from a cache with a gap."""
    drafter = Counting(family, 1)
    for position in range(200):
        drafter.observe(mx.ones((1, 1, 64)), as_row([position % VOCABULARY]))
    _ = drafter.draft(1, 201)
    assert drafter.held == [(200, 200)]
