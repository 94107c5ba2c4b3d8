"""An answer with `min_tokens` ends after them; greedy ones: option `barred` of the corpus."""

import functools
from dataclasses import replace

import pytest
from engines import Answer, answer, changed, request
from forced_copies import FixedLength, force
from readers import Reader, alone, engine, prompt, together

from exo_node.mtp.types import Sampling
from exo_node.shard.engine.request import Parameters
from exo_node.shard.text.grammars.grammar import Gate
from exo_node.shard.text.grammars.grammars import GrammarSpec

LEAST, MOST = 19, 32
END = min(engine().codec.end_tokens)
GREEDY = Sampling(logit_bias=((END, 60.0),), min_tokens=LEAST)
"""Without a least number of tokens the answer is empty."""
PROMPT = [*prompt(1), *prompt(1)]


def parameters(k: int = 0, sampling: Sampling = GREEDY, **changes: object) -> Parameters:
    return request(PROMPT, k, MOST, **({"sampling": sampling} | changes))


@functools.cache
def plain(sampling: Sampling) -> Answer:
    return alone(parameters(sampling=sampling))


@pytest.mark.parametrize("k", [0, 2])
def test_copied_drafts_give_the_same_ids(k: int) -> None:
    served = engine()
    force(served.lookup, FixedLength(7))
    body = plain(GREEDY).ids
    # What is copied holds ends within it, which none of the answers may take.
    rows = [*PROMPT, *body[:9], END, *body[9:], *PROMPT]
    expected = alone(request(rows, 0, MOST, sampling=GREEDY)).ids
    got = answer(served, request(rows, k, MOST, sampling=GREEDY, prompt_lookup=True))
    assert got.stats.lookup_proposed_tokens > 0
    assert got.ids == expected and len(expected) == LEAST + 1


@pytest.mark.smoke
def test_each_answer_of_a_batch_has_its_own_least() -> None:
    samplings = [replace(GREEDY, min_tokens=least) for least in (0, 4, 9, 25)]
    readers = [
        Reader(request(prompt(i), i % 3, MOST, sampling=sampling), begins=2 * i)
        for i, sampling in enumerate(samplings)
    ]
    together(engine(), readers)
    for reader, sampling in zip(readers, samplings, strict=True):
        assert len(reader.ids) == sampling.min_tokens + 1
        assert tuple(reader.ids) == alone(changed(reader.request, num_draft_tokens=0)).ids
    assert max(each.forward.batch for r in readers for each in r.rounds) > 1


@pytest.mark.parametrize("k", [0, 2])
def test_up_to_the_last_token_no_end_comes(k: int) -> None:
    got = alone(parameters(k, replace(GREEDY, min_tokens=2**32 - 1)))
    assert len(got.ids) == MOST and END not in got.ids
    assert got.end.reason == "length"


@pytest.mark.parametrize("k", [0, 2])
def test_a_stop_string_ends_an_answer_before_its_least(k: int) -> None:
    text = plain(GREEDY).text
    stop = next(part for at in range(4, 20) if text.find(part := text[at : at + 6]) == at)
    got = alone(parameters(k, stop=(stop,)))
    assert got.end.reason == "stop" and len(got.ids) < LEAST


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize(("pattern", "count"), [("[a-f]{3,200}", LEAST), ("abc", 0)])
def test_under_a_grammar_ends_wait_while_anything_else_may_follow(
    pattern: str, count: int, k: int
) -> None:
    grammars = engine().codec.grammars
    spec = GrammarSpec("regex", pattern, "regex")
    got = alone(parameters(k, grammar=grammars.compile(spec, Gate())))
    assert got.end.reason == "stop"
    if count:
        assert len(got.ids) == count + 1
    else:
        assert got.text == "abc"
