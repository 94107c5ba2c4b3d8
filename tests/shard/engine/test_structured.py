"""Answers under a grammar: whole and valid, with drafts or without, alone, in batches, resumed."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from budget import seeds
from engines import answer, request
from jsonschema import Draft202012Validator
from random_schemas import random_schema
from readers import Reader, together
from small import PROMPT, small_engine

from exo_node.mtp.types import Sampling
from exo_node.placement.errors import InvalidRequest
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammars.grammar import Gate, TokenGrammar
from exo_node.shard.text.grammars.grammars import GrammarSpec

TOGETHER = 10
LONG = 900


@functools.cache
def codec() -> TextCodec:
    from models import DEMO

    return TextCodec.load(DEMO)


def grammar(served: TextEngine, seed: int) -> TokenGrammar:
    spec = GrammarSpec("json_schema", json.dumps(random_schema(seed)), "f")
    return served.codec.grammars.compile(spec, Gate())


def structured(
    served: TextEngine, seed: int, k: int, prompt: Sequence[int] = PROMPT, **changes: Any
) -> Parameters:
    return request(prompt, k, LONG, grammar=grammar(served, seed), **changes)


def faults(seed: int, ids: Sequence[int]) -> list[Any]:
    """Raises ValueError where they are no whole document and the end token."""
    validator: Any = Draft202012Validator(random_schema(seed))
    return list(validator.iter_errors(json.loads(codec().decode(ids[:-1]))))


def test_random_schemas_in_batches_with_drafts_and_without() -> None:
    """A random model, which tells a token sooner than the demo."""
    schemas = seeds(2 * TOGETHER, 10 * TOGETHER)
    served = small_engine(batching=True)
    ids_by_k: dict[int, list[list[int]]] = {}
    for k in (0, 2):
        ids_by_k[k] = []
        for start in schemas[::TOGETHER]:
            batch = schemas[start : start + TOGETHER]
            readers = [Reader(structured(served, seed, k)) for seed in batch]
            together(served, readers)
            for seed, reader in zip(batch, readers, strict=True):
                assert reader.fault is None and reader.end is not None
                assert reader.end.stats.batch_size > 1
                assert not faults(seed, reader.ids), seed
                ids_by_k[k].append(reader.ids)
    assert ids_by_k[0] == ids_by_k[2]
    alone = small_engine(batching=False)
    for seed in (0, TOGETHER, schemas[-1]):
        assert list(answer(alone, structured(alone, seed, 2)).ids) == ids_by_k[0][seed]


SAMPLED = [Sampling(0.9, seed=5), Sampling(0.9, top_k=20), Sampling(1.2, top_p=0.9)]


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_sampled_answers_are_valid_too(sampling: Sampling, k: int) -> None:
    served = small_engine(batching=False)
    for seed in (k, 2 + SAMPLED.index(sampling)):
        assert not faults(seed, answer(served, structured(served, seed, k, sampling=sampling)).ids)


class GivesUp(TokenGrammar):
    """Fails like a grammar that hits a limit in the middle."""

    def take(self, tokens: Sequence[int]) -> None:
        super().take([codec().encode_text("zzz")[0]])


@pytest.mark.smoke
def test_a_grammar_that_fails_ends_its_own_answer_alone_and_says_why() -> None:
    served = small_engine(batching=True)
    matcher = grammar(served, 0)._matcher  # pyright: ignore[reportPrivateUsage]
    failing = GivesUp(matcher, frozenset(), 4096, Gate(), "response_format")
    readers = [Reader(request(PROMPT, 2, 60, grammar=failing)), Reader(structured(served, 3, 2))]
    together(served, readers)
    first, second = readers
    assert isinstance(first.fault, InvalidRequest) and "response_format" in first.fault.message
    assert second.fault is None and not faults(3, second.ids)
    assert served.live_requests == 0
