"""Drafting from a prefix of the vocabulary: the same logits, less read, the same answers."""

from typing import Any

import mlx.core as mx
import pytest
from engines import answer, request
from mlx import nn
from small import PROMPT, small_engine

from exo_node.mtp.families.family import first_rows
from exo_node.mtp.types import Sampling

ROWS, VOCABULARY, WIDTH = 40, 96, 64
X = mx.random.normal((1, 3, WIDTH), key=mx.random.key(1))


def linear(*, bias: bool = False, bits: int = 0) -> nn.Module:
    mx.random.seed(2)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    return nn.QuantizedLinear.from_linear(layer, 32, bits) if bits else layer


def embedding(bits: int = 0) -> nn.Module:
    mx.random.seed(3)
    layer = nn.Embedding(VOCABULARY, WIDTH)
    return nn.QuantizedEmbedding.from_embedding(layer, 32, bits) if bits else layer


@pytest.mark.parametrize(
    "matrix",
    [
        linear(),
        linear(bias=True),
        linear(bits=4),
        linear(bits=8, bias=False),
        embedding(),
        embedding(4),
    ],
    ids=["linear", "with bias", "4-bit", "8-bit", "tied", "tied 4-bit"],
)
def test_the_logits_that_remain_are_the_same_numbers(matrix: nn.Module) -> None:
    m: Any = matrix
    whole = m.as_linear(X) if hasattr(m, "as_linear") else m(X)
    got = first_rows(matrix, ROWS)(X)
    assert got.shape == (1, 3, ROWS)
    assert mx.array_equal(got, whole[..., :ROWS])


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.8, seed=5, top_k=20)],
    ids=["greedy", "seeded top_k"],
)
def test_answers_do_not_change_and_ids_beyond_are_never_drafted(sampling: Sampling) -> None:
    engine = small_engine(draft_vocabulary=3000)
    expected = request(PROMPT, 2, 40, sampling=sampling, ignore_eos=True)
    got, plain = (
        answer(engine, expected),
        answer(engine, request(PROMPT, 0, 40, sampling=sampling, ignore_eos=True)),
    )
    assert got.ids == plain.ids
    assert any(token >= 3000 for token in got.ids)
    for r in got.rounds:
        assert all(token < 3000 for token in r.tokens[: r.accepted])
    assert got.stats.accepted_draft_tokens > 0


def test_a_size_over_the_vocabulary_drafts_all_of_it() -> None:
    got, whole = (
        answer(small_engine(draft_vocabulary=size), request(PROMPT, 2, 40))
        for size in (1_000_000, 0)
    )
    assert got.rounds == whole.rounds
    assert whole.stats.accepted_draft_tokens > 0
