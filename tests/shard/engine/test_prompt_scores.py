"""Log-probabilities of a prompt's tokens are those of one forward over all of it."""

from typing import Any

import mlx.core as mx
import pytest
from engines import request
from mlx_lm.utils import load_model
from prefixes import FIRST, ROOM, SYSTEM, engine
from small import small_checkpoint, small_engine

from exo_node.mtp import schedule
from exo_node.mtp.types import Prefilled, Sampling, TokenLogprobs
from exo_node.shard.engine.answers.events import AnswerEnd, Delta


def scores_of(served: Any, **changes: Any) -> tuple[list[TokenLogprobs], list[int], AnswerEnd]:
    """The entries of a prompt, the rows after each part of them, and the answer's end."""
    fields = {"top_logprobs": 3, "prompt_logprobs": True} | changes
    entries, rows = list[TokenLogprobs](), list[int]()
    events = list(served.generate(request(FIRST, fields.pop("k", 0), 4, **fields)))
    for event in events:
        if isinstance(event, Prefilled) and event.logprobs:
            entries += event.logprobs
            rows.append(event.rows)
    end = events[-1]
    assert isinstance(end, AnswerEnd) and any(isinstance(each, Delta) for each in events)
    return entries, rows, end


def direct() -> mx.array:
    """Log-probabilities (n, V) of a forward over the whole prompt."""
    model, _ = load_model(small_checkpoint())
    logits = model(mx.array([FIRST]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("k", [0, 3])
def test_each_token_has_what_a_direct_forward_gives(k: int) -> None:
    """Also with drafts, penalties and a temperature, which the model's own distribution ignores."""
    sampling = Sampling(temperature=0.7, seed=1, repetition_penalty=1.3, logit_bias=((5, 9.0),))
    entries, _, _ = scores_of(small_engine(prefill_chunk=160), k=k, sampling=sampling)
    expected = direct()
    assert [entry.token for entry in entries] == FIRST
    assert (entries[0].logprob, entries[0].top) == (0.0, ())
    for row, entry in enumerate(entries[1:]):
        assert entry.logprob == pytest.approx(expected[row, entry.token].item(), abs=2e-3)
        best = mx.argmax(expected[row]).item()
        assert len(entry.top) == 3 and entry.top[0][0] == best
        assert entry.top[0][1] == max(value for _, value in entry.top)


def test_no_forward_has_more_rows_than_its_logits_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SCORED_ROWS", 64)
    _, rows, _ = scores_of(engine())
    assert rows == [*range(64, 300, 64), len(SYSTEM), len(FIRST)]


def test_a_prompt_with_scores_begins_after_no_prefix_and_leaves_none() -> None:
    """Its forwards end elsewhere, and rows from the cache have no logits."""
    served = engine(room=ROOM)
    plain, _, _ = scores_of(served, prompt_logprobs=False)
    warm, _, end = scores_of(served)
    assert not plain and len(warm) == len(FIRST) and end.stats.cached_tokens == 0
    again, _, end = scores_of(served)
    assert again == warm and end.stats.cached_tokens == 0
    cold = engine(room=ROOM)
    _ = scores_of(cold)
    assert cold.prefix_cache_bytes == 0
