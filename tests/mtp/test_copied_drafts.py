"""Drafts that are copied from a request's own tokens are verified as the head's drafts are.

Over tables of few ids, where nearly every trigram occurred before, so that most rounds copy. Their
distribution is in test_distribution.py.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from forced_copies import FixedLength
from tables import PROMPT, EndAt, Logits, TableAnswer, random_table, tell

from exo_node.mtp.drafting.lookup_drafts import PromptLookup
from exo_node.mtp.types import Sampling

LENGTHS = (1, 4)
POSITIONS = 160


def _table() -> Logits:
    """The same at most positions: answers repeat themselves, but not for long."""
    usual, other = (random_table(6, seed, positions=1) for seed in (3, 4))
    at = np.arange(POSITIONS)[:, None, None]
    return np.where(at % 11 == 5, other, usual)


def told(
    length: int,
    k: int = 0,
    *,
    sampling: Sampling | None = None,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 120,
    **fields: object,
) -> TableAnswer:
    """An answer that repeats itself; `length` 0: nothing is copied."""
    table = _table()
    lookup = PromptLookup(prompt, FixedLength(length)) if length else None
    return tell(
        table,
        table[..., :5] if k else None,
        k,
        sampling=sampling,
        prompt=prompt,
        max_tokens=max_tokens,
        lookup=lookup,
        **fields,  # pyright: ignore[reportArgumentType]
    )


def copies(answer: TableAnswer) -> tuple[int, int]:
    """Drafts that were copied, and how many of them stood."""
    rounds = [each for each in answer.rounds if each.is_copied]
    return sum(each.drafted for each in rounds), sum(each.accepted for each in rounds)


OPTIONS = {
    "greedy": Sampling(),
    "penalised": Sampling(repetition_penalty=1.3, frequency_penalty=0.4, repetition_context_size=8),
    "seeded": Sampling(temperature=0.7, seed=4),
    "seeded, top_k": Sampling(temperature=0.9, seed=5, top_k=3),
    "seeded, xtc": Sampling(temperature=0.8, seed=6, xtc_probability=0.5, xtc_threshold=0.1),
}


@pytest.mark.parametrize(("name", "k"), [*((name, 2) for name in OPTIONS), ("penalised", 0)])
def test_the_ids_are_those_of_plain_decoding(name: str, k: int) -> None:
    plain = told(0, sampling=OPTIONS[name])
    for length in LENGTHS:
        answer = told(length, k, sampling=OPTIONS[name])
        drafted, stood = copies(answer)
        assert answer.ids == plain.ids
        assert drafted > stood > 0
        # Of the cache's rows none is of a rejected draft: only the last token has none.
        assert answer.cached_ids == [*PROMPT, *plain.ids][:-1]


@pytest.mark.parametrize("count", range(1, 24))
def test_an_answer_ends_inside_a_copy_where_plain_decoding_ends(count: int) -> None:
    plain = told(0, max_tokens=40)
    stopped = told(6, max_tokens=40, ending=EndAt(count))
    cut = told(6, max_tokens=count)
    assert stopped.ids == cut.ids == plain.ids[:count]
    assert (stopped.reason, cut.reason) == ("stop", "length")
    # Row i of a copy emits the token after it, so the last token has none, unless a plain round
    # was issued ahead.
    assert stopped.cached_ids in ([*PROMPT, *stopped.ids][:-1], [*PROMPT, *stopped.ids])


@pytest.mark.parametrize("k", [0, 2])
def test_a_resumed_answer_copies_on(k: int) -> None:
    """Its index holds the prompt and the log, so it copies what the whole answer copied, a token
    earlier where that had a plain round under way."""
    whole = told(4, k, max_tokens=60)
    assert copies(whole)[1] > 0
    for cut in range(1, len(whole.rounds) - 1):
        log = whole.rounds[:cut]
        rest = told(4, k, max_tokens=60, replay=log)
        assert [t for each in log for t in each.tokens] + list(rest.ids) == list(whole.ids)
        if k:
            assert rest.rounds == whole.rounds[cut:]
        else:
            assert rest.rounds[0].is_copied == any(r.is_copied for r in whole.rounds[cut : cut + 2])


def test_the_head_reads_the_rows_of_copies() -> None:
    """Once it drafts again, its cache is that of an answer without copies."""
    lookup = PromptLookup(PROMPT, FixedLength(5))
    answer = tell(_table(), _table(), 2, max_tokens=90, lookup=lookup)
    by_head = [each for each in answer.rounds if each.drafted and not each.is_copied]
    assert copies(answer)[0] > 0 and by_head and answer.head is not None
    ids = [*PROMPT, *answer.ids]
    rows = answer.head.head_rows
    committed = [(at, token, after) for at, (token, after) in enumerate(pairwise(ids))]
    assert rows and rows == committed[: len(rows)]
