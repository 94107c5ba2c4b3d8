"""Rounds that are rebuilt by fewer forwards than they were made by leave the same state."""

from collections.abc import Generator, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from engines import ORACLE, answer, engine_of, request
from readers import loaded
from small import small_spec

from exo_node.mtp.rebuild import Rebuild
from exo_node.mtp.seams import Block, Wait, Want
from exo_node.mtp.types import Penalties, Round, Sampling
from exo_node.shard.engine.engine import TextEngine
from exo_node.shard.engine.request import EngineRequest

PROMPT: list[int] = ORACLE[0]["prompt_ids"]
TOKENS = 44
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=0.9, top_p=0.95, seed=11),
    "penalised": Sampling(penalties=Penalties(repetition=1.3, logit_bias=((7, 2.0),))),
}


def engine(*, bitwise: bool = True) -> TextEngine:
    made = engine_of(loaded(), small_spec(native_mtp=True))
    made.identity = "bitwise" if bitwise else "near_tie"
    return made


def asked_for(k: int, sampling: Sampling = SAMPLINGS["greedy"]) -> EngineRequest:
    """With log-probabilities, which tell of a state what tokens may not."""
    return request(PROMPT, k, TOKENS, ignore_end=True, sampling=sampling, top_logprobs=0)


def answers(rounds: Sequence[Round]) -> list[tuple[object, ...]]:
    return [(each.tokens, each.accepted, each.logprobs) for each in rounds]


def rows_of_forwards(made: TextEngine, asked: EngineRequest) -> tuple[tuple[Round, ...], list[int]]:
    """The rounds of the answer, and the rows of each forward that was made before the first."""
    rows: list[int] = []
    forward = made._target.forward  # pyright: ignore[reportPrivateUsage]

    def counted(tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        rows.append(tokens.shape[0])
        return forward(tokens, caches, want=want)

    made._target.forward = counted  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return answer(made, asked).rounds, rows


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_what_follows_is_the_undisturbed_answers(k: int, kind: str) -> None:
    asked = asked_for(k, SAMPLINGS[kind])
    undisturbed = answer(engine(), asked).rounds
    for cut in (1, 2, 18, len(undisturbed) - 1):
        again = replace(asked, attempt=2, replay=tuple(undisturbed[:cut]))
        rest, rows = rows_of_forwards(engine(), again)
        assert answers(rest) == answers(undisturbed[cut:])
        told = sum(len(each.tokens) for each in undisturbed[1:cut])
        # The prompt, the rounds in sixteens, and a forward for each round that is new.
        assert len(rows) <= 1 + -(-told // 4) + -(-cut // 16) + len(rest) + 1


def test_where_rows_matter_each_round_is_repeated_as_it_was() -> None:
    asked = asked_for(3)
    undisturbed = answer(engine(), asked).rounds
    again = replace(asked, attempt=2, replay=tuple(undisturbed[:9]))
    _, rows = rows_of_forwards(engine(bitwise=False), again)
    assert rows[1:9] == [each.forward.rows for each in undisturbed[1:9]]


def test_a_rebuilt_state_that_lacks_a_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    asked = asked_for(0)
    undisturbed = answer(engine(), asked).rounds
    repeat = Rebuild._repeat_together  # pyright: ignore[reportPrivateUsage]

    def lacking(
        self: Rebuild, token: mx.array, rounds: Sequence[Round]
    ) -> Generator[Wait, None, None]:
        yield from repeat(self, token, rounds[1:])

    monkeypatch.setattr(Rebuild, "_repeat_together", lacking)
    again = replace(asked, attempt=2, replay=tuple(undisturbed[:20]))
    rest = answer(engine(), again).rounds
    assert answers(rest) != answers(undisturbed[20:])
