"""Rounds of a log, rebuilt by fewer forwards than they were made by, leave the same state."""

# pyright: reportPrivateUsage=false

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from engines import ORACLE, answer, engine_of, request
from readers import loaded
from small import small_spec
from tables import EndAt, random_table, tell

from exo_node.mtp.types import Round, Sampling
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters

PROMPT: list[int] = ORACLE[0]["prompt_ids"]
TOKENS = 44
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=0.9, top_p=0.95, seed=11),
    "penalised": Sampling(repetition_penalty=1.3, logit_bias=((7, 2.0),)),
}


def engine(*, bitwise: bool = True) -> TextEngine:
    text_engine = engine_of(loaded(), small_spec(native_mtp=True))
    text_engine.measurements.identity = "bitwise" if bitwise else "near_tie"
    return text_engine


def asked_for(k: int, sampling: Sampling = SAMPLINGS["greedy"]) -> Parameters:
    """With log-probabilities, which tell of a state what tokens may not."""
    return request(PROMPT, k, TOKENS, ignore_eos=True, sampling=sampling, top_logprobs=0)


def answers(rounds: Sequence[Round]) -> list[tuple[object, ...]]:
    return [(each.tokens, each.accepted, each.logprobs) for each in rounds]


def rows_of_forwards(
    text_engine: TextEngine, engine_request: Parameters, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[Round, ...], list[int]]:
    """The rounds of the answer, and the rows of each forward after the prompt's."""
    rows: list[int] = []
    forward = text_engine._target.forward_batch

    def counted(tokens: mx.array, caches: Sequence[object]) -> tuple[mx.array, mx.array | None]:
        rows.append(tokens.shape[1])
        return forward(tokens, caches)

    monkeypatch.setattr(text_engine._target, "forward_batch", counted)
    return answer(text_engine, engine_request).rounds, rows


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("k", [0, 3])
def test_what_follows_is_the_undisturbed_answers(
    k: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_request = asked_for(k, SAMPLINGS[kind])
    undisturbed = answer(engine(), engine_request).rounds
    most = len(undisturbed) - 1
    for cut in (1, 2, min(18, most - 1), most):
        again = replace(engine_request, attempt=2, replay=tuple(undisturbed[:cut]))
        rest, rows = rows_of_forwards(engine(), again, monkeypatch)
        assert answers(rest) == answers(undisturbed[cut:])
        num_tokens = sum(len(each.tokens) for each in undisturbed[1:cut])
        # The rounds in sixteens, and a forward for each round that is new.
        assert len(rows) <= -(-num_tokens // 4) + -(-cut // 16) + len(rest)


@pytest.mark.parametrize("rounds", [1, 5, 40])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_log_of_a_whole_answer_ends_as_that_did(reason: str, rounds: int) -> None:
    """Its runner went away after the last round, before it had told the end."""
    table, ending = random_table(5, 1), rounds if reason == "stop" else 1000
    budget = rounds if reason == "length" else 1000
    whole = tell(table, ending=EndAt(ending), max_tokens=budget)
    again = tell(table, ending=EndAt(ending), max_tokens=budget, replay=whole.rounds)
    assert len(whole.rounds) == rounds
    assert (again.rounds, again.reason) == ((), whole.reason) == ((), reason)
