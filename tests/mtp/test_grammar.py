"""Masks of a grammar: row by row, exact for drafts, and no fault of one row reaches another."""

import math
from collections.abc import Sequence

import mlx.core as mx
import pytest

from exo_node.mtp.finite import NO_TOKEN
from exo_node.mtp.grammar import GrammarMask, masked
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Drafts, as_ids
from exo_node.mtp.types import Sampling

V = 70  # no multiple of a word's 32 bits


def mask_of(*ids: int) -> bytes:
    return sum(1 << i for i in ids).to_bytes(9, "little")


class Rising:
    """Allows the two ids above the last one."""

    def __init__(self) -> None:
        self.last = 0
        self.failed = ""

    def take(self, tokens: Sequence[int]) -> None:
        self.last = tokens[-1]

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        rows: list[bytes | None] = []
        last, stands = self.last, True
        for draft in (*drafts, None):
            rows.append(mask_of(last + 1, last + 2) if stands else None)
            if draft is not None:
                stands = stands and draft in (last + 1, last + 2)
                last = draft
        return rows


def logits(rows: int, seed: int = 0) -> mx.array:
    return mx.random.normal((rows, V), key=mx.random.key(seed))


def best(row: mx.array, ids: Sequence[int]) -> int:
    values = mx.stack([row[i] for i in ids])
    return ids[as_ids(mx.argmax(values)[None])[0]]


def test_what_a_mask_lacks_has_no_probability_and_the_rest_is_untouched() -> None:
    x = logits(3)
    got = masked(x, [mask_of(0, 31, 32, 69), None, b"\x02"])
    allowed = [i for i in range(V) if got[0, i].item() != -math.inf]
    assert allowed == [0, 31, 32, 69]
    assert all(got[0, i].item() == x[0, i].item() for i in allowed)
    assert mx.array_equal(got[1], x[1])
    assert [i for i in range(V) if got[2, i].item() != -math.inf] == [1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=1), Sampling(0.8)], ids=str)
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_draft_that_is_not_allowed_falls_with_all_after_it(
    sampling: Sampling, wrong: int
) -> None:
    drafts = [2, 3, 4]
    drafts[wrong] = 60
    x = logits(4)
    x[:, 60] = 50.0  # by itself the target would want nothing else
    q = mx.full((3, V), -math.log(V))
    sampler = Sampler(sampling, 5, grammar=Rising())
    accepted, tokens = sampler.judge(x, Drafts(mx.array(drafts), q), 0).read()
    assert accepted <= wrong
    last = 0
    for token in tokens:
        assert token in (last + 1, last + 2)
        last = token


def test_sampling_under_a_grammar_keeps_the_masked_distribution() -> None:
    """Drafts that know nothing of the grammar: what is emitted first has the target's shares."""
    x = mx.zeros((2, V))
    x[0, 1] = math.log(3.0)
    shares = [0] * V
    for seed in range(400):
        draft = mx.array([seed % 4])
        q = mx.full((1, V), -math.inf)
        q[0, :4] = math.log(0.25)
        sampler = Sampler(Sampling(1.0), seed, grammar=Rising())
        # The draft is drawn evenly from the first four ids, of which the grammar allows two.
        _, tokens = sampler.judge(x, Drafts(draft, q), 0).read()
        shares[tokens[0]] += 1
    assert sum(shares) == shares[1] + shares[2]
    assert abs(shares[1] / 400 - 0.75) < 0.08


def test_the_first_draft_is_masked_where_the_head_knows_an_allowed_id() -> None:
    sampler = Sampler(Sampling(), 0, grammar=Rising())
    x = logits(1)
    assert sampler.draft(x, 0).tokens.tolist() == [best(x[0], (1, 2))]
    far = Rising()
    far.last = 60
    narrow = logits(1)[:, :40]
    drafts = Sampler(Sampling(), 0, grammar=far).draft(narrow, 0)
    assert drafts.finite is not None and drafts.finite.all().item()
    assert drafts.tokens.tolist() == [best(narrow[0], range(40))]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=1), Sampling(0.8)], ids=str)
def test_every_draft_of_a_round_is_one_that_may_stand_there(sampling: Sampling) -> None:
    sampler = Sampler(sampling, 3, grammar=Rising())
    x, before, last = logits(3), list[Drafts](), 0
    for depth in range(3):
        before.append(sampler.draft(x[depth : depth + 1], depth, before))
        (token,) = as_ids(before[-1].tokens)
        assert token in (last + 1, last + 2)
        last = token
        q = before[-1].log_probabilities
        if q is not None:
            likely = mx.sum(q > -1e30)[None]
            assert as_ids(likely)[0] <= 2, "its own distribution is masked, too"


def test_after_a_draft_that_may_not_stand_nothing_is_masked() -> None:
    x = logits(1)
    wrong = Drafts(mx.array([60]), None)
    drafts = Sampler(Sampling(), 0, grammar=Rising()).draft(x, 1, [wrong])
    assert drafts.tokens.tolist() == [best(x[0], range(V))]


def test_tokens_are_read_when_the_next_mask_is_wanted_and_in_order() -> None:
    grammar = Rising()
    mask = GrammarMask(grammar)
    mask.commit(mx.array([2]))
    mask.commit(mx.array([3, 5]))
    assert grammar.last == 0
    got = mask.apply(logits(1))
    assert [i for i in range(V) if got[0, i].item() != -math.inf] == [6, 7]


def test_a_grammar_that_allows_nothing_gives_no_token() -> None:
    class Stuck(Rising):
        def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
            return [b""] * (len(drafts) + 1)

    for sampling in (Sampling(), Sampling(0.8)):
        sampler = Sampler(sampling, 0, grammar=Stuck())
        assert sampler.token(logits(1), 0).tolist() == [NO_TOKEN]
